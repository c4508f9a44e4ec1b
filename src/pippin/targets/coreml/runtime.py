"""A saved .mlpackage as a Scorer: its own program and weights, run operator by operator in numpy.

Core ML runs on Apple's systems only; this reads what it would read.

Shape letters: V vocab.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load as load_program
from coremltools.converters.mil.mil import types
from numpy.typing import NDArray

from pippin.errors import ModelError
from pippin.targets.coreml import mil
from pippin.targets.stepping import SteppingModel

_EXPANDED = "constexpr_blockwise_shift_scale"
_LARGEST = float(np.finfo(np.float16).max)
# What coremltools adds to the name of an operator that it makes float16.
_NARROWED = "_cast_fp16"


class PackageModel(SteppingModel):
    """A deployed file as a Scorer.

    Raises ModelError for a value that no float16 holds, but where it is `tolerant`: then such
    values go on as they are, and `overflowed` has the largest by operator.
    """

    slow = True

    def __init__(self, path: Path, context: int) -> None:
        super().__init__(context)
        model: Any = coremltools.models.MLModel(str(path), skip_model_load=True)
        spec = model.get_spec()
        program: Any = load_program(
            spec,
            specification_version=spec.specificationVersion,
            file_weights_dir=model.weights_dir,
        )
        (self._function,) = program.functions.values()
        self._inputs = [given.name for given in spec.description.input]
        self._constants = dict(self._read_constants())
        self.tolerant = False
        self.overflowed: dict[str, float] = {}
        self._states = {
            state.name: np.zeros(state.type.stateType.arrayType.shape, np.float32)
            for state in spec.description.state
        }

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        self.require_room(start + len(tokens))
        if len(tokens) == self.context:
            self.last_logits(tokens[:-1], start)
            tokens, start = tokens[-1:], start + len(tokens) - 1
        given = (np.array([tokens], np.int32), np.array([start], np.int32))
        values: mil.Values = dict(zip(self._inputs, given, strict=True))
        for operation in self._function.operations:
            if operation.outputs[0].name not in self._constants:
                values[operation.outputs[0].name] = self._compute(operation, values)
        (output,) = self._function.outputs
        return values[output.name].reshape(-1)

    def matrices(self) -> Iterator[NDArray[np.float32]]:
        """Every weight that the package stores as codes, expanded."""
        for operation in self._function.operations:
            if operation.op_type == _EXPANDED:
                yield self._constants[operation.outputs[0].name]

    def report(self) -> dict[str, Any]:
        """Every operator that computes, with the dtype of its result, as deploy.json lists them.

        All are Core ML's; which unit runs each, it decides when it loads the package.
        """
        counts = Counter(
            f"{operation.op_type}, {types.builtin_to_string(operation.outputs[0].dtype)}"
            for operation in self._function.operations
            if operation.outputs[0].name not in self._constants
        )
        rows = [
            {"operator": name, "delegated": count, "left": 0, "share": 0.0, "why": ""}
            for name, count in counts.most_common()
        ]
        return {"delegate": "Core ML", "subgraphs": 1, "flops_share": 1.0, "operators": rows}

    def _read_constants(self) -> Iterator[tuple[str, Any]]:
        found: dict[str, Any] = {}
        for operation in self._function.operations:
            name = operation.outputs[0].name
            if operation.op_type == "const":
                found[name] = _widened(operation.val.val)
            elif operation.op_type == _EXPANDED:
                given = {k: found[v.name] for k, v in operation.inputs.items() if v is not None}
                found[name] = mil.expand_blocks(given)
            else:
                continue
            yield name, found[name]

    def _compute(self, operation: Any, values: mil.Values) -> Any:
        kind, inputs = operation.op_type, operation.inputs
        if kind == "read_state":
            return self._states[inputs["input"].name]
        given = {k: self._value(v, values) for k, v in inputs.items() if k != "state"}
        if kind == "coreml_update_state":
            self._states[inputs["state"].name] = given["value"]
            return given["value"]
        if kind not in mil.OPERATORS:
            raise ModelError(
                f"coreml: operator {kind} of {operation.name} is not known here",
                "use the version of coremltools that pippin names",
            )
        return self._rounded(mil.run(kind, given), operation.outputs[0])

    def _rounded(self, value: NDArray[Any], output: Any) -> NDArray[Any]:
        """As wide as the operator declares; computed in float32 all the same."""
        if output.dtype != types.fp16:
            return value
        largest = float(np.abs(value).max(initial=0))
        if largest > _LARGEST:
            name = output.op.name.removesuffix(_NARROWED)
            if not self.tolerant:
                raise ModelError(
                    f"float16 does not hold the values of {name}, up to {largest:.3g}",
                    "deploy this model to another target",
                )
            self.overflowed[name] = max(largest, self.overflowed.get(name, 0.0))
            return value
        return value.astype(np.float16).astype(np.float32)

    def _value(self, variable: Any, values: mil.Values) -> Any:
        if variable is None:
            return None
        if isinstance(variable, list | tuple):
            return [self._value(one, values) for one in variable]
        name = variable.name
        return self._constants[name] if name in self._constants else values[name]


def _widened(value: Any) -> Any:
    is_half = isinstance(value, np.ndarray | np.generic) and value.dtype == np.float16
    return value.astype(np.float32) if is_half else value
