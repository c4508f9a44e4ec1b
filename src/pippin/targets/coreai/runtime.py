"""An .aimodel in Core AI's own runtime: tokens in, floats out.

Shape letters: T tokens, N wanted positions, V vocab.
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

from pippin.targets.coreai.program import MAIN
from pippin.targets.exporting import INPUTS, OUTPUT, WANTED
from pippin.targets.quiet import quiet
from pippin.targets.stepping import SteppingModel, log_softmax


class AimodelModel(SteppingModel):
    """A deployed file as a Scorer; loading it compiles it for this machine."""

    slow = True

    def __init__(self, path: Path, context: int) -> None:
        super().__init__(context)
        self._loop = asyncio.new_event_loop()
        opened: Any = AIModelAsset.load(path).executable()
        with quiet():
            model = self._loop.run_until_complete(opened.__aenter__())
            self._function = model.load_function(MAIN)
        weakref.finalize(self, _close, self._loop, opened)
        self._states = _zeros(self._function.desc)

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,); see SteppingModel."""
        if len(tokens) == self.context:
            self._run(tokens[:-1], start, [0])
            tokens, start = tokens[-1:], start + len(tokens) - 1
        return self._run(tokens, start, [len(tokens) - 1])[0]

    def logits(self, tokens: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits after every token of one row from `first` on, (T, V).

        In one call, or two for a full context.
        """
        longest = self.context - 1
        parts = [(tokens[:longest], 0), (tokens[longest:], longest)]
        found = [self._run(part, start, range(len(part))) for part, start in parts if len(part)]
        return np.concatenate(found)[first:]

    def _row_logprobs(self, row_T: NDArray[np.int64]) -> NDArray[np.float32]:
        logprobs_TV = log_softmax(self.logits(row_T[:-1].tolist()))
        return np.take_along_axis(logprobs_TV, row_T[1:, None], -1)[:, 0]

    def _run(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> NDArray[np.float32]:
        """Logits of some of the given tokens, (N, V)."""
        self.require_room(start + len(tokens))
        values = zip((*INPUTS, WANTED), ([tokens], [start], wanted), strict=True)
        inputs = {key: DeviceArray(np.array(value, np.int32)) for key, value in values}
        found = self._loop.run_until_complete(self._function(inputs=inputs, state=self._states))
        return np.array(found[OUTPUT].numpy(), np.float32)[0]


def _zeros(description: Any) -> dict[str, Any]:
    """Zeroed states: those that the runtime makes itself hold whatever was in memory."""
    found = {name: description.state_descriptor(name) for name in description.state_names}
    return {name: DeviceArray(np.zeros(tuple(s.shape), np.float32)) for name, s in found.items()}


def _close(loop: asyncio.AbstractEventLoop, opened: Any) -> None:
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()
