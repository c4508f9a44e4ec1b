"""What quantizing a model is to do, settled before the first tensor is written."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pippin import memory
from pippin.data.batches import Batch
from pippin.errors import ModelError
from pippin.figures import counted
from pippin.job import Job
from pippin.model.config import ModelConfig, read_config
from pippin.model.weights import Checkpoint, Tensors
from pippin.quantizers import CALIBRATED
from pippin.quantizers.awq import Folding
from pippin.quantizers.choices import Choice
from pippin.stages.calibration import Calibration, calibrate, in_layers, passes
from pippin.stages.folding import fold
from pippin.stages.merge import Merged
from pippin.stages.recovery import updates
from pippin.stages.revised import Revised
from pippin.stages.sharing import share_bits, shares_embeddings

NOTHING = "every linear stays as it is: there is nothing to share out or to tune"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is quantized: a folder's weights, or those with an adapter's update."""

    tensors: Tensors
    config: ModelConfig
    notices: tuple[str, ...] = ()


def open_source(job: Job) -> Source:
    """The job's weights. Raises ModelError for codes, but under an adapter."""
    if "adapter" in job.inputs:
        merged = Merged(job)
        return Source(tensors=merged, config=merged.config, notices=merged.notices)
    folder = job.inputs["model"]
    config = read_config(folder)
    _refuse_quantized(folder, config)
    return Source(tensors=Checkpoint(folder), config=config)


def _refuse_quantized(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError for a model whose weights are codes already."""
    if config.quantization or config.raw.get("quantization_config"):
        raise ModelError(
            f"{folder} is quantized already", "start from the model it was quantized from"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is done to every tensor.

    Calibrated methods have a `calibration`, and `parts` as `passes` gives them; `updates` are for
    recovery, `revised` for layers that read what those before them became. `summary` is what the
    manifest keeps of it; the seed is among the settings.
    """

    choices: dict[str, Choice]
    calibration: Calibration | None = None
    parts: tuple[dict[str, str], ...] = ()
    updates: list[list[Batch]] = field(default_factory=list)
    revised: Revised | None = None
    folding: Folding = field(default_factory=Folding)
    notices: tuple[str, ...] = ()
    summary: dict[str, Any] = field(default_factory=dict)


def settle(job: Job, source: Source, choices: dict[str, Choice]) -> Work:
    """Read what the method needs, and settle the choices and scales that follow from it."""
    settings = job.recipe.quantize
    parts: tuple[dict[str, str], ...] = ()
    if settings.method in CALIBRATED:
        # The bits of embedding and head are open under a budget that counts them.
        plain = {"plain_bits": 16} if shares_embeddings(settings) else {}
        parts = tuple(passes(source.tensors, choices, source.config, memory.MOMENTS, **plain))
    if not parts:
        asked = settings.budget or settings.recover_tokens
        return Work(choices=choices, notices=(NOTHING,) if asked else ())
    # Where moments take several passes, a layer at a time is less work and less memory. Recovery
    # needs the whole model.
    large = settings.sequential or (len(parts) > 1 and not settings.recover_tokens)
    revised = Revised(source.tensors) if settings.sequential else None
    calibration = calibrate(job, revised or source.tensors, large=large)
    if calibration.by_layer:
        parts = tuple(in_layers(parts, back=calibration.by_loss))
    notices, summary, folding = [*calibration.notices], dict[str, Any](), Folding()
    tuned = updates(calibration, job.recipe.model.engine) if settings.recover_tokens else []
    if settings.budget:
        budget = share_bits(calibration, choices, parts, job.recipe)
        choices, summary["budget"] = budget.choices, budget.report
        notices.append(budget.text)
    if CALIBRATED[settings.method].scaled:
        folding = fold(calibration, choices, parts, source.config)
        notices.append(f"inputs of {counted(len(folding.inputs), 'linear')} are scaled")
    summary["calibration_rows"] = calibration.rows
    summary["calibration_tokens"] = calibration.tokens
    return Work(
        choices=choices,
        calibration=calibration,
        parts=parts,
        updates=tuned,
        revised=revised,
        folding=folding,
        notices=tuple(notices),
        summary=summary,
    )
