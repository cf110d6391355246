"""What a model type is that gptworks does not read: by its kind, never by the spelling of its name."""

import difflib
import re
from collections.abc import Iterable

_KINDS = {
    "some or all of its layers keep a state in place of attention": (
        "mamba mamba2 falcon_mamba rwkv recurrent_gemma xlstm jamba bamba zamba zamba2 falcon_h1 granitemoehybrid "
        "nemotron_h qwen3_next"
    ),
    "it is an encoder, which predicts no next token": (
        "bert roberta albert distilbert electra deberta deberta-v2 xlm-roberta modernbert camembert mpnet ernie"
    ),
    "it has an encoder and a decoder": "t5 mt5 umt5 bart mbart pegasus marian led longt5 switch_transformers t5gemma",
    "it reads images or sounds too; a folder of its language model only can be read": (
        "gemma3 gemma3n llava llava_next mllama mistral3 pixtral qwen2_vl qwen2_5_vl qwen3_vl qwen2_audio "
        "idefics2 idefics3 smolvlm paligemma llama4 phi4_multimodal whisper internvl aya_vision voxtral"
    ),
    "it has keys and values of low rank (latent attention)": "deepseek_v2 deepseek_v3 minicpm3",
    "its positions are a bias of attention (ALiBi)": "bloom mpt",
    "its attention has sinks": "gpt_oss",
}
REASONS = {kind: reason for reason, names in _KINDS.items() for kind in names.split()}
_ONE_LETTER = 0.85
"""Similarity of two words of which one lacks a letter."""


def about(kind: str, known: Iterable[str]) -> str:
    """What to say about a model type that is not among the known ones: its kind, or the name that is meant; or nothing.

    A name is meant where one letter of it is missing. Another number, or a letter more, is another model.
    """
    if kind in REASONS:
        return f": {REASONS[kind]}"
    numbers = re.findall(r"\d+", kind)
    alike = [name for name in known if re.findall(r"\d+", name) == numbers and 0 <= len(name) - len(kind) < 2]
    meant = difflib.get_close_matches(kind, alike, n=1, cutoff=_ONE_LETTER)
    return f" (nearest: `{meant[0]}`)" if meant else ""
