"""Bring the model to the run's folder, in Hugging Face's format."""

from collections.abc import Iterator
from typing import Any

from pippin import artifact
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model.source import count_pieces, fetch_into, locate

STAGE = "fetch"


def fetch(job: Job) -> Iterator[Event]:
    """Fetch a hub model, or convert a GGUF file. Raises ModelError for what cannot be had."""
    model = job.recipe.model
    found = locate(model, job.recipe.folder)
    total = count_pieces(found)
    yield Started(stage=STAGE, title=f"fetch {model.source}", total=total, unit="tensors")
    summary: dict[str, Any] = {"source": model.source, "kind": found.kind}
    with artifact.writing(job.folder, job.origin, summary) as folder:
        for done, _ in enumerate(fetch_into(found, model, folder), 1):
            yield Progress(stage=STAGE, done=done, values={})
        summary["size_bytes"] = artifact.size(folder)
    if found.kind in ("gguf", "builtin"):
        yield Notice(stage=STAGE, text="weights dequantized from GGUF to bfloat16")
    yield Finished(stage=STAGE, folder=str(job.folder), summary=summary)
