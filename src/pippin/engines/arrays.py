"""What every engine asks of arrays by name: an adapter's pairs, a saved state, that all move.

Shape letters: I inputs, O outputs, R rank.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from numpy.typing import NDArray

from pippin.engines import Weights
from pippin.errors import ModelError
from pippin.model import names

Pair: TypeAlias = tuple[NDArray[Any], NDArray[Any]]


def adapted(weights: Iterable[str]) -> list[str]:
    """The linears of `<linear>.lora_A.weight` and `<linear>.lora_B.weight`, sorted."""
    return sorted({key.rpartition(".lora_")[0] for key in weights})


def find_pair(weights: Weights, linear: str, inputs: int, outputs: int) -> Pair:
    """The linear's lora_A (R, I) and lora_B (O, R); ModelError where the base has other widths."""
    a_RI, b_OR = (weights[f"{linear}.lora_{side}.weight"] for side in "AB")
    shapes = ((a_RI.shape[0], inputs), (outputs, a_RI.shape[0]))
    for side, array, wanted in zip("AB", (a_RI, b_OR), shapes, strict=True):
        if array.shape != wanted:
            raise ModelError(
                f"{linear}: lora_{side} of the adapter is {array.shape}, the base needs {wanted}",
                "the adapter was trained on another base; name its base as model.source",
            )
    return a_RI, b_OR


def find_magnitude(weights: Weights, linear: str, outputs: int) -> NDArray[Any] | None:
    """DoRA's vector of the linear, (O,); None in a plain LoRA. ModelError for another length."""
    array = weights.get(f"{linear}.{names.MAGNITUDE}")
    if array is not None and array.shape != (outputs,):
        raise ModelError(
            f"{linear}: {names.MAGNITUDE} of the adapter is {array.shape}, the base has {outputs} "
            "outputs",
            "the adapter was trained on another base; name its base as model.source",
        )
    return array


def find_saved(state: Weights, key: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of a trainer's state; ModelError where it is missing or of another shape."""
    array = state.get(key)
    if array is None or array.shape != shape:
        found = "missing" if array is None else f"{array.shape}"
        raise ModelError(
            f"the checkpoint's {key} is {found}, the trainer needs {shape}",
            "it belongs to another model or adapter; remove the checkpoint to start again",
        )
    return array


def refuse_stuck(still: Iterable[str], update: int, *, first: bool) -> None:
    """Raise ModelError for tensors that have not moved; `first` says that nothing moved before.

    The gradient of lora_A is zero while lora_B is: it moves in the second update.
    """
    stuck = sorted(n for n in still if not (first and n.endswith(".lora_A.weight")))
    if stuck:
        raise ModelError(
            f"{len(stuck)} trainable tensors did not move in update {update}: "
            f"{', '.join(stuck[:4])}",
            "leave them out of lora.targets; where all are named, try another device",
        )
