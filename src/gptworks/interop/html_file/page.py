"""The page of a model: the studio's own code and styles, a strict content security policy, and blocks of data.

JavaScript modules are bundled into one script, imported modules first; each module becomes a function that returns its
exports. An import or export must have one of the forms that the studio's modules use. It must begin a line; a list of
exports may also follow a semicolon.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gptworks.interop.html_file.blocks import as_text
from gptworks.pages.parts import environment

_JS = Path(__file__).with_name("js")
_STUDIO = Path(__file__).parents[2] / "studio" / "static"
_STYLES = (
    *(_STUDIO / f"{name}.css" for name in ("style", "shared", "play", "card", "read", "model")),
    *(_JS.parent / f"{name}.css" for name in ("about", "explain", "explain-pictures")),
)

_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E%3Crect width='8' height='8' "
    "rx='2' fill='%233f55b5'/%3E%3Cpath d='M2 6V4m2 2V2m2 4V3' stroke='%23fff' stroke-linecap='round'/%3E%3C/svg%3E"
)
"""Three bars: the probabilities of a token and its alternatives."""


def as_json(tree: Any) -> str:
    """Return a JSON tree as text that is safe inside a script element."""
    return json.dumps(tree, separators=(",", ":")).replace("<", "\\u003c")


def model_page(title: str, page: Any, about: Any, blocks: Iterable[tuple[str, bytes]]) -> Iterator[str]:
    """Yield the page's HTML in pieces; each block is a piece.

    Args:
        page: the content that the page shows at once, for main.js.
        about: data on the model, for model.js. With the key `files`, the page may fetch files from its own host.
        blocks: names and contents of blocks of bytes; read one at a time.
    """
    first = (_STUDIO / "js" / "theme.js").read_text(encoding="utf-8")
    style = "\n".join(file.read_text(encoding="utf-8") for file in _STYLES)
    yield from environment().get_template("model.html").generate(
        title=title, policy=_policy((first, script()), style, fetches="files" in about), first=_inside(first),
        style=_inside(style), page=_inside(as_json(page)), script=_inside(script()), about=_inside(as_json(about)),
        icon=_ICON, blocks=((name, _inside(as_text(content))) for name, content in blocks),
    )  # fmt: skip


def _policy(scripts: Iterable[str], style: str, fetches: bool) -> str:
    """Return a content security policy. It allows only these scripts, this style, WebAssembly, and images and workers
    in the page itself. If `fetches` is true, it also allows files from the page's own host."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"

    allowed = " ".join(map(digest, scripts))
    connect = "connect-src 'self'; " if fetches else ""
    return (
        f"default-src 'none'; script-src {allowed} 'wasm-unsafe-eval'; style-src {digest(style)}; img-src data:; "
        f"worker-src blob:; {connect}base-uri 'none'; form-action 'none'"
    )


def _inside(text: str) -> Markup:
    """Return code, styles or data as markup, which a template inserts into an element without escaping. Raises a
    ValueError if the text has a tag of a script, the end of a style, or the start of a comment."""
    lower = text.lower()
    for end in ("</script", "<script", "<!--", "</style"):
        if end in lower:
            raise ValueError(f"a part of the page holds {end}, which is read as markup")
    return Markup(text)  # noqa: S704 - made here, and checked


# ----------------------------------------------------------------------------------------------------- the script

_IMPORT = re.compile(r'^import\s+(?:\*\s+as\s+(\w+)|\{([^}]*)\})\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT_FROM = re.compile(r'^export\s+\{([^}]*)\}\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT_LIST = re.compile(r"(?:^|(?<=;))export\s*\{([^}]*)\};", re.MULTILINE)
_EXPORTED = re.compile(r"^export\s+((?:async\s+)?function\s*\*?\s*|class\s+|const\s+|let\s+)(\w+)", re.MULTILINE)


@cache
def script() -> str:
    """Return the page's script: main.js and all that it imports, with the page's api.js instead of the studio's.

    Raises:
        ValueError: modules import one another in a circle, or an import or export has an unsupported form.
    """
    own = {(_STUDIO / "js" / "api.js").resolve(): (_JS / "api.js").resolve()}
    numbers: dict[Path, int] = {}
    made: list[str] = []

    def add(file: Path, above: tuple[Path, ...] = ()) -> int:
        file = own.get(file.resolve(), file.resolve())
        if file in above:
            raise ValueError(f"{file.name} imports itself, through {', '.join(one.name for one in above)}")
        if file not in numbers:
            text = _as_function(file, lambda path: add(file.parent / path, (*above, file)))
            numbers[file] = len(numbers)
            made.append(f"modules[{numbers[file]}] = {text};\n")
        return numbers[file]

    add(_JS / "main.js")
    return str(_inside('"use strict";\n{\nconst modules = [];\n' + "".join(made) + "}\n"))


def _as_function(file: Path, number: Callable[[str], int]) -> str:
    text = file.read_text(encoding="utf-8")
    exports: list[tuple[str, str]] = []

    def imported(found: re.Match[str]) -> str:
        whole, names, path = found.groups()
        target = whole or "{ " + ", ".join(f"{a}: {b}" for a, b in _names(names)) + " }"
        return f"const {target} = modules[{number(path)}];"

    def passed_on(found: re.Match[str]) -> str:
        names, path = found.groups()
        module = number(path)
        exports.extend((f"modules[{module}].{a}", b) for a, b in _names(names))
        return ""

    def listed(found: re.Match[str]) -> str:
        exports.extend(_names(found[1]))
        return ""

    def declared(found: re.Match[str]) -> str:
        exports.append((found[2], found[2]))
        return found[1] + found[2]

    for pattern, replace in (
        (_IMPORT, imported), (_EXPORT_FROM, passed_on), (_EXPORT_LIST, listed), (_EXPORTED, declared),
    ):  # fmt: skip
        text = pattern.sub(replace, text)
    if left := re.search(r"^(?:import|export)\b.*|\bimport\(.*", text, re.MULTILINE):
        raise ValueError(f"{file.name}: the bundle does not read {left[0][:80]!r}")
    getters = ", ".join(f"get {name}() {{ return {value}; }}" for value, name in exports)
    return f"(() => {{\n{text}\nreturn {{ {getters} }};\n}})()"


def _names(text: str) -> list[tuple[str, str]]:
    """Return the names of an import or export list, each with the name after `as`, or itself."""
    pairs = [part.split(" as ") for part in re.sub(r"\s+", " ", text).split(",") if part.strip()]
    return [(pair[0].strip(), pair[-1].strip()) for pair in pairs]
