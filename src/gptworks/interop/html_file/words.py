"""A tokenizer as the page reads it (js/tokenizer.js)."""

import json
from typing import Any

from tokenizers import Tokenizer

from gptworks.data.spelling import Speller
from gptworks.errors import UserError
from gptworks.interop.html_file.patterns import as_javascript
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import BPE_PATTERNS, vocabulary_size

_NORMALIZERS = ("Lowercase", "NFC")
_UNUSED = {
    "dropout": (None, 0.0), "continuing_subword_prefix": (None, ""), "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,), "byte_fallback": (False,),
}  # fmt: skip
"""Settings of BPE, and the values for which the page computes the same ids."""


def words_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a tokenizer for the page.

    Raises:
        UserError: it has a part that the page does not compute; the error names the part.
    """
    tree = json.loads(tokenizer.to_str())
    model, kind = tree["model"], tree["model"]["type"]
    if kind not in ("BPE", "WordLevel"):
        raise _refused(f"model {kind}")
    for name, values in _UNUSED.items():
        if model.get(name, values[0]) not in values:
            raise _refused(f"{name}={model[name]}")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    names = [""] * vocabulary_size(tokenizer)
    for name, index in vocabulary.items():
        names[index] = name
    speller = Speller(tokenizer)
    splits, is_bytes = _splits(tree["pre_tokenizer"])
    special = special_tokens(tokenizer)
    return {
        "names": names,
        "spellings": {i: spelled for i, name in enumerate(names) if (spelled := speller.spell(i)[0]) != name},
        "known": sorted(model["vocab"].values()),
        "merges": [vocabulary[part] for pair in model.get("merges", ()) for part in _pair(pair)],
        "ignore_merges": bool(model.get("ignore_merges")),
        "unknown": vocabulary.get(model.get("unk_token") or ""),
        "normalizers": _normalizers(tree["normalizer"]),
        "splits": splits, "is_bytes": is_bytes,
        "decoder": _decoder(tree["decoder"]),
        "added": [_added(token) for token in tree["added_tokens"]],
        "before": special.before, "after": special.after, "start": special.start, "ends": special.ends,
    }  # fmt: skip


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _steps(tree: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if tree is None:
        return []
    return [step for one in tree[key] for step in _steps(one, key)] if tree["type"] == "Sequence" else [tree]


def _normalizers(tree: dict[str, Any] | None) -> list[str]:
    kinds = [step["type"] for step in _steps(tree, "normalizers")]
    for kind in kinds:
        if kind not in _NORMALIZERS:
            raise _refused(f"normalizer {kind}")
    return kinds


def _splits(tree: dict[str, Any] | None) -> tuple[list[dict[str, Any]], bool]:
    """Return the patterns that split a text in turn, and whether the pieces are then spelled in bytes."""
    splits, is_bytes = [], False
    for step in _steps(tree, "pretokenizers"):
        if is_bytes:
            raise _refused(f"pre_tokenizer {step['type']} behind ByteLevel")
        if step["type"] == "ByteLevel":
            if step["add_prefix_space"]:
                raise _refused("ByteLevel with add_prefix_space")
            is_bytes = True
            if step.get("use_regex", True):
                splits.append({"pattern": as_javascript(BPE_PATTERNS["gpt2"]), "keeps": "all"})
        elif step["type"] == "Split":
            keeps = {("Isolated", False): "all", ("Removed", True): "matches"}.get((step["behavior"], step["invert"]))
            pattern = step["pattern"].get("Regex")
            if keeps is None or pattern is None:
                raise _refused(f"Split with behavior {step['behavior']}")
            splits.append({"pattern": as_javascript(pattern), "keeps": keeps})
        else:
            raise _refused(f"pre_tokenizer {step['type']}")
    return splits, is_bytes


def _decoder(tree: dict[str, Any] | None) -> str:
    kind = None if tree is None else tree["type"]
    if kind not in ("ByteLevel", "Fuse", None):
        raise _refused(f"decoder {kind}")
    return {"ByteLevel": "bytes", "Fuse": "fused", None: "spaced"}[kind]


def _added(token: dict[str, Any]) -> dict[str, Any]:
    for name in ("single_word", "lstrip", "rstrip"):
        if token[name]:
            raise _refused(f"token {token['content']!r} with {name}")
    if token["normalized"] and not token["special"]:
        raise _refused(f"token {token['content']!r}, which is normalized")
    return {"id": token["id"], "name": token["content"], "special": token["special"]}


def _refused(what: str) -> UserError:
    return UserError(f"--format html: the page has no tokenizer with {what}. Export the run with --format hf or gguf.")
