"""Probes of gathers and scatters: embeddings and their gradients, updates at repeated places.

Shape letters: V rows of a table, D features, N indices.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from pippin.check import Case, NotThere
from pippin.check.families import Single
from pippin.engines.torch.probes.bench import Bench, exact, gap, unequal


def lookup(bench: Bench) -> Iterator[Case]:
    """Rows of a table as large as the vocabulary, its last row among them."""
    vocab = bench.shapes.vocab
    table_VD = bench.draw(vocab, 16)
    index_N = torch.cat([_index(vocab, 500), torch.tensor([0, vocab - 1])])
    wanted = exact(table_VD)[index_N]
    yield "embedding", unequal(embedding(bench.put(index_N), table_VD), wanted)
    yield "index_select", unequal(table_VD.index_select(0, bench.put(index_N)), wanted)
    yield "int32 indices", unequal(table_VD[bench.put(index_N.int())], wanted)


def lookup_gradient(bench: Bench) -> Iterator[Case]:
    """An embedding's gradient, tokens repeated often."""
    index_N, upstream_ND = _index(50, 3000), bench.draw(3000, 16, seed=1)
    table_VD = bench.draw(50, 16).requires_grad_()
    embedding(bench.put(index_N), table_VD).backward(upstream_ND)
    assert table_VD.grad is not None
    yield "3000 tokens, 50 words", gap(table_VD.grad, _summed(50, index_N, upstream_ND))


def added(bench: Bench) -> Iterator[Case]:
    """Values added at repeated indices, by every operator that can."""
    index_N, values_ND = _index(20, 700), bench.draw(700, 8, seed=1)
    here, wanted = bench.put(index_N), _summed(20, index_N, values_ND)
    empty = values_ND.new_zeros(20, 8)
    yield "index_add", gap(empty.index_add(0, here, values_ND), wanted)
    wide = here[:, None].expand(-1, 8)
    yield "scatter_add", gap(empty.scatter_add(0, wide, values_ND), wanted)
    yield "index_put", gap(empty.index_put((here,), values_ND, accumulate=True), wanted)


def written(bench: Bench) -> Iterator[Case]:
    """Values written in place: into slices, by index, by mask, into a cache."""
    base, values = bench.draw(12, 10), bench.draw(4, 10, seed=1)
    place = torch.tensor([7, 0, 11, 3])
    wanted = base.cpu().numpy().copy()
    wanted[place.numpy()] = values.cpu().numpy()
    yield "index_copy", unequal(base.index_copy(0, bench.put(place), values), torch.tensor(wanted))
    assigned = base.clone()
    assigned[bench.put(place)] = values
    yield "assignment", unequal(assigned, torch.tensor(wanted))
    sliced, wanted = base.T.clone(), base.cpu().numpy().T.copy()
    sliced[2:9:3, 1:] = values[:3, :10].new_ones(3, 11)
    wanted[2:9:3, 1:] = 1
    yield "slice", unequal(sliced, torch.tensor(wanted))
    filled = base.masked_fill(base > 0, -torch.inf)
    yield "mask", unequal(filled, torch.where(exact(base) > 0, -torch.inf, exact(base)))


def gathered(bench: Bench) -> Iterator[Case]:
    """The target's logit of every row, out of a large vocabulary."""
    logits, targets = bench.draw(40, bench.shapes.vocab), _index(bench.shapes.vocab, 40)
    wanted = exact(logits)[torch.arange(40), targets]
    yield "gather", unequal(logits.gather(1, bench.put(targets)[:, None])[:, 0], wanted)


def out_of_range(bench: Bench) -> Iterator[Case]:
    """A token beyond the vocabulary is an error, not a row of zeros."""
    if bench.device.type == "cuda":
        raise NotThere("CUDA answers with an assertion that ends the process")
    table, index = bench.draw(10, 4), bench.put(torch.tensor([3, 10]))
    try:
        embedding(index, table).cpu()
    except (IndexError, RuntimeError):
        yield "token 10 of 10", 0.0
    else:
        yield "token 10 of 10 is accepted", float("inf")


def _index(limit: int, count: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, limit, count))


def _summed(rows: int, index_N: Tensor, values_ND: Tensor) -> Tensor:
    total = np.zeros((rows, values_ND.shape[1]))
    np.add.at(total, index_N.numpy(), exact(values_ND).numpy())
    return torch.from_numpy(total)


FAMILIES = (
    Single(name="index.lookup", measure=lookup),
    Single(
        name="index.lookup gradient",
        measure=lookup_gradient,
        remedy="train an adapter: the embedding then needs no gradient",
        tolerance=1e-5,
        avoid="",
    ),
    Single(name="index.added", measure=added, tolerance=1e-5),
    Single(name="index.written", measure=written),
    Single(name="index.gathered", measure=gathered),
    Single(
        name="index.out of range",
        measure=out_of_range,
        remedy="make sure that the tokenizer has no token beyond the model's vocab_size",
        avoid="",
    ),
)
