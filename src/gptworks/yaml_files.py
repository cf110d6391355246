"""Untrusted YAML files, read as plain data within limits."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from gptworks.errors import UserError
from gptworks.files import read_text

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
"""Values in a file, each alias counted wherever it is used."""
MAX_DEPTH = 64


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys and unlimited nesting, which YAML allows."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        given = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE]
        if twice := next((key for i, key in enumerate(given) if key in given[:i]), None):
            raise yaml.YAMLError(f"the key `{twice}` stands twice in one section, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(path: Path) -> Any:
    """The data of a YAML file.

    Raises:
        UserError: it is no regular UTF-8 file, no YAML, or larger or deeper than a recipe can be.
        OSError: it cannot be opened; FileNotFoundError where there is none.
    """
    return parse_yaml(read_text(path, MAX_BYTES), str(path))


def parse_yaml(text: str, origin: str) -> Any:
    """The data of a YAML text; see `read_yaml`."""
    try:
        tree = yaml.load(text, _Loader)
        _count(tree, {}, set())
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError, TypeError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{origin} is not readable YAML: {why[:400]}") from None
    return tree


def _count(value: Any, known: dict[int, int], above: set[int]) -> int:
    """The number of values in a tree. An alias is one object in several places; a bomb has exponentially many.

    Raises:
        ValueError: more than MAX_NODES, or a value that contains itself.
    """
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"the text {value[:40]!r} has a zero byte, which no path and no name can have")
    if not isinstance(value, dict | list | set | tuple):
        return 1
    if id(value) in above:
        raise ValueError("a value contains itself by an alias")
    if id(value) not in known:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
        above.add(id(value))
        known[id(value)] = 1 + sum(_count(item, known, above) for item in inner)
        above.discard(id(value))
    if known[id(value)] > MAX_NODES:
        raise ValueError(f"its aliases make it more than {MAX_NODES:,} values")
    return known[id(value)]
