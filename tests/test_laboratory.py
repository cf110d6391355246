"""Settings of the laboratory in whole runs: trained, stopped, resumed and read."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.infer.engine import Engine
from gptworks.recipe import parse_recipe
from gptworks.tokenizer import load_tokenizer
from gptworks.train.loop import train
from gptworks.train.record.metrics import read_metrics
from test_stream import WHOLE

SETTINGS: dict[str, dict[str, Any]] = {
    "untied at the stop": {"tie_embeddings": False},
    "untied behind it, averaged": {"tie_embeddings": False},
    "repeated": {"layer_repeats": (1, 2)},
    "stream, values, gates, smear": WHOLE,
    "token pairs": {"bigram_vocab_size": 61},
}

TRAIN: dict[str, dict[str, Any]] = {
    "untied at the stop": {"untie_after_steps": 3},
    "untied behind it, averaged": {"untie_after_steps": 4, "ema_decay": 0.5},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stopped_run_resumes_bit_for_bit_and_generates(name: str, tmp_path: Path) -> None:
    def run(folder: str, max_steps: int, resume: bool = False) -> Path:
        tree = tiny.recipe_tree(
            tmp_path, max_steps=max_steps, schedule="constant", checkpoint_every=3, evaluate_every=3,
            **TRAIN.get(name, {}),
        )  # fmt: skip
        tree["model"] |= SETTINGS[name]
        train(parse_recipe(tree | {"run_dir": str(tmp_path / folder)}), resume=resume)
        return tmp_path / folder

    whole, stopped = run("whole", 6), run("stopped", 3)
    run("stopped", 6, resume=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, other = ((checkpoints(folder)[0].folder / file).read_bytes() for folder in (whole, stopped))
        assert one == other, file
    losses = [row["loss"] for row in read_metrics(whole / "metrics.jsonl") if row["kind"] == "validation"]
    assert losses[-1] < losses[0]
    loaded = load_run(whole, "last")
    engine, text = Engine(loaded.model, load_tokenizer(whole / "tokenizer"), prefill_tokens=5), "the quick brown fox"
    scored = [token.logprob for token in engine.score(text) if token is not None]
    ids = torch.tensor([engine.encode_prompt(text)])
    with torch.no_grad():
        logprobs = loaded.model.eval()(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert scored == pytest.approx(logprobs.tolist(), abs=1e-4)
