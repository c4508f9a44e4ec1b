"""C++ beside a module: compiled once by the machine's g++, kept in the user's cache."""

import contextlib
import ctypes
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pippin import disk
from pippin.caching import cache_folder

FLAGS = "-std=c++20 -O3 -march=native -fno-math-errno -fno-trapping-math -fPIC -shared"
TYPES: dict[str, Any] = {  # by the letters of a signature
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
    "b": ctypes.c_bool,
}


@dataclass(kw_only=True)
class Compiled:
    """The functions of a source, none of which returns anything.

    `flags` are beside FLAGS; `signatures` are a letter of TYPES for each argument, by function;
    `headers` are what the source includes that lies beside it.
    """

    source: Path
    headers: tuple[Path, ...] = ()
    flags: str
    signatures: Mapping[str, str]

    @cached_property
    def missing(self) -> str | None:
        """Why there are none here, in words; None where there are. Compiles them if need be."""
        if sys.platform != "linux":
            return "they are compiled on Linux alone"
        if shutil.which("g++") is None:
            return "g++ is not installed"
        try:
            _ = self.library
        except subprocess.CalledProcessError as error:
            return f"g++ does not compile them: {error.stderr.strip().partition(chr(10))[0][:200]}"
        except OSError as error:
            return f"they do not load: {error}"
        return None

    @cached_property
    def library(self) -> ctypes.CDLL:
        """With the functions' types."""
        place = cache_folder() / f"{self.source.stem}-{self._digest()}.so"
        library = ctypes.CDLL(str(place)) if place.exists() else self.compile(place)
        for name, letters in self.signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [TYPES[letter] for letter in letters], None
        return library

    def compile(self, place: Path) -> ctypes.CDLL:
        """The library, kept at `place` where that can be written.

        It is made in a folder of its own: another process may be making it as well.
        """
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(prefix="pippin-", dir=place.parent)
        except OSError:
            scratch = tempfile.TemporaryDirectory(prefix="pippin-")
        with scratch as folder:
            made = Path(folder) / place.name
            _run_compiler(*self._flags().split(), "-o", str(made), str(self.source))
            library = ctypes.CDLL(str(made))  # it stays when its file is gone
            with contextlib.suppress(OSError):
                disk.sync_path(made)  # a machine that dies now must not leave half of it for later
                made.replace(place)
        return library

    def _flags(self) -> str:
        return f"{FLAGS} {self.flags}"

    def _digest(self) -> str:
        """Of all that decides about the code: machines that differ may share a home folder."""
        cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        said = ("model name", "flags", "Feat")
        lines = [line for line in cpu.splitlines() if line.startswith(said)]
        files = [file.read_text() for file in (self.source, *self.headers)]
        parts = [*files, self._flags(), _run_compiler("--version")]
        text = "\n".join([*parts, platform.machine(), *lines])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run_compiler(*arguments: str) -> str:
    done = subprocess.run(("g++", *arguments), check=True, capture_output=True, text=True)
    return done.stdout
