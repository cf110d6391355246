"""Drawing in SVG: boxes, lines, and text that is measured to fit its room.

Lengths are in the drawing's own units; y grows downwards. Classes of the page's stylesheet give the colours.
ElementTree makes the elements, and escapes every text and attribute.
"""

from typing import Literal
from xml.etree import ElementTree

from markupsafe import Markup

from gptworks.errors import shortened

Point = tuple[float, float]

LABEL, SMALL = 14.0, 12.0
"""Font sizes of bold and of regular text."""

_MOST_CHARACTERS = 2_000
"""Maximum number of characters of a text in a drawing; longer texts are cut."""

_WIDTHS = {
    **dict.fromkeys("ijl'", 0.31),
    **dict.fromkeys(" .,:;·/|()[]ftr-I", 0.45),
    **dict.fromkeys("mwMWQ%@…—", 1.01),
}
_DIGIT, _LOWER, _OTHER = 0.64, 0.64, 0.84


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return an upper bound on the width of an English text, based on DejaVu Sans, the widest of the usual
    sans-serif fonts. Letters of other languages may be wider."""
    ems = 0.0
    for letter in text:
        plain = _DIGIT if letter.isdigit() else _LOWER if letter.islower() else _OTHER
        ems += _WIDTHS.get(letter, plain)
    return ems * size * (1.12 if bold else 1.0)


class Drawing:
    """A drawing: SVG elements in the order in which they are painted."""

    def __init__(self) -> None:
        self.elements: list[ElementTree.Element] = []

    def add(self, tag: str, content: str | None = None, *, title: str = "", **attributes: str | float) -> None:
        """Add an element with the tooltip `title`. Attribute names get hyphens for underscores; `class_` is class."""
        element = _element(tag, content, **attributes)
        if title:
            element.append(_element("title", title))
        self.elements.append(element)

    def style(self, sheet: str) -> None:
        """Add a stylesheet, for a drawing in a separate file."""
        self.elements.append(_element("style"))
        self.elements[-1].text = sheet

    def group(self, inside: "Drawing", **attributes: str) -> None:
        """Add another drawing as a group."""
        self.elements.append(_element("g", None, **attributes))
        self.elements[-1].extend(inside.elements)

    def clip(self, inside: "Drawing", name: str, x: float, y: float, width: float, height: float) -> None:
        """Add another drawing, clipped to a rectangle. `name` makes the id of the clip path unique."""
        self.elements.append(_element("clipPath", id=f"{name}-clip"))
        self.elements[-1].append(_element("rect", x=x, y=y, width=width, height=height))
        self.group(inside, clip_path=f"url(#{name}-clip)")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        room: float,
        *,
        bold: bool = False,
        anchor: Literal["start", "middle", "end"] = "start",
    ) -> None:
        """Add a line of text on the baseline y, in smaller type if it would be wider than `room`."""
        size = LABEL if bold else SMALL
        size *= min(1.0, room / max(text_width(text, size, bold), 1e-9))
        kind = "name" if bold else "shape"
        self.add("text", text, class_=kind, x=x, y=y, font_size=size, text_anchor=anchor)

    def line(self, *points: Point, kind: str) -> None:
        """Add straight lines through the points."""
        self.add("path", class_=kind, d="M" + " L".join(f"{x:.6g} {y:.6g}" for x, y in points))

    def svg(self, width: float, height: float, title: str, description: str, name: str) -> Markup:
        """Return the drawing as an SVG element. `name` makes the ids of its title and description unique."""
        root = _element(
            "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.6g} {height:.6g}", role="img",
            aria_labelledby=f"{name}-title {name}-description",
        )  # fmt: skip
        root.append(_element("title", title, id=f"{name}-title"))
        root.append(_element("desc", description, id=f"{name}-description"))
        root.extend(self.elements)
        for element in root:
            element.tail = "\n"
        return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704  ElementTree has escaped it


def _element(tag: str, content: str | None = None, **attributes: str | float) -> ElementTree.Element:
    written = {
        name.rstrip("_").replace("_", "-"): value if isinstance(value, str) else f"{value:.6g}"
        for name, value in attributes.items()
    }
    element = ElementTree.Element(tag, written)
    if content is not None:
        element.text = shortened(content, _MOST_CHARACTERS)
    return element
