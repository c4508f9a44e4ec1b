"""Which operators run on MPS in a version of PyTorch, read from the file they were generated from.

torchgen/packaged/ATen/native/native_functions.yaml lies in the wheels for every system.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pippin.caching import cache_folder, write_cached
from pippin.errors import UsageError

COMPOSITES = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """Overloads by name, e.g. `add.Tensor`: with a kernel for MPS, with one for any device, all.

    `fallback` run on the CPU without being asked; `gaps` reach a kernel that MPS lacks; `later` got
    a kernel in the version named.
    """

    version: str
    native: frozenset[str]
    composite: frozenset[str]
    every: frozenset[str]
    fallback: frozenset[str]
    gaps: frozenset[str]
    later: dict[str, str]


@functools.cache
def load_operators(version: str | None = None) -> Operators:
    """The table of the installed PyTorch, or of `2.14`, whose differences are on file."""
    import torch

    installed = torch.__version__.partition("+")[0]
    facts = _facts()
    short = _short(version or installed)
    if short not in facts:
        raise UsageError(
            f"MPS's operators in PyTorch {short} are not known", f"choose one of {', '.join(facts)}"
        )
    parsed = _cached(installed)
    native = frozenset(parsed["native"])
    if short != _short(installed):
        native = (native | set(facts[short]["added"])) - set(facts[short]["removed"])
    return Operators(
        version=short,
        native=native,
        composite=frozenset(parsed["composite"]),
        every=frozenset(parsed["every"]) | native,
        fallback=frozenset(facts[short]["fallback"]),
        gaps=frozenset(facts[short]["gaps"]),
        later={name: v for v in facts for name in facts[v]["added"] if name not in native},
    )


def _facts() -> dict[str, Any]:
    """What no wheel for Linux can tell, by version: written by `mps_versions.py` in benchmarks."""
    return json.loads(
        resources.files("pippin.engines.torch.mps").joinpath("versions.json").read_text()
    )


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cached(installed: str) -> dict[str, list[str]]:
    path = cache_folder() / f"mps-operators-{installed}.json"
    if path.is_file():
        return json.loads(path.read_text())
    import torchgen

    folder = Path(torchgen.__path__[0]) / "packaged" / "ATen" / "native"
    parsed = parse_operators(folder)
    write_cached(path, json.dumps(parsed))
    return parsed


def parse_operators(folder: Path) -> dict[str, list[str]]:
    """The names in a folder with native_functions.yaml and tags.yaml; takes some seconds."""
    from torchgen.gen import get_grouped_native_functions, parse_native_yaml
    from torchgen.model import DispatchKey, NativeFunctionsGroup

    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    indices = parsed.backend_indices
    native = {str(name) for name in indices[DispatchKey.MPS].index}
    for group in get_grouped_native_functions(parsed.native_functions):
        # A structured group is one kernel: where its out variant runs, all variants do.
        if not isinstance(group, NativeFunctionsGroup) or not group.structured:
            continue
        if str(group.out.func.name) in native:
            native |= {str(function.func.name) for function in group.functions()}
    keys = [DispatchKey.parse(name) for name in COMPOSITES]
    composite = {str(name) for key in keys for name in indices[key].index}
    every = {str(function.func.name) for function in parsed.native_functions}
    return {"native": sorted(native), "composite": sorted(composite), "every": sorted(every)}
