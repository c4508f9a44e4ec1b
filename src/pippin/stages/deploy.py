"""Writes the quantized model in the format of a target."""

from collections.abc import Iterator
from typing import Any

from pippin import artifact
from pippin.errors import PippinError
from pippin.events import Event, Finished, Started
from pippin.job import Job
from pippin.stages.loading import needs_of, open_target
from pippin.targets import Bundle, require_sound


def deploy(job: Job) -> Iterator[Event]:
    """Deploy `job.inputs["model"]`, a quantized folder, to the target `job.subject`.

    Raises PippinError where the target cannot hold such a model, its packages are missing, or the
    folder is not whole.
    """
    yield Started(stage=job.stage, title=f"deploy to {job.subject}")
    target, model, asked = open_target(job.subject), job.inputs["model"], job.recipe.deploy
    refusal = target.refusal(job.recipe.quantize, model)
    if refusal is not None:
        raise PippinError(*refusal)
    scores: dict[str, Any] = {}
    with artifact.writing(job.folder, job.origin, scores) as folder:
        bundle = Bundle(
            quantized=model,
            folder=folder,
            context=asked.context,
            gate_prompts=asked.gate_prompts,
        )
        with needs_of(job.subject):
            require_sound(model)
            yield from target.write(bundle)
        scores["size_bytes"] = artifact.size(folder)
    yield Finished(stage=job.stage, folder=str(job.folder), summary=dict(scores))
