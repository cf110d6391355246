"""GGUF files: their contents, read back by the gguf package, and refused exports. With llama.cpp: the same logits.

Tests marked `llama_cpp` need the `peers` extra and are run by `make test-gguf`.
"""

import argparse
import ctypes
import decimal
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

import hf
import tiny
from gptworks.config import BPETokenizer, CharTokenizer, GPT2Tokenizer, ModelConfig, WordTokenizer
from gptworks.errors import RunError, UserError
from gptworks.interop.gguf import export_gguf
from gptworks.interop.gguf.architectures import ARCHITECTURES, choose_architecture
from gptworks.interop.gguf.vocabulary import PATTERNS, read_vocabulary
from gptworks.interop.tensors import interleaved
from gptworks.model.rotary import Rotary, rotate
from gptworks.presets import PRESETS, preset
from gptworks.special_tokens import Stated, attach, special_tokens
from gptworks.tokenizer import prompt_ids, tokenizer_from_json, train_tokenizer, vocabulary_size

VOCABULARY = hf.VOCABULARY
BASE: dict[str, Any] = {"vocab_size": VOCABULARY, "context_length": 256, "n_layers": 2, "d_model": 64, "n_heads": 4}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu"}
GPT2: dict[str, Any] = {"position": "learned", "mlp": "gelu_tanh", "attention_bias": True, "mlp_bias": True}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2, no biases, grouped queries, untied": (
        "gpt2",
        {"position": "learned", "mlp": "gelu_tanh", "n_kv_heads": 2, "norm_bias": False, "tie_embeddings": False},
    ),
    "gpt2, exact gelu": ("gpt2", {**GPT2, "mlp": "gelu"}),
    "starcoder2": ("starcoder2", {**GPT2, "position": "rope", "n_kv_heads": 2, "rope_theta": 5000.0}),
    "vaani": ("starcoder2", {"mlp": "gelu"}),
    "gptneox": (
        "gptneox",
        {**GPT2, "position": "rope", "parallel_residual": True, "rope_fraction": 0.25, "tie_embeddings": False},
    ),
    "gptneox, sequential, tied": ("gptneox", {"mlp": "gelu_tanh", "rope_fraction": 0.5}),
    "stablelm, tied": ("stablelm", {"mlp": "swiglu", "rope_theta": 500.0}),
    "stablelm": (
        "stablelm",
        {"mlp": "swiglu", "rope_fraction": 0.25, "attention_bias": "qkv", "tie_embeddings": False, "n_kv_heads": 2},
    ),
    "nemotron": ("nemotron", {"mlp": "relu2", "rope_fraction": 0.5, "n_kv_heads": 2}),
    "llama": ("llama", {**LLAMA, "n_kv_heads": 2, "tie_embeddings": False}),
    "llama, biases, wide heads": ("llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "d_head": 32}),
    "qwen2": ("llama", {**LLAMA, "attention_bias": "qkv", "rope_theta": 1e6}),
    "mixtral": ("llama", {**LLAMA, "n_experts": 4, "n_kv_heads": 2}),
    "shared expert": ("granitemoe", {**LLAMA, "n_experts": 4, "d_ff_shared": 96}),
    "no positions": ("granite", {**LLAMA, "position": "none"}),
    "scaled attention": ("granite", {**LLAMA, "attention_scale": 0.1}),
    "arcee": ("arcee", {"norm": "rmsnorm", "mlp": "relu2", "n_kv_heads": 2}),
    "qwen3": ("qwen3", {**LLAMA, "qk_norm": True, "d_head": 32, "n_kv_heads": 2}),
    "qwen3moe": ("qwen3moe", {**LLAMA, "qk_norm": True, "n_experts": 4}),
    "linear scaling": ("llama", {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4}}),
    "yarn": ("llama", {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4}}),
    "yarn, attention": (
        "llama",
        {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.5}},
    ),
}
"""Each architecture, with what can be different in it."""


def config_of(name: str) -> ModelConfig:
    return tiny.plain_model(**{**BASE, **MODELS[name][1]})


def export(folder: Path, config: ModelConfig, tokenizer: Tokenizer | None = None, **options: Any) -> tuple[Any, Any]:
    """Write a random model's run and its export; return our model and the parsed file."""
    model = hf.random_model(config)
    run = hf.make_run(folder / "run", model, tokenizer)
    written = export_gguf(run, folder / "model.gguf", **{"tokenizer": tokenizer is not None, **options})
    assert list(folder.glob(".*")) == [], "something half-written stays"
    assert written.bytes == written.file.stat().st_size
    return model, gguf.GGUFReader(written.file)


def values(tensor: Any) -> Tensor:
    """Return a tensor of the file in float32, with our order of dimensions."""
    shape = tuple(int(n) for n in reversed(tensor.shape))
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape).copy())


def field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


# ------------------------------------------------------------------------------------------ the model in the file


def test_every_architecture_is_tried() -> None:
    assert {name for name, _ in MODELS.values()} == {architecture.name for architecture in ARCHITECTURES}


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_the_architecture_has(name: str, tmp_path: Path) -> None:
    config, architecture = config_of(name), MODELS[name][0]
    _, reader = export(tmp_path, config, quantization="f32")
    assert field(reader, "general.architecture") == architecture
    ids = {name: model for model, name in gguf.MODEL_ARCH_NAMES.items()}
    patterns = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[ids[architecture]]]
    known = {pattern.format(bid=layer) for pattern in patterns for layer in range(config.n_layers)}
    assert {tensor.name.rpartition(".")[0] for tensor in reader.tensors} <= known
    assert all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in reader.tensors)


def test_settings(tmp_path: Path) -> None:
    config = tiny.plain_model(
        **BASE, **LLAMA, n_kv_heads=2, d_head=32, d_ff=160, norm_eps=1e-6, n_experts=4, n_experts_per_token=3,
        d_ff_shared=96, rope_theta=500.0, attention_scale=0.5,
        rope_scaling={"type": "yarn", "factor": 4, "original_context_length": 50, "attention_factor": 2.0},
    )  # fmt: skip
    _, reader = export(tmp_path, config)
    settings = {
        "vocab_size": VOCABULARY, "context_length": 256, "block_count": 2, "embedding_length": 64,
        "feed_forward_length": 160, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32,
        "expert_count": 4, "expert_used_count": 3, "expert_shared_feed_forward_length": 96,
        "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 50,
        "rope.freq_base": 500.0, "rope.scaling.factor": 4.0, "attention.scale": 0.5, "logit_scale": 1.0,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "rope.scaling.attn_factor": pytest.approx(2 / (1 + 0.1 * np.log(4))),
    }  # fmt: skip
    assert {name: field(reader, f"granitemoe.{name}") for name in settings} == settings
    assert field(reader, "general.name") == "run"
    assert field(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_F16


@pytest.mark.parametrize("parallel", [True, False])
def test_side_by_side_or_one_after_the_other(parallel: bool, tmp_path: Path) -> None:
    _, reader = export(
        tmp_path, tiny.plain_model(**BASE, rope_fraction=0.5, mlp="gelu_tanh", parallel_residual=parallel)
    )
    assert field(reader, "gptneox.use_parallel_residual") is parallel


def test_the_tensors_hold_the_weights(tmp_path: Path) -> None:
    config = tiny.plain_model(**BASE, **LLAMA, n_experts=4, n_kv_heads=2, tie_embeddings=False)
    model, reader = export(tmp_path, config, quantization="f32")
    theirs = {tensor.name: values(tensor) for tensor in reader.tensors}
    ours = model.state_dict()
    for name, same in {
        "token_embd.weight": "token_embedding.weight", "output.weight": "untied_head.weight",
        "output_norm.weight": "norm.weight", "blk.1.attn_norm.weight": "blocks.1.norm1.weight",
        "blk.1.ffn_norm.weight": "blocks.1.norm2.weight", "blk.1.attn_v.weight": "blocks.1.attention.value.weight",
        "blk.1.attn_output.weight": "blocks.1.attention.out.weight",
        "blk.1.ffn_gate_inp.weight": "blocks.1.mlp.router.weight",
    }.items():  # fmt: skip
        assert torch.equal(theirs[name], ours[same])
    for expert in range(4):
        for part in ("gate", "up", "down"):
            stacked = theirs[f"blk.1.ffn_{part}_exps.weight"]
            assert torch.equal(stacked[expert], ours[f"blocks.1.mlp.experts.{expert}.{part}.weight"])


def test_query_key_and_value_are_joined_and_absent_biases_are_zeros(tmp_path: Path) -> None:
    config = config_of("gpt2, no biases, grouped queries, untied")
    model, reader = export(tmp_path, config, quantization="f32")
    theirs = {tensor.name: values(tensor) for tensor in reader.tensors}
    attention = model.blocks[1].attention
    joined = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
    assert torch.equal(theirs["blk.1.attn_qkv.weight"], joined)
    biases = [name for name in theirs if name.endswith(".bias")]
    assert len(biases) == 6 * config.n_layers + 1
    assert not any(theirs[name].any() for name in biases)


def test_a_tied_head_is_stored_only_where_it_must_be(tmp_path: Path) -> None:
    _, without = export(tmp_path / "llama", tiny.plain_model(**BASE, **LLAMA))
    assert "output.weight" not in {tensor.name for tensor in without.tensors}
    model, with_head = export(tmp_path / "stablelm", tiny.plain_model(**BASE, mlp="swiglu"), quantization="f32")
    heads = [values(tensor) for tensor in with_head.tensors if tensor.name == "output.weight"]
    assert torch.equal(heads[0], model.token_embedding.weight)


def test_interleaved_rows_give_the_same_scores() -> None:
    """llama.cpp rotates neighbours as complex numbers; compared with our rotation of halves."""
    config = tiny.plain_model(**BASE)
    generator = torch.Generator().manual_seed(0)
    heads, width, length = config.n_heads, config.d_head, 20
    x = torch.randn(length, config.d_model, generator=generator, dtype=torch.float64)
    w_query, w_key = torch.randn(2, heads * width, config.d_model, generator=generator, dtype=torch.float64)
    tables = Rotary(config).at(slice(0, length), length, torch.float64)
    ours_q, ours_k = (rotate((x @ w.T).view(length, heads, width).transpose(0, 1), tables) for w in (w_query, w_key))
    turn = torch.polar(
        torch.ones(()).double(),
        torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(0, width, 2).double() / width)),
    )

    def theirs(w: Tensor) -> Tensor:
        pairs = (x @ interleaved(w, heads).T).view(length, heads, -1, 2)
        return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn[:, None]).flatten(2).transpose(0, 1)

    expected = ours_q @ ours_k.mT
    torch.testing.assert_close(theirs(w_query) @ theirs(w_key).mT, expected, rtol=1e-5, atol=1e-4)  # tables in float32
    assert not torch.equal(interleaved(w_query, heads), w_query)
    rows = torch.arange(heads * width)
    assert torch.equal(interleaved(rows, heads).view(heads, width // 2, 2).mT.flatten(), rows)


# -------------------------------------------------------------------------------------------------- quantization

KIND = gguf.GGMLQuantizationType


@pytest.mark.parametrize("quantization", ["f16", "bf16", "q8_0", "q4_0"])
def test_matrices_are_near_the_originals(quantization: Any, tmp_path: Path) -> None:
    config = tiny.plain_model(**BASE, **LLAMA, d_ff=100, n_experts=2, d_ff_shared=96)
    model, reader = export(tmp_path, config, quantization=quantization)
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    kind = KIND[quantization.upper()]
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_up_exps.weight"] == kind
    assert kinds["token_embd.weight"] == (KIND.Q8_0 if kind == KIND.Q4_0 else kind), "the head's are not cut to 4 bits"
    assert kinds["blk.0.ffn_down_exps.weight"] == (kind if kind == KIND.BF16 else KIND.F16), "rows of 100"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.ffn_gate_inp.weight"] == KIND.F32
    ours = {
        "blk.0.attn_v.weight": model.blocks[0].attention.value.weight,
        "token_embd.weight": model.token_embedding.weight,
    }
    for tensor in reader.tensors:
        if tensor.name in ours:
            original = ours[tensor.name].detach()
            largest = original.view(-1, 32).abs().amax(-1, keepdim=True).expand(-1, 32).reshape(original.shape)
            bound = {
                KIND.F16: original.abs() / 2**11, KIND.BF16: original.abs() / 2**8,
                KIND.Q8_0: largest / 127 * 0.57, KIND.Q4_0: largest / 8 * 1.01,
            }[tensor.tensor_type]  # fmt: skip
            off = (values(tensor) - original).abs()
            assert (off <= bound + 1e-7).all()
            assert off.any()


def test_positions_and_vectors_stay_in_f32(tmp_path: Path) -> None:
    _, reader = export(tmp_path, config_of("gpt2"), quantization="q4_0")
    for tensor in reader.tensors:
        alone = len(tensor.shape) == 1 or tensor.name == "position_embd.weight"
        assert (tensor.tensor_type == KIND.F32) == alone, tensor.name


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(config_of("llama")))
    for name in ("a", "b"):
        export_gguf(run, tmp_path / name, quantization="q8_0", tokenizer=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ------------------------------------------------------------------------------------------------------ tokenizers


def bpe(
    patterns: Sequence[str], *, ignore_merges: bool = False, special: Sequence[str] = ("<|endoftext|>",)
) -> Tokenizer:
    """Return a byte-level BPE that splits text by these patterns, as the tokenizers of current models do."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([tiny.TEXT, *TEXTS], trainer)
    return tokenizer_from_json(tokenizer.to_str())


def gpt2_like() -> Tokenizer:
    """Return a byte-level BPE with GPT-2's pattern inside the ByteLevel step, as in GPT-2's own tokenizer.json."""
    tokenizer = bpe(next(iter(PATTERNS)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def area(radius):\n    return 3.14159 * radius**2  # in m²\n\n\n\tx = 12345678\r\n\r\n",
    "Zoë naïvely paid 1,234.50 € for 東京 🗼 — twice!\n\n\tWhy? don't DON'T we'LL I'd 'tis ''s",
    "   leading  spaces   and trailing   ",
    "Ελληνικά Русский العربية हिन्दी ภาษาไทย 한국어 👩‍👩‍👧 ⅷ ½ ١٢٣ ſ's \u00a0\u2003\u200b\ufeff \x85 \u2028",
    "<|endoftext|> </s> <unk> are text",
    "line\n",
    " ",
)


def test_a_bpe_in_the_file(tmp_path: Path) -> None:
    tokenizer = gpt2_like()
    n_tokens = vocabulary_size(tokenizer)
    _, reader = export(tmp_path, tiny.plain_model(**{**BASE, "vocab_size": n_tokens + 2}, **LLAMA), tokenizer)
    assert field(reader, "tokenizer.ggml.model") == "gpt2"
    assert field(reader, "tokenizer.ggml.pre") == "gpt-2"
    names = [tokenizer.id_to_token(i) for i in range(n_tokens)]
    assert field(reader, "tokenizer.ggml.tokens") == [*names, f"[unused {n_tokens}]", f"[unused {n_tokens + 1}]"]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    assert field(reader, "tokenizer.ggml.token_type") == [control, *[normal] * (n_tokens - 1), unused, unused]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert field(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]
    assert field(reader, "tokenizer.ggml.bos_token_id") == field(reader, "tokenizer.ggml.eos_token_id") == 0
    assert field(reader, "tokenizer.ggml.add_bos_token") is field(reader, "tokenizer.ggml.add_eos_token") is False


@pytest.mark.parametrize(
    ("patterns", "ignore_merges", "name"),
    [(patterns, bool(i), name) for patterns, names in PATTERNS.items() for i, name in enumerate(names) if name],
)
def test_a_pattern_is_known_by_its_regex(patterns: tuple[str, ...], ignore_merges: bool, name: str) -> None:
    assert read_vocabulary(bpe(patterns, ignore_merges=ignore_merges), 600).pattern == name


def test_a_pattern_is_known_by_its_steps() -> None:
    assert read_vocabulary(gpt2_like(), 600).pattern == "gpt-2"
    assert read_vocabulary(changed(smollm_steps), 600).pattern == "smollm"


def test_a_bos_token_begins_prompts_there_as_here() -> None:
    vocabulary = read_vocabulary(bpe(next(iter(PATTERNS)), special=("<s>", "</s>", "<pad>")), 600)
    assert vocabulary.special_ids == {"bos": 0, "eos": 1, "pad": 2}
    assert vocabulary.begins_with_bos


def test_a_token_at_which_llama_cpp_ends_a_text_by_its_name_only_is_in_a_note() -> None:
    """The names are those of llama.cpp's `special_eog_ids`."""

    def notes(*special: str) -> list[str]:
        found = read_vocabulary(bpe(next(iter(PATTERNS)), special=special), 600).notes
        return [note for note in found if "also ends a text at" in note]

    assert not notes("<s>", "</s>"), "an end here too"
    (note,) = notes("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|file_sep|>")
    assert "at <|im_end|>, <|file_sep|> because of the name; the run does not" in note
    (note,) = notes("</s>", "<|end|>")
    assert "<|end|>" in note
    (note,) = notes("</s>", "<|end|>", "<|return|>", "<|call|>")
    assert "at <|return|>, <|call|> because" in note, "llama.cpp reads on at <|end|> where both others are"


def test_characters_in_the_file() -> None:
    tokenizer = train_tokenizer(CharTokenizer(type="char"), ["a b\n€"])
    vocabulary = read_vocabulary(tokenizer, 7)
    assert (vocabulary.model, vocabulary.pattern) == ("t5", None)
    assert vocabulary.tokens == ("<|endoftext|>", "<unk>", "\n", "▁", "a", "b", "€")
    assert vocabulary.types[:3] == (gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN, gguf.TokenType.NORMAL)
    assert vocabulary.special_ids == {"bos": 0, "eos": 0, "unk": 1}
    assert "<unk>" in vocabulary.notes[0]


def test_the_sampling_settings_that_an_imported_model_states_are_in_the_file(tmp_path: Path) -> None:
    """llama.cpp#17120: llama.cpp samples with them where a user gives none."""
    stated = Stated(
        {}, (0,), generation={"do_sample": True, "temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    )
    tokenizer = attach(gpt2_like(), stated)
    _, reader = export(tmp_path / "stated", config_of("llama"), tokenizer)
    names = [name for name in reader.fields if name.startswith("general.sampling.")]
    assert {name.rpartition(".")[2]: field(reader, name) for name in names} == {
        "temp": 0.5, "top_k": 20, "penalty_repeat": 1.25
    }  # fmt: skip
    _, reader = export(tmp_path / "plain", config_of("llama"), gpt2_like())
    assert not [name for name in reader.fields if name.startswith("general.sampling.")]


def test_without_a_tokenizer(tmp_path: Path) -> None:
    _, reader = export(tmp_path, config_of("llama"))
    assert field(reader, "tokenizer.ggml.model") == "no_vocab"
    assert "tokenizer.ggml.tokens" not in reader.fields


def changed(change: Callable[[Tokenizer], Any]) -> Tokenizer:
    tokenizer = gpt2_like()
    change(tokenizer)
    return tokenizer


def smollm_steps(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def replaced(**settings: Any) -> Tokenizer:
    """Return GPT-2's kind of BPE with other settings of the BPE itself."""
    tree = json.loads(gpt2_like().to_str())
    tree["model"] |= settings
    return Tokenizer.from_str(json.dumps(tree))


UNLIKE: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "our own pattern": (
        lambda: train_tokenizer(BPETokenizer(type="bpe", vocab_size=300, pattern="code"), [tiny.TEXT]),
        "its pattern is not one of gpt-2, smollm, smaug-bpe, llama-bpe, qwen2; tokenizer.pattern=llama3",
    ),
    "words": (
        lambda: train_tokenizer(WordTokenizer(type="word"), [tiny.TEXT]),
        "it reads words (tokenizer.type=word)",
    ),
    "unigrams": (
        lambda: hf_special(Tokenizer(models.Unigram([("a", -1.0), ("<unk>", -2.0)], unk_id=1))),
        "it is a Unigram",
    ),
    "no end of text": (lambda: bpe(next(iter(PATTERNS)), special=("<s>",)), "no token that ends a text"),
    "lower case": (
        lambda: changed(lambda t: setattr(t, "normalizer", normalizers.Lowercase())),
        "it normalizes text (Lowercase)",
    ),
    "a space before the text": (
        lambda: changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))),
        "its pattern is not one of",
    ),
    "split on white space": (
        lambda: changed(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())),
        "its pattern is not one of",
    ),
    "byte fallback": (lambda: replaced(byte_fallback=True), "its BPE has byte_fallback=True"),
    "suffixes": (lambda: replaced(end_of_word_suffix="</w>"), "its BPE has end_of_word_suffix='</w>'"),
    "whole words": (lambda: replaced(ignore_merges=True), "its pattern is not one of"),
    "llama.cpp's space": (lambda: train_tokenizer(CharTokenizer(type="char"), ["a ▁"]), "▁ (U+2581)"),
}


def hf_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("name", UNLIKE)
def test_tokenizers_that_llama_cpp_does_not_have_are_refused(name: str) -> None:
    make, reason = UNLIKE[name]
    tokenizer = make()
    with pytest.raises(UserError, match="--no-tokenizer") as refusal:
        read_vocabulary(tokenizer, vocabulary_size(tokenizer))
    assert reason in str(refusal.value)


# -------------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, dict[str, Any]] = {
    "position=none": {**GPT2, "position": "none"},
    "position=learned": {**LLAMA, "position": "learned"},
    "norm=layernorm": {"mlp": "swiglu", "n_experts": 2},
    "mlp=geglu": {**LLAMA, "mlp": "geglu"},
    "qk_norm=true": {"mlp": "gelu", "qk_norm": True},
    "attention_bias=true": {"mlp": "swiglu", "attention_bias": True},
    "attention_bias=out": {**LLAMA, "qk_norm": True, "attention_bias": "out"},
    "mlp_bias=true": {**LLAMA, "n_experts": 2, "mlp_bias": True},
    "d_head=8": {"mlp": "gelu", "d_head": 8},
    "rope_fraction=0.5": {**LLAMA, "rope_fraction": 0.5},
    "layer_repeats=2": {**LLAMA, "layer_repeats": 2},
    "bigram_vocab_size=99": {**LLAMA, "bigram_vocab_size": 99},
    "parallel_residual=true": {**LLAMA, "parallel_residual": True},
    "n_experts=2": {"mlp": "relu2", "norm": "rmsnorm", "n_experts": 2},
    "d_ff_shared=32": {**LLAMA, "qk_norm": True, "n_experts": 2, "d_ff_shared": 32},
    "attention_scale=1.0": {**GPT2, "attention_scale": 1.0},
    "window=16": {**LLAMA, "window": 16},
    "rope_scaling.type=dynamic": {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}},
    "rope_scaling.beta_fast=16.0": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 16}},
    "rope_scaling.beta_slow=2.0": {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 2}},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_models_that_llama_cpp_does_not_have_are_refused(setting: str) -> None:
    with pytest.raises(UserError) as refusal:
        choose_architecture(tiny.plain_model(**{**BASE, **REFUSED[setting]}))
    assert f"model.{setting}" in str(refusal.value)


def test_which_presets_have_an_architecture() -> None:
    chosen = {}
    for name in PRESETS:
        try:
            chosen[name] = choose_architecture(preset(name)).name
        except UserError:
            chosen[name] = None
    assert {name for name, architecture in chosen.items() if architecture is None} == {
        name for name in PRESETS if name.endswith("-banded")
    }
    expected = {
        "custom-300m": "gpt2", "gpt3-125m": "gpt2", "gpt2-tiny": "gpt2", "vaani-427m": "starcoder2",
        "llm-200m": "stablelm", "modern-9m": "qwen3", "moe-115m": "llama", "mixtral-8x7b": "llama",
        "smollm2-135m": "llama", "qwen3-0.6b": "qwen3",
    }  # fmt: skip
    assert {name: chosen[name] for name in expected} == expected


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(config_of("llama")))
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(UserError, match=r"model\.gguf exists"):
        export_gguf(run, tmp_path / "model.gguf", tokenizer=False)
    assert (tmp_path / "model.gguf").read_text() == "mine"


def test_an_unknown_quantization_is_refused(tmp_path: Path) -> None:
    unknown: Any = "q5_k"
    with pytest.raises(UserError, match=r"q5_k: it must be one of f32, f16, bf16, q8_0, q4_0"):
        export_gguf(tmp_path, tmp_path / "model.gguf", quantization=unknown)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("gptworks.interop.gguf")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'gptworks\[interop\]'"):
        importlib.import_module("gptworks.interop.gguf")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(config_of("llama")))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(RunError, match="No space left on device"):
        export_gguf(run, tmp_path / "new" / "model.gguf", tokenizer=False)
    assert list((tmp_path / "new").iterdir()) == []


def test_the_note_on_gelu_is_true(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(config_of("vaani")))
    notes = export_gguf(run, tmp_path / "model.gguf", tokenizer=False).notes
    assert len(notes) == 1 and "at most 0.0005" in notes[0]
    x = torch.linspace(-10, 10, 1_000_001, dtype=torch.float64)
    assert 0.0004 < (F.gelu(x) - F.gelu(x, approximate="tanh")).abs().max() < 0.0005


def test_the_command(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(config_of("llama")))
    asked = ("export", run, tmp_path / "model.gguf", "--format", "gguf", "--type", "q8_0")
    refused = tiny.gptworks(*asked)
    assert refused.returncode == 2 and "no token that ends a text" in refused.stderr
    folder = tiny.gptworks("export", run, tmp_path / "folder", "--no-tokenizer")
    assert folder.returncode == 2 and "--no-tokenizer is for --format gguf" in folder.stderr
    written = tiny.gptworks(*asked, "--no-tokenizer")
    assert written.returncode == 0 and "llama of llama.cpp, q8_0" in written.stdout
    again = tiny.gptworks(*asked[:2], tmp_path / "again.gguf", *asked[3:], "--no-tokenizer", "--json")
    assert json.loads(again.stdout)["bytes"] == (tmp_path / "model.gguf").stat().st_size


# ---------------------------------------------------------------------------------------------------- in llama.cpp

GREEDY_TOKENS = 64


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that loads a file in llama.cpp, with a float32 cache and all logits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    opened = []

    def load(file: Path) -> Any:
        cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        opened.append(llama_cpp.Llama(str(file), n_ctx=256, logits_all=True, verbose=False, n_threads=1, **cache))
        return opened[-1]

    yield load
    for model in opened:
        model.close()


def theirs_and_ours(loaded: Any, model: Any, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of llama.cpp and of our model."""
    loaded.reset()
    loaded.eval(list(ids))
    with torch.no_grad():
        return torch.from_numpy(loaded.scores[: len(ids)].copy()), model(torch.tensor([list(ids)]))[0]


def greedy(next_logits: Callable[[list[int]], Tensor], ids: list[int]) -> list[int]:
    for _ in range(GREEDY_TOKENS):
        ids = [*ids, int(next_logits(ids).argmax())]
    return ids


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path, llama: Callable[..., Any]) -> None:
    config = config_of(name)
    model, _ = export(tmp_path, config, quantization="f32")
    loaded = llama(tmp_path / "model.gguf")
    ids = hf.tokens(batch=1, length=200)[0].tolist()
    theirs, ours = theirs_and_ours(loaded, model, ids)
    table = config.mlp in ("gelu", "gelu_tanh")  # llama.cpp looks GELU up in a table of 16-bit numbers
    assert (theirs - ours).abs().max() < (5e-3 if table else 1e-4)
    assert ours.std() > 0.5, "logits that say nothing"

    def their_next(ids: list[int]) -> Tensor:
        loaded.eval(ids[loaded.n_tokens :])
        return torch.from_numpy(loaded.scores[len(ids) - 1])

    loaded.reset()
    with torch.no_grad():
        assert greedy(their_next, ids[:8]) == greedy(lambda ids: model(torch.tensor([ids]))[0, -1], ids[:8])


def rounded(model: Any, quantization: str) -> Any:
    """Return our model with the dequantized matrices of the file."""
    copy = deepcopy(model)
    with torch.no_grad():
        for name, weights in copy.named_parameters():
            if weights.dim() == 2 and name != "position_embedding.weight":
                in_8_bits = quantization == "q4_0" and name in ("token_embedding.weight", "untied_head.weight")
                kind = KIND["Q8_0" if in_8_bits else quantization.upper()]
                weights.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(weights.numpy(), kind), kind).copy()))
    return copy


@pytest.mark.llama_cpp
@pytest.mark.parametrize(("quantization", "near"), [("f16", 0.003), ("bf16", 0.02), ("q8_0", 0.05), ("q4_0", 0.05)])
@pytest.mark.parametrize("name", ["gpt2", "stablelm", "nemotron", "llama", "qwen3"])
def test_llama_cpp_computes_what_the_rounded_numbers_say(
    name: str, quantization: Any, near: float, tmp_path: Path, llama: Callable[..., Any]
) -> None:
    """Root mean square of the difference relative to the logits': llama.cpp also rounds the activations."""
    model, _ = export(tmp_path, config_of(name), quantization=quantization)
    loaded = llama(tmp_path / "model.gguf")
    tokens = hf.tokens(batch=1, length=200)[0].tolist()
    theirs, ours = theirs_and_ours(loaded, rounded(model, quantization), tokens)
    assert (theirs - ours).square().mean().sqrt() < near * ours.square().mean().sqrt()
    loaded.reset()
    assert len(list(zip(loaded.generate([1, 2, 3], temp=0), range(8), strict=False))) == 8


ALIKE: dict[str, Callable[[], Tokenizer]] = {
    **{
        str(name): (lambda patterns=patterns, i=i: bpe(patterns, ignore_merges=bool(i)))  # type: ignore[misc]
        for patterns, names in PATTERNS.items()
        for i, name in enumerate(names)
        if name
    },
    "gpt2": gpt2_like,
    "smollm, as it is published": lambda: changed(smollm_steps),
    "our training, llama3": lambda: train_tokenizer(
        BPETokenizer(type="bpe", vocab_size=400, pattern="llama3"), [tiny.TEXT, *TEXTS]
    ),
    "our training, gpt2": lambda: train_tokenizer(
        BPETokenizer(type="bpe", vocab_size=400, pattern="gpt2"), [tiny.TEXT, *TEXTS]
    ),
    "bos": lambda: bpe(next(iter(PATTERNS)), special=("<s>", "</s>")),
    "characters": lambda: train_tokenizer(CharTokenizer(type="char"), ["".join(TEXTS)]),
}


def piece(loaded: Any, index: int) -> bytes:
    """Return the bytes of a token. (Llama.detokenize truncates them to 32.)"""
    import llama_cpp

    buffer = ctypes.create_string_buffer(1000)
    vocabulary = llama_cpp.llama_model_get_vocab(loaded.model)
    n_bytes = llama_cpp.llama_token_to_piece(vocabulary, index, buffer, len(buffer), 0, False)
    return buffer.raw[:n_bytes]


def same_ids(tokenizer: Tokenizer, texts: Sequence[str], folder: Path, llama: Callable[..., Any]) -> None:
    export(folder, tiny.plain_model(**{**BASE, "vocab_size": vocabulary_size(tokenizer)}, **LLAMA), tokenizer)
    loaded = llama(folder / "model.gguf")
    for text in texts:
        ids = prompt_ids(tokenizer, text)
        assert loaded.tokenize(text.encode(), add_bos=True, special=False) == ids
        assert b"".join(piece(loaded, index) for index in ids).decode() == tokenizer.decode(ids)
    assert loaded.token_eos() == special_tokens(tokenizer).eos


SOURCES = tuple(Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, decimal))


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ALIKE)
def test_llama_cpp_reads_and_writes_text_as_we_do(name: str, tmp_path: Path, llama: Callable[..., Any]) -> None:
    same_ids(ALIKE[name](), TEXTS if name == "characters" else TEXTS + SOURCES, tmp_path, llama)


@pytest.mark.llama_cpp
def test_llama_cpp_reads_gpt2s_own_tokens(shared_data: Path, tmp_path: Path, llama: Callable[..., Any]) -> None:
    config = GPT2Tokenizer(type="gpt2", path=shared_data / "r50k_base.tiktoken")
    shakespeare = (shared_data / "tinyshakespeare.txt").read_text(encoding="utf-8")
    same_ids(train_tokenizer(config, []), (*TEXTS, *SOURCES, shakespeare), tmp_path, llama)


@pytest.mark.llama_cpp
def test_an_unknown_character_is_one_token_and_so_is_a_run_of_them(tmp_path: Path, llama: Callable[..., Any]) -> None:
    tokenizer = train_tokenizer(CharTokenizer(type="char"), ["abc"])
    export(tmp_path, tiny.plain_model(**{**BASE, "vocab_size": vocabulary_size(tokenizer)}, **LLAMA), tokenizer)
    loaded = llama(tmp_path / "model.gguf")
    for text, alike in (("aЖb", True), ("Ж", True), ("aЖЖb", False)):
        theirs = loaded.tokenize(text.encode(), add_bos=True, special=False)
        assert (theirs == prompt_ids(tokenizer, text)) is alike
    assert theirs == prompt_ids(tokenizer, "aЖb")
