"""Framed products equal the linears one by one, forward and backward."""

import pytest
import torch

from pippin.engines.torch.float8 import round_rows
from pippin.engines.torch.frames import Frame, Wide
from pippin.engines.torch.lora import LoraLinear

pytestmark = pytest.mark.torch

TOKENS, INPUTS = 6, 8


def linear(outputs, rank, bias, generator, inputs=INPUTS, dtype=torch.float64):
    exact = torch.promote_types(dtype, torch.float32)

    def draw(*shape):
        return torch.randn(*shape, dtype=exact, generator=generator)

    base = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    base.weight.copy_(draw(outputs, inputs))
    if bias:
        base.bias.copy_(draw(outputs))
    if not rank:
        return base
    return LoraLinear(base, (draw(rank, inputs), draw(outputs, rank)), 0.5, 0.0)


@torch.no_grad()
def refresh(frame):
    for place, master in zip(frame.places, frame.masters, strict=True):
        place.copy_(master)


@pytest.mark.parametrize("ranks", [(0, 3, 3), (2, 3, 16), (3, 0, 2), (0, 0, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_the_linears(ranks, bias):
    generator = torch.Generator().manual_seed(0)
    linears = [linear(n, rank, bias, generator) for n, rank in zip((4, 6, 5), ranks, strict=True)]
    x_TI = torch.randn(TOKENS, INPUTS, dtype=torch.float64, generator=generator).requires_grad_()
    upstream_TO = torch.randn(TOKENS, 15, dtype=torch.float64, generator=generator)
    wanted_TO = torch.cat([part(x_TI) for part in linears], 1)
    frame = Frame(linears, float8=False, by_columns=bias)
    wanted = torch.autograd.grad(wanted_TO, [x_TI, *frame.masters], upstream_TO)
    refresh(frame)
    x, dy = frame.inner(TOKENS), frame.outer(TOKENS)
    x.values.copy_(x_TI.detach())
    dy.values.copy_(upstream_TO)
    torch.testing.assert_close(frame.product(x), wanted_TO.detach())
    dx_TI, grads = frame.product_back(dy, x.whole)
    for ours, one in zip([dx_TI, *grads], wanted, strict=True):
        torch.testing.assert_close(ours, one)
    if frame.extra:  # the same, with inputs or gradients read once
        y_TO, tail_TE = frame.wide_product(x)
        torch.testing.assert_close(y_TO + tail_TE @ frame.beside.T, wanted_TO.detach())
        again, tail_TE = frame.outer(TOKENS), dy.tail.clone()
        again.values.copy_(upstream_TO)
        torch.testing.assert_close(frame.wide_back(again), wanted[0])
        torch.testing.assert_close(again.tail[:, : frame.rank], tail_TE[:, : frame.rank])


@pytest.mark.parametrize("by_columns", [False, True])
def test_the_linears_weights_become_views(by_columns):
    linears = [linear(4, 2, False, torch.Generator().manual_seed(n)) for n in range(2)]
    before = [part.weight.clone() for part in linears]
    frame = Frame(linears, float8=False, by_columns=by_columns)
    frame.adopt()
    for part, weight in zip(linears, before, strict=True):
        assert torch.equal(part.weight, weight)
        assert part.weight.untyped_storage().data_ptr() == frame.whole.untyped_storage().data_ptr()
        assert not part.weight.requires_grad


def test_nothing_is_added_beside_plain_linears():
    frame = Frame([linear(4, 0, False, torch.Generator().manual_seed(0))], float8=False)
    assert frame.extra == 0
    assert isinstance(frame.inner(TOKENS), Wide)
    assert frame.masters == []


@pytest.mark.parametrize("bias", [False, True])
def test_in_float8_they_differ_by_its_rounding_alone(bias):
    generator = torch.Generator().manual_seed(0)
    linears = [
        linear(n, rank, bias, generator, inputs=32, dtype=torch.bfloat16)
        for n, rank in ((16, 0), (32, 4), (16, 3))
    ]
    make = {"dtype": torch.bfloat16, "generator": generator}
    x_TI, upstream_TO = torch.randn(32, 32, **make).requires_grad_(), torch.randn(32, 64, **make)
    wanted_TO = torch.cat([part(x_TI) for part in linears], 1)
    frame = Frame(linears, float8=True)
    wanted = torch.autograd.grad(wanted_TO, [x_TI, *frame.masters], upstream_TO)
    refresh(frame)
    x, dy = frame.inner(32), frame.outer(32)
    for wide, values in ((x, x_TI.detach()), (dy, upstream_TO)):
        wide.values.copy_(values)
        codes, scale = round_rows(values)
        wide.codes.copy_(codes)
        wide.scale.copy_(scale)
    y_TO = frame.product(x)
    dx_TI, grads = frame.product_back(dy, x.whole)
    results = zip([y_TO, dx_TI, *grads], [wanted_TO.detach(), *wanted], strict=True)
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in results]
    assert max(errors[:2]) < 0.05
    assert min(errors[:2]) > 0.001  # it is FP8
    assert max(errors[2:]) < 0.01  # adapters stay in bfloat16
