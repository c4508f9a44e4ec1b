"""Takes out of a .pte what it stores twice: a tied head's codes, which are the embedding's.

The lookup reads its table among the program's constants, XNNPACK reads the head's codes under a
name of their own. Both are found by a segment's offset in the file
(https://docs.pytorch.org/executorch/stable/pte-file-format.html), so one may lie inside the other.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executorch.exir._serialize._flatbuffer_program import _patch_generated_flatbuffer_aliases
from executorch.exir._serialize.generated.executorch_flatbuffer.Program import Program

# Where the header behind flatbuffers' own eight bytes says how the segments lie.
_BASE, _LENGTH = 8 + 16, 8 + 24
_OFFSET_FIELD = 4
ALIGNMENT = 128
SMALLEST = 1 << 12  # bytes worth looking for


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """Bytes `start` to `end` of the segments; its offset is written at `field` of the file."""

    start: int
    end: int
    field: int | None


def share_segments(path: Path) -> int:
    """Let named data that stands among the constants be read there; the bytes that this saves."""
    # Without it the generated readers find modules where their classes should be.
    _patch_generated_flatbuffer_aliases()
    data = bytearray(path.read_bytes())
    base = _number(data, _BASE)
    program = Program.GetRootAs(bytes(data[:base]), 0)
    segments = [_read(program.Segments(i)) for i in range(program.SegmentsLength())]
    table = program.ConstantSegment()
    constants = segments[table.SegmentIndex()]
    places = [constants.start + table.Offsets(i) for i in range(table.OffsetsLength())]
    named = {program.NamedData(i).SegmentIndex() for i in range(program.NamedDataLength())}
    before = len(data)
    # From the back, so that what is still to be looked at has not moved.
    for index in sorted(named, reverse=True):
        found = segments[index]
        place = _find(data, base, found, constants, places)
        if place is not None:
            segments[index] = _Segment(start=place, end=place + _size(found), field=found.field)
            segments = list(_without(data, base, found, segments))
    for segment in segments:
        if segment.field is not None:
            struct.pack_into("<Q", data, segment.field, segment.start)
    struct.pack_into("<Q", data, _LENGTH, len(data) - base)
    path.write_bytes(data)
    return before - len(data)


def _find(
    data: bytearray, base: int, found: _Segment, constants: _Segment, places: Sequence[int]
) -> int | None:
    """Where a constant begins with the same bytes."""
    size = _size(found)
    if size < SMALLEST or found.field is None or found.start < constants.end:
        return None
    wanted = data[base + found.start : base + found.end]
    fitting = (place for place in places if place + size <= constants.end)
    same = (p for p in fitting if data[base + p : base + p + size] == wanted)
    return next(same, None)


def _without(
    data: bytearray, base: int, gone: _Segment, segments: list[_Segment]
) -> Iterator[_Segment]:
    """The segments after its whole blocks left the file: the others stay aligned."""
    length = _size(gone) // ALIGNMENT * ALIGNMENT
    del data[base + gone.start : base + gone.start + length]
    for segment in segments:
        moved = length if segment.start > gone.start else 0
        yield _Segment(start=segment.start - moved, end=segment.end - moved, field=segment.field)


def _read(segment: Any) -> _Segment:
    # A zero is not written.
    field = segment._tab.Offset(_OFFSET_FIELD)
    start = segment.Offset()
    place = field + segment._tab.Pos if field else None
    return _Segment(start=start, end=start + segment.Size(), field=place)


def _size(segment: _Segment) -> int:
    return segment.end - segment.start


def _number(data: bytearray, place: int) -> int:
    return struct.unpack_from("<Q", data, place)[0]
