"""Hugging Face folders with the tokenizer layouts of released families, and vocabularies of a few hundred tokens.

What a release states is kept: the names of its special tokens and their order, the normalizer, the splitting, the
post-processor, which file says what, the kind of its chat template, and its lists of end tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as t
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import hf
from gptworks.interop.huggingface.architectures import FAMILIES

ROWS = 640
"""Rows of the embedding; some stay unused, as in releases."""

TEXT = (
    "The quick brown fox jumps over the lazy dog.\n", "def area(radius):\n    return 3.14159 * radius**2\n",
    "Zoë naïvely paid 1,234.50 € for 東京 — twice! I'll say we've done it.\n", "the then there the other the them\n",
)  # fmt: skip

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN = FAMILIES["qwen2"].own_split
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str | None) -> Any:
    assert pattern is not None
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES])


def _gpt2(*before: Any) -> Any:
    step = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([*before, step]) if before else step


def byte_level(special: Sequence[str], split: Any, normalizer: Any = None) -> Tokenizer:
    """Return a byte-level BPE with the special tokens last, like Llama 3's and Qwen's; reserved tokens fill the
    gaps."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def sentence_piece(special: Sequence[str], *, gemma: bool = False) -> Tokenizer:
    """Return a BPE with a token for each byte and spaces as ▁, with or (as in Gemma) without one before the text."""
    characters = sorted({*"".join(TEXT).replace(" ", ""), "▁"} - {"東"})
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("i", "n"), ("▁", "▁"), ("▁▁", "▁▁"), ("o", "v"), ("e", "r")]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *("".join(pair) for pair in merges)]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = spaces if gemma else normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    if gemma:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    ends = [] if gemma else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _begins(name: str, *steps: Any) -> Any:
    """Return a post-processor that puts a token before the text; `{}` is replaced by the token's id."""
    return lambda tokenizer: _sequence(
        *steps,
        processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, tokenizer.token_to_id(name))]
        ),
    )


def _sequence(*steps: Any) -> Any:
    return processors.Sequence(list(steps)) if len(steps) > 1 else steps[0]


_OFFSETS = processors.ByteLevel(trim_offsets=False)


def _offsets(_: Tokenizer) -> Any:
    return _OFFSETS


def _text_only(_: Tokenizer) -> Any:
    return processors.TemplateProcessing(single="$A", pair="$A $B")


def token(content: str) -> dict[str, Any]:
    """Return a token in the form of older special_tokens_map.json files."""
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def _typed(tokens: dict[str, Any]) -> dict[str, Any]:
    """Return a token in the form of tokenizer_config.json."""
    return {role: {"__type": "AddedToken", **given} for role, given in tokens.items()}


CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
WITH_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}"
    + CHATML
)
HEADERS = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + "
    "'\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ROLES = (
    "{%- for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + "
    "'<|end_of_text|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)  # fmt: skip
TULU = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
NANO = (
    "{{- bos_token }}{%- for m in messages %}{%- if m['role'] == 'user' %}"
    "{{- '<|user_start|>' + m['content'] + '<|user_end|>' }}{%- elif m['role'] == 'assistant' %}"
    "{{- '<|assistant_start|>' + m['content'] + '<|assistant_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant_start|>' }}{%- endif %}"
)


@dataclass(frozen=True)
class Layout:
    """A release's layout: its tokenizer, and the contents of its files."""

    kind: str
    """The model_type, and with it the class that AutoTokenizer takes."""
    tokenizer: Tokenizer
    settings: dict[str, Any]
    """tokenizer_config.json."""
    ends: tuple[str, ...]
    """Tokens that end generation."""
    bos: str | None = None
    """The token whose id config.json and generation_config.json have as bos."""
    config_end: str | None = None
    """config.json's eos, where it is another than those of generation_config.json."""
    generation: dict[str, Any] | None = field(default_factory=dict)
    """What generation_config.json has besides; None: there is no such file."""
    tokens_map: dict[str, Any] | None = None
    files: dict[str, str] = field(default_factory=dict)
    """Others: path → text."""
    post: Any = None
    """Makes the post-processor."""
    reads_otherwise: bool = False
    """AutoTokenizer's class ignores parts of tokenizer.json; transformers' general class does not."""


def _all() -> dict[str, Layout]:
    gpt2 = byte_level(["<|endoftext|>"], _gpt2())
    llama2 = sentence_piece(["<unk>", "<s>", "</s>"])
    llama3 = byte_level(
        ["<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>",
         "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"], _split(_LLAMA3))  # fmt: skip
    smollm = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                        _gpt2(pre_tokenizers.Digits(individual_digits=True)))  # fmt: skip
    qwen = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _split(_QWEN), normalizers.NFC())
    gemma = sentence_piece(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"],
        gemma=True,
    )
    phi3 = sentence_piece(
        ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    )
    mistral = sentence_piece(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"])
    dolma = byte_level(["<|endoftext|>", "<|pad|>"], _split(_LLAMA3))
    granite = byte_level(["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
                         _gpt2(pre_tokenizers.Digits(individual_digits=True)))  # fmt: skip
    o200k = byte_level(["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"], _split(_LLAMA3))
    nano = byte_level(["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"],
                      _split(_LLAMA3.replace("{1,3}", "{1,2}")))  # fmt: skip
    neox = byte_level(["<|endoftext|>", "<|padding|>"], _gpt2(), normalizers.NFC())
    sent = {"unk_token": token("<unk>"), "bos_token": token("<s>"), "eos_token": token("</s>")}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072}
    begun = {"bos_token": "<|begin_of_text|>", "clean_up_tokenization_spaces": True,
             "model_input_names": ["input_ids", "attention_mask"], **fast}  # fmt: skip
    one = "<|endoftext|>"
    return {
        "gpt2": Layout("gpt2", gpt2, {"model_max_length": 1024}, (one,), one, post=_offsets),
        "pythia": Layout(
            "gpt_neox", neox,
            {"add_prefix_space": False, "bos_token": one, "eos_token": one, "unk_token": one,
             "tokenizer_class": "GPTNeoXTokenizer"},
            (one,), one, generation=None, post=_offsets,
            tokens_map={"bos_token": one, "eos_token": one, "unk_token": one},
        ),
        "llama-2": Layout(
            "llama", llama2,
            {"add_bos_token": True, "add_eos_token": False, **_typed(sent), "pad_token": None, "legacy": False,
             "padding_side": "right", "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer",
             "clean_up_tokenization_spaces": False},
            ("</s>",), "<s>", generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096},
            tokens_map=dict(sent), post=_begins("<s>"), reads_otherwise=True,
        ),
        "llama-2-chat": Layout(
            "llama", llama2, {**_typed(sent), "add_bos_token": True, "add_eos_token": False, "chat_template": INST,
                              "tokenizer_class": "LlamaTokenizer", "legacy": False},
            ("</s>",), "<s>", post=_begins("<s>"), reads_otherwise=True,
        ),
        "tinyllama-chat": Layout(
            "llama", llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>",
                              "chat_template": ZEPHYR, "tokenizer_class": "LlamaTokenizer", "legacy": False,
                              "use_default_system_prompt": False},
            ("</s>",), "<s>", post=_begins("<s>"), reads_otherwise=True,
        ),
        "llama-3": Layout(
            "llama", llama3, begun | {"eos_token": "<|end_of_text|>"}, ("<|end_of_text|>",), "<|begin_of_text|>",
            post=_begins("<|begin_of_text|>", _OFFSETS),
        ),
        "llama-3-instruct": Layout(
            "llama", llama3, begun | {"eos_token": "<|eot_id|>", "chat_template": HEADERS},
            ("<|end_of_text|>", "<|eot_id|>"), "<|begin_of_text|>", config_end="<|end_of_text|>",
            post=_begins("<|begin_of_text|>", _OFFSETS),
            tokens_map={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ),
        "llama-3.1-instruct": Layout(
            "llama", llama3, begun | {"eos_token": "<|eot_id|>", "chat_template": HEADERS},
            ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|begin_of_text|>",
            generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            post=_begins("<|begin_of_text|>", _OFFSETS),
        ),
        "hermes-3": Layout(  # a list of named templates
            "llama", byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
                                _split(_LLAMA3)),
            begun | {"eos_token": "<|im_end|>", "pad_token": "<|end_of_text|>",
                     "chat_template": [{"name": "default", "template": "{{ bos_token }}" + CHATML},
                                       {"name": "tool_use", "template": "{{ bos_token }}tools " + CHATML}]},
            ("<|im_end|>",), "<|begin_of_text|>", post=_begins("<|begin_of_text|>", _OFFSETS),
        ),
        "smollm": Layout(
            "llama", smollm, {"bos_token": one, "eos_token": one, "unk_token": one, "add_prefix_space": False,
                              "tokenizer_class": "GPT2Tokenizer", "vocab_size": 49152}, (one,), one,
        ),
        "smollm2-instruct": Layout(
            "llama", smollm, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": one, "pad_token":
                              "<|im_end|>", "chat_template": WITH_SYSTEM, "tokenizer_class": "GPT2Tokenizer",
                              "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
            ("<|im_end|>",), "<|im_start|>",
        ),
        "smollm3": Layout(
            "smollm3", byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"],
                                  _split(_LLAMA3)),
            fast | {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}, ("<|im_end|>",),
            "<|begin_of_text|>", files={"chat_template.jinja": CHATML}, post=_offsets,
        ),
        "qwen2.5": Layout(
            "qwen2", qwen, {"add_bos_token": False, "bos_token": None, "eos_token": one, "pad_token": one,
                            "unk_token": None, "errors": "replace", "tokenizer_class": "Qwen2Tokenizer",
                            "split_special_tokens": False, "chat_template": WITH_SYSTEM},
            (one,), one, generation={"do_sample": False, "max_new_tokens": 2048}, post=_offsets,
        ),
        "qwen2.5-instruct": Layout(
            "qwen2", qwen, {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": one,
                            "unk_token": None, "tokenizer_class": "Qwen2Tokenizer", "chat_template": WITH_SYSTEM},
            ("<|im_end|>", one), one, config_end="<|im_end|>", post=_offsets,
            generation={"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "do_sample": True},
        ),
        "qwen3": Layout(
            "qwen3", qwen, {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": one,
                            "unk_token": None, "tokenizer_class": "Qwen2Tokenizer", "chat_template": CHATML},
            ("<|im_end|>", one), one, config_end="<|im_end|>", post=_offsets,
        ),
        "qwen3-moe": Layout(
            "qwen3_moe", qwen, {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": one,
                                "unk_token": None, "tokenizer_class": "Qwen2Tokenizer", "chat_template": CHATML},
            ("<|im_end|>", one), one, config_end="<|im_end|>", post=_offsets,
        ),
        "olmo2-instruct": Layout(
            "olmo2", dolma, {"bos_token": one, "eos_token": one, "unk_token": one, "pad_token": "<|pad|>",
                             "tokenizer_class": "GPT2Tokenizer", "chat_template": TULU}, (one,), one, post=_offsets,
        ),
        "mistral-0.1": Layout(
            "mistral", mistral, {**{role: given["content"] for role, given in sent.items()}, "add_bos_token": True,
                                 "add_eos_token": False, "tokenizer_class": "LlamaTokenizer", "legacy": True},
            ("</s>",), "<s>", post=_begins("<s>"), reads_otherwise=True,
        ),
        "mistral-0.3-instruct": Layout(
            "mistral", mistral, {**{role: given["content"] for role, given in sent.items()}, "add_bos_token": True,
                                 "tokenizer_class": "LlamaTokenizer", "legacy": False,
                                 "chat_template": [{"name": "default", "template": INST},
                                                   {"name": "tool_use", "template": "tools" + INST}]},
            ("</s>",), "<s>", post=_begins("<s>"), reads_otherwise=True,
        ),
        "gemma-2": Layout(
            "gemma2", gemma, {"add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "eos_token":
                              "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "tokenizer_class":
                              "GemmaTokenizer", "chat_template": TURNS, "sp_model_kwargs": {}},
            ("<eos>", "<end_of_turn>"), "<bos>", config_end="<eos>", post=_begins("<bos>"),
        ),
        "gemma-3": Layout(
            "gemma3_text", gemma, {"add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>", "pad_token":
                                   "<pad>", "unk_token": "<unk>", "tokenizer_class": "GemmaTokenizer",
                                   "boi_token": "<start_of_image>", "chat_template": TURNS},
            ("<eos>", "<end_of_turn>"), "<bos>", post=_begins("<bos>"),
            generation={"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
        ),
        "granite-3": Layout(
            "granite", granite, {"bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>", "pad_token":
                                 "<|end_of_text|>", "unk_token": "<|end_of_text|>", "errors": "replace",
                                 "tokenizer_class": "GPT2Tokenizer", "chat_template": ROLES},
            ("<|end_of_text|>",), "<|end_of_text|>",
        ),
        "phi-3-mini": Layout(
            "phi3", phi3, {"add_bos_token": False, "add_eos_token": False, "bos_token": "<s>", "eos_token": one,
                           "pad_token": one, "unk_token": "<unk>", "legacy": False, "padding_side": "left",
                           "tokenizer_class": "LlamaTokenizer", "chat_template": PHI},
            (one, "<|assistant|>", "<|end|>"), "<s>", config_end=one, post=_text_only,
        ),
        "phi-4-mini": Layout(
            "phi3", o200k, {"add_bos_token": False, "bos_token": one, "eos_token": one, "pad_token": one, "unk_token":
                            one, "tokenizer_class": "GPT2Tokenizer", "chat_template": PHI},
            ("<|end|>", one), one, config_end=one,
        ),
        "starcoder2": Layout(
            "starcoder2", smollm, {"add_prefix_space": False, "bos_token": one, "eos_token": one, "unk_token": one,
                                   "tokenizer_class": "GPT2Tokenizer"}, (one,), one,
        ),
        "nanochat": Layout(
            "llama", nano, fast | {"bos_token": "<|bos|>", "eos_token": "<|assistant_end|>"},
            ("<|assistant_end|>", "<|bos|>"), "<|bos|>", files={"chat_template.jinja": NANO}, post=_begins("<|bos|>"),
        ),
        "a-template-in-json": Layout(
            "llama", llama3, begun | {"eos_token": "<|eot_id|>"}, ("<|eot_id|>",), "<|begin_of_text|>",
            files={"chat_template.json": json.dumps({"chat_template": HEADERS})},
            post=_begins("<|begin_of_text|>", _OFFSETS),
        ),
        "templates-in-files": Layout(
            "llama", llama3, begun | {"eos_token": "<|eot_id|>", "chat_template": "not this"}, ("<|eot_id|>",),
            "<|begin_of_text|>", post=_begins("<|begin_of_text|>", _OFFSETS),
            files={"chat_template.jinja": HEADERS, "additional_chat_templates/rag.jinja": "rag " + HEADERS},
        ),
    }  # fmt: skip


LAYOUTS = cache(_all)()


def _forgetful() -> dict[str, Layout]:
    """Return folders of careless publishers: files that contradict each other, and keys that are missing, null or
    unknown."""
    llama, qwen = LAYOUTS["llama-3.1-instruct"], LAYOUTS["qwen2.5-instruct"]
    begun, chat = llama.settings, qwen.settings
    without = {key: value for key, value in begun.items() if key not in ("bos_token", "eos_token")}
    listed = {str(llama.tokenizer.token_to_id(name)): {"content": name, "special": True, "lstrip": False,
              "rstrip": False, "normalized": False, "single_word": False}
              for name in ("<|begin_of_text|>", "<|eot_id|>")}  # fmt: skip
    spaced = Tokenizer.from_str(llama.tokenizer.to_str())
    spaced.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("kilo", normalized=True),
                       AddedToken("single", single_word=True)])  # fmt: skip
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    guarded = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    dated = "{% if strftime_now is defined %}{% set year = strftime_now('%Y') %}{% endif %}"
    return {
        "added-tokens-decoder": replace(llama, settings=begun | {"added_tokens_decoder": listed}),
        "template-in-both": replace(llama, files={"chat_template.jinja": "{{ '' }}" + HEADERS}),
        "eos-in-config-differs": replace(llama, config_end="<|end_of_text|>"),
        "add-bos-null": replace(llama, settings=begun | {"add_bos_token": None, "add_eos_token": None}),
        "class-unknown": replace(llama, settings=begun | {"tokenizer_class": "OurOwnTokenizerFast"}),
        "spaces-around-tokens": replace(llama, tokenizer=spaced),
        "names-in-the-map-only": replace(llama, settings=without, tokens_map=named),
        "eos-list-in-config-only": replace(llama, generation=None),
        "pad-is-eos": replace(llama, settings=begun | {"pad_token": "<|eot_id|>"}),
        "unk-missing": replace(qwen, settings={key: value for key, value in chat.items() if key != "unk_token"}),
        "template-of-tools": replace(llama, settings=begun | {"chat_template": tools + guarded + dated + HEADERS}),
    }


FORGETFUL = _forgetful()

_SMALL: dict[str, Any] = {"vocab_size": ROWS, "num_hidden_layers": 1, "max_position_embeddings": 192,
                          "tie_word_embeddings": False}  # fmt: skip
_WIDE = _SMALL | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": ROWS, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 192,
             "tie_word_embeddings": False},
    "gpt_neox": _SMALL | {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "qwen3": _WIDE | {"head_dim": 8},
    "qwen3_moe": _WIDE | {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                          "norm_topk_prob": True},
    "gemma2": _WIDE | {"head_dim": 8}, "gemma3_text": _WIDE | {"head_dim": 8},
}  # fmt: skip


PROMPT = "The quick brown"


def write(folder: Path, layout: Layout) -> Any:
    """Write the folder of a layout, whose model continues `PROMPT` with the last end token. Returns the model."""
    torch.manual_seed(0)
    id_of = layout.tokenizer.token_to_id
    listed: Any = [id_of(name) for name in layout.ends]
    listed = listed if len(listed) > 1 else listed[0]
    config_end = listed if layout.config_end is None else id_of(layout.config_end)
    stated = {"bos_token_id": layout.bos and id_of(layout.bos), "pad_token_id": None}
    config = t.AutoConfig.for_model(layout.kind, **_CONFIGS.get(layout.kind, _WIDE), eos_token_id=config_end, **stated)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    hf.shake(model, 0.2)
    layout.tokenizer.post_processor = None if layout.post is None else layout.post(layout.tokenizer)
    layout.tokenizer.save(str(make(folder) / "tokenizer.json"))
    with torch.no_grad():
        first = int(model(torch.tensor([layout.tokenizer.encode(PROMPT).ids])).logits[0, -1].argmax())
        head, pair = model.get_output_embeddings().weight, [first, id_of(layout.ends[-1])]
        head[pair] = head[pair[::-1]].clone()
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if layout.generation is not None:
        _json(folder / "generation_config.json", {**stated, "eos_token_id": listed, **layout.generation})
    _json(folder / "tokenizer_config.json", layout.settings)
    if layout.tokens_map is not None:
        _json(folder / "special_tokens_map.json", layout.tokens_map)
    for name, text in layout.files.items():
        (make((folder / name).parent) / (folder / name).name).write_text(text, encoding="utf-8")
    return model


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
