"""Bundle JavaScript modules into one script: each becomes a function that returns its exports, imported modules first.

Imports and exports must have one of the forms that the studio's modules use, and begin a line. A list of exports may
also follow a semicolon.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

_IMPORT = re.compile(r'^import\s+(?:\*\s+as\s+(\w+)|\{([^}]*)\})\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT_FROM = re.compile(r'^export\s+\{([^}]*)\}\s+from\s+"([^"]+)";$', re.MULTILINE)
_EXPORT_LIST = re.compile(r"(?:^|(?<=;))export\s*\{([^}]*)\};", re.MULTILINE)
_EXPORTED = re.compile(r"^export\s+((?:async\s+)?function\s*\*?\s*|class\s+|const\s+|let\s+)(\w+)", re.MULTILINE)


def bundle(entry: Path, instead: Mapping[Path, Path]) -> str:
    """Return one script with the module `entry` and all that it imports.

    Args:
        instead: module to replace → module to take in its place.

    Raises:
        ValueError: modules import one another in a circle, or have a form of import or export that is not read.
    """
    replaced = {theirs.resolve(): ours.resolve() for theirs, ours in instead.items()}
    numbers: dict[Path, int] = {}
    made: list[str] = []

    def add(file: Path, above: tuple[Path, ...]) -> int:
        file = replaced.get(file.resolve(), file.resolve())
        if file in above:
            raise ValueError(f"{file.name} imports itself, through {', '.join(one.name for one in above)}")
        if file not in numbers:
            text = _as_function(file, lambda path: add(file.parent / path, (*above, file)))
            numbers[file] = len(numbers)
            made.append(f"modules[{numbers[file]}] = {text};\n")
        return numbers[file]

    add(entry, ())
    return '"use strict";\n{\nconst modules = [];\n' + "".join(made) + "}\n"


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
    """Return the names of an import or export list, each with the name after `as`."""
    pairs = [part.split(" as ") for part in re.sub(r"\s+", " ", text).split(",") if part.strip()]
    return [(pair[0].strip(), pair[-1].strip()) for pair in pairs]
