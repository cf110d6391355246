"""The formula for the memory of an adapter's step, against the traced step, for models of model/lab."""

import pytest

from gptworks.config import LoRAConfig
from gptworks.planning.memory import training_peak
from gptworks.planning.setting import Setting
from gptworks.training.rehearsal.trace import Rehearsal, trace_step
from test_memory import SMALL, VARIANTS
from tiny import plain_model, plain_training


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("variant", ["blocks repeated", "token pairs"])
def test_frozen_matrices_are_copied_at_each_run_and_a_frozen_table_keeps_nothing(
    variant: str, checkpointing: str
) -> None:
    model, adapter = plain_model(**SMALL | VARIANTS[variant]), LoRAConfig()
    config = plain_training(max_steps=1, batch_size=1, micro_batch_size=1, activation_checkpointing=checkpointing)
    planned = training_peak(Setting.of(model, config, "bf16", True, adapter)).total_bytes
    assert planned == pytest.approx(trace_step(Rehearsal(model, config, "cpu", "bf16", adapter)).peak_bytes, rel=0.02)
