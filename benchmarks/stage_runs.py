"""Stages one after another into folders by name, for benchmarks of what a whole run leaves."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.artifact import Origin
from pippin.job import Job
from pippin.recipe import Recipe


def run_stage(
    work: Path, stage: Callable[[Job], Iterator[Any]], name: str, made: Recipe, **inputs: str
) -> None:
    """A stage of the recipe into `work`/`name`, from scratch; inputs are folders there, by role."""
    shutil.rmtree(work / name, ignore_errors=True)
    folders = {role: work / folder for role, folder in inputs.items()}
    digests = {role: artifact.digest(folder) for role, folder in folders.items()}
    settings = {"seed": made.seed}
    origin = Origin(stage=stage.__name__, inputs=digests, settings=settings, versions={})
    job = Job(
        stage=stage.__name__,
        recipe=made,
        inputs=folders,
        folder=work / name,
        origin=origin,
        subject="base",
    )
    for _ in stage(job):
        pass
