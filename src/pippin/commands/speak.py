"""`pippin generate`, `chat` and `serve`: talk with whatever speaks."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pippin.verbs import sentence

if TYPE_CHECKING:
    from pippin.console import Console
    from pippin.stages.generate import Speaker

PATH = click.Path(path_type=Path)


class _Real(click.FloatRange):
    """A number of a range; NaN is in none, though no comparison says so."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def figure(name: str, default: float, kind: click.ParamType, text: str) -> Callable[..., Any]:
    """An option that takes a number."""
    return click.option(
        f"--{name}", default=default, show_default=True, type=kind, metavar="N", help=text
    )


_SPEAKING = (
    figure("max-tokens", 256, click.IntRange(1), "longest answer"),
    figure("temperature", 0.0, _Real(0), "0 is greedy"),
    figure("top-p", 1.0, _Real(0, 1), "draw from the likeliest tokens of this share"),
    figure("seed", 0, click.IntRange(0), "drawing follows from it"),
    click.option(
        "--cache-bits",
        type=click.IntRange(2, 8),
        metavar="N",
        help="keep keys and values of what was read in so few bits (engine mlx)",
    ),
    click.option(
        "--base", type=PATH, metavar="PATH", help="the model under an adapter that stands alone"
    ),
)


def _speaking(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_SPEAKING):
        function = option(function)
    return function


@click.command("generate", help=sentence("generate"))
@_speaking
@click.argument("what", type=PATH)
@click.argument("prompt")
def generate(what: Path, prompt: str, **options: Any) -> None:
    """Print one answer as it comes."""
    from pippin.console import Console

    console = Console()
    speaker, sampling = _speaker(what, console, options)
    prompt = os.fsencode(prompt).decode(errors="replace")
    for piece in speaker.say(prompt, sampling):
        console.text(piece, end="")
    console.text("")


@click.command("chat", help=sentence("chat"))
@_speaking
@click.argument("what", type=PATH)
@click.option("--system", metavar="TEXT", help="a system message")
def chat(what: Path, system: str | None, **options: Any) -> None:
    """Talk until the input ends."""
    from pippin.console import Console
    from pippin.errors import DataError
    from pippin.events import Notice
    from pippin.stages.generate import Conversation

    console = Console()
    speaker, sampling = _speaker(what, console, options)
    messages = [{"role": "system", "content": system}] if system else []
    talk = Conversation(speaker=speaker, sampling=sampling, messages=messages)
    for said in console.questions():
        try:
            for piece in talk.ask(said):
                console.text(piece, end="")
        except DataError as error:
            # One question that does not fit ends no conversation, but a script must hear of it.
            if not console.asks:
                raise
            console.notice(Notice(stage="chat", text=f"{error.message}; {error.hint}"))
        console.text("")


@click.command("serve", help=sentence("serve"))
@_speaking
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="NAME", help="address to listen on"
)
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="0 is any free one",
)
@click.argument("what", type=PATH)
def serve(what: Path, host: str, port: int, **options: Any) -> None:
    """Answer over HTTP until Ctrl-C."""
    from concurrent.futures import ThreadPoolExecutor

    from pippin.console import Console
    from pippin.events import Notice
    from pippin.stages.loading import needs

    console = Console()
    with needs("pippin serve", "serve"):
        from pippin.stages.serve import Desk, application, listen, run
    listener = listen(host, port)
    worker = ThreadPoolExecutor(max_workers=1)
    speaker, defaults = worker.submit(_speaker, what, console, options).result()
    desk = Desk(name=what.resolve().name, speaker=speaker, worker=worker, defaults=defaults)
    address, port = listener.getsockname()[:2]
    where = f"http://{f'[{address}]' if ':' in address else address}:{port}/v1"
    console.notice(Notice(stage="serve", text=f"listening on {where}; Ctrl-C ends it"))
    run(application(desk, host), listener)


def _speaker(what: Path, console: "Console", options: dict[str, Any]) -> "tuple[Speaker, Any]":
    from pippin.engines import Sampling
    from pippin.recipe_file import load_recipe
    from pippin.stages.generate import load_speaker
    from pippin.steps import model_folder, run_folder

    base, recipe, folder = options.pop("base"), None, what
    cache_bits = options.pop("cache_bits")
    sampling = Sampling(**options)
    if what.suffix == ".toml":
        recipe = load_recipe(what)
        folder, base = run_folder(recipe), base or model_folder(recipe)
    speaker = load_speaker(folder, console.notice, recipe, base)
    if cache_bits:
        speaker.quantize_cache(cache_bits)
    return speaker, sampling
