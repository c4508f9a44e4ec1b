"""The learning rate against transformers' schedulers; what counts as a fault."""

import math
from typing import Any

import pytest

from pippin.recipe import Schedule, Train
from pippin.stages.schedule import fault, learning_rate, total_steps


def rates(total: int, **settings: Any) -> list[float]:
    train = Train(learning_rate=3e-4, **settings)
    return [learning_rate(train, step, total) for step in range(total)]


def reference(name: str, total: int, warmup: int, **options: Any) -> list[float]:
    """transformers' rates from its second update on: its first one is at rate 0."""
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(name, optimizer, warmup + 1, total + 1, options or None)
    found = []
    for _ in range(total + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found[0] == 0
    return found[1:]


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize(
    ("schedule", "name"),
    [("cosine", "cosine"), ("linear", "linear"), ("constant", "constant_with_warmup")],
)
def test_rates_equal_transformers(schedule: Schedule, name: str, warmup: int) -> None:
    ours = rates(17, schedule=schedule, warmup_steps=warmup)
    assert ours == pytest.approx(reference(name, 17, warmup), rel=1e-12)


def test_a_cosine_that_ends_above_zero_equals_transformers() -> None:
    ours = rates(20, warmup_steps=0, min_learning_rate=1e-5)
    wanted = reference("cosine_with_min_lr", 20, 0, min_lr=1e-5)
    assert ours == pytest.approx(wanted, rel=1e-12)


def test_a_line_that_ends_above_zero() -> None:
    ours = rates(10, schedule="linear", min_learning_rate=1e-4)
    assert ours == pytest.approx([3e-4 - step * 2e-5 for step in range(10)])


def test_no_update_is_wasted_on_a_rate_of_zero() -> None:
    assert min(rates(50, warmup_steps=10)) > 0
    assert min(rates(5, warmup_steps=10)) > 0


@pytest.mark.parametrize(
    ("settings", "per_epoch", "total"),
    [({}, 7, 7), ({"epochs": 2.5}, 7, 18), ({"steps": 3}, 7, 3), ({"epochs": 0.01}, 7, 1)],
)
def test_total_steps(settings: dict[str, Any], per_epoch: int, total: int) -> None:
    assert total_steps(Train(**settings), per_epoch) == total


def test_faults() -> None:
    usual = [2.0] * 10
    assert fault(2.0, 1.0, usual, 5.0) is None
    assert fault(9.9, 1.0, usual, 5.0) is None
    assert fault(10.2, 1.0, usual, 5.0) == "the loss is 10.2, 5.1 times the recent median of 2"
    assert fault(1e9, 1.0, usual, 0) is None
    assert fault(1e9, 1.0, usual[1:], 5.0) is None
    assert fault(0.5, 1.0, [0.02] * 20, 5.0) is None, "tiny losses vary by large factors"
    assert fault(1.5, 1.0, [0.02] * 20, 5.0)
    assert fault(math.nan, 1.0, [], 0) == "the loss is nan"
    assert fault(math.inf, 1.0, [], 0) == "the loss is inf"
    assert fault(2.0, math.inf, [], 0) == "the gradient's norm is inf (loss 2)"
