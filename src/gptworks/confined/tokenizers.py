"""What a tokenizer of unknown origin may do: static rules, since tokenization is too frequent for a process per call.

The `tokenizers` library limits neither how much a component lengthens a text nor how long a regular expression works,
and an exhausted allocation ends the process. So each component has a factor: the most bytes that it can make of one.
"""

import base64
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from gptworks.errors import UserError

MAX_GROWTH = 1 << 16
"""Factor of the normalizers together. ALBERT's, with NFKD and a table, have a bound of about 1,000; most have 12."""
MAX_PIECES_GROWTH = 128
"""Of the pre-tokenizers, and of the decoders. Metaspace and two ByteLevels have 72."""
MAX_NORMALIZED_BYTES = 1 << 24
"""Of one text, where that is more than it had times `_USUAL_GROWTH`."""
_USUAL_GROWTH = 16
_MAX_AFFIX, _MAX_WORD, _MAX_TEMPLATE_BYTES, _MAX_PATTERN, _MAX_COMPONENTS = 64, 1000, 1 << 16, 10_000, 64

_FACTORS = {
    # type: the most UTF-8 bytes for one, by Unicode's own tables of decompositions
    "NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "BertNormalizer": 5.0, "ByteLevel": 3.0,
}  # fmt: skip
_PARTS = ("normalizers", "pretokenizers", "decoders")


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that can lengthen a text, or work on it, without bound.

    Raises:
        UserError: the text names the component, and the rule.
    """
    limits = {"normalizer": MAX_GROWTH, "pre_tokenizer": MAX_PIECES_GROWTH, "decoder": MAX_PIECES_GROWTH}
    for name, most in limits.items():
        state = _state(tokenizer, name)
        if (factor := _growth(state)) > most:
            raise UserError(
                f"the tokenizer's {name} can make {factor:.3g} bytes of one; at most {most:,} are allowed. Take what "
                f"lengthens a text (Replace, Prepend) out of its tokenizer.json."
            )
        parts = list(_components(json.loads(state)))
        if len(parts) > _MAX_COMPONENTS:
            raise UserError(
                f"the tokenizer's {name} has {len(parts):,} components; at most {_MAX_COMPONENTS} are allowed."
            )
        for part in parts:
            pattern = part["pattern"].get("Regex") if isinstance(part.get("pattern"), dict) else None
            if pattern is not None and (reason := slow_pattern(pattern)):
                raise UserError(
                    f"the tokenizer's {name} has the pattern {pattern[:100]!r}, which may take forever: {reason}. "
                    f"Write it without that."
                )
    for name, most in (("continuing_subword_prefix", _MAX_AFFIX), ("end_of_word_suffix", _MAX_AFFIX)):
        if len(getattr(tokenizer.model, name, None) or "") > most:
            raise UserError(f"the tokenizer's {name} has more than {most} characters, which each character would get.")
    if (longest := getattr(tokenizer.model, "max_input_chars_per_word", 0)) > _MAX_WORD:
        raise UserError(
            f"the tokenizer's max_input_chars_per_word is {longest}: the time for a word is its square. At most "
            f"{_MAX_WORD} are allowed."
        )
    if len(_state(tokenizer, "post_processor")) > _MAX_TEMPLATE_BYTES:
        raise UserError(f"the tokenizer's post_processor has more than {_MAX_TEMPLATE_BYTES:,} bytes.")


def check_normalized(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Refuse texts that the normalizer makes too long, before memory is used for them.

    Raises:
        UserError: one has more than MAX_NORMALIZED_BYTES then.
    """
    most = max(map(len, texts), default=0) * 4
    if most * MAX_GROWTH <= MAX_NORMALIZED_BYTES or tokenizer.normalizer is None:
        return
    factor = _growth(_state(tokenizer, "normalizer"))
    if factor <= _USUAL_GROWTH or most * factor <= MAX_NORMALIZED_BYTES:
        return
    step = max(1, int(MAX_NORMALIZED_BYTES / 4 / factor))
    for text in texts:
        allowed = max(MAX_NORMALIZED_BYTES, _USUAL_GROWTH * len(text))
        if len(text) * 4 * factor <= allowed:
            continue
        n_bytes = 0
        for at in range(0, len(text), step):
            n_bytes += len(tokenizer.normalizer.normalize_str(text[at : at + step]).encode("utf-8", "replace"))
            if n_bytes > allowed:
                raise UserError(
                    f"this tokenizer's normalizer makes more than {allowed:,} bytes of a text of {len(text):,} "
                    f"characters. Give a shorter text."
                )


def _state(tokenizer: Tokenizer, name: str) -> bytes:
    """A component as JSON, without the vocabulary."""
    component = getattr(tokenizer, name)
    return b"null" if component is None else bytes(component.__getstate__())


@lru_cache(maxsize=32)
def _growth(state: bytes) -> float:
    return math.prod(map(_factor, _components(json.loads(state))))


def _components(tree: Any) -> Iterator[dict[str, Any]]:
    """Those of a sequence, nested ones too."""
    waiting = [tree]
    while waiting:
        part = waiting.pop(0)
        if isinstance(part, dict):
            yield part
            for name in _PARTS:
                waiting += part.get(name) or []


def _factor(part: dict[str, Any]) -> float:
    kind = part.get("type")
    if kind == "Replace":
        pattern, content = part["pattern"], len(part["content"].encode())
        found = len(pattern.get("String", "").encode())  # a regular expression may match nothing at each place
        return max(1.0, content / found) if found else 1.0 + content
    if kind == "Prepend":  # before each part between added tokens
        return 1.0 + len(part["prepend"].encode())
    if kind == "Metaspace":
        return 2.0 * max(4, len(part["replacement"].encode()))
    if kind in ("WordPiece", "BPEDecoder"):
        return 2.0
    if kind == "Precompiled":  # a trie, and the texts that it replaces by, each with a zero at its end
        table = base64.b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1.0, float(max(map(len, texts))))
    return _FACTORS.get(str(kind), 1.0)


# -------------------------------------------------------------------------------------------- regular expressions

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})([+?]?)")


def slow_pattern(pattern: str) -> str | None:
    """Why a pattern's time can grow exponentially, or with a high power, with the text; None: it cannot.

    Exponentially takes a repeated group that can match one text in several ways: with a quantifier inside, or with
    alternatives. The power is at most the number of long repetitions one after another; released patterns have two.
    """
    if len(pattern) > _MAX_PATTERN:
        return f"it has more than {_MAX_PATTERN:,} characters"
    open_groups, at = [_Group()], 0
    while at < len(pattern):
        character, varies, n_long = pattern[at], False, 0
        if character == "(":
            opening = re.compile(r"\((?:\?(?:<?[=!]|[>~|]|[a-z-]*:|<\w+>|#))?").match(pattern, at)
            assert opening is not None
            open_groups.append(_Group())
            at = opening.end()
            continue
        if character == "|":
            open_groups[-1].varies, open_groups[-1].n_long = True, 0
            at += 1
            continue
        if character == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            varies, n_long = closed.varies, closed.most_long
            at += 1
        elif character == "[":
            at = _end_of_class(pattern, at)
        else:
            at += 2 if character == "\\" else 1
            if character == "\\" and pattern[at - 1 : at] in ("p", "P", "x", "k", "g") and pattern[at : at + 1] == "{":
                at = pattern.find("}", at) + 1 or len(pattern)
        found = _QUANTIFIER.match(pattern, at)
        if found is not None:
            at = found.end()
            fixed = found[1] and not found[2]
            many = found[0][0] in "*+" or (found[0][0] == "{" and (not found[3] or int(found[3]) > _MANY))
            possessive = found[0][0] in "*+?" and found[4] == "+"
            if varies and many and not fixed and not possessive:
                return "it repeats a group that can match in several ways (a quantifier or alternatives within)"
            if varies and fixed and int(found[1]) > _MANY:
                return "it repeats a group that can match in several ways (a quantifier or alternatives within)"
            varies = varies or not (fixed or possessive)
            n_long += not possessive and (found[0][0] in "*+" or (not found[3] and found[2] == ","))
            n_long += found[3] is not None and found[3] != "" and int(found[3]) > _LONG
        group = open_groups[-1]
        group.varies, group.n_long = group.varies or varies, group.n_long + n_long
        group.most_long = max(group.most_long, group.n_long)
        if group.most_long > _MOST_LONG:
            return f"more than {_MOST_LONG} long repetitions follow one another"
    return None


@dataclass
class _Group:
    """An open group of a pattern: can it match one text in several ways; long repetitions in its alternative; the most
    in one."""

    varies: bool = False
    n_long: int = 0
    most_long: int = 0


_LONG, _MOST_LONG = 16, 2
_MANY = 4
"""Repetitions of a group that are few."""


def _end_of_class(pattern: str, at: int) -> int:
    """The index after a class of characters, which may hold others."""
    depth, start = 0, at
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth, start = depth + 1, at
        elif pattern[at] == "]" and at != start + 1 + (pattern[start + 1 : start + 2] == "^"):
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at
