"""Convert a tokenizer to the form that the page reads (js/tokenizer.js), and its regular expressions from Oniguruma's
syntax to JavaScript's, with the same matches."""

import json
import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import Tokenizer

from gptworks.data.spelling import Speller
from gptworks.errors import UserError
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import BPE_PATTERNS, vocabulary_size

_UNUSED = {
    "dropout": (None, 0.0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, ""),
    "alpha": (None,), "nbest_size": (None,),
}  # fmt: skip
"""Settings of tokenizer models that the page does not support → their accepted values, which have no effect."""
_KEEPS = ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_Step = dict[str, Any]


def words_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer in the form that the page reads. Raises a UserError if the tokenizer has a part that the page
    does not support; the error names the part."""
    tree = json.loads(tokenizer.to_str())
    model, kind = tree["model"], tree["model"]["type"]
    if kind not in ("BPE", "Unigram", "WordLevel"):
        raise _refused(f"model {kind}")
    for name, values in _UNUSED.items():
        if model.get(name, values[0]) not in values:
            raise _refused(f"{name}={model[name]}")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = [tokenizer.id_to_token(index) or "" for index in range(vocabulary_size(tokenizer))]
    speller = Speller(tokenizer)
    steps, is_bytes = _steps(tree["pre_tokenizer"])
    special = special_tokens(tokenizer)
    is_unigram = kind == "Unigram"
    known = {i: name for i, (name, _) in enumerate(model["vocab"])} if is_unigram else _by_id(model["vocab"])
    return {
        "kind": kind, "names": names,
        "spellings": {i: spelled for i, name in enumerate(names) if (spelled := speller.spell(i)[0]) != name},
        "known": [*known], "inner": {i: name for i, name in known.items() if name != names[i]},
        "scores": [score for _, score in model["vocab"]] if is_unigram else [],
        "merges": [vocabulary[part] for pair in model.get("merges", ()) for part in _pair(pair)],
        "ignore_merges": bool(model.get("ignore_merges")),
        "fuse_unknown": bool(model.get("fuse_unk")), "byte_fallback": bool(model.get("byte_fallback")),
        "unknown": model["unk_id"] if is_unigram else vocabulary.get(model.get("unk_token") or ""),
        "normalizers": [_normalizer(step) for step in _parts(tree["normalizer"], "normalizers")],
        "steps": steps, "is_bytes": is_bytes,
        "decoder": [_decoder(step) for step in _parts(tree["decoder"], "decoders")] or [{"type": "Spaced"}],
        "added": _added(tree["added_tokens"], tokenizer),
        "before": special.before, "after": special.after, "start": special.start, "ends": special.ends,
        "document": special.document[0],
    }  # fmt: skip


def _by_id(vocabulary: dict[str, int]) -> dict[int, str]:
    return {index: name for name, index in sorted(vocabulary.items(), key=itemgetter(1))}


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _parts(tree: _Step | None, key: str) -> list[_Step]:
    if tree is None:
        return []
    return [step for one in tree[key] for step in _parts(one, key)] if tree["type"] == "Sequence" else [tree]


def _normalizer(step: _Step) -> _Step:
    kind = step["type"]
    if kind in ("NFC", "Lowercase"):
        return {"type": kind}
    if kind == "Prepend":
        return {"type": kind, "to": step["prepend"]}
    if kind == "Replace":
        return _replacing(step)
    raise _refused(f"normalizer {kind}")


def _replacing(step: _Step) -> _Step:
    if not (found := step["pattern"].get("String")):
        raise _refused(f"Replace of {step['pattern']}")
    return {"type": "Replace", "from": found, "to": step["content"]}


def _steps(tree: _Step | None) -> tuple[list[_Step], bool]:
    """Return the steps that divide a text into pieces, and whether the pieces are then spelled in bytes."""
    steps: list[_Step] = []
    is_bytes = False
    for step in _parts(tree, "pretokenizers"):
        kind = step["type"]
        if is_bytes:
            raise _refused(f"pre_tokenizer {kind} behind ByteLevel")
        if kind == "ByteLevel":
            is_bytes = True
            if step["add_prefix_space"]:
                steps.append({"type": "Prefix", "to": " ", "always": True})
            if step.get("use_regex", True):
                steps.append(_split(BPE_PATTERNS["gpt2"]))
        elif kind == "Metaspace":
            steps += _metaspace(step, behind=bool(steps))
        elif kind == "Digits":
            steps.append(_split(r"\p{N}", "Isolated" if step["individual_digits"] else "Contiguous"))
        elif kind == "Split" and step["behavior"] in _KEEPS and any(step["pattern"].values()):
            pattern = step["pattern"].get("Regex") or re.escape(step["pattern"]["String"])
            steps.append(_split(pattern, step["behavior"], step["invert"]))
        else:
            raise _refused(f"pre_tokenizer {kind}")
    return steps, is_bytes


def _split(pattern: str, keeps: str = "Isolated", inverted: bool = False) -> _Step:
    return {"type": "Split", "pattern": as_javascript(pattern), "keeps": keeps, "inverted": inverted}


def _metaspace(step: _Step, behind: bool) -> Iterator[_Step]:
    mark, scheme = step["replacement"], step["prepend_scheme"]
    if behind and scheme == "first":
        raise _refused("Metaspace with prepend_scheme first behind another pre_tokenizer")
    yield {"type": "Replace", "from": " ", "to": mark}
    if scheme != "never":
        yield {"type": "Prefix", "to": mark, "always": scheme == "always"}
    if step["split"]:
        yield _split(re.escape(mark), "MergedWithNext")


def _decoder(step: _Step) -> _Step:
    kind = step["type"]
    if kind in ("ByteLevel", "ByteFallback", "Fuse"):
        return {"type": kind}
    if kind == "Strip":
        return {name: step[name] for name in ("type", "content", "start", "stop")}
    if kind == "Replace":
        return _replacing(step)
    if kind == "Metaspace":
        return {"type": kind, "replacement": step["replacement"], "prefixed": step["prepend_scheme"] != "never"}
    raise _refused(f"decoder {kind}")


def _added(tokens: Sequence[_Step], tokenizer: Tokenizer) -> list[_Step]:
    """Return the added tokens for the page. `matched` is the text to find, normalized for a token with `normalized`."""
    made: dict[tuple[bool, str], _Step] = {}
    for token in sorted(tokens, key=lambda token: not token["special"]):
        name, normalized = token["content"], token["normalized"]
        matched = tokenizer.normalizer.normalize_str(name) if normalized and tokenizer.normalizer else name
        if not matched:
            raise _refused(f"token {name!r}, of which the normalizer leaves nothing")
        flags = {flag: token[flag] for flag in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        made.setdefault((normalized, matched), {"id": token["id"], "name": name, "matched": matched, **flags})
    return list(made.values())


def _refused(what: str) -> UserError:
    return UserError(f"--format html: the page has no tokenizer with {what}. Export the run with --format hf or gguf.")


# ------------------------------------------------------------------------------------------- regular expressions

_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WORD = r"\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\xb2\xb3\xb9\xbc-\xbe"
_SETS = {"s": _SPACE, "w": _WORD, "d": r"\p{Nd}"}
_EDGE = f"(?:(?<=[{_WORD}])(?![{_WORD}])|(?<![{_WORD}])(?=[{_WORD}]))"
_FOLDED = {"s": "ſ", "k": "\u212a"}
"""ASCII letter → the character outside ASCII that matches the letter if case is ignored."""
_PIECES = re.compile(
    r"\[\\s\\S\]|\\[pP]\{[\^A-Za-z_= ]+\}|\\x\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|"
    r"&&|\(\?[a-z]+:|\(\?[:=!]|\(\?<[=!]|\(\?|\{\d+(?:,\d*)?\}|[+*?}][+?]?|.",
    re.DOTALL,
)


def as_javascript(pattern: str) -> str:
    """Return the pattern in JavaScript's syntax, for a regular expression with flag u. Raises a UserError if the
    pattern has a construct that is not translated."""
    made: list[str] = []
    inside = 0  # number of open character classes
    folding: list[bool] = [False]  # whether case is ignored: outside groups, then in each open group
    for piece in _PIECES.findall(pattern):
        made.append(_translated(piece, inside > 0, folding[-1], pattern))
        if inside:
            inside += {"[": 1, "]": -1}.get(piece, 0)
            if inside > 1 or piece == "&&":
                raise _refused_pattern(piece, pattern)
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
        raise _refused_pattern(piece, pattern)
    if len(piece) == 2 and piece[0] in "+*?}" and piece[1] == "+":  # a possessive quantifier
        raise _refused_pattern(piece, pattern)
    if piece.startswith(r"\x{"):
        return rf"\u{{{piece[3:-1]}}}"
    if piece[0] == "\\" and len(piece) == 2:
        return _escape(piece, in_class, pattern)
    if in_class:
        return piece
    if piece in "^$":
        raise _refused_pattern(piece, pattern)
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
        raise _refused_pattern(piece, pattern)
    return letter


def _refused_pattern(piece: str, pattern: str) -> UserError:
    return UserError(
        f"--format html: the tokenizer's pattern {pattern[:200]!r} has {piece!r}, which the page does not read. Export "
        f"the run with --format hf or gguf."
    )
