"""A .pte for the MLX delegate as a Scorer: its own bytecode, instruction by instruction.

MLX computes on Apple's GPUs; this reads what it would read. Floats are widened to float32, so that
a wrong program or weight is seen and not the rounding of bfloat16.

Shape letters: B batch, T tokens, V vocab.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executorch.backends.mlx import pte_inspector
from executorch.exir._serialize._program import deserialize_pte_binary
from numpy.typing import NDArray
from torch import Tensor

from pippin.errors import ModelError
from pippin.targets.executorch.mlx import operators
from pippin.targets.stepping import SteppingModel

# ExecuTorch's scalar types.
_DTYPES = {
    0: torch.uint8,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    11: torch.bool,
    15: torch.bfloat16,
    28: torch.uint32,
}
_TENSOR = 0  # a slot's type


class BytecodeModel(SteppingModel):
    """A deployed file as a Scorer."""

    def __init__(self, path: Path, context: int) -> None:
        super().__init__(context)
        data = path.read_bytes()
        flat = pte_inspector._load_mlx_payload(data).fb_data
        self._metas = pte_inspector._get_fb_graph(flat)
        self._graph = pte_inspector.parse_mlx_flatbuffer(flat)
        self._tensors: dict[int, Tensor] = dict(self._constants(data))
        self._expanded: dict[int, Tensor] = {}
        for slot in self._graph["mutable_buffer_map"]:
            _, shape = self._kind(slot["idx"])
            self._tensors[slot["idx"]] = torch.zeros(shape)
        if self._graph["init_chain_idx"] >= 0:
            self._run(self._graph["init_chain_idx"])

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        self.require_room(start + len(tokens))
        given = (torch.tensor([[int(t) for t in tokens]]), torch.tensor([start]))
        for slot, value in zip(self._graph["input_map"], given, strict=True):
            self._tensors[slot["idx"]] = value
        with torch.no_grad():
            self._run(self._graph["main_chain_idx"])
        (output,) = self._graph["output_map"]
        return self._tensors[output["idx"]].reshape(-1).numpy()

    def _constants(self, data: bytes) -> Iterator[tuple[int, Tensor]]:
        stored = deserialize_pte_binary(data).named_data
        assert stored is not None
        for slot in self._graph["named_slots"]:
            index = slot["slot_idx"]
            if slot["slot_type"] == _TENSOR and index < self._graph["num_constant_tensors"]:
                raw = stored.buffers[stored.pte_data[slot["name"]].buffer_index]
                assert isinstance(raw, bytes)
                dtype, shape = self._kind(index)
                assert len(raw) >= math.prod(shape) * dtype.itemsize, slot
                found = torch.frombuffer(bytearray(raw), dtype=dtype, count=math.prod(shape))
                yield index, (found.float() if dtype.is_floating_point else found).reshape(shape)

    def _kind(self, index: int) -> tuple[torch.dtype, list[int]]:
        meta = self._metas.TensorMeta(index)
        shape = [meta.Shape(axis).Value() for axis in range(meta.ShapeLength())]
        return _DTYPES[meta.ScalarType()], shape

    def _run(self, chain: int) -> None:
        numbers: dict[int, int] = {}
        for instruction in self._graph["instruction_chains"][chain]["instructions"]:
            name = instruction["op_name"]
            if name not in operators.OPERATORS:
                raise ModelError(
                    f"executorch-mlx: instruction {name} is not known here",
                    "use the version of executorch that pippin names",
                )
            given = {key: self._value(field, numbers) for key, field in instruction.items()}
            out, result = instruction["out"], self._compute(name, instruction, given)
            if "vid" in out:
                numbers[out["vid"]] = result
            else:
                self._tensors[out["tid"]] = result

    def _compute(self, name: str, instruction: dict[str, Any], given: operators.Values) -> Any:
        if name != "QuantizedMatmulNode":
            return operators.run(name, given)
        # A weight is expanded once, not at every token.
        index = instruction["w"]["tid"]
        if index not in self._expanded:
            self._expanded[index] = operators.expand(given)
        return operators.multiply(given, self._expanded[index])

    def _value(self, field: Any, numbers: dict[int, int]) -> Any:
        if isinstance(field, list):
            return [self._value(one, numbers) for one in field]
        if not isinstance(field, dict):
            return field
        if "tid" in field:
            return self._tensors.get(field["tid"])
        return numbers.get(field["vid"]) if "vid" in field else field["literal"]
