"""The GGUF file in llama.cpp itself, where llama-cpp-python is installed.

Shape letters: T tokens, V vocab.
"""

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pippin.engines.host import cores
from pippin.errors import ModelError
from pippin.targets.native_log import without_harmless_lines
from pippin.targets.stepping import SteppingModel

RUNTIME = "llama.cpp, on the CPU"


def is_installed() -> bool:
    """Whether llama.cpp can be asked here; nothing is imported to find out."""
    return find_spec("llama_cpp") is not None


def open_llama(path: Path, **options: Any) -> Any:
    """llama_cpp's model of a file. Raises ModelError where the package is missing."""
    if not is_installed():
        raise ModelError(
            f"{path} was judged in llama.cpp, and llama-cpp-python is not installed",
            'pip install "pippin[llama]", or deploy again: --redo deploy',
        )
    with without_harmless_lines():
        module: Any = importlib.import_module("llama_cpp")
        return module.Llama(str(path), verbose=False, **options)


class LlamaCppModel(SteppingModel):
    """A Scorer over one conversation of llama.cpp's, which takes a row at once.

    `options` are llama_cpp's; its own are what people run: keys and values in float16.
    """

    def __init__(self, path: Path, context: int, **options: Any) -> None:
        super().__init__(context)
        options = {"n_threads": cores(), "n_threads_batch": cores(), **options}
        self._model = open_llama(path, n_ctx=context, logits_all=True, n_gpu_layers=0, **options)

    def last_logits(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Logits after the last of some tokens, (V,)."""
        return self._run(tokens, start)[-1]

    def logits(self, tokens: Sequence[int], first: int = 0) -> NDArray[np.float32]:
        """Logits after every token of one row from `first` on, (T, V)."""
        self.require_room(len(tokens))
        return self._run(tokens, 0)[first:]

    def _run(self, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        self._model.n_tokens = start  # what llama.cpp holds beyond is dropped at the next call
        self._model.eval([int(token) for token in tokens])
        return np.array(self._model.scores[start : start + len(tokens)], np.float32)
