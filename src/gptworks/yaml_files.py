"""Reader of untrusted YAML, as plain data and within limits. Only this module parses YAML.

The limits are checked while nodes are composed, before values are constructed. Each use of an alias counts as its
complete value. A merge key thus counts as all the keys that it adds.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from gptworks.errors import UserError
from gptworks.files import read_text
from gptworks.units import whole_number

try:  # libyaml's parser is four times as fast
    from yaml.cyaml import CParser as _Parser  # type: ignore[attr-defined]
except ImportError:

    class _Parser(Reader, Scanner, Parser):  # type: ignore[no-redef]
        def __init__(self, text: str) -> None:
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)


MAX_BYTES = 1 << 20
MAX_NODES = 100_000
"""Maximum number of keys, values, sections and lists in a file, counting each use of an alias."""
MAX_DEPTH = 64
"""Maximum depth of nested sections and lists, with aliases expanded."""
MAX_DIGITS = 400
"""Maximum number of digits of a number, because Python reads numbers in quadratic time. Recipes need fewer than 20."""

_MISREAD = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads in base 8 or 60."""

_TAG = "tag:yaml.org,2002:"
_PLAIN = {None, *(_TAG + kind for kind in ("null", "bool", "int", "float", "timestamp", "str", "seq", "map"))}


class Origin(str):
    """A YAML file's name for messages. It also has the file's text, so that messages can state line numbers."""

    text = ""

    @classmethod
    def of(cls, name: str, text: str) -> "Origin":
        """Return an `Origin` with a file's name and text."""
        origin = cls(name)
        origin.text = text
        return origin

    @cached_property
    def _root(self) -> yaml.Node | None:
        try:
            return compose_yaml(self.text, self)
        except UserError:
            return None

    def at(self, key: str) -> str:
        """Return the name with the line of the value at a path such as `data.sources.0.path`, or at the longest part of
        the path that exists."""
        node: Any = self._root
        line = None
        for name in key.split(".") if key else ():
            if isinstance(node, yaml.MappingNode):
                mark, node = next(((k.start_mark, v) for k, v in node.value if k.value == name), (None, None))
            elif isinstance(node, yaml.SequenceNode) and (item := whole_number(name)) is not None:
                if item >= len(node.value):
                    break
                node = node.value[item]
                mark = node.start_mark
            else:
                break
            if mark is None:
                break
            line = mark.line + 1
        return self if line is None else f"{self}, line {line}"


class _Loader(Composer, _Parser, SafeConstructor, Resolver):
    """Loader that refuses YAML that no recipe needs, such as repeated keys, keys that are not names, more than
    MAX_NODES nodes or MAX_DEPTH levels (aliases expanded), long or octal numbers, and tags not in `_PLAIN`."""

    yaml_constructors = {  # noqa: RUF012
        tag: make for tag, make in SafeConstructor.yaml_constructors.items() if tag in _PLAIN
    }

    def __init__(self, text: str) -> None:
        _Parser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self.n_nodes = 0
        """Number of nodes (keys, values, sections, lists) composed so far, with aliases expanded."""
        self._depth = self._deepest = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # by anchor: number of nodes, and nesting levels

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node.

        Raises:
            YAMLError: the node is too deep, too large, or contains itself.
        """
        event: Any = self.peek_event()
        n_before, deepest_before = self.n_nodes, self._deepest
        self._depth += 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise _fault("a value contains itself by an alias", event)
            n_values, n_levels = self._sizes[event.anchor]
        else:
            n_values = n_levels = 1
        self.n_nodes += n_values
        self._deepest = self._depth + n_levels - 1
        if self._deepest > MAX_DEPTH:
            raise _fault(f"it is nested more than {MAX_DEPTH} deep", event)
        if self.n_nodes > MAX_NODES:
            raise _fault(f"it has more than {MAX_NODES:,} keys and values, each use of an alias counted", event)
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._sizes[event.anchor] = self.n_nodes - n_before, self._deepest - self._depth + 1
        self._deepest = max(self._deepest, deepest_before)
        self._depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        if "\0" in node.value:
            raise _fault(f"the text {node.value[:40]!r} has a zero byte, which no path and no name can have", node)
        if not node.style and _MISREAD.fullmatch(node.value):
            raise _fault(
                f"YAML reads {node.value[:40]} as another number: write it without leading zeros or colons, or in "
                f"quotation marks",
                node,
            )
        if node.tag in (_TAG + "int", _TAG + "float") and len(node.value) > MAX_DIGITS:
            raise _fault(f"a number of {len(node.value):,} digits; one may have {MAX_DIGITS}", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, names = super().compose_mapping_node(anchor), dict[str, int]()
        for key, _ in node.value:
            if key.tag == _TAG + "merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise _fault("a list or section is an unhashable key: keys are names", key)
            if key.tag != _TAG + "str":
                raise _fault(
                    f"it has the key {key.value[:40] or 'null'}: keys are names; put it into quotation marks", key
                )
            if key.value in names:
                before = names[key.value]
                raise _fault(
                    f"the key `{key.value[:40]}` occurs twice in one section, before in line {before}: leave one out",
                    key,
                )
            names[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError):  # the value's text does not fit its tag
            raise _fault(f"{str(node.value)[:40]!r} is not of the type {node.tag.removeprefix(_TAG)}", node) from None


def _fault(why: str, place: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=place.start_mark)


def read_yaml(path: Path) -> Any:
    """Read the data in a YAML file.

    Raises:
        UserError: the file is not a regular UTF-8 file, not YAML, or too large or too deeply nested for a recipe.
        OSError: the file cannot be opened; FileNotFoundError if it does not exist.
    """
    return parse_yaml(read_text(path, MAX_BYTES), str(path))


def parse_yaml(text: str, origin: str) -> Any:
    """Return the data in a YAML text; see `read_yaml`. `origin` names the text in messages."""
    return _load(text, origin, _Loader.get_single_data)


def compose_yaml(text: str, origin: str) -> yaml.Node | None:
    """Return the root node of a YAML text, with positions and any tags; None if the text is empty. See `read_yaml`."""
    node: yaml.Node | None = _load(text, origin, _Loader.get_single_node)
    return node


def _load(text: str, origin: str, get: Any) -> Any:
    try:
        loader = _Loader(text)
        try:
            return get(loader)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        why = _explained(error, text.splitlines())
    except (yaml.YAMLError, UnicodeError) as error:
        why = " ".join(str(error).split())
    raise UserError(f"{origin} is not readable YAML: {why[:400]}")


def _explained(error: yaml.MarkedYAMLError, lines: list[str]) -> str:
    """Return the error's place, the line, the reason and, for common errors, advice."""
    problem = " ".join(f"{error.problem or error.context}".split())
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return problem
    began = error.context_mark or mark
    advice = ""
    if "expected ':'" in problem:
        mark, advice = began, "write `key: value`, with a colon and a space"
    elif "quoted scalar" in f"{error.context}" and "end of stream" in problem:
        mark, advice = began, "the quotation mark is not closed: close it in its line"
    elif "',' or" in problem and began.line < len(lines):
        mark = began
        bracket = lines[mark.line][mark.column : mark.column + 1]
        advice = f"the `{bracket}` is not closed, or a value in it needs quotation marks"
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        advice = "indent with spaces, not with tabs"
    elif "\u00a0" in "".join(lines[max(0, mark.line - 1) : mark.line + 1]):
        advice = "this line or the one above has no-break spaces: write plain ones"
    elif not advice and re.search("any token|alphabetic or numeric|escape|hexdecimal", problem):
        advice = "put the value into single quotation marks, '...'"
    elif not advice and re.search("mapping values|expected key|expected <block end>", problem):
        above = next((one for one in reversed(lines[: mark.line]) if one.strip() and one.strip()[0] != "#"), "")
        here, before = (len(one) - len(one.lstrip()) for one in (line, above))
        advice = "put a value that holds `: ` into quotation marks"
        if here != before:
            advice = f"it is indented by {here} and the line above by {before}: indent all lines of a section alike"
    shown = f" `{line.strip()[:60]}`" if line.strip() else ""
    return f"line {mark.line + 1}, column {mark.column + 1}:{shown} {problem}{f': {advice}' if advice else ''}"
