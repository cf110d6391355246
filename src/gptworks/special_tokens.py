"""Special tokens, which begin, end and pad a text, replace unknown text, and end generation.

In a tokenizer trained by gptworks, well-known names identify the special tokens. A folder of transformers states its
special tokens in several files, with the precedence of transformers 5:

tokenizer.json          its post-processor adds tokens around a text; `add_bos_token` and `add_eos_token` of
                        tokenizer_config.json are ignored.
tokenizer_config.json   bos_token, eos_token and the other `ROLES`: a text, or a mapping with `content`; null: none.
special_tokens_map.json the same; it has precedence if tokenizer_config.json has no `added_tokens_decoder`.
generation_config.json  the ids that end generation (`eos_token_id`: one id or a list), begin generation, and pad.
config.json             the same ids, used without a generation_config.json; `eos_token_id` is also used if
                        generation_config.json states none.

A run's `tokenizer/` uses the same files, so that `read_stated` reads both kinds of folders.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gptworks.choices import SAMPLING_RULES
from gptworks.errors import UserError
from gptworks.json_files import read_json

SEPARATOR = "<|endoftext|>"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""transformers' names for the roles of special tokens, which chat templates may use as variables."""

TOKENIZER_CONFIG, TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION_CONFIG, MODEL_CONFIG = "generation_config.json", "config.json"
THEIR_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The sampling settings that transformers and llama.cpp read from a model's files."""
STATED_SAMPLING = tuple(SAMPLING_RULES)
"""The sampling settings that a generation_config.json may state."""

_BOS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")
_EOS = ("<eos>", "</s>", SEPARATOR, "<|end_of_text|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[EOS]")
_UNK = ("<unk>", "[UNK]", "<|unk|>")
_PAD = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")

_GPT2 = dict.fromkeys(("bos_token", "eos_token", "unk_token"), SEPARATOR)
_CLASS_DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": _GPT2 | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), SEPARATOR),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
}  # fmt: skip
"""Default special tokens of transformers' tokenizer classes, by role."""
_CLASS_OF_MODEL = {
    **dict.fromkeys(("gpt2", "gpt_neo", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
}
"""Tokenizer class that transformers uses for each model type if tokenizer_config.json names no class."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of a tokenizer's special tokens; None or empty where the tokenizer has no such token."""

    bos: int | None
    eos: int | None
    unk: int | None
    """Token for text that the tokenizer does not know; None if it has none, usually because it knows every text."""
    pad: int | None
    separator: bool
    """Whether `eos` separates documents, like GPT-2's `<|endoftext|>`. The tokenizer then has no other bos token. If a
    folder states the special tokens, `eos` is a separator only if the post-processor adds no tokens."""
    ends: tuple[int, ...]
    """Tokens that each end generation."""
    before: tuple[int, ...]
    """Tokens put before the text of a prompt."""
    after: tuple[int, ...]
    """Tokens put after the text of a prompt; usually empty."""
    start: tuple[int, ...]
    """Tokens used for an empty prompt, which begin a document; empty if the tokenizer has none."""
    document: tuple[tuple[int, ...], tuple[int, ...]]
    """Tokens put before and after each document."""
    names: Mapping[str, str]
    """Texts of the tokens by role, as chat templates and transformers name the roles, such as bos_token."""

    @property
    def end(self) -> int | None:
        """Token that ends a document and generation: `eos`, or the first of `ends` if they lack `eos`."""
        return self.eos if self.eos in self.ends or not self.ends else self.ends[0]


@dataclass(frozen=True)
class Stated:
    """Special tokens and sampling settings, as the files of a tokenizer folder state them. If the files state only
    sampling settings, `by_name` finds the tokens."""

    names: Mapping[str, str]
    """Texts of the tokens by role; a missing role has no token."""
    ends: tuple[int, ...]
    """Ids of the tokens that end generation."""
    bos: int | None = None
    """Id of the token that begins generation without a prompt; often the tokenizer's bos token."""
    pad: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Contents of generation_config.json except token ids: sampling settings, which an export writes again."""
    others: tuple[str, ...] = ()
    """Further special tokens, which tokenizer.json may not mark as special."""
    notes: tuple[str, ...] = ()
    """Messages about contradictions in the files, and about contents that are ignored."""

    @property
    def has_tokens(self) -> bool:
        """Whether the files state special tokens, and not only sampling settings."""
        return bool(self.names or self.ends or self.others) or (self.bos, self.pad) != (None, None)

    def generation_config(self) -> dict[str, Any]:
        """Return the contents of generation_config.json, with the token ids that the files state."""
        if not self.has_tokens:
            return dict(self.generation)
        ends: Any = list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)
        ids = {"bos_token_id": self.bos, "eos_token_id": ends, "pad_token_id": self.pad}
        return {"_from_model_config": False, **self.generation, **{k: v for k, v in ids.items() if v is not None}}


# ------------------------------------------------------------------------------------------------- of a tokenizer


def by_name(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens with well-known names. A name that is only in the plain vocabulary does not count. A
    separator begins a prompt only if the post-processor puts it there (`tokenizer.begin_prompts`)."""
    ids = {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def first(names: tuple[str, ...]) -> int | None:
        return next((ids[name] for name in names if name in ids), None)

    bos, eos, unk, pad = first(_BOS), first(_EOS), first(_UNK), first(_PAD)
    separator = bos is None and eos is not None and tokenizer.id_to_token(eos) == SEPARATOR
    begin, end = _some(eos if separator else bos), _some(eos)
    found = {"bos_token": begin, "eos_token": end, "unk_token": _some(unk), "pad_token": _some(pad)}
    names = {role: tokenizer.id_to_token(token) or "" for role, tokens in found.items() for token in tokens}
    before = post_processed(tokenizer)[0] if separator else begin
    document = begin, () if separator else end
    return SpecialTokens(bos, eos, unk, pad, separator, end, before, (), begin, document, names)


def as_stated(tokenizer: Tokenizer, stated: Stated) -> SpecialTokens:
    """Return the special tokens that a folder states; the post-processor decides which of them surround a text."""
    ids = {role: tokenizer.token_to_id(name) for role, name in stated.names.items()}
    bos, eos = ids.get("bos_token", stated.bos), ids.get("eos_token", next(iter(stated.ends), None))
    before, after = post_processed(tokenizer)
    one_token = bos == eos or (bos is None and eos is not None and tokenizer.id_to_token(eos) == SEPARATOR)
    separator = eos is not None and one_token and not before and not after
    start = before or _some(eos if separator else bos)
    document = (before or (_some(eos) if separator else ()), after or (() if separator else _some(eos)))
    pad = ids.get("pad_token", stated.pad)
    unk = tokenizer.token_to_id(name) if (name := getattr(tokenizer.model, "unk_token", None)) else None
    return SpecialTokens(bos, eos, unk, pad, separator, stated.ends, before, after, start, document, stated.names)


def post_processed(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer's post-processor adds before and after a text. Raises a UserError if the
    post-processor does anything else."""
    if tokenizer.post_processor is None:
        return (), ()
    return _around(json.loads(tokenizer.post_processor.__getstate__()))


def _around(step: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that one step of a post-processor in tokenizer.json adds before and after a text."""
    kind = step["type"]
    if kind == "ByteLevel":  # changes only offsets
        return (), ()
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (step["cls"][1],), (step["sep"][1],)
    if kind == "Sequence":
        parts = [found for one in step["processors"] if (found := _around(one)) != ((), ())]
        if len(parts) < 2:
            return parts[0] if parts else ((), ())
        kind = f"{kind} with {len(parts)} steps that add tokens"
    if kind == "TemplateProcessing":
        names = [piece.get("SpecialToken", {}).get("id") for piece in step["single"]]
        if names.count(None) == 1:
            sides = names[: names.index(None)], names[names.index(None) + 1 :]
            before, after = ([i for name in side for i in step["special_tokens"][name]["ids"]] for side in sides)
            return tuple(before), tuple(after)
        kind = f"{kind} with `single` of {names.count(None)} texts"
    raise UserError(f"tokenizer.json has the post_processor {kind}: gptworks puts tokens before and after one text.")


def _some(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


# --------------------------------------------------------------------------------------------------- of a folder


def read_stated(folder: Path, tokenizer: Tokenizer) -> Stated | None:
    """Read the special tokens and sampling settings that a folder states; None if it states neither. A folder without
    `stating_files` states only sampling settings. Raises a UserError if a file is not readable JSON, a value has a
    wrong type, or the post-processor does more than add tokens before and after a text."""
    if not stating_files(folder):
        sampling = _optional(folder / GENERATION_CONFIG)
        return Stated({}, (), generation=sampling) if sampling else None
    config, by_map = _optional(folder / TOKENIZER_CONFIG), _optional(folder / TOKENS_MAP)
    generation, model = _optional(folder / GENERATION_CONFIG), _optional(folder / MODEL_CONFIG)
    names, notes = _names(config, by_map, str(model.get("model_type")), tokenizer)
    source, name = (generation, GENERATION_CONFIG) if generation else (model, MODEL_CONFIG)
    most = model.get("vocab_size")
    limit = most if isinstance(most, int) and not isinstance(most, bool) else None
    found = {key: _ids(source, name, key, limit, notes) for key in ("eos_token_id", "bos_token_id", "pad_token_id")}
    ends = found["eos_token_id"]
    if not ends and generation and (ends := _ids(model, MODEL_CONFIG, "eos_token_id", limit, notes)):
        notes.append(f"{GENERATION_CONFIG} has no `eos_token_id`: generation ends at that of {MODEL_CONFIG}")
    eos = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    if not ends and eos is not None:
        ends = (eos,)
    elif eos is not None and eos not in ends:
        shown = " or ".join(f"`{tokenizer.id_to_token(end)}`" for end in ends)
        notes.append(f"generation ends at {shown} ({name}), and the tokenizer's eos_token is `{names['eos_token']}`")
    notes += _adding(config, tokenizer, names)
    others = _others(config, {} if "added_tokens_decoder" in config else by_map, tokenizer, notes)
    kept = {key: value for key, value in generation.items() if key not in found}
    if not names and not any(found.values()) and not ends:
        return Stated({}, (), generation=kept, notes=tuple(notes)) if kept or notes else None
    bos, pad = (next(iter(found[key]), None) for key in ("bos_token_id", "pad_token_id"))
    return Stated(names, ends, bos, pad, kept, others, tuple(notes))


def stating_files(folder: Path) -> list[Path]:
    """Return the files, apart from tokenizer.json, that state a folder's special tokens. The list is empty without such
    files, or if gptworks wrote them for its own tokenizer: `by_name` then finds the tokens. Raises a UserError if
    tokenizer_config.json or generation_config.json is not readable JSON."""
    others = [file for name in (TOKENS_MAP, GENERATION_CONFIG, MODEL_CONFIG) if (file := folder / name).exists()]
    if others == [folder / GENERATION_CONFIG] and _optional(others[0]).keys() <= {"do_sample", *STATED_SAMPLING}:
        others = []
    config = folder / TOKENIZER_CONFIG
    return [] if not others and _is_ours(_optional(config)) else [*([config] if config.exists() else []), *others]


def our_config(names: Mapping[str, str]) -> dict[str, Any]:
    """Return the contents of a run's tokenizer_config.json: transformers' class that uses tokenizer.json unchanged, and
    these special tokens by role."""
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _is_ours(config: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer_config.json is empty, or equals `our_config` apart from special tokens."""
    if not config:
        return True
    return {key: value for key, value in config.items() if key not in ROLES} == our_config({})


def _names(
    config: Mapping[str, Any], by_map: Mapping[str, Any], model_type: str, tokenizer: Tokenizer
) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens' texts by role, and notes on tokens that the tokenizer lacks."""
    wins = {} if "added_tokens_decoder" in config else by_map
    kind = str(config.get("tokenizer_class") or _CLASS_OF_MODEL.get(model_type)).removesuffix("Fast")
    defaults = _CLASS_DEFAULTS.get(kind, {})
    names: dict[str, str] = {}
    notes: list[str] = []
    for role in ROLES:
        file, given = next(
            ((file, found[role]) for file, found in ((TOKENS_MAP, wins), (TOKENIZER_CONFIG, config)) if role in found),
            ("", None),
        )
        name = given.get("content") if isinstance(given, dict) else given
        if given is not None and not isinstance(name, str):
            raise UserError(f"{file} has `{role}`={str(given)[:100]}: a token's text, or a mapping with `content`, is "
                            f"expected.")  # fmt: skip
        name = name if file else defaults.get(role)
        if name and tokenizer.token_to_id(name) is not None:
            names[role] = name
        elif name and file:
            notes.append(f"`{role}` of {file}, `{name[:100]}`, is not a token of tokenizer.json and is left out")
    return names, notes


def _ids(source: Mapping[str, Any], file: str, key: str, n_rows: int | None, notes: list[str]) -> tuple[int, ...]:
    """Return the token ids of a setting: none, one, or a list. Leave out, and note, ids beyond the embedding's rows."""
    given = source.get(key)
    values = given if isinstance(given, list) else [] if given is None else [given]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{file} has `{key}`={str(given)[:100]}: a token id, or a list of them, is expected.")
    there = [value for value in dict.fromkeys(values) if value >= 0 and (n_rows is None or value < n_rows)]
    gone = [value for value in values if value not in there]
    if any(value != -1 for value in gone):
        notes.append(f"{file} has `{key}`={str(given)[:100]}, and the model has ids from 0 to {(n_rows or 0) - 1}: "
                     f"{gone[0]} is left out")  # fmt: skip
    return tuple(there)


def _others(
    config: Mapping[str, Any], by_map: Mapping[str, Any], tokenizer: Tokenizer, notes: list[str]
) -> tuple[str, ...]:
    """Return the special tokens without a role; add notes on tokens that tokenizer.json lacks or gives another id."""
    listed: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        for given in (config.get(key), by_map.get(key)):
            listed += given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    named = [token.get("content") if isinstance(token, dict) else token for token in listed]
    texts = [name for name in dict.fromkeys(filter(None, named)) if isinstance(name, str)]
    decoder = config.get("added_tokens_decoder")
    if decoder is not None and not isinstance(decoder, dict):
        raise UserError(f"{TOKENIZER_CONFIG} has `added_tokens_decoder` of a wrong type: id → token is expected.")
    ids = {token.get("content"): index for index, token in (decoder or {}).items() if isinstance(token, dict)}
    for name in dict.fromkeys([*texts, *(name for name in ids if isinstance(name, str))]):
        there = tokenizer.token_to_id(name)
        if there is None or (name in ids and ids[name] != str(there)):
            has = "does not have it" if there is None else f"has it as {there}"
            notes.append(f"{TOKENIZER_CONFIG} names the token `{name[:100]}`, and tokenizer.json {has}, which counts")
    return tuple(name for name in texts if tokenizer.token_to_id(name) is not None)


def _adding(config: Mapping[str, Any], tokenizer: Tokenizer, names: Mapping[str, str]) -> list[str]:
    """Return notes on `add_bos_token` and `add_eos_token` if they contradict the post-processor."""
    notes = []
    before, after = post_processed(tokenizer)
    for flag, role, found in (("add_bos_token", "bos_token", before), ("add_eos_token", "eos_token", after)):
        given = config.get(flag)
        if given is not None and not isinstance(given, bool):
            raise UserError(f"{TOKENIZER_CONFIG} has `{flag}`={str(given)[:100]}: true or false is expected.")
        if given is not None and given != (role in names and tokenizer.token_to_id(names[role]) in found):
            notes.append(f"{TOKENIZER_CONFIG} has `{flag}`={str(given).lower()}, and the post-processor of "
                         f"tokenizer.json does otherwise: it counts, as in transformers 5")  # fmt: skip
    return notes


# ------------------------------------------------------------------------------------------------- with a tokenizer


def attach(tokenizer: Tokenizer, stated: Stated | None) -> Tokenizer:
    """Give the tokenizer the special tokens that a folder states (None: those that `by_name` finds), and return it."""
    vars(tokenizer).pop(_KEY, None)
    if stated is not None:
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        new = [name for name in (*stated.names.values(), *stated.others) if name not in special]
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in dict.fromkeys(new)])
        vars(tokenizer)[_KEY] = stated, as_stated(tokenizer, stated) if stated.has_tokens else by_name(tokenizer)
    return tokenizer


def stated_of(tokenizer: Tokenizer) -> Stated | None:
    """Return the special tokens and sampling settings that `attach` gave the tokenizer; None if it gave none."""
    found = vars(tokenizer).get(_KEY)
    return found and found[0]


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return a tokenizer's special tokens: those that its folder states, or those with well-known names."""
    found = vars(tokenizer).get(_KEY)
    return by_name(tokenizer) if found is None else found[1]


_KEY = "gptworks_special_tokens"
