"""What `pippin data RECIPE` shows: trained tokens marked, lengths, what is cut or dropped, fill."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pippin.data.batches import BatchPlan, Sample
from pippin.data.beginnings import WORTH_TELLING, shared_share
from pippin.data.chat import tokenize
from pippin.data.dataset import SPLITS, find_splits, load_split
from pippin.data.fit import Tokenized
from pippin.data.holdout import repeated, seen_before
from pippin.errors import DataError
from pippin.figures import counted
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

BINS, BAR = 10, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Neighbouring tokens as text; `trained` when the loss counts them."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedRow:
    """A sample of the training split as the model sees it, from the file's row at `where`."""

    where: str
    tokens: int
    trained: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """How many samples have `low` to `high` tokens, both included."""

    low: int
    high: int
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """A split in numbers; `place` is its file, or the words that say where it was set aside."""

    place: str
    rows: int
    samples: int
    tokens: int
    trained: int
    median: int
    longest: int
    cut: int
    dropped: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The rows one epoch is packed into; `fill` is the share of them that is not padding.

    `shared` is the share of the tokens that begin another sample of their micro-batch as well.
    """

    rows: int
    row_tokens: int
    fill: float
    updates: int
    shared: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """All of it, as plain data: first training samples, counts, lengths, packing, notices."""

    rows: tuple[MarkedRow, ...]
    splits: dict[str, SplitCounts]
    histogram: tuple[Bin, ...]
    packing: Packing
    notices: tuple[str, ...]


def look(recipe: Recipe, tokenizer: Tokenizer, rows: int = 3) -> Look:
    """Load and tokenize every split of a recipe's data. Raises DataError as training would."""
    notices: list[str] = []
    places = find_splits(recipe.data, recipe.folder)
    splits: dict[str, SplitCounts] = {}
    loaded = load_split(recipe.data, recipe.folder, "train")
    train = tokenize(loaded, tokenizer, recipe.data)
    for split in SPLITS:
        try:
            found = loaded if split == "train" else load_split(recipe.data, recipe.folder, split)
        except DataError as error:
            if not isinstance(places[split], str):
                raise
            notices.append(f"{split}: {error.message}; {error.hint}")
            continue
        held_out = split != "train"
        tokenized = tokenize(found, tokenizer, recipe.data) if held_out else train
        splits[split] = _counts(str(places[split]), len(found), tokenized)
        notices += [f"{split}: {text}" for text in tokenized.notices]
        notices += seen_before(found, loaded, split) if held_out else repeated(found)
    return Look(
        rows=tuple(
            _marked(sample, loaded[sample.row].where, tokenizer) for sample in train.samples[:rows]
        ),
        splits=splits,
        histogram=_histogram(train.lengths),
        packing=_packing(train.samples, recipe),
        notices=tuple(notices),
    )


def as_json(seen: Look) -> dict[str, Any]:
    """The look as one JSON object."""
    return asdict(seen)


def as_lines(seen: Look) -> list[str]:
    """The look as plain text; what is trained stands in [[ ]]."""
    lines = []
    for row in seen.rows:
        lines.append(_heading(row))
        parts = [(_printable(piece.text), piece.trained) for piece in row.pieces]
        lines += "".join(f"[[{text}]]" if trained else text for text, trained in parts).split("\n")
        lines.append("")
    return [*lines, *_summary(seen)]


def as_rich(seen: Look) -> "RenderableType":
    """The look for a terminal: what is trained in reverse green, the rest dim."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text] = []
    for row in seen.rows:
        parts.append(Text(_heading(row), style="bold"))
        parts.append(_coloured(row.pieces))
        parts.append(Text())
    return Group(*parts, *(Text(line) for line in _summary(seen)))


def _coloured(pieces: Sequence[Piece]) -> "Text":
    from rich.text import Text

    text = Text()
    for piece in pieces:
        text.append(_printable(piece.text), style="green reverse" if piece.trained else "dim")
    return text


def _printable(text: str) -> str:
    """Data must not steer the terminal: control characters are written as escapes."""
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def _heading(row: MarkedRow) -> str:
    return f"{row.where}: {row.trained} of {counted(row.tokens, 'token')} trained"


def _summary(seen: Look) -> list[str]:
    lines = [_split_line(name, counts) for name, counts in seen.splits.items()]
    lines += ["", "tokens a sample (train)"]
    most = max(one.samples for one in seen.histogram)
    wide = len(str(seen.histogram[-1].high))
    for one in seen.histogram:
        bar = "#" * -(-one.samples * BAR // most)
        lines.append(f"  {one.low:>{wide}}-{one.high:<{wide}} {one.samples:>7,} {bar}".rstrip())
    packing = seen.packing
    lines += [
        "",
        f"{counted(packing.rows, 'row')} of {packing.row_tokens:,} tokens, "
        f"{packing.fill:.1%} full; {counted(packing.updates, 'update')} an epoch",
    ]
    if packing.shared >= WORTH_TELLING:
        lines.append(f"{packing.shared:.0%} of the tokens are beginnings that samples share")
    return lines + [f"note: {notice}" for notice in seen.notices]


def _split_line(name: str, counts: SplitCounts) -> str:
    return (
        f"{name:5} {counted(counts.rows, 'row')}, {counted(counts.samples, 'sample')}, "
        f"{counted(counts.tokens, 'token')}, "
        f"{counts.trained:,} trained; median {counts.median:,}, longest {counts.longest:,}; "
        f"{counts.cut:,} cut, {counts.dropped:,} dropped ({counts.place})"
    )


def _counts(place: str, rows: int, tokenized: Tokenized) -> SplitCounts:
    samples = tokenized.samples
    return SplitCounts(
        place=place,
        rows=rows,
        samples=len(samples),
        tokens=sum(len(sample.tokens) for sample in samples),
        trained=sum(int(sample.scored.sum()) for sample in samples),
        median=int(np.median(tokenized.lengths)),
        longest=int(tokenized.lengths.max()),
        cut=tokenized.cut,
        dropped=tokenized.dropped,
    )


def _marked(sample: Sample, where: str, tokenizer: Tokenizer) -> MarkedRow:
    pieces = []
    for trained, group in groupby(range(len(sample.tokens)), key=lambda i: bool(sample.scored[i])):
        text = tokenizer.decode([int(sample.tokens[i]) for i in group])
        pieces.append(Piece(text=text, trained=trained))
    return MarkedRow(
        where=where,
        tokens=len(sample.tokens),
        trained=int(sample.scored.sum()),
        pieces=tuple(pieces),
    )


def _histogram(lengths: NDArray[np.int32]) -> tuple[Bin, ...]:
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // BINS))
    counts = np.bincount((lengths - low) // width)
    return tuple(
        Bin(low=low + i * width, high=low + (i + 1) * width - 1, samples=int(count))
        for i, count in enumerate(counts)
    )


def _packing(samples: Sequence[Sample], recipe: Recipe) -> Packing:
    plan = BatchPlan(samples, recipe.train, recipe.seed)
    return Packing(
        rows=plan.rows,
        row_tokens=recipe.train.row_tokens,
        fill=plan.fill,
        updates=plan.steps_per_epoch,
        shared=shared_share(plan),
    )
