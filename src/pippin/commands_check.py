"""`pippin check`: the device's probes, drawn as they come; exit code 1 where one is wrong."""

from typing import TYPE_CHECKING

import click

from pippin.cli import COMMANDS

if TYPE_CHECKING:
    from pippin.check.runner import Checkup


@click.command("check", help=COMMANDS["check"][0].upper() + COMMANDS["check"][1:] + ".")
@click.option(
    "--engine", default="torch", show_default=True, metavar="NAME", help="whose probes are run"
)
@click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda or mps"
)
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line on stdout")
@click.option("--quiet", "-q", is_flag=True, help="results and errors only")
def check(engine: str, device: str, as_json: bool, quiet: bool) -> None:
    """Probe the device."""
    from pippin.check.runner import Checkup

    mode = "json" if as_json else "quiet" if quiet else "auto"
    _probe(Checkup(engine=engine, device=device), mode)


def _probe(checkup: "Checkup", mode: str) -> None:
    from pippin.console import Console
    from pippin.errors import GateError

    findings = Console(mode=mode).probes(checkup.run())
    wrong = [found.probe for found in findings if found.verdict == "wrong"]
    if wrong:
        raise GateError(
            f"{len(wrong)} of {len(findings)} probes are wrong: {', '.join(wrong[:4])}",
            "the lines under the table name the way round each",
        )
