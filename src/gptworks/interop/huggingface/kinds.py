"""Reasons why gptworks cannot read some model types, listed by the types' exact names."""

import difflib
import re
from collections.abc import Iterable

_KINDS = {
    "some or all of its layers have a recurrent state, not attention": (
        "mamba mamba2 falcon_mamba rwkv recurrent_gemma xlstm jamba bamba zamba zamba2 falcon_h1 granitemoehybrid "
        "nemotron_h qwen3_next"
    ),
    "it is an encoder, which predicts no next token": (
        "bert roberta albert distilbert electra deberta deberta-v2 xlm-roberta modernbert camembert mpnet ernie"
    ),
    "it has an encoder and a decoder": "t5 mt5 umt5 bart mbart pegasus marian led longt5 switch_transformers t5gemma",
    "it also reads images or sound; a folder of only its language model can be read": (
        "gemma3 gemma3n llava llava_next mllama mistral3 pixtral qwen2_vl qwen2_5_vl qwen3_vl qwen2_audio "
        "idefics2 idefics3 smolvlm paligemma llama4 phi4_multimodal whisper internvl aya_vision voxtral"
    ),
    "it has latent attention (low-rank keys and values)": "deepseek_v2 deepseek_v3 minicpm3",
    "it has positions as attention biases (ALiBi)": "bloom mpt",
    "it has attention sinks": "gpt_oss",
}
REASONS = {kind: reason for reason, names in _KINDS.items() for kind in names.split()}
_ONE_LETTER = 0.85
"""Minimum similarity, by difflib, at which an unknown name counts as a misspelt known name."""


def about(kind: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown model type: a reason, the known type that was probably meant, or "".

    Only a missing letter, or a wrong one in a long name, counts as a typing error: a different number or an extra
    letter means another model.
    """
    if kind in REASONS:
        return f": {REASONS[kind]}"
    numbers = re.findall(r"\d+", kind)
    alike = [name for name in known if re.findall(r"\d+", name) == numbers and 0 <= len(name) - len(kind) < 2]
    meant = difflib.get_close_matches(kind, alike, n=1, cutoff=_ONE_LETTER)
    return f" (nearest: `{meant[0]}`)" if meant else ""
