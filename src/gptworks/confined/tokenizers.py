"""Check untrusted tokenizers by static rules, since tokenization is too frequent for a child process per call.

The `tokenizers` library limits neither how much a component lengthens a text nor how long a regular expression runs,
and a failed allocation ends the process. So each component has a factor: the most bytes it can make from one byte.
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
"""Maximum product of the normalizers' factors. ALBERT has about 1,000 (NFKD and a table); most tokenizers have 12."""
MAX_PIECES_GROWTH = 128
"""Maximum product of the pre-tokenizers' or the decoders' factors. Metaspace with two ByteLevels has 72."""
MAX_NORMALIZED_BYTES = 1 << 24
"""Maximum bytes of a normalized text. The maximum of a long text is `_USUAL_GROWTH` bytes per character, if larger."""
_USUAL_GROWTH = 16
_MAX_AFFIX, _MAX_WORD, _MAX_TEMPLATE_BYTES, _MAX_PATTERN, _MAX_COMPONENTS = 64, 1000, 1 << 16, 10_000, 64

_FACTORS = {
    # type of component: the most UTF-8 bytes it can make from one byte, by Unicode's tables of decompositions
    "NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5, "BertNormalizer": 5.0, "ByteLevel": 3.0,
}  # fmt: skip
_PARTS = ("normalizers", "pretokenizers", "decoders")


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise a UserError if a tokenizer may lengthen a text too much, or take too long."""
    limits = {"normalizer": MAX_GROWTH, "pre_tokenizer": MAX_PIECES_GROWTH, "decoder": MAX_PIECES_GROWTH}
    for name, most in limits.items():
        state = _state(tokenizer, name)
        if (factor := _growth(state)) > most:
            raise UserError(
                f"the tokenizer's {name} can make {factor:.3g} bytes of one; at most {most:,} are allowed. Remove the "
                f"components that lengthen a text (Replace, Prepend) from its tokenizer.json."
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
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(tokenizer.model, name, None) or "") > _MAX_AFFIX:
            raise UserError(f"the tokenizer's {name} has more than {_MAX_AFFIX} characters, for each character.")
    if (longest := getattr(tokenizer.model, "max_input_chars_per_word", 0)) > _MAX_WORD:
        raise UserError(
            f"the tokenizer's max_input_chars_per_word is {longest}; at most {_MAX_WORD} are allowed: the time grows "
            f"with its square."
        )
    if len(_state(tokenizer, "post_processor")) > _MAX_TEMPLATE_BYTES:
        raise UserError(f"the tokenizer's post_processor has more than {_MAX_TEMPLATE_BYTES:,} bytes.")


def check_normalized(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Check that no text becomes too long by normalization. Texts are normalized in parts, to save memory. Raises
    UserError if a normalized text would be too long; see MAX_NORMALIZED_BYTES."""
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
    """Return a component of a tokenizer, such as its normalizer, as JSON; null if the tokenizer has none."""
    component = getattr(tokenizer, name)
    return b"null" if component is None else bytes(component.__getstate__())


@lru_cache(maxsize=32)
def _growth(state: bytes) -> float:
    return math.prod(map(_factor, _components(json.loads(state))))


def _components(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield a component, and all components nested in it."""
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
        found = len(pattern.get("String", "").encode())  # a regular expression may match "" everywhere
        return max(1.0, content / found) if found else 1.0 + content
    if kind == "Prepend":  # prepended to each part of a text between added tokens
        return 1.0 + len(part["prepend"].encode())
    if kind == "Metaspace":
        return 2.0 * max(4, len(part["replacement"].encode()))
    if kind in ("WordPiece", "BPEDecoder"):
        return 2.0
    if kind == "Precompiled":  # a trie, then the replacement texts, each ended by a zero byte
        table = base64.b64decode(part["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return max(1.0, float(max(map(len, texts))))
    return _FACTORS.get(str(kind), 1.0)


# -------------------------------------------------------------------------------------------- regular expressions

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})([+?]?)")


def slow_pattern(pattern: str) -> str | None:
    """Return the reason why a pattern may be slow or cannot be checked; None if it is safe.

    A slow pattern takes time that is exponential in the text's length, or a high power of the length. Time can be
    exponential only if a repeated group can match a text in several ways: by a quantifier inside, or by alternatives.
    The power is at most the number of consecutive long repetitions. Patterns of released models have at most two.
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
            if varies and (int(found[1]) > _MANY if fixed else many and not possessive):
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
    """A pattern's group that is still open, or the whole pattern."""

    varies: bool = False
    """Whether the group can match a text in several ways."""
    n_long: int = 0
    """Number of long repetitions in the current alternative."""
    most_long: int = 0
    """Largest number of long repetitions in one alternative."""


_LONG, _MOST_LONG = 16, 2
_MANY = 4
"""Maximum repetitions of a group that can match in several ways; more may take long."""


def _end_of_class(pattern: str, at: int) -> int:
    """Return the index after the character class that begins at `at`, such as `[a-z]`. Classes may be nested."""
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
