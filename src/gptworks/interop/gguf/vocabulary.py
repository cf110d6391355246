"""Convert a tokenizer to llama.cpp's form (tokens, merges, pattern name), or refuse it if token ids would differ."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from gptworks.errors import UserError
from gptworks.infer.defaults import stated_sampling
from gptworks.special_tokens import THEIR_SAMPLING, Stated, special_tokens

# PATTERNS: splitting patterns of a byte-level BPE in `tokenizer.json` → llama.cpp's names for them, without and with
# `ignore_merges`; None: no name. With `ignore_merges`, a word that is a token is kept whole.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[tuple[str, ...], tuple[str | None, str | None]] = {
    (_GPT2,): ("gpt-2", None),
    (r"\p{N}", _GPT2): ("smollm", None),
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",): ("smaug-bpe", "llama-bpe"),
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",): ("qwen2", None),
}
_BPE_WITHOUT = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
"""Settings of BPE that llama.cpp does not support."""

_CHARACTERS = r"[\s\S]"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that represents a space in tokens of llama.cpp's `t5` tokenizer."""

_RUNS_OF_UNKNOWN = "llama.cpp reads consecutive unknown characters as one <unk>, the run as one each"
_UNNORMALIZED = "llama.cpp does not normalize text to Unicode's NFC form, and the run does"

_THEIR_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""llama.cpp's names for sampling settings, where they differ from ours."""

_KNOWN_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)
"""Tokens at which every version of llama.cpp since 2024 ends a text because of their names."""

_FURTHER_ENDS = frozenset(
    {"</s>", "<eos>", "<|end_of_text|>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>",
     "<|tool_response>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
     "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
     "<reponame>", "<|file_sep|>"}
)  # fmt: skip
"""Tokens, including file separators, at which newer versions of llama.cpp also end a text (src/llama-vocab.cpp)."""

_END_IS_NONE = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"},
                {"<|return|>", "<|calls|>"})  # fmt: skip
"""If both tokens of a pair are in the vocabulary, newer versions of llama.cpp do not end a text at <|end|>."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a GGUF file."""

    model: str
    """llama.cpp's kind of tokenizer: gpt2 (byte-level BPE), or t5 (unigrams), used for single-character tokens."""
    pattern: str | None
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int]
    """Ids of the special tokens, by name: bos, eos, unk, pad, eot and eom (eot and eom also end a text). A name without
    a token is missing."""
    begins_with_bos: bool
    ends_with_eos: bool
    notes: tuple[str, ...]
    """Remaining differences from the run: texts with other ids, and tokens that end a text in only one program."""


def read_vocabulary(tokenizer: Tokenizer, n_rows: int, turn_end: int | None = None) -> Vocabulary:
    """Convert a run's tokenizer to llama.cpp's form, filled with unused tokens up to the embedding's `n_rows` rows.
    `turn_end`: the id of the token that the chat template puts after an answer. Raises a UserError if no tokenizer of
    llama.cpp produces the same ids, or the run's tokenizer has no token that ends a text."""
    tree = json.loads(tokenizer.to_str())
    characters = _is_by_character(tree)
    pattern = None if characters else _bpe_pattern(tree)
    special = special_tokens(tokenizer)
    if special.end is None:
        raise _refusal("it has no token that ends a text, and llama.cpp would choose another")
    added = {token["id"]: token["special"] for token in tree["added_tokens"]}
    names = {index: name for name, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    if characters and _SPACE in names.values():
        raise _refusal(f"it has a token for the character {_SPACE} (U+2581), which llama.cpp reads as a space")
    tokens, types = [], []
    for index in range(n_rows):
        name = names.get(index, f"[unused {index}]")
        tokens.append(_SPACE if characters and name == " " else name)
        if index not in names:
            types.append(TokenType.UNUSED)
        elif index == special.unk:
            types.append(TokenType.UNKNOWN)
        elif index in added:
            types.append(TokenType.CONTROL if added[index] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
    if len(special.before) > 1 or len(special.after) > 1 or (special.after and special.after != (special.end,)):
        raise _refusal(f"it adds {list(special.before)} before and {list(special.after)} after a text")
    bos = special.before[0] if special.before else special.eos if special.separator else special.bos
    ids = {"bos": bos, "eos": special.end, "unk": special.unk, "pad": special.pad, "eot": turn_end}
    others = [end for end in special.ends if end not in (special.end, turn_end)]
    known = _KNOWN_ENDS - ({"<|end|>"} if any(set(tokens) >= pair for pair in _END_IS_NONE) else set())
    others.sort(key=lambda end: names.get(end) in known)
    for slot in ("eot", "eom"):
        if ids.get(slot) is None and others:
            ids[slot] = others.pop(0)
    unsaid = [names.get(end, str(end)) for end in others if names.get(end) not in known]
    by_name = [name for name in tokens if name in known | _FURTHER_ENDS]
    stated = {*special.ends, *(ids.get(slot) for slot in ("eos", "eot", "eom", "pad"))}
    too = [name for name in by_name if tokenizer.token_to_id(name) not in stated]
    notes = [_RUNS_OF_UNKNOWN] if characters else [_UNNORMALIZED] if tree["normalizer"] else []
    if unsaid:
        notes.append(f"llama.cpp does not end a text at {', '.join(unsaid)}: its files name at most three end tokens")
    if too:
        notes.append(f"llama.cpp also ends a text at {', '.join(too)} because of the name; the run does not")
    return Vocabulary(
        model="t5" if characters else "gpt2",
        pattern=pattern,
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in tree["model"].get("merges", ())),
        special_ids={name: index for name, index in ids.items() if index is not None},
        begins_with_bos=bool(special.before),
        ends_with_eos=bool(special.after),
        notes=tuple(notes),
    )


def _is_by_character(tree: Mapping[str, Any]) -> bool:
    split = tree["pre_tokenizer"] or {}
    return (
        tree["model"]["type"] == "WordLevel"
        and tree["normalizer"] is None
        and (split.get("pattern"), split.get("behavior")) == ({"Regex": _CHARACTERS}, "Isolated")
    )


def _bpe_pattern(tree: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the splitting pattern of a byte-level BPE. Raises a UserError if the tokenizer is not
    a byte-level BPE, or llama.cpp lacks its pattern or one of its settings."""
    model = tree["model"]
    if model["type"] != "BPE":
        raise _refusal(
            "it reads words (tokenizer.type=word)" if model["type"] == "WordLevel" else f"it is a {model['type']}"
        )
    for setting in _BPE_WITHOUT:
        if model.get(setting):
            raise _refusal(f"its BPE has {setting}={model[setting]!r}")
    if tree["normalizer"] not in (None, {"type": "NFC"}):
        raise _refusal(f"it normalizes text ({tree['normalizer']['type']})")
    pre = tree["pre_tokenizer"] or {"type": "None"}
    steps = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    patterns = tuple(found for step in steps if (found := _pattern(step)) is not None)
    name = PATTERNS.get(patterns, (None, None))[bool(model.get("ignore_merges"))]
    if name is None or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        known = ", ".join(filter(None, chain(*PATTERNS.values())))
        raise _refusal(
            f"its pattern is not one of {known}; tokenizer.pattern=llama3 or gpt2 and tokenizer.type=gpt2 are"
        )
    return name


def _pattern(step: Mapping[str, Any]) -> str | None:
    """Return a pre-tokenizer step's splitting pattern: None if the step does not split, "" if its kind is unknown."""
    if step["type"] == "ByteLevel":
        return _GPT2 if step["use_regex"] else None
    if step["type"] == "Digits" and step["individual_digits"]:
        return r"\p{N}"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", ""))
    return ""


def _refusal(reason: str) -> UserError:
    return UserError(
        f"llama.cpp has no tokenizer like this run's: {reason}. Give --no-tokenizer (tokenizer=False in Python) for a "
        f"file without one, which works only with token ids, or use --format hf."
    )


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary | None) -> None:
    """Write the tokenizer, and whether a text begins with bos and ends with eos. For None, write that the file has no
    tokenizer."""
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
        return
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pattern is not None:
        writer.add_tokenizer_pre(vocabulary.pattern)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, index in vocabulary.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(vocabulary.begins_with_bos)
    writer.add_add_eos_token(vocabulary.ends_with_eos)
    writer.add_add_space_prefix(False)


def add_sampling(writer: GGUFWriter, stated: Stated | None) -> None:
    """Write the model's stated sampling settings for which llama.cpp has a key; llama.cpp uses them as defaults."""
    sampling, _ = stated_sampling({} if stated is None else stated.generation)
    for name in (name for name in THEIR_SAMPLING if name in sampling):
        add = writer.add_int32 if name == "top_k" else writer.add_float32
        add(f"general.sampling.{_THEIR_NAMES.get(name, name)}", sampling[name])
