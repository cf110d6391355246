"""Bounds on JSON schemas and regular expressions, checked before anything is compiled.

They catch what is known to be expensive, with a message that says what to change. The limits of the compilation
(`gptworks.confined`) catch the rest.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from gptworks.errors import UserError

MAX_PATTERN_ATOMS = 20_000
"""Of all patterns together, with their counted repetitions written out; single characters' classes repeat for free."""
MAX_PATTERNS_AT_ONCE = 8
"""Patterns inside one allOf: all of them must hold at once, and what is built for that grows exponentially."""
MAX_MULTIPLE_OF = 10_000
"""Its automaton has as many states."""

_COUNTED = re.compile(r"\s*\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")
_BRACED = "pPxuU"
"""After a backslash, these may be followed by braces that count nothing."""
_MOST = 10**12


def check_schema(schema: Any) -> None:
    """Raises a UserError if a pattern, an allOf or a multipleOf is beyond the bounds."""
    n_atoms = 0
    for key, value in _items(schema):
        if key in ("pattern", "whitespace_pattern") and isinstance(value, str):
            n_atoms += n_pattern_atoms(value)
        elif key == "patternProperties" and isinstance(value, dict):
            n_atoms += sum(map(n_pattern_atoms, value))
        elif key == "multipleOf":
            _check_multiple(value)
        elif key == "allOf":
            n = sum(inner in ("pattern", "patternProperties", "format") for inner, _ in _items(value))
            if n > MAX_PATTERNS_AT_ONCE:
                raise UserError(
                    f"json_schema: an allOf with {n} patterns; at most {MAX_PATTERNS_AT_ONCE} may have to hold at "
                    f"once. Write fewer patterns, or one that says the same."
                )
    _check_atoms("json_schema", n_atoms)


def check_regex(pattern: str) -> None:
    """Raises a UserError if its repetitions come to too much."""
    _check_atoms("regex", n_pattern_atoms(pattern))


def _check_atoms(name: str, n_atoms: int) -> None:
    if n_atoms > MAX_PATTERN_ATOMS:
        shown = f"{n_atoms}" if n_atoms < _MOST else "a great many"
        raise UserError(
            f"{name}: its patterns come to {shown} characters when counted repetitions are written out; at most "
            f"{MAX_PATTERN_ATOMS} are allowed. Use smaller counts such as {{0,100}}, or *."
        )


def _check_multiple(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        return  # the compilation says what is wrong with it
    n = Fraction(str(value)).numerator
    while n % 10 == 0:
        n //= 10
    if n > MAX_MULTIPLE_OF:
        raise UserError(
            f"json_schema: multipleOf={value!r:.40} has too many digits that count: without its decimal point and the "
            f"zeros at its end it may be at most {MAX_MULTIPLE_OF}. Use a rounder number, or minimum and maximum."
        )


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object, with its value. However deep."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from node.items()
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def n_pattern_atoms(pattern: str) -> int:
    """Characters and classes of a regular expression, each as often as counted repetitions ask for it."""
    totals, atom, is_class = [0], 0, False  # of the groups that are open; of what stands last, not yet in its group
    at = 0
    while at < len(pattern):
        character = pattern[at]
        counted = _COUNTED.match(pattern, at) if character == "{" or character.isspace() else None  # as (?x) allows
        if counted is not None:
            n = max(int(text[:12] or 1) for text in counted.groups("1"))
            atom = atom if is_class else min(_MOST, atom * max(1, n))
            at = counted.end()
            continue
        if character in "*+?":
            at += 1
            continue
        totals[-1] = min(_MOST, totals[-1] + atom)
        atom, is_class = 1, False
        if character == "\\":
            at = _after_escape(pattern, at)
            is_class = True
        elif character == "[":
            at = _after_class(pattern, at)
            is_class = True
        elif character == "(":
            totals.append(0)
            atom, at = 0, at + 1
        elif character == ")" and len(totals) > 1:
            atom, at = totals.pop(), at + 1
        else:
            is_class, at = character == ".", at + 1
    return min(_MOST, sum(totals) + atom)


def _after_escape(pattern: str, at: int) -> int:
    """Where an escape ends that begins here."""
    braced = pattern[at + 1 : at + 2] in _BRACED and pattern[at + 2 : at + 3] == "{"
    closed = pattern.find("}", at) if braced else -1
    return closed + 1 if closed >= 0 else at + 2


def _after_class(pattern: str, at: int) -> int:
    """Where a class [...] ends that begins here; classes may stand in classes."""
    depth, at = 1, at + 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and depth:
        character = pattern[at]
        depth += (character == "[") - (character == "]")
        at += 2 if character == "\\" else 1
    return at
