"""Which storages are said to lie on MPS: the data stays where it is, a tag travels with it."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

SWEEP = 4096  # new tags between two looks for storages that are gone


class Tags:
    """A set of storages that does not keep them alive."""

    def __init__(self) -> None:
        self._tagged: dict[int, StorageWeakRef] = {}
        self._added = 0

    def __contains__(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        return key is not None and key in self._tagged

    def add(self, tensor: Tensor) -> None:
        """Say that it lies on MPS."""
        key = _key(tensor)
        if key is None or key in self._tagged:
            return
        self._tagged[key] = StorageWeakRef(tensor.untyped_storage())
        self._added += 1
        if self._added % SWEEP == 0:
            gone = [key for key, reference in self._tagged.items() if reference.expired()]
            for key in gone:
                del self._tagged[key]

    def drop(self, tensor: Tensor) -> None:
        """Say that it lies on the CPU."""
        key = _key(tensor)
        if key is not None:
            self._tagged.pop(key, None)

    def any(self, tree: Any) -> bool:
        """Whether one of a tree's tensors lies on MPS."""
        return any(tensor in self for tensor in tensors(tree))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def dtypes(tree: Any) -> str:
    """Their dtypes, each once, in order."""
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors(tree))
    return ", ".join(dict.fromkeys(names))


def _key(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # sparse tensors have none
        return None


MPS, CPU = torch.device("mps:0"), torch.device("cpu")
