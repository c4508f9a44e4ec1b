"""Training in several processes, on one machine or many: each computes its share of an update.

The first leads: it runs the recipe, and tells the others which model to load, and then the batches
of every update. All add up their gradients over the ring, so all hold the same weights at every
step; the others read the model's folder and write nothing.
"""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, save

from pippin.engines import Weights
from pippin.errors import PippinError, first_line

Group: TypeAlias = mx.distributed.Group
HEADER = "told"
FAULT = 4096  # bytes in which a process tells why it cannot go on


class Message(NamedTuple):
    """What the first process tells: the deed, its settings, and arrays by name."""

    what: str
    settings: dict[str, Any]
    arrays: Weights


class Ring:
    """The processes that `mlx.launch` started together. `ready`: nobody is in the midst of work."""

    def __init__(self, group: Group) -> None:
        self.group, self.ready = group, True
        self.number, self.size = group.rank(), group.size()

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """Those that this process computes."""
        return items[self.number :: self.size]

    def added_up(self, arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        """float32 arrays summed over all processes, in one message."""
        summed = self._sum(mx.concatenate([array.flatten() for array in arrays]))
        ends = list(itertools.accumulate(array.size for array in arrays))
        parts = mx.split(summed, ends[:-1])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    @contextlib.contextmanager
    def told(
        self, what: str, settings: dict[str, Any], arrays: Weights | None = None
    ) -> Generator[None]:
        """Inside, all do the same: the first process tells the others what."""
        if self.number == 0:
            named = {name: np.ascontiguousarray(a) for name, a in (arrays or {}).items()}
            header = np.frombuffer(json.dumps([what, settings, [*named]]).encode(), np.uint8)
            self._spread(save({HEADER: header, **named}))
        self.ready = False
        yield
        self.ready = True

    def hear(self) -> Message:
        """What the first process tells next."""
        arrays = load(self._spread(b""))
        what, settings, names = json.loads(arrays[HEADER].tobytes())
        # In the first one's order: sums that run over them are the same to the last bit.
        return Message(what, settings, {name: arrays[name] for name in names})

    def agree(self, fault: PippinError | None) -> None:
        """All go on, or none: raises the fault of this process, or the first of another's."""
        text = f"{fault.message}\t{fault.hint}".encode()[:FAULT] if fault else b""
        said = np.zeros((self.size, FAULT), np.uint8)
        said[self.number, : len(text)] = np.frombuffer(text, np.uint8)
        said = np.array(self._sum(mx.array(said)))
        if fault:
            raise fault
        for number, row in enumerate(said):
            if row.any():
                text = row.tobytes().rstrip(b"\0").decode(errors="ignore")
                message, _, hint = text.partition("\t")
                raise PippinError(f"process {number + 1} of the ring: {message}", hint)

    def let_go(self, fault: str) -> None:
        """Tell the others that the run is over; in the midst of work they see this process end."""
        if self.number == 0 and self.ready:
            # One that has ended already need not hear it, and must not hide this one's fault.
            with contextlib.suppress(PippinError), self.told("over", {"fault": fault}):
                pass

    def _spread(self, data: bytes) -> bytes:
        """The first process's bytes, in every process."""
        length = int(np.array(self._sum(mx.array([len(data)], mx.int64)))[0])
        sent = np.frombuffer(data, np.uint8) if data else np.zeros(length, np.uint8)
        return np.array(self._sum(mx.array(sent))).tobytes()

    def _sum(self, array: mx.array) -> mx.array:
        summed = mx.distributed.all_sum(array, group=self.group)
        try:
            mx.eval(summed)
        except RuntimeError as error:
            self.ready = False
            raise PippinError(
                "another process of the ring has ended",
                "its own output says why; the same command goes on where all were",
            ) from error
        return summed


@functools.cache
def find_ring() -> Ring | None:
    """This process's; None where it is alone."""
    if not os.environ.get("MLX_RANK"):
        return None
    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except RuntimeError as error:
        raise PippinError(
            f"the other processes of the ring do not answer: {first_line(error)}",
            "start all of them at once, with `mlx.launch --backend ring`",
        ) from error
    return Ring(group) if group.size() > 1 else None
