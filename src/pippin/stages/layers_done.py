"""The finished layers of an unfinished quantization: a kill loses the one that was being made.

Next to the stage's folder `quantize` lies `.quantize.work`, with one sealed folder a layer. Layers
made from other settings or inputs, and damaged ones, are made again.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pippin import artifact, disk
from pippin.artifact import Origin
from pippin.engines import Weights
from pippin.model.weights import file_tensors, read_tensor
from pippin.stages.coding import Coder, Row
from pippin.stages.sealed import STATE, DamagedError, check, seal


@dataclass(kw_only=True)
class LayersDone:
    """Finds what there is when it is made; `add` and `flush` keep what is new."""

    folder: Path
    origin: Origin
    found: dict[str, tuple[Row, Path]] = field(default_factory=dict)
    _rows: list[Row] = field(default_factory=list)
    _parts: Weights = field(default_factory=dict)

    def __post_init__(self) -> None:
        for layer in sorted(self.folder.glob("layer-*")):
            try:
                record = check(layer)
                if artifact.origin_differences(record["origin"], self.origin):
                    continue
                rows = [_row(values) for values in record["rows"]]
            except (DamagedError, KeyError, TypeError):
                continue
            self.found |= {row.name: (row, layer) for row in rows}

    def restore(self, name: str, coder: Coder) -> Row:
        """Write a found tensor once more; its row."""
        row, layer = self.found[name]
        module = name.removesuffix(".weight")
        infos = file_tensors(layer / STATE)
        for part in (name, f"{module}.scales", f"{module}.biases"):
            coder.writer.write(part, read_tensor(infos[part]))
        return row

    def add(self, row: Row, parts: Weights) -> None:
        """Take up a tensor that was just written, as it is stored."""
        self._rows.append(row)
        self._parts |= parts

    def flush(self, layer: int | None) -> None:
        """Seal what was added: all of a layer, or what lies outside of layers."""
        if self._rows:
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = [asdict(row) for row in self._rows]
            record = {"origin": artifact.record(self.origin), "rows": rows}
            name = "layer-none" if layer is None else f"layer-{layer:04}"
            seal(self.folder / name, self._parts, record)
            self._rows, self._parts = [], {}

    def forget(self) -> None:
        """The whole is there: the layers are no longer needed."""
        disk.retire(self.folder)


def _row(values: dict[str, Any]) -> Row:
    whole: dict[str, Any] = {**values, "shape": tuple(values["shape"])}
    return Row(**whole)
