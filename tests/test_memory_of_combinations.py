"""The formula for a step's memory against the traced step, for several settings of model/lab together with an adapter,
frozen blocks, or rows of several texts."""

from dataclasses import replace
from typing import Any

import pytest

from gptworks.config import FreezeConfig, LoRAConfig
from gptworks.planning.memory import Setting, training_peak
from gptworks.training.rehearsal.trace import Rehearsal, trace_step
from test_memory import SMALL, combinations
from tiny import plain_model, plain_training

STREAM: dict[str, Any] = {
    "unet_skips": True, "value_residual": True, "attention_gate": True, "smear": True,
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
    "adapter with dropout": (LoRAConfig(dropout=0.1), None, False),
    "frozen beginning": (None, FreezeConfig(first_blocks=1, embeddings=True), False),
    "frozen blocks": (None, FreezeConfig(first_blocks=3, embeddings=True), False),
    "frozen MLPs": (None, FreezeConfig(patterns=("*.mlp.*",)), False),
    "frozen middle": (None, FreezeConfig(patterns=("blocks.1.*",)), False),
    "frozen matrices": (None, FreezeConfig(patterns=("blocks.*.mlp.*", "blocks.*.attention.*")), False),
}


@pytest.mark.parametrize(
    ("model", "how", "case"),
    combinations(list(MODELS), list(ADAPTED), [("fp32", "none"), ("bf16", "block"), ("bf16", "selective")]),
)
def test_settings_together(model: str, how: str, case: tuple[str, str]) -> None:
    (adapter, freeze, several_texts), (precision, checkpointing) = ADAPTED[how], case
    config = plain_model(**SMALL | MODELS[model])
    train = plain_training(
        max_steps=1, batch_size=2, micro_batch_size=1 if how == "whole" else 2, activation_checkpointing=checkpointing
    )
    setting = Setting.of(config, train, precision, True, adapter, freeze)
    planned = training_peak(replace(setting, several_texts=several_texts)).total_bytes
    rehearsal = Rehearsal(config, train, "cpu", precision, adapter, freeze, several_texts=several_texts)
    assert planned == pytest.approx(trace_step(rehearsal).peak_bytes, rel=0.05)
