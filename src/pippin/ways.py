"""Other ways to train the same recipe: rows, their length, checkpointing, a quantized base.

An update stays what it was: as many tokens, whatever of them are computed at once. Each way has its
memory and its pace, the time of a token beside the recipe's own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pippin import memory
from pippin.forecast import Forecast
from pippin.model.config import ModelConfig
from pippin.recipe import Recipe, Train

# Paces are rough: they were read off a few runs of 3B parameters on one card (docs/log.md).
# A pass of so many tokens takes twice the time a token of an endless one: weights are read, and
# kernels are started, once a pass. There 16k tokens were 1.17 times as fast as 4k.
HALF = {"cuda": 1024}
OTHER_HALF = 256
# Dense copies of a quantized base, forward and backward: 39.4k and 35.4k tokens a second.
DECODING = 0.1
SHORTEST = 128  # tokens of a row; samples are cut down to it where nothing else fits
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
RECOMPUTED = (0.0, 0.5, 1.0)  # shares of the layers; other engines than torch have none or all
BITS, GROUP = 4, 64  # of a quantized base: the recipe's defaults


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to train. `keys` are what it changes in the recipe, in words; `memory` bytes.

    `pace` is its time a token over that of the recipe as it is: 0.8 is faster. `checkpointing` and
    `quantized` tell what kind it is, whether the recipe is of that kind already or not.
    """

    keys: str
    memory: int
    pace: float
    checkpointing: bool
    quantized: bool


def ways(forecast: Forecast) -> list[Way]:
    """Every way that computes the recipe's own updates, the fastest first."""
    return _sorted(forecast, _settings(forecast.recipe))


def shorter_ways(forecast: Forecast) -> list[Way]:
    """One row, checkpointing, and samples cut shorter and shorter."""
    train, length = forecast.recipe.train, forecast.recipe.train.row_tokens
    spared = replace(train, batch_rows=1, gradient_checkpointing=True, recomputed_layers=1.0)
    lengths = []
    while (length := length // 2) >= SHORTEST:
        lengths.append(replace(spared, row_tokens=length))
    return _sorted(forecast, lengths)


def fastest_fits(forecast: Forecast, free: int) -> Way | None:
    """The fastest way that takes no more than `free` bytes; cut samples where no other does."""
    found = (way for way in (*ways(forecast), *shorter_ways(forecast)) if way.memory <= free)
    return next(found, None)


def kinds_that_fit(forecast: Forecast, free: int) -> list[Way]:
    """The fastest way that fits of each kind: with or without checkpointing, a quantized base."""
    first: dict[tuple[bool, bool], Way] = {}
    for way in ways(forecast):
        if way.memory <= free:
            first.setdefault((way.checkpointing, way.quantized), way)
    return list(first.values())


def _settings(recipe: Recipe) -> Iterator[Train]:
    """Rows x length x passes with the recipe's tokens an update, with checkpointing and without."""
    train = recipe.train
    whole = train.row_tokens * train.batch_rows * train.accumulate
    shares = RECOMPUTED if recipe.model.engine == "torch" else (0.0, 1.0)
    lengths = [train.row_tokens]
    lengths += [n for n in LENGTHS if n >= recipe.data.max_seq_len]
    for length in dict.fromkeys(lengths):
        rows = 1
        while length * rows <= whole:
            if whole % (length * rows) == 0:
                passes = whole // (length * rows)
                same = replace(train, row_tokens=length, batch_rows=rows, accumulate=passes)
                for share in shares:
                    spared = {
                        "gradient_checkpointing": share > 0,
                        "recomputed_layers": share or 1.0,
                    }
                    yield replace(same, **spared)
            rows *= 2
    yield train


def _sorted(forecast: Forecast, settings: Iterable[Train]) -> list[Way]:
    """By pace; of equals, those that leave the rows' length alone come first."""
    train = forecast.recipe.train
    own = _pace(forecast, train)
    found: dict[str, tuple[bool, Way]] = {}
    for new in settings:
        for base in _bases(replace(forecast, recipe=replace(forecast.recipe, train=new))):
            keys = _keys(forecast, train, new, base)
            way = Way(
                keys=keys,
                memory=base.train().memory,
                pace=_pace(base, new) / own,
                checkpointing=new.gradient_checkpointing,
                quantized=bool(base.facts.config.quantization),
            )
            found[keys] = new.row_tokens != train.row_tokens, way
    order = sorted(
        found.values(), key=lambda pair: (round(pair[1].pace, 3), pair[0], pair[1].memory)
    )
    return [way for _, way in order]


def _bases(forecast: Forecast) -> Iterator[Forecast]:
    """As it is, and quantized where the engine trains over codes."""
    yield forecast
    config = forecast.facts.config
    if (
        forecast.trains_over_codes
        and not config.quantization
        and forecast.recipe.train.method == "lora"
    ):
        yield replace(forecast, facts=replace(forecast.facts, config=_quantized(config)))


def _quantized(config: ModelConfig) -> ModelConfig:
    return replace(config, quantization={"bits": BITS, "group_size": GROUP})


def _keys(forecast: Forecast, old: Train, new: Train, base: Forecast) -> str:
    """What to set, in the recipe's own words; empty for the recipe as it is."""
    names = ("batch_rows", "row_tokens", "accumulate", "gradient_checkpointing")
    names += ("recomputed_layers",)
    changed = [
        f"train.{name} = {str(getattr(new, name)).lower()}"
        for name in names
        if getattr(new, name) != getattr(old, name)
    ]
    if new.row_tokens < forecast.recipe.data.max_seq_len:
        changed.append(f"data.max_seq_len = {new.row_tokens}")
    if base.facts.config.quantization and not forecast.facts.config.quantization:
        changed.append(f"a model.source that is quantized to {BITS} bits first")
    return ", ".join(changed)


def _pace(forecast: Forecast, train: Train) -> float:
    """Time of a token, in operations a weight."""
    operations = memory.operations(train.method, train.recomputed)
    codes = DECODING if forecast.facts.config.quantization else 0.0
    half = HALF.get(forecast.device, OTHER_HALF)
    return operations * (1 + half / (train.row_tokens * train.batch_rows)) * (1 + codes)
