"""The page of a model in one file: the studio's own code and styles, a strict policy, and blocks of data."""

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gptworks.interop.html_file.bundle import bundle
from gptworks.pages.parts import environment

_JS = Path(__file__).with_name("js")
_STUDIO = Path(__file__).parents[2] / "studio" / "static"
_STYLES = (
    _STUDIO / "style.css",
    _STUDIO / "shared.css",
    _STUDIO / "play.css",
    _STUDIO / "card.css",
    _JS.parent / "about.css",
)


@cache
def script() -> str:
    """Return the page's script."""
    return str(_inside(bundle(_JS / "main.js", {_STUDIO / "js" / "api.js": _JS / "api.js"})))


def as_json(tree: Any) -> str:
    """Return JSON that may stand in a script element."""
    return json.dumps(tree, separators=(",", ":")).replace("<", "\\u003c")


def model_page(title: str, page: Any, about: Any, blocks: Iterable[tuple[str, str]]) -> str:
    """Return the page.

    Args:
        page: what the page shows at once, for main.js.
        about: the model, for model.js.
        blocks: names and texts of blocks of bytes (`blocks.as_text`).
    """
    first = (_STUDIO / "js" / "theme.js").read_text(encoding="utf-8")
    style = "\n".join(file.read_text(encoding="utf-8") for file in _STYLES)
    text: str = environment().get_template("model.html").render(
        title=title, policy=_policy((first, script()), style), first=_inside(first), style=_inside(style),
        page=_inside(as_json(page)), script=_inside(script()),
        blocks=[("about", _inside(as_json(about))), *((name, _inside(block)) for name, block in blocks)],
    )  # fmt: skip
    return text


def _policy(scripts: Iterable[str], style: str) -> str:
    """Return a policy that allows these scripts, this style and WebAssembly, and no connection."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"

    allowed = " ".join(map(digest, scripts))
    return (
        f"default-src 'none'; script-src {allowed} 'wasm-unsafe-eval'; style-src {digest(style)}; img-src data:; "
        f"base-uri 'none'; form-action 'none'"
    )


def _inside(text: str) -> Markup:
    """Return code, styles or data to stand in their element as they are.

    Raises:
        ValueError: the text would end the element or change how a page reads it.
    """
    lower = text.lower()
    for end in ("</script", "<script", "<!--", "</style"):
        if end in lower:
            raise ValueError(f"a part of the page holds {end}, which is read as markup")
    return Markup(text)  # noqa: S704 - made here, and checked
