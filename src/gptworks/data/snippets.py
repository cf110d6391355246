"""Snippets: extra documents for training, each a few statements from inside a Python file.

A file begins with comments, a docstring or imports, so a model that has read only whole files has hardly seen a text
that begins with `for` or `with`, as the prompts that people type do.
"""

import ast
import hashlib
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator

from gptworks.data.shards import Split
from gptworks.data.sources.base import Piece, text_document

MOST_LINES = 40
_ANYWHERE = (ast.Assign, ast.Expr)
_KINDS = (
    *_ANYWHERE, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.While, ast.With, ast.If, ast.Try,
    ast.Import, ast.ImportFrom,
)  # fmt: skip

Place = tuple[int, tuple[int, ...]]
"""A snippet's first line, from 0, and the ends that it may have."""


def with_snippets(parts: Iterable[tuple[Split, Piece]], share: float) -> Iterator[tuple[Split, Piece]]:
    """Yield the parts, then the snippets of the training documents among them; a held-out document gives none.

    Only documents of one piece give snippets. They come last, so that training text seldom has a snippet beside its
    own file, from which it could be copied.

    Args:
        share: the snippets' size as a share of these documents' size, on average. 0: no snippets.
    """
    made: list[str] = []
    for split, piece in parts:
        yield split, piece
        if share and split == "train" and piece.starts_document and piece.ends_document:
            made += snippets(piece.text, share)
    for text in made:
        for piece in text_document(text):
            yield "train", piece


def snippets(text: str, share: float) -> list[str]:
    """Return snippets of a Python file: statements that follow each other anywhere in it, with the comment before them
    and without their indentation.

    The choice depends only on the text. The kinds of statements that the file has are equally likely, so that `while`
    is not rarer than assignments. A text that is not Python, or has nothing but assignments and expressions, gives
    none.

    Args:
        share: the snippets' size as a share of the text's, on average.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    places = _places("\n".join(lines), lines)
    if places.keys() <= {*_ANYWHERE}:
        return []
    chance = random.Random(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest())
    kinds, left, found = [*places], share * len(text), list[str]()
    while kinds:
        kind = chance.choice(kinds)
        first, ends = places[kind].pop(chance.randrange(len(places[kind])))
        if not places[kind]:
            kinds.remove(kind)
        snippet = textwrap.dedent("\n".join(lines[first : chance.choice(ends)])) + "\n"
        if snippet[0].isspace():  # a string in it has lines with less indentation
            continue
        if chance.random() * len(snippet) > left:  # a short file, too, has its share on average
            break
        found.append(snippet)
        left -= len(snippet)
    return found


def _places(text: str, lines: list[str]) -> dict[type, list[Place]]:
    """Return where snippets can begin, by kind of statement; nothing if the text is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    places: dict[type, list[Place]] = {}
    for parent in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(parent, name, [])
            for number, one in enumerate(block if isinstance(block, list) else []):  # a lambda's is no list
                if isinstance(one, _KINDS) and (place := _place(block[number:], lines)):
                    places.setdefault(type(one), []).append(place)
    return places


def _place(block: list[ast.stmt], lines: list[str]) -> Place | None:
    """Return the place of a snippet that begins with the first of these statements; None if it begins within a line or
    with `elif`, is a docstring, or is too long."""
    one = block[0]
    if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
        return None
    decorators: list[ast.expr] = getattr(one, "decorator_list", [])
    first = (decorators[0] if decorators else one).lineno - 1
    indentation = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    if len(indentation) != one.col_offset or lines[first].startswith(f"{indentation}elif"):
        return None
    while first and lines[first - 1].startswith(f"{indentation}#"):
        first -= 1
    ends = tuple(each.end_lineno for each in block if each.end_lineno and each.end_lineno - first <= MOST_LINES)
    return (first, ends) if ends and ends[0] == one.end_lineno else None
