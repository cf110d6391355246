"""Show parts of pages in a notebook, without affecting the style of the rest of the notebook."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from gptworks.files import write_whole
from gptworks.pages.parts import environment, image, paragraph, printable


def cell(*parts: Markup) -> str:
    """Return the HTML of the non-empty parts, for a `_repr_html_` to return. Text is escaped as on a page."""
    return printable(environment().get_template("cell.html").render(parts=parts))


@dataclass(frozen=True, repr=False)
class Figure:
    """A drawing that a notebook shows."""

    svg: str
    """A complete SVG file with its own style; empty if there is nothing to draw."""
    title: str

    def __repr__(self) -> str:
        return f"<figure: {self.title}>"

    def _repr_html_(self) -> str:
        return cell(self.markup())

    def markup(self) -> Markup:
        """Return the drawing as a part of a page."""
        return image(self.svg, self.title) if self.svg else paragraph(f"{self.title}: nothing yet", "note")

    def save(self, path: str | Path) -> None:
        """Write the drawing as an SVG file."""
        write_whole(Path(path), self.svg)
