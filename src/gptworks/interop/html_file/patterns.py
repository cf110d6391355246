"""Translate a tokenizer's regular expression from Oniguruma's syntax to JavaScript's, with the same matches."""

import re

from gptworks.errors import UserError

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\xb2\xb3\xb9\xbc-\xbe"
_SETS = {"s": _SPACE, "w": _WORD, "d": r"\p{Nd}"}
_EDGE = f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))"
_FOLDED = {"s": "ſ", "k": "\u212a"}
"""For an ASCII letter, the character outside ASCII that matches it if case is ignored."""
_PIECES = re.compile(
    r"\[\\s\\S\]|\\[pP]\{[\^A-Za-z_= ]+\}|\\x\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|"
    r"&&|\(\?[a-z]+:|\(\?[:=!]|\(\?<[=!]|\(\?|\{\d+(?:,\d*)?\}|[+*?}][+?]?|.",
    re.DOTALL,
)


def as_javascript(pattern: str) -> str:
    """Return the pattern in JavaScript's syntax, for a regular expression with flag u.

    Raises:
        UserError: the pattern has a construct that is not translated.
    """
    made: list[str] = []
    inside = 0  # number of open character classes
    folding: list[bool] = [False]  # whether case is ignored, outside groups and in each open group
    for piece in _PIECES.findall(pattern):
        made.append(_translated(piece, inside > 0, folding[-1], pattern))
        if inside:
            inside += {"[": 1, "]": -1}.get(piece, 0)
            if inside > 1 or piece == "&&":
                raise _refused(piece, pattern)
        elif piece == "[":
            inside = 1
        elif piece.startswith("("):
            folding.append(folding[-1] or piece == "(?i:")
        elif piece == ")":
            folding.pop()
    return "".join(made)


def _translated(piece: str, in_class: bool, folds: bool, pattern: str) -> str:
    if piece == r"[\s\S]":
        return "[^]"
    if piece == "(?i:":
        return "(?:"
    if piece.startswith("(?") and piece not in ("(?:", "(?=", "(?!", "(?<=", "(?<!"):
        raise _refused(piece, pattern)
    if len(piece) == 2 and piece[0] in "+*?}" and piece[1] == "+":  # a possessive quantifier
        raise _refused(piece, pattern)
    if piece.startswith(r"\x{"):
        return rf"\u{{{piece[3:-1]}}}"
    if piece[0] == "\\" and len(piece) == 2:
        return _escape(piece, in_class, pattern)
    if in_class:
        return piece
    if piece in "^$":
        raise _refused(piece, pattern)
    if piece == ".":
        return r"[^\n]"
    if folds and piece.isalpha() and piece.isascii():
        return f"[{piece.lower()}{piece.upper()}{_FOLDED.get(piece.lower(), '')}]"
    return piece


def _escape(piece: str, in_class: bool, pattern: str) -> str:
    letter = piece[1]
    if letter in _SETS:
        return _SETS[letter] if in_class else f"[{_SETS[letter]}]"
    if letter.lower() in _SETS and not in_class:
        return f"[^{_SETS[letter.lower()]}]"
    if letter == "b" and not in_class:
        return _EDGE
    if letter in "rntfv\\^$.*+?()[]{}|/-":
        return piece if letter != "-" or in_class else "-"
    if letter.isalnum():
        raise _refused(piece, pattern)
    return letter


def _refused(piece: str, pattern: str) -> UserError:
    return UserError(
        f"--format html: the tokenizer's pattern {pattern[:200]!r} has {piece!r}, which the page does not read. Export "
        f"the run with --format hf or gguf."
    )
