"""Keeps harmless lines of the runtimes' native logs off stderr."""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Generator
from typing import TextIO

HARMLESS = (
    # custom_sdpa asks for scratch memory, is told that there is none, and allocates it: every call.
    b"No temp allocator provided",
    # A look for ARM's core identification where there is none, when the library is loaded.
    b"[cpuinfo_utils.cpp",
    # Kernels of GPUs that a library brings along, and a registration that torch no longer wants.
    b"torchao/_C_",
    b"register_constant() on Enum subclasses",
    # Progress of converters, and of Core AI's loader.
    b"Converting PyTorch Frontend",
    b"Running MIL",
    b"to Core AI",
    b"ODIE [default]",
    # Progress of transformers and compressed-tensors while a folder is loaded.
    b"Loading weights:",
    b"Applying quantization config:",
    b"ompressing model:",
    b"Dispatching model:",
    # A context of llama.cpp's that reads the vocabulary alone, or is rounded up to its own step.
    b"llama_context: n_ctx_seq",
)
STDERR = 2


class _Words(io.TextIOBase):
    """A sys.stderr that writes to `target`: a log handler made meanwhile may keep it for good."""

    def __init__(self, target: TextIO) -> None:
        self.target = target

    def write(self, text: str) -> int:
        return self.target.write(text)

    def flush(self) -> None:
        self.target.flush()


@contextlib.contextmanager
def without_harmless_lines() -> Generator[None]:
    """Hold back what is written to stderr inside, then pass on all but the harmless lines.

    Both ways are held: the file descriptor, and sys.stderr, to which pybind sends C++ streams and
    which a progress bar may have replaced.
    """
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(STDERR)
        os.dup2(held.fileno(), STDERR)
        text = io.TextIOWrapper(os.fdopen(os.dup(held.fileno()), "wb", 0), write_through=True)
        words = _Words(text)
        try:
            with text, contextlib.redirect_stderr(words):
                yield
        finally:
            words.target = sys.stderr
            os.dup2(stderr, STDERR)
            os.close(stderr)
            held.seek(0)
            _pass_on(held.read())


def _pass_on(written: bytes) -> None:
    if written:
        lines = written.splitlines(keepends=True)
        os.write(STDERR, b"".join(line for line in lines if not _is_harmless(line)))


def _is_harmless(line: bytes) -> bool:
    return not line.strip() or any(words in line for words in HARMLESS)
