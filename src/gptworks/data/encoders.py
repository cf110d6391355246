"""Fast encoding to the ids of `tokenizers`: by gigatoken if it gives the same ids, else by `tokenizers`.

gigatoken implements the patterns of some tokenizers by hand and caches the tokens of each word. It is used only for
byte-level BPE, with tokens renumbered in the order of the merges and without special tokens. The two libraries have
different Unicode versions. So `tokenizers` encodes every text that has a character which the libraries may classify
differently.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers

from gptworks.data.shards import Ids
from gptworks.errors import not_installed
from gptworks.gpt2_vocabulary import BYTE_CHARACTERS
from gptworks.tokenizer import BPE_PATTERNS, encodings

_CACHED_CHARACTERS = 1 << 26
"""Number of encoded characters after which to restart gigatoken, because its cache only grows."""
_MARK = "\0"
_PIECES_KEPT, _PIECE_CHARACTERS = 1 << 16, 128


class Encoder(NamedTuple):
    """A function that encodes texts to the ids of `tokenizers`, and the library that it uses."""

    name: str
    """The library that encodes: gigatoken or tokenizers."""
    reason: str
    """The reason for choosing the encoder's library; empty if there was no choice."""
    encode: Callable[[list[str]], list[Ids]]
    """Encodes each text to ids, uint32 [n]. Raises UserError like `gptworks.tokenizer.encodings`."""


class _Unsuitable(Exception):
    """Raised if gigatoken cannot replace this tokenizer; the message has the reason."""


def plain_encoder(tokenizer: Tokenizer, reason: str = "") -> Encoder:
    """Return an encoder that uses the tokenizer itself; `reason` becomes its `Encoder.reason`."""

    def encode(texts: list[str]) -> list[Ids]:
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings(tokenizer, texts)]

    return Encoder("tokenizers", reason, encode)


def choose_encoder(tokenizer: Tokenizer) -> Encoder:
    """Return the fastest encoder that gives the tokenizer's ids for every text, judging by the tokenizer's settings."""
    plain = plain_encoder(tokenizer)
    try:
        return Encoder("gigatoken", "its tokens are the same and it is faster", _Gigatoken(tokenizer, plain.encode))
    except _Unsuitable as why:
        return plain._replace(reason=str(why))


def compared(encoder: Encoder, tokenizer: Tokenizer, sample: Iterable[str]) -> Encoder:
    """Return `encoder` if it encodes the sample as the tokenizer does, else `plain_encoder(tokenizer)`."""
    plain = plain_encoder(tokenizer, f"{encoder.name} gave other ids for a sample of the text")
    if encoder.name == plain.name:
        return encoder
    texts = list(sample)
    return encoder if all(map(np.array_equal, encoder.encode(texts), plain.encode(texts))) else plain


class _Gigatoken:
    def __init__(self, tokenizer: Tokenizer, library: Callable[[list[str]], list[Ids]]) -> None:
        pattern, merges, ids = _byte_level_bpe(tokenizer)
        try:
            import gigatoken
        except ImportError:
            raise _Unsuitable(str(not_installed("gigatoken", "data", "faster encoding"))) from None
        self._library, self._make = library, gigatoken.Tokenizer.from_json
        self._ids = np.array([*ids, 0], dtype=np.uint32)  # the last entry is a placeholder for _MARK
        self._mark = len(ids)
        self._pieces = _Pieces(library) if pattern == "code" else None
        self._json = _tokenizer_json("llama3" if pattern == "code" else pattern, merges, marked=pattern == "code")
        try:
            self._encode, self._encoded = self._make(self._json).encode, 0
        except Exception as error:  # other versions of gigatoken may raise other types of errors
            raise _Unsuitable(f"gigatoken does not accept the tokenizer: {error}") from None

    def __call__(self, texts: list[str]) -> list[Ids]:
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> Ids:
        if not text.isascii() and _has_doubtful(text):
            return self._library([text])[0]
        self._encoded += len(text)
        if self._encoded > _CACHED_CHARACTERS:
            self._encode, self._encoded = self._make(self._json).encode, len(text)
        if self._pieces is None:
            return self._ids[self._encode(text)]
        if (cut := _cut_code(text)) is None:
            return self._library([text])[0]
        rest, pieces = cut
        found = self._encode(rest)
        if not pieces:
            return self._ids[found]
        lengths, spelled = self._pieces(pieces)
        counts = np.ones(len(found), dtype=np.int64)
        counts[found == self._mark] = lengths
        found = np.repeat(found, counts)
        ids = self._ids[found]
        ids[found == self._mark] = spelled
        return ids


# ---------------------------------------------------------------------------------------- conditions for gigatoken


def _byte_level_bpe(tokenizer: Tokenizer) -> tuple[str, list[tuple[str, str]], list[int]]:
    """Return the pattern's name, the merges, and the ids of the 256 bytes and of each merge's token.

    gigatoken merges in the order of the ids. If the vocabulary has a whole word as a token, gigatoken encodes the word
    as this token. Raises _Unsuitable if the tokenizer works differently.
    """
    settings = json.loads(tokenizer.to_str())
    model, added = settings["model"], settings["added_tokens"]
    pattern = _pattern(settings["pre_tokenizer"])
    odd = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if pattern is None or model["type"] != "BPE" or settings["normalizer"] or any(model.get(name) for name in odd):
        raise _Unsuitable("the tokenizer is not byte-level BPE with a pattern that gigatoken knows")
    if not tokenizer.encode_special_tokens or not all(token["special"] for token in added):
        raise _Unsuitable("the tokenizer finds added tokens in the text")
    vocabulary: dict[str, int] = model["vocab"]
    merges = [(left, right) for left, right in model["merges"]]
    made = [left + right for left, right in merges]
    names = dict.fromkeys([*BYTE_CHARACTERS, *made])
    if len(names) != 256 + len(made) or not names.keys() <= vocabulary.keys():
        raise _Unsuitable("the tokenizer lacks a byte, or two of its merges make one token")
    if model.get("ignore_merges"):
        if len(vocabulary) > len(names):
            raise _Unsuitable("the tokenizer has tokens that no merge makes")
    else:
        encoded = Tokenizer(models.BPE(vocabulary, merges)).encode_batch_fast(made, add_special_tokens=False)
        if any(len(encoding.ids) != 1 for encoding in encoded):
            raise _Unsuitable("the text of some of the tokenizer's tokens gives other tokens")
    return pattern, merges, [vocabulary[name] for name in names]


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the pattern's name in BPE_PATTERNS; None if BPE_PATTERNS lacks the pattern."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return "gpt2"
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return next((name for name, known in BPE_PATTERNS.items() if known == regex), None)
    return None


def _tokenizer_json(pattern: str, merges: list[tuple[str, str]], *, marked: bool = False) -> str:
    """Return a tokenizer for gigatoken as JSON: ids 0 to 255 are bytes, then merges, then `_MARK` if `marked`."""
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": pattern == "gpt2"}
    split = {"type": "Split", "pattern": {"Regex": BPE_PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}
    names = [*BYTE_CHARACTERS, *(left + right for left, right in merges)]
    settings = {
        "model": {"type": "BPE", "vocab": {name: rank for rank, name in enumerate(names)}, "merges": merges},
        "pre_tokenizer": to_bytes if pattern == "gpt2" else {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "added_tokens": [{"id": len(names), "content": _MARK, "special": True}] if marked else [],
    }
    return json.dumps(settings)


# ------------------------------------------------------------------------------------------- classes of characters

_COMPARED, _BLOCK = 0x40000, 0x1000
"""Both libraries' classes of code points below _COMPARED are compared, a block at a time when needed. Text with higher
code points, which are rare, goes to `tokenizers`."""
_SAME, _DOUBTFUL, _NOT_COMPARED = 0, 1, 2
_LONG_S = ord("ſ")
_LEADS = BYTE_CHARACTERS[0x80:]


def _has_doubtful(text: str) -> bool:
    try:
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)
    except UnicodeEncodeError:  # half of a surrogate pair cannot be encoded
        return True
    found = (known := _known()).take(points)
    if (most := found.max(initial=_SAME)) != _NOT_COMPARED:
        return bool(most == _DOUBTFUL)
    for block in np.unique(points[found == _NOT_COMPARED] // _BLOCK).tolist():
        start = block * _BLOCK
        known[start : start + _BLOCK] = _doubtful(start, start + _BLOCK)
    return bool(known.take(points).max() == _DOUBTFUL)


@functools.cache
def _known() -> np.ndarray[Any, np.dtype[np.int8]]:
    """Return the state of every code point: _SAME (both libraries agree), _DOUBTFUL, or _NOT_COMPARED so far."""
    known = np.full(0x110000, _DOUBTFUL, dtype=np.int8)
    known[:_COMPARED] = _NOT_COMPARED
    known[:0x80] = _SAME
    return known


def _doubtful(start: int, end: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Return the state of each code point: _DOUBTFUL if the libraries may classify it differently (as a letter, a
    number, white space or other), else _SAME."""
    points = np.array([point for point in range(max(start, 0x80), end) if not 0xD800 <= point < 0xE000], np.uint32)
    characters = points.tobytes().decode("utf-32-le")
    classes = characters
    for expression, name in ((r"\s", "\n"), (r"\p{N}", "1"), (r"\p{L}", "a")):
        classes = normalizers.Replace(Regex(expression), name).normalize_str(classes)
    ours = np.frombuffer(classes.encode("utf-32-le"), dtype=np.uint32)

    probe = _probe()
    ids = probe.encode("".join(f"a{character}1{character}!{character}\n" for character in characters))
    line = np.cumsum(ids == ord("\n")) - (ids == ord("\n"))
    theirs = np.full(len(points), ord("\n"), dtype=np.uint32)
    for number, name in enumerate("!1a"):
        theirs[line[(ids - 256) // len(_LEADS) == number]] = ord(name)
    doubtful = np.full(end - start, _SAME, dtype=np.int8)
    doubtful[points - start] = np.where(np.where(ours < 0x80, ours, ord("!")) != theirs, _DOUBTFUL, _SAME)
    if start <= _LONG_S < end:  # `'ſ` matches `'s` if case is ignored
        doubtful[_LONG_S - start] = _DOUBTFUL
    return doubtful


@functools.cache
def _probe() -> Any:
    """Return a tokenizer that shows gigatoken's class of a character: the character's first byte merges with an `a`
    before a letter, with a `1` before a number, and with a `!` before any other character except white space."""
    import gigatoken

    merges = [(before, byte) for before in "!1a" for byte in _LEADS]
    return gigatoken.Tokenizer.from_json(_tokenizer_json("llama3", merges))


# ------------------------------------------------------------------------------------------------- the code pattern

# gigatoken knows llama3's pattern, but not our code pattern. The patterns differ only in three places: at line breaks,
# where a token of the code pattern includes the white space around the break; at '\r'; and at an apostrophe with the
# letters after it, which llama3 cuts after 's, 't, 're, 've, 'm, 'll, 'd. So line breaks and words with an apostrophe
# are cut out of the text: `tokenizers` encodes each of these pieces once, and gigatoken encodes the rest. The pattern
# never looks before the start of a token, and looks only one character beyond white space. So a cut between two tokens
# changes neither token, unless white space precedes the cut. `tokenizers` encodes the whole text if another '\r' is
# left, or if it is uncertain whether tokens end at a cut.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SIGNS = "\xa1-\xa9\xab-\xb1\xb4\xb6-\xb8\xbb\xbf\u2010-\u2027\u2030-\u205e"  # not letters in any Unicode version
_OTHER = rf"[^\0-\x7f{_SIGNS}]"
_SHORT = "(?:[sdmtSDMT]|[rR][eE]|[vV][eE]|[lL][lL])"
_BREAK = re.compile(rf"(\n(?:[{_SPACES}]*\n)?[ \t]*)")
_WORD = re.compile(rf"('(?<![^A-Za-z0-9{_MARK}]'){_SHORT}[A-Za-z]++(?!{_OTHER}))")
_UNCERTAIN = re.compile(rf"'(?:{_SHORT}[A-Za-z]*+{_OTHER}|(?<=[\t\v\f]'|{_OTHER}'){_SHORT}[A-Za-z])|\r")


def _cut_code(text: str) -> tuple[str, list[str]] | None:
    """Return the text with a mark for each piece cut out, and the pieces. Return None if the text already has a mark,
    or if it is uncertain where tokens end."""
    if _MARK in text:
        return None
    parts = _BREAK.split(text)
    lines, pieces = parts[::2], parts[1::2]
    for at, line in enumerate(lines[:-1]):
        if line and line[-1] in _SPACES:  # a line break's token includes the white space before it
            lines[at] = line.rstrip(_SPACES)
            pieces[at] = line[len(lines[at]) :] + pieces[at]
    rest = _MARK.join(lines)
    if len(parts := _WORD.split(rest)) > 1:
        breaks, pieces, words = iter(pieces), [], parts[1::2]
        for part, word in zip_longest(parts[::2], words):
            pieces += islice(breaks, part.count(_MARK))
            pieces += [word] if word else []
        rest = _MARK.join(parts[::2])
    return None if _UNCERTAIN.search(rest) else (rest, pieces)


class _Pieces:
    """Encodes pieces and caches their ids."""

    def __init__(self, library: Callable[[list[str]], list[Ids]]) -> None:
        self._library = library
        self._known: dict[str, bytes] = {}

    def __call__(self, pieces: list[str]) -> tuple[list[int], Ids]:
        """Return the number of ids of each piece, and the ids of all pieces, [n]."""
        known = self._known
        if missing := list(set(pieces).difference(known)):
            if len(known) > _PIECES_KEPT:
                known.clear()
                missing = list(set(pieces))
            known.update(zip(missing, (ids.tobytes() for ids in self._library(missing)), strict=True))
        found = [known[piece] for piece in pieces]
        for piece in missing:
            if len(piece) > _PIECE_CHARACTERS:
                del known[piece]
        return [len(ids) // 4 for ids in found], np.frombuffer(b"".join(found), dtype=np.uint32)
