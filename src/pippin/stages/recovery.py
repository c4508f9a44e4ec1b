"""Recovery: scales, zero points and norms of a quantized folder, tuned to its parent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pippin.data.batches import Batch, Sample, single_batches
from pippin.engines.recovery import Recoverer, Tune
from pippin.errors import DataError, ModelError
from pippin.figures import counted
from pippin.model.weights import Checkpoint
from pippin.stages.calibration import Calibration

# Tokens of one update, padding included.
_UPDATE_TOKENS = 1024


def updates(calibration: Calibration, engine: str) -> list[list[Batch]]:
    """What recovery reads, a batch an update: rows that did not calibrate, then those that did.

    Raises ModelError for an engine that cannot tune, DataError where calibration left no rows.
    """
    if not isinstance(calibration.model, Recoverer):
        raise ModelError(
            f"engine {engine} tunes no scales",
            'set model.engine = "torch" or "mlx", or quantize.recover_tokens = 0',
        )
    samples = calibration.further
    if len(samples) < 2:
        raise DataError(
            f"{counted(len(samples), 'row')} left for quantize.recover_tokens, 2 are the least",
            "lower quantize.calibration_tokens",
        )
    return [_batches(part) for part in (samples, calibration.again)]


def _batches(samples: Sequence[Sample]) -> list[Batch]:
    longest = max((len(sample.tokens) for sample in samples), default=1)
    return single_batches(list(samples), max(1, min(_UPDATE_TOKENS // longest, len(samples) // 2)))


def recover(
    calibration: Calibration, updates: list[list[Batch]], passes: int, folder: Path
) -> dict[str, Any]:
    """Write what was tuned in place, if it is worth it; what held-out rows say of them.

    The calibration's model is used up.
    """
    assert isinstance(calibration.model, Recoverer)
    fresh, again = updates
    batches = fresh + again
    tune = Tune(fresh=len(fresh), passes=passes, seed=calibration.seed)
    found = calibration.model.recover(folder, batches, tune)
    infos = Checkpoint(folder).tensors
    for name, tensor in found.weights.items():
        info = infos[name]
        assert (tensor.shape, tensor.dtype) == (info.shape, info.dtype), name
        with info.file.open("r+b") as file:
            file.seek(info.start)
            file.write(tensor.tobytes())
    return {
        "batches": len(batches),
        "tokens": sum(batch.real_tokens for batch in batches),
        "tokens_that_calibrated": sum(batch.real_tokens for batch in again),
        "passes": passes,
        "held_out_tokens": found.tokens,
        "kl_before": found.before,
        "kl_after": found.after,
        "kept": bool(found.weights),
        "linears": sum(name.endswith(".scales") for name in found.weights),
        "norms": [name for name in found.weights if name.endswith(".weight")],
    }


def recovery_text(found: dict[str, Any]) -> str:
    """The same in words."""
    end = "" if found["kept"] else ": they stay as they were"
    what = "scales" if found["kept"] and not found["norms"] else "scales and norms"
    return (
        f"{what} tuned: KL {found['kl_before']:.4f} before, {found['kl_after']:.4f} "
        f"after, on {found['held_out_tokens']:,} held-out tokens{end}"
    )
