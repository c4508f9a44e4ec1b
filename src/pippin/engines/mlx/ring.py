"""Training in several processes, on one machine or many: each computes its share of an update.

All of them run the same recipe on the same data, and add up their gradients over the ring; so all
hold the same adapter at every step, and each leaves a whole run behind.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import mlx.core as mx

Group: TypeAlias = mx.distributed.Group


def find_group() -> Group | None:
    """The processes that `mlx.launch` started together; None where this one is alone."""
    if "MLX_RANK" not in os.environ:
        return None
    group = mx.distributed.init(strict=True, backend="ring")
    return group if group.size() > 1 else None


def share(group: Group | None, items: Sequence[Any]) -> Sequence[Any]:
    """Those that this process computes."""
    return items if group is None else items[group.rank() :: group.size()]


def added_up(group: Group | None, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """float32 arrays summed over all processes, in one message."""
    if group is None:
        return arrays
    sent = mx.concatenate([array.flatten() for array in arrays])
    ends = list(itertools.accumulate(array.size for array in arrays))
    parts = mx.split(mx.distributed.all_sum(sent, group=group), ends[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
