"""A Hugging Face folder as stacked arrays on a device: safetensors only, strict, named faults.

Shape letters: L layers, V vocabulary, D hidden.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from pippin.engines.jax.architecture import Spec, read_spec
from pippin.engines.jax.decoder import Params
from pippin.engines.jax.device import DTYPES
from pippin.engines.jax.products import Codes, dense
from pippin.errors import ModelError
from pippin.model.quantized import DenseView

TOP = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
# Buffers that old checkpoints store; they follow from the config.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


class Loaded(NamedTuple):
    """A folder's decoder and weights; `notices` tell what takes more memory than its files."""

    spec: Spec
    params: Params
    notices: tuple[str, ...]


def load_params(folder: Path, dtype: str, device: jax.Device) -> Loaded:
    """The folder's decoder and its weights in `dtype`; quantized linears of its layers keep codes.

    Raises ModelError for a family that the engine lacks, and for tensors that are missing, left
    over or of another shape.
    """
    spec = read_spec(folder)
    view = DenseView(folder)
    _refuse_gaps(folder, spec, view)

    def read(name: str) -> NDArray[Any]:
        return view.read(name).astype(DTYPES[dtype])

    layers: Params = {}
    widened = []
    for name, shape in spec.shapes().items():
        full = [layer_name(number, name) for number in range(spec.num_layers)]
        grids = {view.grids.get(n) for n in full}
        if grids == {None} or len(grids) > 1:
            layers[name] = hold(_stacked(full, shape, DTYPES[dtype], read), device)
            if len(grids) > 1 or not view.floats.keys().isdisjoint(full):
                widened.append(name.removesuffix(".weight"))
        else:
            layers[name] = jax.device_put(_stacked_codes(view, full), device)
    top = {key: jax.device_put(read(TOP[key]), device) for key in top_shapes(spec)}
    notice = f"held in {dtype}, as codes are floats or bits differ by layer: {', '.join(widened)}"
    notices = (notice,) if widened else ()
    return Loaded(spec, {**top, "layers": layers}, notices)


def dequantize(spec: Spec, params: Params, device: jax.Device) -> None:
    """Put dense weights in the place of codes, a stack at a time."""
    layers, dtype = params["layers"], params["embed"].dtype
    for name, held in layers.items():
        if isinstance(held, Codes):
            inputs = spec.shapes()[name][1]
            whole = jax.lax.map(lambda codes, n=inputs: dense(codes, n, dtype), held)
            layers[name] = hold(np.asarray(whole), device)


def _stacked(
    full: list[str], shape: tuple[int, ...], dtype: Any, read: Callable[[str], NDArray[Any]]
) -> NDArray[Any]:
    whole = np.empty((len(full), *shape), dtype)
    for number, name in enumerate(full):
        whole[number] = read(name)
    return whole


def _stacked_codes(view: DenseView, full: list[str]) -> Any:
    """As they are stored, (L, O, P), (L, O, G), (L, O, G)."""
    modules = [name.removesuffix(".weight") for name in full]

    def stacked(part: str) -> Any:
        return np.stack([view.checkpoint.read(f"{module}.{part}") for module in modules])

    return Codes(stacked("weight"), stacked("scales"), stacked("biases"))


def hold(stacked: NDArray[Any], device: jax.Device) -> jax.Array:
    """A stack on a device; one of bfloat16 matrices stays bits on a CPU until a layer is computed.

    XLA widens what a CPU cannot multiply, and would do it to the whole stack ahead of the loop over
    its layers: three times the model's memory.
    """
    if device.platform == "cpu" and stacked.ndim == 3 and stacked.dtype == DTYPES["bfloat16"]:
        stacked = stacked.view(np.uint16)
    return jax.device_put(stacked, device)


def layer_name(number: int, name: str) -> str:
    """The checkpoint's name of a tensor of a layer."""
    return f"model.layers.{number}.{name}"


def top_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The tensors outside the layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "norm": (spec.hidden_size,),
    }
    return shapes if spec.tied else {**shapes, "head": (spec.vocab_size, spec.hidden_size)}


def names(spec: Spec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, by name."""
    yield from ((TOP[key], shape) for key, shape in top_shapes(spec).items())
    for number in range(spec.num_layers):
        yield from ((layer_name(number, name), shape) for name, shape in spec.shapes().items())


def _refuse_gaps(folder: Path, spec: Spec, view: DenseView) -> None:
    wanted, found = dict(names(spec)), view.tensors
    left = [n for n in found.keys() - wanted.keys() if not _DERIVED.search(n)]
    if spec.tied and TOP["head"] in left and _same_head(view):
        left.remove(TOP["head"])
    faults = {
        "lacks": sorted(wanted.keys() - found.keys()),
        "has tensors of another shape:": sorted(
            n for n in wanted.keys() & found.keys() if found[n].shape != wanted[n]
        ),
        "has tensors the architecture does not know:": sorted(left),
    }
    for text, faulty in faults.items():
        if faulty:
            raise ModelError(
                f"{folder} {text} {', '.join(faulty[:3])} ({len(faulty)} in all)",
                "config.json and the weights must belong together; fetch the model again",
            )


def _same_head(view: DenseView) -> bool:
    """Whether a stored copy of a tied head is the embedding."""
    return np.array_equal(view.read(TOP["head"]), view.read(TOP["embed"]))
