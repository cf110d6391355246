"""The layout of reports and other HTML pages, and of notebook cells.

A page is one file without scripts or network access, for light and dark screens and for A4 paper. The style of a
notebook cell does not affect other cells. Exported models and the studio have pages with another layout.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

from gptworks.errors import UserError
from gptworks.files import write_whole
from gptworks.pages.parts import environment, image, paragraph, printable, stylesheet


def page(
    title: str, lines: Sequence[str], parts: Sequence[Markup], footer: str, refresh_seconds: int | None = None
) -> str:
    """Return a complete HTML page: the title, `lines` of text, the parts that are not empty, and the footer.

    Text is escaped, markup comes only from templates and drawings, and the page's policy forbids a browser to load or
    run anything. Characters that cannot be shown are replaced by U+FFFD.

    Args:
        refresh_seconds: time after which a browser loads the page again, or None for never.
    """
    template = environment().get_template("page.html")
    text = template.render(
        title=title, lines=lines, parts=parts, footer=footer, policy=content_security_policy(), refresh=refresh_seconds
    )
    return printable(text)


@cache
def content_security_policy() -> str:
    """Return a content security policy that allows only the page's own stylesheet and embedded images."""
    digest = base64.b64encode(hashlib.sha256(stylesheet().encode("utf-8")).digest()).decode("ascii")
    return f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"


def write_page(text: str, path: Path, option: str) -> None:
    """Write a page atomically, replacing an older one. Errors name `option`, the command's option for the path.

    Raises:
        UserError: `path` is a folder or a special file, or its own folder does not exist.
        RunError: the file cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: name a file, such as {path / 'page.html'}")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")
    write_whole(path, text)


def cell(*parts: Markup) -> str:
    """Return the HTML of the non-empty parts, for `_repr_html_`. Characters that cannot be shown become U+FFFD."""
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
