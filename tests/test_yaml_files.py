"""YAML from strangers: the limits, the refusals, and that there is only one reader."""

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

import gptworks
from gptworks.errors import UserError
from gptworks.yaml_files import MAX_DEPTH, MAX_NODES, _Loader, compose_yaml, parse_yaml

LETTERS = "abcdefghijklmnop"


def nested_merges(width: int, levels: int) -> str:
    """Return YAML in which each level merges the one before it `width` times: without a limit, width ** levels keys are
    copied."""
    lines = ["a: &a {x: 1}"]
    for before, letter in itertools.pairwise(LETTERS[:levels]):
        lines.append(f"{letter}: &{letter} {{<<: [{','.join([f'*{before}'] * width)}]}}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        nested_merges(10, 14),
        nested_merges(3, 16),
        "a: &a [x]\n" + "\n".join(f"{n}: &{n} [{', '.join(f'*{b}' for b in LETTERS[:i + 1])}]" for i, n in
                                  enumerate(LETTERS[1:])) + "\nlast: [" + "*p," * 9 + "]",
        "list: [" + "1," * (MAX_NODES + 10) + "]",
    ],
    ids=["merges", "deeper merges", "aliases of aliases", "plain values"],
)  # fmt: skip
def test_nodes_are_counted_before_they_are_made(text: str) -> None:
    """Refused while composing: at that point there are at most as many nodes as the limit, plus one alias."""
    loader = _Loader(text)
    with pytest.raises(yaml.YAMLError, match="more than 100,000 keys and values"):
        loader.get_single_node()
    assert loader.n_nodes <= 2 * MAX_NODES and not loader.constructed_objects
    with pytest.raises(UserError, match=r"line \d+, column \d+: `.+` it has more than 100,000 keys and values"):
        parse_yaml(text, "recipe")


def test_an_alias_counts_as_its_value() -> None:
    loader = _Loader("a: &a [1, {b: 2}]\nc: *a\nd: {<<: {e: 3}}")
    loader.get_single_node()
    plain = _Loader("a: [1, {b: 2}]\nc: [1, {b: 2}]\nd: {f: {e: 3}}")
    plain.get_single_node()
    assert loader.n_nodes == plain.n_nodes == 1 + 3 * 6


def test_a_mapping_of_many_keys_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key is looked up in a set, not compared with all keys before it."""
    n_keys, compared = 40_000, [0]

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    make = yaml.ScalarNode.__init__

    def counted(self: yaml.ScalarNode, tag: str, value: str, *rest: Any, **more: Any) -> None:
        make(self, tag, Counted(value), *rest, **more)

    monkeypatch.setattr(yaml.ScalarNode, "__init__", counted)
    node = compose_yaml("".join(f"k{i}: 1\n" for i in range(n_keys)), "recipe")
    assert node is not None and len(node.value) == n_keys
    assert compared[0] < 5 * n_keys


def test_depth_follows_aliases() -> None:
    chain = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, MAX_DEPTH - 2))
    assert parse_yaml(chain, "recipe")["a3"] == [[[["x"]]]]
    with pytest.raises(UserError, match="nested more than 64 deep"):
        parse_yaml(chain + f"more: [[*a{MAX_DEPTH - 3}]]\n", "recipe")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "seed: 1" + ":1" * 200_000,
            "as another number: write it without leading zeros or colons",
        ),  # base 60: quadratic to compute
        ("seed: 0b" + "1" * 20_000, "a number of 20,002 digits"),  # too long to be shown
        ("a: 1\nb: {c: 1, c: 2}\n", r"line 2, column 11: `b: {c: 1, c: 2}` the key `c` occurs twice"),
        ("b: &b {x: 1, x: 2}\na: {<<: *b}", "the key `x` occurs twice"),
        ("1: 2\n", "line 1, column 1: `1: 2` it has the key 1"),
        ("yes: 2\n", "it has the key yes"),
        ("? \n: 1\n", "it has the key null"),
        ("? [a]\n: 1\n", "unhashable key"),
        ("a: !!timestamp x", "'x' is not of the type timestamp"),
        ("a: !!bool maybe", "'maybe' is not of the type bool"),
        ("a: !!int ''", "'' is not of the type int"),
        ("a: !!set {b, c}", "could not determine a constructor"),
        ("a: !!binary aGk=", "could not determine a constructor"),
        ("%TAG ! tag:yaml.org,2002:\n---\na: !python/name:os.system", "could not determine a constructor"),
        ("a: {<<: [1]}", "expected a mapping for merging"),
        ("a: &a {<<: *a}", "contains itself"),
        ("name: \udc80", "not readable YAML"),
        ("model:\n\tx: 1\n", "line 2, column 1: .*indent with spaces"),
    ],
)
def test_what_no_file_of_ours_needs_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        parse_yaml(text, "recipe")
    assert len(str(refused.value)) < 500


def test_harmless_values_are_read() -> None:
    text = "a: &a {x: 1, y: 2}\ns: {b: &b {<<: *a, x: 3}}\nc: {<<: [*b, {z: 4}], y: 5}\n'1': !!float 1e-3\n"
    expected = {"a": {"x": 1, "y": 2}, "s": {"b": {"x": 3, "y": 2}}, "c": {"x": 3, "y": 5, "z": 4}, "1": 0.001}
    assert parse_yaml(text, "recipe") == yaml.safe_load(text) == expected


def test_nothing_else_parses_yaml() -> None:
    readers = {"load", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all", "compose", "compose_all",
               "parse", "scan", "SafeLoader", "CSafeLoader", "BaseLoader", "FullLoader", "Loader"}  # fmt: skip
    found = set()
    root = Path(gptworks.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            of_yaml = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml"
            imported = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "yaml"
            if (of_yaml and node.attr in readers) or imported:
                found.add(path.relative_to(root).as_posix())
    assert found == {"yaml_files.py"}
