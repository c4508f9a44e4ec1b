"""Probes of torch.compile: compiled code gives the values and gradients of plain code."""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pippin.check import Case
from pippin.check.families import Family
from pippin.engines.torch.probes.bench import Bench, exact, gap

OFF = "leave it out: train.compile = false"


def parity(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """A normed, gated block with a softmax over its output, forward and backward."""
    leaves = [
        (bench.draw(*shape, dtype=dtype, seed=seed) * 0.3).detach().requires_grad_()
        for seed, shape in enumerate(((33, 64), (96, 64), (64, 96)))
    ]
    references = [exact(x).requires_grad_() for x in leaves]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's advice on this machine
        out = torch.compile(_block, fullgraph=True)(*leaves)
    wanted = _block(*references)
    yield "values", gap(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    for name, ours, theirs in zip(("input", "up", "down"), leaves, references, strict=True):
        yield f"gradient of {name}", gap(_grad(ours), _grad(theirs))


def _block(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    normed = functional.rms_norm(hidden, (hidden.shape[1],), eps=1e-6)
    return (hidden + functional.silu(normed @ up.T) @ down.T).softmax(-1)


def _grad(tensor: Tensor) -> Any:
    assert tensor.grad is not None
    return tensor.grad


FAMILIES = (
    Family(name="compile.parity", measure=parity, remedy=OFF, avoid="compile", dtypes=("float32",)),
)
