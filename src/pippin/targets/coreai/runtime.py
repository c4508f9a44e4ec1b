"""An .aimodel in Core AI's own runtime: tokens in, floats out.

Shape letters: T tokens, V vocab.
"""

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import NDArray as DeviceArray
from numpy.typing import NDArray

from pippin.targets.coreai.program import MAIN, SCORE
from pippin.targets.exporting import INPUTS, OUTPUT
from pippin.targets.quiet import quiet
from pippin.targets.stepping import SteppingModel, log_softmax


class AimodelModel(SteppingModel):
    """A deployed file as a Scorer; loading it compiles it for this machine."""

    def __init__(self, path: Path, context: int) -> None:
        super().__init__(context)
        self._loop = asyncio.new_event_loop()
        opened: Any = AIModelAsset.load(path).executable()
        with quiet():
            self._model = self._loop.run_until_complete(opened.__aenter__())
        weakref.finalize(self, _close, self._loop, opened)
        self._opened: dict[str, tuple[Any, dict[str, Any]]] = {}

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        if len(tokens) == self.context:
            self._run(MAIN, tokens[:-1], start)
            tokens, start = tokens[-1:], start + len(tokens) - 1
        return self._run(MAIN, tokens, start)[0]

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after every token of one row, (T, V), in one call, or two for a full context."""
        longest = self.context - 1
        parts = [(tokens[:longest], 0), (tokens[longest:], longest)]
        return np.concatenate([self._run(SCORE, *part)[0] for part in parts if len(part[0])])

    def _row_logprobs(self, row_T: NDArray[np.int64]) -> NDArray[np.float32]:
        logprobs_TV = log_softmax(self.logits(row_T[:-1].tolist()))
        return np.take_along_axis(logprobs_TV, row_T[1:, None], -1)[:, 0]

    def _run(self, name: str, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        self.require_room(start + len(tokens))
        values = (np.array([tokens], np.int32), np.array([start], np.int32))
        inputs = {key: DeviceArray(value) for key, value in zip(INPUTS, values, strict=True)}
        function, states = self._function(name)
        found = self._loop.run_until_complete(function(inputs=inputs, state=states))
        return np.array(found[OUTPUT].numpy(), np.float32)

    def _function(self, name: str) -> tuple[Any, dict[str, Any]]:
        """A function with states of its own, opened when it is first asked."""
        if name not in self._opened:
            with quiet():
                function = self._model.load_function(name)
            self._opened[name] = function, _zeros(function.desc)
        return self._opened[name]


def _zeros(description: Any) -> dict[str, Any]:
    """Zeroed states: those that the runtime makes itself hold whatever was in memory."""
    found = {name: description.state_descriptor(name) for name in description.state_names}
    return {name: DeviceArray(np.zeros(tuple(s.shape), np.float32)) for name, s in found.items()}


def _close(loop: asyncio.AbstractEventLoop, opened: Any) -> None:
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()
