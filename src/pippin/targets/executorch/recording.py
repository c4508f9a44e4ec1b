"""What a .pte's own runtime hands to every stretch and gets from it, recorded while it runs.

Shape letters: B batch (1), T tokens.
"""

import errno
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# These define the operators that a .pte calls beside XNNPACK.
import executorch.extension.llm.custom_ops.custom_ops
import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc
from executorch.runtime import Runtime
from torch import Tensor

from pippin.errors import PippinError
from pippin.targets.native_log import without_harmless_lines

Call = tuple[Sequence[int], int]  # tokens, the position of the first


def record(path: Path, calls: Sequence[Call], room: int) -> list[list[list[Tensor]]]:
    """Tensors of every call's every stretch, float32: what was given, then the results.

    `room` is how many bytes they may take, on the disk of `path`. Raises OSError where it is full,
    and PippinError where the runtime was built without the record.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as place, without_harmless_lines():
        events, values = Path(place, "events"), Path(place, "values")
        program = Runtime.get().load_program(path, enable_etdump=True, debug_buffer_size=room)
        forward = program.load_method("forward")
        assert forward is not None, "every bundle has a forward method"
        for tokens, start in calls:
            forward.execute((torch.tensor([list(tokens)]), torch.tensor([start])))
        program.write_etdump_result_to_file(str(events), str(values))
        if values.stat().st_size < room:  # the runtime does not say that it could not write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(values))
        found = deserialize_from_etdump_flatcc(events.read_bytes())
        data = torch.from_file(str(values), size=values.stat().st_size, dtype=torch.uint8)
        # The first run is the loading of the method.
        runs = [_stretches(run.events or [], data) for run in found.run_data[-len(calls) :]]
    if not (runs and all(runs)):
        raise PippinError(
            f"executorch's runtime keeps no record of its calls: {path} cannot be proven here",
            "use the wheel of executorch that pippin names",
        )
    return runs


def _stretches(events: Sequence[Any], data: Tensor) -> list[list[Tensor]]:
    profiled = [event.profile_event for event in events if event.profile_event]
    delegated = [e.instruction_id for e in profiled if e.name == "DELEGATE_CALL"]
    found: dict[int, list[Tensor]] = {number: [] for number in sorted(delegated)}
    for event in events:
        said = event.debug_event
        if said and said.instruction_id in found:
            found[said.instruction_id].append(_tensor(said.debug_entry.tensor, data))
    return list(found.values())


def _tensor(stored: Any, data: Tensor) -> Tensor:
    size = 4 * math.prod(stored.sizes)
    return data[stored.offset : stored.offset + size].view(torch.float32).view(stored.sizes)
