"""The formula for a step's memory against the traced step where several settings of the laboratory meet, beside an
adapter, frozen blocks, and rows of several texts."""

from dataclasses import replace
from typing import Any

import pytest

from gptworks.config import FreezeConfig, LoRAConfig
from gptworks.plan.memory import Setting, training_peak
from gptworks.plan.trained import trained
from gptworks.train.rehearsal.trace import Rehearsal, trace_step
from test_memory import SMALL, combinations
from tiny import plain_model, plain_training

STREAM: dict[str, Any] = {
    "residual_scalars": True, "unet_skips": True, "value_residual": True, "attention_gate": True, "smear": True,
    "value_embeddings": ("table", "projected", "none"), "gate_channels": 32, "bigram_vocab_size": 3000,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "stream": STREAM | {"n_kv_heads": 2},
    "stream, experts, own head": STREAM
    | {"n_experts": 4, "d_ff": 256, "tie_embeddings": False, "norm_placement": "both"},
    "repeated": {"layer_repeats": (2, 1, 2), "smear": True, "bigram_vocab_size": 3000, "rope_fraction": 0.5},
}

ADAPTED: dict[str, tuple[LoRAConfig | None, FreezeConfig | None, bool]] = {
    "whole": (None, None, False),
    "several texts": (None, None, True),
    "adapter": (LoRAConfig(), None, False),
    "adapter over int4": (LoRAConfig(base="int4"), None, False),
    "frozen": (None, FreezeConfig(first_blocks=1, embeddings=True), False),
}


@pytest.mark.parametrize(
    ("model", "how", "case"),
    combinations(list(MODELS), list(ADAPTED), [("fp32", "none"), ("bf16", "block")]),
)
def test_settings_together(model: str, how: str, case: tuple[str, str]) -> None:
    """What is not saved because its block is frozen is planned for all the same: too much, never too little."""
    (adapter, freeze, several_texts), (precision, checkpointing) = ADAPTED[how], case
    config = plain_model(**SMALL | MODELS[model])
    train = plain_training(
        max_steps=1, batch_size=2, micro_batch_size=1 if how == "whole" else 2, activation_checkpointing=checkpointing
    )
    setting = Setting.of(config, train, precision, True, trained(config, adapter, freeze))
    planned = training_peak(replace(setting, several_texts=several_texts)).total_bytes
    rehearsal = Rehearsal(config, train, "cpu", precision, adapter, freeze, several_texts=several_texts)
    off = planned / trace_step(rehearsal).peak_bytes - 1
    assert -0.05 < off < (0.1 if freeze else 0.05)
