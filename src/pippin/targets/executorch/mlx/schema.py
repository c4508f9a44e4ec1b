"""Completes ExecuTorch's MLX delegate on systems whose wheels lack its generated files.

The wheels for Macs carry Python made from the delegate's flatbuffer schema; those for Linux carry
the schema, the script and the compiler that make it. The files are made once, in the cache folder.
"""

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata, util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from pippin.caching import cache_folder
from pippin.errors import PippinError

_PACKAGE = "executorch.backends.mlx"
_GENERATED = {f"{_PACKAGE}.serialization", f"{_PACKAGE}._generated_inspector"}


class _Finder:
    """Imports what was generated from its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(self.folder)]) if name in _GENERATED else None


def provide_schema() -> None:
    """Make `executorch.backends.mlx` importable. Raises PippinError where generating fails."""
    spec = util.find_spec("executorch.backends")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / "mlx" / "serialization"
    known = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if known or (source / "mlx_graph_schema.py").is_file():
        return
    name = f"executorch-mlx-{metadata.version('executorch')}"
    folder = cache_folder() / name
    if not folder.is_dir():
        folder = _room(folder)
        _generate(source, folder)
    sys.meta_path.insert(0, _Finder(folder))


def _room(folder: Path) -> Path:
    """`folder` itself, or one for this process where the cache cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            return folder
    except OSError:
        place = tempfile.mkdtemp(prefix="pippin-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        return Path(place) / folder.name


def _generate(source: Path, folder: Path) -> None:
    """The script writes beside itself, so it runs in a copy that becomes `folder` when whole."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place) / folder.name
        shutil.copytree(source, made / "serialization")
        (made / "runtime").mkdir()
        # Two C++ files are made as well, from templates that no wheel has.
        for template in ("MLXLoader.h.tmpl", "MLXLoader.cpp.tmpl"):
            (made / "serialization" / template).touch()
        script = made / "serialization" / "generate.py"
        flatc = source.parents[2] / "data" / "bin" / "flatc"
        command = [sys.executable, str(script), "--flatc", str(flatc)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (made / "_generated_inspector.py").is_file():
            raise PippinError(
                f"executorch-mlx: {script.name} of ExecuTorch's MLX delegate failed: "
                f"{(done.stderr or done.stdout).strip()[-200:]}",
                "install the version of executorch that pippin names",
            )
        if not folder.is_dir():
            made.replace(folder)
