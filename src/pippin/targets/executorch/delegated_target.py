"""A target whose file a delegate of ExecuTorch runs whole; delegated.py makes it."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.engines import Scorer
from pippin.events import Event
from pippin.recipe import Quantize
from pippin.targets import TARGETS, Bundle, Refusal
from pippin.targets.families import refuse_family
from pippin.targets.grids import refuse_grids
from pippin.targets.quiet import quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class DelegatedTarget:
    """The target of this name; its packages are imported when it writes or loads.

    `bits` are the widths of symmetric codes that it holds.
    """

    name: str
    bits: tuple[int, ...]

    def refusal(self, quantize: Quantize, checkpoint: Path) -> Refusal | None:
        """The first reason against deploying such a model, as (message, hint); None for none."""
        reasons = [
            *refuse_family(self.name, checkpoint),
            *refuse_grids(self.name, quantize, self.bits),
        ]
        return reasons[0] if reasons else None

    def write(self, bundle: Bundle) -> Iterator[Event]:
        """Make, describe and check the bundle. Raises what delegated.write raises."""
        with quiet():
            from pippin.targets.executorch import delegated

            delegate = self._delegate()
        yield from delegated.write(delegate, bundle)

    def load(self, folder: Path) -> Scorer:
        """What `runtime` in deploy.json says. Raises what delegated.load raises."""
        with quiet():
            from pippin.targets.executorch import delegated

            delegate = self._delegate()
        return delegated.load(delegate, folder)

    def _delegate(self) -> Any:
        return importlib.import_module(f"{TARGETS[self.name]}.delegate").delegate()
