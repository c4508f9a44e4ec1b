"""`pippin check`: the device's probes, or a model under another device's rules.

Exit code 1 where a probe is wrong, or where a program would fail.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pippin.check import PROBES
from pippin.check.audits import AUDITS, CHIPS
from pippin.verbs import sentence

if TYPE_CHECKING:
    from pippin.check.audits import Ask, Audited, Auditor
    from pippin.check.runner import Checkup


# What each kind of check takes besides; the probes of a device take --engine and --device.
KINDS = {
    "jax_fuji": {"tokens", "device"},
    "top50": {"rules", "version", "chip", "strict"},
    "rules": {"version", "chip", "strict"},
}
WORDS = {"jax_fuji": "--jax-fuji", "rules": "--as", "top50": "--top50", "version": "--torch"}
OWNERS = {"tokens": "--jax-fuji", "version": "--as", "chip": "--as", "strict": "--as"}

# Options of `pippin plan`.
ELSEWHERE = (
    click.option("--memory", metavar="SIZE", help="of a machine that is not here, e.g. 16GB"),
    click.option(
        "--device",
        type=click.Choice(("cpu", "cuda", "mps")),
        metavar="NAME",
        help="its device: cpu, cuda or mps",
    ),
    click.option("--chip", metavar="NAME", help="its chip, e.g. m2-pro"),
)


@click.command("check", help=sentence("check"))
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "--engine",
    default="torch",
    show_default=True,
    type=click.Choice(list(PROBES)),
    metavar="NAME",
    help=f"whose probes are run: {', '.join(PROBES)}",
)
@click.option(
    "--device", default="auto", show_default=True, metavar="NAME", help="cpu, cuda or mps"
)
@click.option(
    "--as",
    "rules",
    type=click.Choice(list(AUDITS)),
    metavar="DEVICE",
    help="judge MODEL, a folder or a recipe, by the rules of a device that is not here: mps",
)
@click.option(
    "--chip",
    type=click.Choice(CHIPS),
    metavar="CHIP",
    help=f"the device's chip, any without it: {', '.join(CHIPS)}",
)
@click.option(
    "--torch", "version", metavar="VERSION", help="rules of another PyTorch than the installed one"
)
@click.option("--strict", is_flag=True, help="stop at the first offence, with file and line")
@click.option("--top50", is_flag=True, help="judge the most used architectures instead of a model")
@click.option(
    "--jax-fuji",
    metavar="SIZE",
    help="run a Fuji-shaped model of random weights on the device and on the CPU: 7B, 1B, test",
)
@click.option(
    "--tokens",
    default=16,
    show_default=True,
    type=click.IntRange(1),
    metavar="N",
    help="tokens that it decodes",
)
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line on stdout")
@click.option("--quiet", "-q", is_flag=True, help="results and errors only")
def check(model: Path | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Probe the device, or audit a model."""
    from pippin.check.audits import Ask
    from pippin.check.planned import planned_shapes
    from pippin.check.runner import Checkup
    from pippin.errors import UsageError

    mode = "json" if as_json else "quiet" if quiet else "auto"
    _refuse_strangers(model, options)
    if options["jax_fuji"]:
        _fuji(options["jax_fuji"], options["tokens"], options["device"], mode)
        return
    folder, shapes = planned_shapes(model)
    asked = {name: options[name] for name in ("version", "chip", "strict")}
    if options["rules"] or options["top50"]:
        if folder is None and not options["top50"]:
            raise UsageError("--as needs a model", "pippin check FOLDER --as mps")
        subject = None if options["top50"] else folder
        _audit(options["rules"] or "mps", subject, Ask(**asked, tokens=shapes.tokens), mode)
        return
    _probe(Checkup(engine=options["engine"], device=options["device"], shapes=shapes), mode)


def _refuse_strangers(model: Path | None, options: dict[str, Any]) -> None:
    """An option of another kind of check would be left aside without a word."""
    from pippin.errors import UsageError

    context = click.get_current_context()
    given = {n for n in options if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}
    kind = next((kind for kind in KINDS if kind in given), "")
    strange = sorted(given - {kind} - KINDS.get(kind, {"engine", "device"}))
    if strange:
        word = WORDS.get(strange[0], f"--{strange[0]}")
        beside = f"beside {WORDS[kind]}" if kind else "without " + OWNERS[strange[0]]
        raise UsageError(f"{word} means nothing {beside}", "see `pippin check --help`")
    if model is not None and kind in ("jax_fuji", "top50"):
        raise UsageError(f"{WORDS[kind]} takes no model", f"leave {model} out")


def _probe(checkup: "Checkup", mode: str) -> None:
    from pippin.check.record import record
    from pippin.console import Console
    from pippin.errors import GateError
    from pippin.events import Notice
    from pippin.figures import counted
    from pippin.machine import find_machine

    console = Console(mode=mode)
    findings = console.probes(checkup.run())
    device = find_machine().device(checkup.device, checkup.engine)
    if refused := record(checkup.engine, device, findings):
        text = f"{refused} cannot be written: plans will not know what was found"
        console.events(iter([Notice(stage="check", text=text)]))
    wrong = [found.probe for found in findings if found.verdict == "wrong"]
    if wrong:
        raise GateError(
            f"wrong: {', '.join(wrong[:4])} ({len(wrong)} of {counted(len(findings), 'probe')})",
            "the lines under the table name the way round each; plans for this device take it",
        )


def _fuji(size: str, tokens: int, device: str, mode: str) -> None:
    import importlib
    from dataclasses import asdict

    from pippin.console import Console
    from pippin.stages.loading import needs

    with needs("--jax-fuji", "jax"):
        found = importlib.import_module("pippin.engines.jax.fuji_run").run_fuji(
            size, tokens, device
        )
    Console(mode=mode).fuji(asdict(found))


def _audit(rules: str, folder: Path | None, ask: "Ask", mode: str) -> None:
    import importlib
    from typing import cast

    from pippin.console import Console
    from pippin.errors import GateError
    from pippin.figures import counted

    auditor = cast("Auditor", importlib.import_module(AUDITS[rules]))
    programs = auditor.architectures(ask) if folder is None else auditor.model(folder, ask)
    audited = Console(mode=mode).audits(programs)
    bad = [each for each in audited if each.outcome in ("fails", "error")]
    if bad:
        raise GateError(
            f"does not run: {_names(bad)} ({len(bad)} of {counted(len(audited), 'program')})",
            "the lines under the table name operators, files and the way round each",
        )


def _names(audited: "list[Audited]") -> str:
    return ", ".join(f"{each.subject} {each.program}" for each in audited[:4])
