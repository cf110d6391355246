"""Charts of curves and points, in SVG and in the page's colours."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from gptworks.pages.drawing import SMALL, Drawing, Point, text_width
from gptworks.pages.parts import figure, paragraph, printable, stylesheet

Format = Callable[[float], str]

WIDE, NARROW = 960.0, 456.0
"""Widths of a chart that is as wide as the page, and of each of two charts side by side."""
NARROW_HEIGHT = 300.0
"""Maximum height of the narrow drawing of a wide chart."""

N_COLOURS = 8
"""Number of colours, series-0 to series-7 in style.css; series 8 to 15 have the same colours, dashed."""

TOP, BOTTOM, GAP, LINE = 30.0, 40.0, 8.0, 16.0
"""Space above and below the plot, between text and plot, and from one line of text to the next."""

MARGIN = 24.0
"""Space around the charts of a picture."""


def compact(value: float) -> str:
    """Return a short form of a number, such as 1.5M for 1,500,000."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g}{letter}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Series:
    """A curve or a cloud of points. A y that is not finite breaks the curve."""

    points: Sequence[Point]
    name: str = ""
    """The text at the curve's end."""
    kind: str = "series-0"
    """The series' class in style.css."""
    style: str = "line"
    """`line`, `dots`, `both`, or `area`, whose points are its outline."""
    titles: Sequence[str] = ()
    """A text for each point, shown when the pointer is on its dot."""


@dataclass(frozen=True)
class Chart:
    """Curves over axes.

    If a few values are far above all others, the y axis ends below them and the chart states their number.
    """

    name: str
    """A name that makes the drawing's ids unique on the page."""
    title: str
    """The chart's title, for screen readers."""
    series: Sequence[Series]
    x_label: str
    y_label: str
    format_x: Format = compact
    format_y: Format = "{:g}".format
    width: float = NARROW
    height: float = 250.0
    log_x: bool = False
    x_range: tuple[float, float] | None = None
    """The range of the x axis, to which 4% is added at each end; None for the points' range, from 0 if 0 is near.
    Two integers give integer ticks, unless the axis is logarithmic."""
    x_names: Sequence[str] | None = None
    """Labels of x = 0, 1, 2 …; None if x is a number."""
    from_zero: bool = False
    """Whether the y axis begins at 0, or below if there are negative values."""

    def svg(self) -> Markup:
        """Return the chart as SVG, or a line of text if no point is finite."""
        drawing = self.draw()
        if drawing is None:
            return paragraph(f"{self.y_label}: nothing yet", "note")
        return drawing.svg(self.width, self.height, self.title, self.words(), self.name)

    def figure(self) -> Markup:
        """Return the chart in a figure. A wide chart is also drawn narrow, for screens on which its text would be too
        small; a page shows one of the two drawings."""
        if self.width <= NARROW:
            return figure(self.svg(), "chart")
        narrow = replace(self, name=f"{self.name}-narrow", width=NARROW, height=min(self.height, NARROW_HEIGHT))
        return figure(self.svg(), "chart wide") + figure(narrow.svg(), "chart narrow")

    def words(self) -> str:
        """Return a description of the curves in words."""
        placed = (_drawable(s, self.log_x) for s in self.series if s.style != "area")
        return "; ".join(f"{s.name or self.y_label}: {_words(s)}" for s in placed)

    def draw(self) -> Drawing | None:
        """Return the drawing of the chart; None if no point is finite."""
        series = [_drawable(s, self.log_x) for s in self.series]
        points = [(x, y) for s in series for x, y in s.points if math.isfinite(x) and math.isfinite(y)]
        if not points:
            return None
        low, high, n_above = _limits([y for _, y in points])
        y_ticks = _ticks(0 if self.from_zero else low, high, 5 if self.width > NARROW else 4)
        low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
        left_x, right_x, x_ticks = self._x_axis([x for x, _ in points])

        left = max(text_width(self.format_y(y), SMALL) for y in y_ticks) + GAP
        right = max((text_width(s.name, SMALL) + GAP for s in series if s.name), default=0.0) + 6
        end, bottom = self.width - right, self.height - BOTTOM
        plot_width, plot_height = end - left, bottom - TOP

        def place(x: float, y: float) -> Point:
            return left + (x - left_x) / (right_x - left_x) * plot_width, TOP + (high - y) / (high - low) * plot_height

        d = Drawing()
        d.text(0, 12, self.y_label, self.width * 0.62)
        if n_above:
            d.text(end, 12, f"{n_above:,} higher", self.width * 0.36, anchor="end")
        for y in y_ticks:
            _, tick_y = place(left_x, y)
            d.line((left, tick_y), (end, tick_y), kind="grid")
            d.text(left - GAP, tick_y + 4, self.format_y(y), left, anchor="end")
        for x in x_ticks:
            tick_x, _ = place(x, low)
            d.line((tick_x, bottom), (tick_x, bottom + 4), kind="axis")
            text = self.x_names[int(x)] if self.x_names is not None else self.format_x(10**x if self.log_x else x)
            d.text(tick_x, bottom + 18, text, plot_width / len(x_ticks) - 4, anchor="middle")
        d.line((left, bottom), (end, bottom), kind="axis")
        d.text(end, self.height - 4, self.x_label, plot_width, anchor="end")
        inside = Drawing()
        for s in series:
            _draw(inside, s, place, int(plot_width))
        d.clip(inside, self.name, left - 5, TOP - 5, plot_width + 10, plot_height + 10)
        _names(d, [s for s in series if s.name], place, end + GAP, (TOP, bottom))
        return d

    def _x_axis(self, xs: list[float]) -> tuple[float, float, list[float]]:
        """Return both ends of the x axis, and its ticks."""
        low, high, n_ticks = min(xs), max(xs), 7 if self.width > NARROW else 4
        if self.x_names is not None:
            return -0.5, len(self.x_names) - 0.5, [float(i) for i in range(len(self.x_names))]
        if self.x_range is not None:
            low, high = map(math.log10, self.x_range) if self.log_x else self.x_range
            low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
        low, high = _apart(low, high)
        if not self.log_x and self.x_range is None and 0 < low < 0.3 * high:
            low = 0.0
        ticks = [x for x in (_log_ticks(low, high) if self.log_x else _ticks(low, high, n_ticks)) if low <= x <= high]
        if self.x_range is not None and not self.log_x and all(isinstance(x, int) for x in self.x_range):
            ticks = [x for x in ticks if x == int(x)]
        return low, high, ticks


def picture(charts: Sequence[Chart], title: str) -> str:
    """Return an SVG file, with its own style, of charts of equal width in a column; empty if no chart has a point."""
    drawn = [(chart, drawing) for chart in charts if (drawing := chart.draw()) is not None]
    if not drawn:
        return ""
    whole, width, y = Drawing(), drawn[0][0].width, 2 * MARGIN
    whole.style(stylesheet())
    whole.text(MARGIN, MARGIN, title, width, bold=True)
    for chart, drawing in drawn:
        whole.group(drawing, transform=f"translate({MARGIN:g} {y:g})")
        y += chart.height
    words = "; ".join(chart.words() for chart, _ in drawn)
    return printable(whole.svg(width + 2 * MARGIN, y + MARGIN, title, words, "picture")) + "\n"


def colour(i: int) -> str:
    """Return the stylesheet's classes for series i: a colour, and `dashed` for series 8 to 15, 24 to 31, and so on."""
    return f"series-{i % N_COLOURS}" + (" dashed" if i // N_COLOURS % 2 else "")


MOST, LEAST = 1e150, 1e-150
"""Bounds of the magnitudes that are drawn. Beyond them, differences and ratios could overflow or underflow. Larger
values are left out; smaller ones count as 0, or are left out of a logarithmic x axis."""


def _drawable(s: Series, log_x: bool) -> Series:
    """Return the series without points whose x cannot be drawn. A y that cannot be drawn becomes NaN, a gap."""
    placed, titles = [], []
    for i, (x, y) in enumerate(s.points):
        if _placed(x) is not None and not (log_x and x < LEAST):
            placed.append((math.log10(x) if log_x else _placed(x) or 0.0, math.nan if _placed(y) is None else y))
            titles.append(s.titles[i] if s.titles else "")
    return Series(placed, s.name, s.kind, s.style, titles)


def _placed(value: float) -> float | None:
    """Return the value; 0 if it is tiny; None if it is too large or NaN."""
    return None if not abs(value) < MOST else 0.0 if abs(value) < LEAST else value


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return the range, widened if its ends agree to nine digits."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    return low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2


def _limits(values: list[float]) -> tuple[float, float, int]:
    """Return the lowest and the highest value of the y axis, and the number of values above the axis."""
    values = sorted(values)
    low, high = values[0], values[-1]
    most = values[min(len(values) - 1, int(0.98 * len(values)))]
    if len(values) >= 20 and high - low > 4 * (most - low) > 0:
        high = low + 1.5 * (most - low)
    return low, high, sum(value > high for value in values)


def _ticks(low: float, high: float, n: int) -> list[float]:
    """Return about n round numbers that enclose the range, or nearly do."""
    low, high = _apart(low, high)
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((b * power for b in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.floor(low / step + 0.02), math.ceil(high / step - 0.02)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return log10 of the powers of ten in the range; with fewer than three, also of 2 and 5 times each power."""
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
    """Yield the parts of a curve between points whose y is not finite."""
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
    """Reduce a long curve to its ends, and the lowest and the highest point in each of `columns` parts."""
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
    """Draw each name next to the end of its curve. Move names apart that would overlap."""
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
