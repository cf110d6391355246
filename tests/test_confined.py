"""Work on untrusted input: the limits of tokenizers, and patterns written by others."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gptworks.confined.tokenizers import MAX_NORMALIZED_BYTES, slow_pattern
from gptworks.errors import UserError
from gptworks.interop.peft_settings import LoraSettings
from gptworks.tokenizer import BPE_PATTERNS, encode_text, load_tokenizer, save_tokenizer

# ----------------------------------------------------------------------------------------------------- tokenizers


def _tokenizer(**parts: Any) -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def _saved(tokenizer: Tokenizer, folder: Path) -> Path:
    save_tokenizer(tokenizer, folder)
    return folder


_THOUSAND = normalizers.Replace("a", "a" * 1000)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.Sequence([_THOUSAND] * 3)}, "normalizer can make 1e\\+09 bytes of one"),
        ({"normalizer": normalizers.Sequence([normalizers.Sequence([_THOUSAND] * 2)])}, "1e\\+06"),
        ({"normalizer": normalizers.Sequence([normalizers.Replace(Regex("a*"), "ab" * 200)] * 2)}, "normalizer"),
        ({"normalizer": normalizers.Sequence([normalizers.Prepend("a" * 9000)] * 2)}, "normalizer"),
        ({"normalizer": normalizers.Sequence([normalizers.NFKD()] * 9)}, "normalizer"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 9)}, "pre_tokenizer can make"),
        ({"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace()] * 99)}, "has 100 components"),
        ({"decoder": decoders.Sequence([decoders.Replace("a", "a" * 1000)] * 3)}, "decoder can make"),
        ({"pre_tokenizer": pre_tokenizers.Split(Regex("(a+)+b"), "isolated")}, "pre_tokenizer has the pattern"),
        ({"normalizer": normalizers.Replace(Regex("(?:a|a)*c"), "")}, "normalizer has the pattern"),
        ({"model": models.BPE({"a": 0}, [], continuing_subword_prefix="#" * 1000)}, "continuing_subword_prefix"),
        ({"model": models.WordPiece({"a": 0}, max_input_chars_per_word=10**9)}, "max_input_chars_per_word"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_lengthens_text_or_works_without_bound_is_refused(
    parts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        load_tokenizer(_saved(_tokenizer(**parts), tmp_path))


def test_a_text_is_bounded_after_normalization(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(_saved(_tokenizer(normalizer=_THOUSAND), tmp_path))
    assert encode_text(tokenizer, "banana") == [2]
    with pytest.raises(UserError, match="normalizer makes more than 16,777,216 bytes of a text of 20,000 characters"):
        encode_text(tokenizer, "a" * 20_000)
    assert len(encode_text(tokenizer, "b" * 20_000)) == 1, "what it does not lengthen is read"


def test_long_texts_are_read_by_tokenizers_that_lengthen_as_released_ones_do(tmp_path: Path) -> None:
    """Like SentencePiece's, which turns a space into a character of three bytes."""
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = load_tokenizer(_saved(_tokenizer(normalizer=normalizer), tmp_path))
    assert encode_text(tokenizer, " " * (MAX_NORMALIZED_BYTES // 50)) == [2]


_RELEASED_PATTERNS = [
    *BPE_PATTERNS.values(),
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}",  # GPT-4o
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",  # Qwen
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    r"[\p{Han}]+|[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?", r"[]x]+|[^]()*]+|\p{L}++",
]  # fmt: skip


@pytest.mark.parametrize("pattern", _RELEASED_PATTERNS)
def test_patterns_of_released_tokenizers_are_read(pattern: str) -> None:
    assert slow_pattern(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b", "(?:a|a)*b", "(?:a|ab?)+c", "((a*)b?)*", "(x+x+)+y", "(?:a?){30}a{30}", "(?<n>a*)*", "(?:[a-z]+)*!",
        "(?i:(?:a+))*b", "((?:a{1,9})){5,}", "(a?b?c?)+", r"(?:\p{L}+ ?)+$", "(?:[a\\]]+)*b", "a" * 20_000,
        r"\s*\s*\s*[^\s]\d", r"(?:a|b.*c.*)d.*", "a{1,99}a{1,99}a{1,99}b", "a{2,}a{2,}a{2,}b",
    ],
)  # fmt: skip
def test_patterns_that_take_forever_are_refused(pattern: str) -> None:
    assert slow_pattern(pattern) is not None


# -------------------------------------------------------------------------------------------- modules' patterns


@pytest.mark.parametrize("pattern", [r".*.*.*.*.*.*.*.*!"])
def test_a_slow_pattern_of_an_adapters_modules_is_named(pattern: str) -> None:
    module = "base_model.model.model.layers.31.self_attention_of_a_model.q_proj"
    for settings in ({"target_modules": pattern}, {"exclude_modules": pattern}):
        read = LoraSettings(peft_type="LORA", r=1, lora_alpha=1.0, **settings)
        with pytest.raises(UserError, match=r"cannot be searched in 'base_model.*0.1 seconds"):
            read.targets(module)
    with pytest.raises(UserError, match=r"0.1 seconds"):
        LoraSettings(peft_type="LORA", r=1, lora_alpha=1.0, rank_pattern={pattern: 2}).rank_of(module)


def test_a_pattern_of_layers_has_no_group_of_its_own() -> None:
    settings = LoraSettings(
        peft_type="LORA", r=1, lora_alpha=1.0, target_modules=["q_proj"], layers_to_transform=1,
        layers_pattern="(layers)",
    )  # fmt: skip
    with pytest.raises(UserError, match="has a group"):
        settings.targets("model.layers.1.q_proj")
