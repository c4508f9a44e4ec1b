"""Training on several devices: rows split over one axis of a mesh, wide weights over the other.

Shape letters: M micro-batches, B rows, T tokens, L layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Linears split by their outputs (L, outputs, inputs), and those by their inputs.
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_ROWS = ("tokens", "positions", "segments")


def make_mesh(devices: Sequence[jax.Device], rows: int) -> Mesh | None:
    """Axes `data` and `tensor` over all devices; None for one. As many parts of rows as go."""
    if len(devices) == 1:
        return None
    data = math.gcd(rows, len(devices))
    shape = (data, len(devices) // data)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=kinds, devices=devices)


def notice(mesh: Mesh) -> str:
    """What the mesh does, in words."""
    data, tensor = mesh.devices.shape
    return f"trains on {mesh.size} devices: rows in {data} parts, weights in {tensor}"


def split_weights(mesh: Mesh | None, tree: Any) -> Any:
    """Weights by name, each on its part of the mesh; without a mesh, as they are."""
    return tree if mesh is None else jax.device_put(tree, shardings(mesh, tree))


def split_rows(mesh: Mesh | None, arrays: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches (M, B, T) with B split; places in the flattened rows are whole everywhere."""
    if mesh is None:
        return arrays
    places = {
        name: NamedSharding(mesh, P(None, "data") if name in _ROWS else P()) for name in arrays
    }
    return jax.device_put(arrays, places)


def shardings(mesh: Mesh, tree: Any) -> Any:
    """Where each leaf lies; one that does not divide evenly, or is no wide weight, is whole."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _parts(mesh, path, leaf.shape)), tree
    )


def _parts(mesh: Mesh, path: Any, shape: tuple[int, ...]) -> P:
    keys = [str(getattr(step, "key", "")) for step in path]
    name = next((key for key in keys if key.endswith("_proj.weight")), "")
    linear = name.removesuffix(".weight").rpartition(".")[2]
    axis = 1 if linear in _BY_OUTPUTS else 2 if linear in _BY_INPUTS else None
    if axis is None or shape[axis] % mesh.shape["tensor"]:
        return P()
    return P(*(None,) * axis, "tensor")
