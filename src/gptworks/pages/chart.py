"""Curves and points over axes, in SVG and in the colours of the page."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gptworks.pages.drawing import SMALL, Drawing, Point, text_width
from gptworks.pages.parts import paragraph

Format = Callable[[float], str]

WIDE, NARROW = 960.0, 456.0
"""Widths of a drawing: a page's, and of one of two side by side."""

N_COLOURS = 8
"""series-0 to series-7 in style.css; further ones are dashed."""

TOP, BOTTOM, GAP, LINE = 30.0, 40.0, 8.0, 16.0
"""Room above and below the plot, between text and plot, and from one line of text to the next."""


def compact(value: float) -> str:
    """1.5M for 1,500,000."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g}{letter}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Series:
    """A curve or a cloud of points. A y that is not finite breaks the curve."""

    points: Sequence[Point]
    name: str = ""
    """Written at its end."""
    kind: str = "series-0"
    """Its class in style.css."""
    style: str = "line"
    """line; dots; both; or area, whose points go round it."""
    titles: Sequence[str] = ()
    """What is shown of a dot under the pointer, a text for each point."""


def chart(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    format_x: Format = compact,
    format_y: Format = lambda value: f"{value:g}",
    width: float = NARROW,
    height: float = 250.0,
    log_x: bool = False,
    x_range: tuple[float, float] | None = None,
    x_names: Sequence[str] | None = None,
    from_zero: bool = False,
) -> Markup:
    """Curves over axes, or a line of text where no point is finite.

    Where the highest values are far above nearly all others, the axis ends below them, and the figure says so.

    Args:
        name: tells the drawing's ids from those of others on the page.
        title: read to those who do not see it.
        x_range: what the x axis holds, where that is not what the points tell; whole numbers have whole ticks.
        x_names: what stands at x = 0, 1, 2 … where these are not numbers.
        from_zero: the y axis begins at 0.
    """
    series = [_drawable(s, log_x) for s in series]
    points = [(x, y) for s in series for x, y in s.points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return paragraph(f"{y_label}: nothing yet", "note")
    low, high, n_above = _limits([y for _, y in points])
    y_ticks = _ticks(0 if from_zero else low, high, 5 if width > NARROW else 4)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    left_x, right_x = min(x for x, _ in points), max(x for x, _ in points)
    if x_names is not None:
        left_x, right_x = -0.5, len(x_names) - 0.5
    elif x_range is not None:
        left_x, right_x = map(math.log10, x_range) if log_x else x_range
        left_x, right_x = left_x - 0.04 * (right_x - left_x), right_x + 0.04 * (right_x - left_x)
    left_x, right_x = _apart(left_x, right_x)
    if not log_x and x_range is None and left_x > 0 and left_x < 0.3 * right_x:
        left_x = 0.0
    x_ticks = (
        list(map(float, range(len(x_names))))
        if x_names is not None
        else _log_ticks(left_x, right_x)
        if log_x
        else _ticks(left_x, right_x, 7 if width > NARROW else 4)
    )
    x_ticks = [x for x in x_ticks if left_x <= x <= right_x]
    if x_range is not None and not log_x and all(isinstance(x, int) for x in x_range):
        x_ticks = [x for x in x_ticks if x == int(x)]

    left = max(text_width(format_y(y), SMALL) for y in y_ticks) + GAP
    named = [s for s in series if s.name]
    right = max((text_width(s.name, SMALL) + GAP for s in named), default=0.0) + 6
    plot_width, plot_height = width - left - right, height - TOP - BOTTOM

    def place(x: float, y: float) -> Point:
        return left + (x - left_x) / (right_x - left_x) * plot_width, TOP + (high - y) / (high - low) * plot_height

    d = Drawing()
    d.text(0, 12, y_label, width * 0.62)
    if n_above:
        d.text(width - right, 12, f"{n_above:,} higher", width * 0.36, anchor="end")
    for y in y_ticks:
        _, tick_y = place(left_x, y)
        d.line((left, tick_y), (left + plot_width, tick_y), kind="grid")
        d.text(left - GAP, tick_y + 4, format_y(y), left, anchor="end")
    for x in x_ticks:
        tick_x, _ = place(x, low)
        d.line((tick_x, TOP + plot_height), (tick_x, TOP + plot_height + 4), kind="axis")
        text = x_names[int(x)] if x_names is not None else format_x(10**x if log_x else x)
        d.text(tick_x, TOP + plot_height + 18, text, plot_width / len(x_ticks) - 4, anchor="middle")
    d.line((left, TOP + plot_height), (left + plot_width, TOP + plot_height), kind="axis")
    d.text(left + plot_width, height - 4, x_label, plot_width, anchor="end")
    inside = Drawing()
    for s in series:
        _draw(inside, s, place, int(plot_width))
    d.clip(inside, name, left - 5, TOP - 5, plot_width + 10, plot_height + 10)
    _names(d, named, place, left + plot_width + GAP, (TOP, TOP + plot_height))
    words = "; ".join(f"{s.name or y_label}: {_words(s)}" for s in series if s.style != "area")
    return d.svg(width, height, title, words, name)


def colour(i: int) -> str:
    """The class of the i-th of several series."""
    return f"series-{i % N_COLOURS}" + (" dashed" if i // N_COLOURS % 2 else "")


MOST, LEAST = 1e150, 1e-150
"""Sizes between which a value is drawn: beyond them a difference or a ratio of two leaves the numbers there are."""


def _drawable(s: Series, log_x: bool) -> Series:
    """The series with its points placed, less those whose x cannot be; a y that cannot be breaks the curve."""
    placed, titles = [], []
    for i, (x, y) in enumerate(s.points):
        if _placed(x) is not None and not (log_x and x < LEAST):
            placed.append((math.log10(x) if log_x else _placed(x) or 0.0, math.nan if _placed(y) is None else y))
            titles.append(s.titles[i] if s.titles else "")
    return Series(placed, s.name, s.kind, s.style, titles)


def _placed(value: float) -> float | None:
    """The value, 0 where it is next to nothing; None where it is too large, or no number."""
    return None if not abs(value) < MOST else 0.0 if abs(value) < LEAST else value


def _apart(low: float, high: float) -> tuple[float, float]:
    """The range, widened where its ends are equal to nine digits."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2


def _limits(values: list[float]) -> tuple[float, float, int]:
    """Lowest and highest value on the axis, and how many lie above it."""
    values = sorted(values)
    low, high = values[0], values[-1]
    most = values[min(len(values) - 1, int(0.98 * len(values)))]
    if len(values) >= 20 and high - low > 4 * (most - low) > 0:
        high = low + 1.5 * (most - low)
    return low, high, sum(value > high for value in values)


def _ticks(low: float, high: float, n: int) -> list[float]:
    """About n round numbers that enclose the range, or nearly."""
    low, high = _apart(low, high)
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((b * power for b in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.floor(low / step + 0.02), math.ceil(high / step - 0.02)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where those are few; as logarithms."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    tens = [float(power) for power in powers if low <= power <= high]
    return tens if len(tens) > 2 else [power + math.log10(b) for power in powers for b in (1, 2, 5)]


def _draw(d: Drawing, s: Series, place: Callable[[float, float], Point], columns: int) -> None:
    if s.style in ("line", "both"):
        for run in _unbroken(s.points):
            placed = [place(x, y) for x, y in _thinned(run, columns)]
            if len(placed) > 1:
                d.line(*placed, kind=f"curve {s.kind}")
            elif s.style == "line":
                d.add("circle", class_=f"dot {s.kind}", cx=placed[0][0], cy=placed[0][1], r=1.5)
    if s.style == "area":
        corners = " ".join(f"{x:.6g},{y:.6g}" for x, y in (place(*point) for point in s.points))
        d.add("polygon", class_=f"area {s.kind}", points=corners)
    if s.style in ("dots", "both"):
        radius = 4.0 if s.style == "dots" else 3.0 if len(s.points) <= 60 else 1.5
        for i, (x, y) in enumerate(s.points):
            if math.isfinite(y):
                dot_x, dot_y = place(x, y)
                title = s.titles[i] if s.titles else ""
                d.add("circle", title=title, class_=f"dot {s.kind}", cx=dot_x, cy=dot_y, r=radius)


def _unbroken(points: Sequence[Point]) -> Iterator[list[Point]]:
    """The parts of a curve between values that are not finite."""
    run: list[Point] = []
    for x, y in points:
        if math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thinned(points: list[Point], columns: int) -> list[Point]:
    """Of a long curve, the lowest and the highest point of each column, and both ends."""
    if len(points) <= 4 * columns:
        return points
    size, kept = len(points) / columns, [points[0]]
    for i in range(columns):
        part = points[int(i * size) : int((i + 1) * size)]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _names(
    d: Drawing, named: Sequence[Series], place: Callable[[float, float], Point], x: float, room: tuple[float, float]
) -> None:
    """Each name beside the end of its curve, moved apart where they would touch."""
    ends = []
    for s in named:
        finite = [point for point in s.points if math.isfinite(point[1])]
        if finite:
            ends.append((min(max(place(*finite[-1])[1], room[0]), room[1]), s))
    ends.sort(key=lambda end: end[0])
    heights = [y for y, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + LINE)
    for i in range(len(heights) - 1, -1, -1):
        limit = room[1] if i == len(heights) - 1 else heights[i + 1] - LINE
        heights[i] = min(heights[i], limit)
    for y, (_, s) in zip(heights, ends, strict=True):
        d.add("text", s.name, class_=f"label {s.kind}", x=x, y=y + 4, font_size=SMALL)


def _words(s: Series) -> str:
    finite = [y for _, y in s.points if math.isfinite(y)]
    if not finite:
        return "nothing yet"
    return f"{len(finite):,} points from {finite[0]:.4g} to {finite[-1]:.4g}, lowest {min(finite):.4g}"
