"""Line charts as plain numbers and SVG paths, drawn by the page's template."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 34
MOST_POINTS = 240

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve: its name, an SVG path, the last value as text, and dots where points are few."""

    name: str
    path: str
    last: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Everything a template needs: ticks are (place in the drawing, label)."""

    title: str
    x_name: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    width: int = WIDTH
    height: int = HEIGHT
    frame: dict[str, int] = field(
        default_factory=lambda: {
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
        }
    )


def line_chart(title: str, x_name: str, curves: Mapping[str, Points]) -> Chart | None:
    """A chart of the curves that have points; None where none has."""
    curves = {name: _thinned(_finite(points)) for name, points in curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return None
    every = [point for points in curves.values() for point in points]
    x_axis = _Axis([x for x, _ in every], LEFT, WIDTH - RIGHT, tight=True)
    y_axis = _Axis([y for _, y in every], HEIGHT - BOTTOM, TOP)
    return Chart(
        title=title,
        x_name=x_name,
        lines=[_line(name, points, x_axis, y_axis) for name, points in curves.items()],
        x_ticks=x_axis.ticks(),
        y_ticks=y_axis.ticks(),
    )


class _Axis:
    """Maps values to places between two ends; ticks at 1, 2 or 5 times a power of ten."""

    def __init__(self, values: list[float], start: float, stop: float, tight: bool = False) -> None:
        low, high = min(values), max(values)
        if low == high:
            low, high = (low - 0.5, high + 0.5) if low == 0 else sorted((low * 0.9, low * 1.1))
        self.step = _nice((high - low) / 4)
        self.low = low if tight else math.floor(low / self.step) * self.step
        self.high = high if tight else math.ceil(high / self.step) * self.step
        self.start, self.stop = start, stop

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)

    def ticks(self) -> list[tuple[float, str]]:
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        values = [number * self.step for number in range(first, last + 1)]
        return [(self.place(value), _label(value, self.step)) for value in values]


def _nice(step: float) -> float:
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _label(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    if not 1e-3 <= step < 1e5:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    decimals = max(0, -math.floor(math.log10(step)))
    return f"{value:,.{decimals}f}"


def _line(name: str, points: Points, x_axis: _Axis, y_axis: _Axis) -> Line:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in points]
    path = "M" + " L".join(f"{x} {y}" for x, y in places)
    return Line(
        name=name, path=path, last=f"{points[-1][1]:.4g}", dots=places if len(places) <= 12 else []
    )


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS, each the mean of as many neighbours; a short curve as it is."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return points
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]
