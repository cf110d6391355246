"""Settings of model/lab in complete runs: trained, stopped, resumed and read."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from gptworks.checkpoint import load_run
from gptworks.infer.engine import Engine
from gptworks.tokenizer import load_tokenizer
from gptworks.training.record.metrics import read_metrics
from halves import assert_resumes_exactly
from test_stream import WHOLE

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "untied, tables of values": (
        {"tie_embeddings": False, "value_embeddings": ("table",)},
        {"rate_factors": {"head": 0.5, "vectors": 2.0}},
    ),
    "untied, averaged": (
        {"tie_embeddings": False, "bigram_vocab_size": 61, "n_experts": 3},
        {"ema_decay": 0.5, "muon_coefficients": "polar_express", "muon_iterations": 3},
    ),
    "repeated, three tokens ahead": (
        {"layer_repeats": (1, 2), "smear": True, "bigram_vocab_size": 61, "logit_softcap": 9.0, "n_future_tokens": 3},
        {"shorter_contexts": [[2, 8]], "optimizer": "normuon", "ema_decay": 0.5, "future_weights_fall": True},
    ),
    "stream, values, gates, smear": (
        WHOLE | {"norm_placement": "both", "mlp": "relu2", "rope_fraction": 0.5, "position": "rope"},
        {"smaller_batches": [[2, 4]], "optimizer": "soap", "soap_frequency": 2, "cautious_weight_decay": True},
    ),
}  # fmt: skip
"""Settings of the model, and of its training."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stopped_run_and_a_fork_end_bit_for_bit_as_one_that_was_not_and_generate(name: str, tmp_path: Path) -> None:
    """Each step has two micro-batches, with dropout."""
    model, settings = SETTINGS[name]
    tree = tiny.recipe_tree(
        tmp_path, max_steps=6, schedule="wsd", checkpoint_every=3, evaluate_every=3, **settings
    )  # fmt: skip
    tree["model"] |= model
    whole = assert_resumes_exactly(tree, at_step=4, forks=True)
    losses = [row["loss"] for row in read_metrics(whole / "metrics.jsonl") if row["kind"] == "validation"]
    assert losses[-1] < losses[0]
    loaded = load_run(whole, "last")
    engine, text = Engine(loaded.model, load_tokenizer(whole / "tokenizer"), prefill_tokens=5), "the quick brown fox"
    scored = [token.logprob for token in engine.score(text) if token is not None]
    ids = torch.tensor([engine.encode_prompt(text)])
    with torch.no_grad():
        logprobs = loaded.model.eval()(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert scored == pytest.approx(logprobs.tolist(), abs=1e-4)
