"""Snippets: extra documents for training, each a few statements from inside a Python file.

A file begins with comments, a docstring or imports, so a model that has read only whole files has hardly seen a text
that begins with `for` or `with`. But people often type prompts that begin with such statements.
"""

import ast
import hashlib
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator

from gptworks.data.shards import Split
from gptworks.data.sources.base import UNIT_BYTES, Piece, text_document

SNIPPETS_VERSION = 1
"""Version of the rules below. A dataset's identity includes this version, because other rules give other snippets."""
MOST_LINES = 40
MOST_CHARACTERS = 200_000
"""Maximum characters of a text to parse: Python takes seconds and much memory for some longer texts."""
MOST_DEPTH = 200
"""Maximum levels of a syntax tree. A deeper file gives no snippets: whether Python can parse it depends on the caller's
stack."""

_ALSO_IN_PROSE = (ast.Assign, ast.Expr)
_KINDS = (
    *_ALSO_IN_PROSE, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With, ast.If,
    ast.Try, ast.Import, ast.ImportFrom,
)  # fmt: skip
"""Kinds of statements that a snippet may begin with."""

Place = tuple[int, tuple[int, ...]]
"""The index of a snippet's first line, and the possible indices of the line after the snippet."""


def with_snippets(parts: Iterable[tuple[Split, Piece]], share: float) -> Iterator[tuple[Split, Piece]]:
    """Yield the parts, with snippets of the training documents in between. `share` is the average size of the snippets
    as a fraction of the Python files' size; 0: no snippets. Held-out documents, and documents of several pieces, give
    no snippets. Snippets follow after many documents, so that a row seldom holds a snippet and its file. In such a row,
    the model could copy the snippet from the file."""
    made: list[str] = []
    n_characters = 0
    for split, piece in parts:
        yield split, piece
        if share and split == "train" and piece.starts_document and piece.ends_document:
            more = snippets(piece.text, share)
            made += more
            n_characters += sum(map(len, more))
            if n_characters > UNIT_BYTES:
                yield from _documents(made)
                made, n_characters = [], 0
    yield from _documents(made)


def _documents(texts: Iterable[str]) -> Iterator[tuple[Split, Piece]]:
    for text in texts:
        for piece in text_document(text):
            yield "train", piece


def snippets(text: str, share: float) -> list[str]:
    """Return snippets of a Python file. A snippet is a few consecutive statements from anywhere in the file, with the
    comment before them and without their indentation.

    The choice depends only on the arguments. Each kind of statement in `_KINDS` that the file has is equally likely to
    begin a snippet, so that `while` is not rarer than assignments. A text gives no snippets if it is not Python, is
    nested too deeply, has only assignments and expressions, or is longer than `MOST_CHARACTERS`. The snippets' total
    size is on average `share` times the text's size.
    """
    if len(text) > MOST_CHARACTERS:
        return []
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    places = _places(lines)
    if places.keys() <= {*_ALSO_IN_PROSE}:
        return []
    chance = random.Random(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
    kinds, left, found = [*places], share * len(text), list[str]()
    while kinds:
        kind = chance.choice(kinds)
        first, ends = places[kind].pop(chance.randrange(len(places[kind])))
        if not places[kind]:
            kinds.remove(kind)
        snippet = textwrap.dedent("\n".join(lines[first : chance.choice(ends)])) + "\n"
        if _parsed(snippet) is None:  # the snippet begins with `elif`, or contains only part of a string
            continue
        if chance.random() * len(snippet) > left:  # a random choice: short files, too, reach the share on average
            break
        found.append(snippet)
        left -= len(snippet)
    return found


def _parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _places(lines: list[str]) -> dict[type, list[Place]]:
    """Return the places of possible snippets by kind of first statement; empty if the syntax is wrong or too deep."""
    places: dict[type, list[Place]] = {}
    tree = _parsed("\n".join(lines))
    level: list[ast.AST] = [] if tree is None else [tree]
    for _ in range(MOST_DEPTH):
        for parent in level:
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, [])
                for number, one in enumerate(block if isinstance(block, list) else []):  # not a list: a lambda's body
                    if isinstance(one, _KINDS) and (place := _place(block[number : number + MOST_LINES], lines)):
                        places.setdefault(type(one), []).append(place)
        level = [child for parent in level for child in ast.iter_child_nodes(parent)]
    return {} if level else places


def _place(block: list[ast.stmt], lines: list[str]) -> Place | None:
    """Return the place of a snippet that begins with the first of these statements; None if that statement is too long
    or a constant, such as a docstring."""
    one = block[0]
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return None
    decorators: list[ast.expr] = getattr(one, "decorator_list", [])
    first = (decorators[0] if decorators else one).lineno - 1
    comment = lines[first][: len(lines[first]) - len(lines[first].lstrip())] + "#"
    while first and lines[first - 1].startswith(comment):
        first -= 1
    ends = tuple(each.end_lineno for each in block if each.end_lineno and each.end_lineno - first <= MOST_LINES)
    return (first, ends) if ends else None
