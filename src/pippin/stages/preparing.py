"""What a training needs before its first update: tokenized rows, their order, what they tell.

Shape letters: B rows, T tokens.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pippin.data.batches import Batch, BatchPlan, Sample
from pippin.data.chat import tokenize
from pippin.data.dataset import SPLITS, find_splits, load_split
from pippin.data.holdout import seen_before
from pippin.data.shapes import Row
from pippin.errors import DataError
from pippin.figures import counted
from pippin.job import Job
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.recipe import Recipe
from pippin.stages.exam import refuse_beyond
from pippin.stages.loading import context_of
from pippin.stages.schedule import total_steps

NAMED = 6  # rows that an error lists


@dataclass(frozen=True, kw_only=True, slots=True)
class Material:
    """The rows of a training; `valid` has every validation sample once, `total` counts updates."""

    rows: Sequence[Row]
    samples: Sequence[Sample]
    plan: BatchPlan
    valid: Sequence[Batch]
    total: int
    notices: tuple[str, ...]

    def digest(self) -> str:
        """Changes with any token, any mask, any order of the training samples."""
        sha = hashlib.sha256()
        for sample in self.samples:
            sha.update(f"{sample.row} {len(sample.tokens)} ".encode())
            sha.update(sample.tokens.tobytes())
            sha.update(sample.scored.tobytes())
        return sha.hexdigest()

    def places(self, batches: Sequence[Batch]) -> str:
        """Where the rows in some batches come from, for an error message."""
        by_tokens = {sample.tokens.tobytes(): sample.row for sample in self.samples}
        found = {by_tokens[tokens] for batch in batches for tokens in _segments(batch)}
        names = [self.rows[row].where for row in sorted(found)]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return ", ".join(names[:NAMED]) + more


def prepare(job: Job) -> Material:
    """Read and tokenize both splits. Raises DataError where nothing is left to train on."""
    recipe = job.recipe
    tokenizer = load_tokenizer(job.inputs["model"])
    rows = load_split(recipe.data, recipe.folder, "train")
    tokenized = tokenize(rows, tokenizer, recipe.data)
    if not tokenized.samples:
        raise DataError(
            f"none of the {len(rows)} training rows can be trained on",
            "`pippin data RECIPE` shows what became of them",
        )
    positions = context_of(job.inputs)
    refuse_beyond(tokenized.samples, positions)
    plan = BatchPlan(tokenized.samples, recipe.train, recipe.seed)
    total = total_steps(recipe.train, plan.steps_per_epoch)
    valid, valid_notices = _validation(recipe, tokenizer, positions)
    return Material(
        rows=rows,
        samples=tokenized.samples,
        plan=plan,
        valid=valid,
        total=total,
        notices=(
            *tokenized.notices,
            *valid_notices,
            *_known(recipe, rows),
            *_derived(recipe, plan, tokenized.samples, total),
        ),
    )


def _validation(
    recipe: Recipe, tokenizer: Tokenizer, positions: int | None
) -> tuple[list[Batch], list[str]]:
    """Packed as the training rows are: constant shapes, nothing compiled or allocated anew."""
    rows = load_split(recipe.data, recipe.folder, "valid")[: recipe.train.valid_rows]
    tokenized = tokenize(rows, tokenizer, recipe.data)
    notices = [f"validation: {notice}" for notice in tokenized.notices]
    if not tokenized.samples:
        return [], [*notices, "no validation rows: the last weights are kept, not the best"]
    refuse_beyond(tokenized.samples, positions)
    train = replace(recipe.train, accumulate=1)
    plan = BatchPlan(tokenized.samples, train, recipe.seed)
    batches = [batch for step in range(plan.steps_per_epoch) for batch in plan.batches(step)]
    wanted = sum(int(sample.scored.sum()) for sample in tokenized.samples)
    assert sum(batch.scored_tokens for batch in batches) == wanted, "an epoch is every sample once"
    return batches, notices


def _known(recipe: Recipe, train: list[Row]) -> list[str]:
    """Held-out rows of a file of their own that the model is trained on all the same."""
    found = find_splits(recipe.data, recipe.folder)
    notices = []
    for split in SPLITS[1:]:
        if isinstance(found[split], Path):
            rows = load_split(recipe.data, recipe.folder, split)
            notices += seen_before(rows, train, split)
    return notices


def _derived(recipe: Recipe, plan: BatchPlan, samples: Sequence[Sample], total: int) -> list[str]:
    train = recipe.train
    longest = max(len(sample.tokens) for sample in samples)
    step = train.row_tokens * train.batch_rows * train.accumulate
    notices = [
        f"rows of {counted(train.row_tokens, 'token')}, {plan.fill:.0%} full "
        f"(the longest of {counted(len(samples), 'sample')} has {longest}); "
        f"{counted(step, 'token')} an update",
        f"{counted(total, 'update')}, {plan.steps_per_epoch:,} an epoch",
    ]
    if train.warmup_steps >= total:
        notices.append(
            f"warm-up of {counted(train.warmup_steps, 'update')} is not over after all {total}: "
            "the learning rate never reaches its peak"
        )
    return notices


def _segments(batch: Batch) -> list[bytes]:
    rows = zip(batch.tokens_BT, batch.segments_BT, strict=True)
    return [
        tokens_T[segments_T == number].tobytes()
        for tokens_T, segments_T in rows
        for number in range(1, int(segments_T.max()) + 1)
    ]
