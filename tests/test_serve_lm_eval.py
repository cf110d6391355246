"""lm-evaluation-harness through the server (`make test-harness`): its scores equal those of the engine alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptworks.infer import Engine, SamplingSettings
from gptworks.special_tokens import special_tokens
from serving import KEY, running, tiny_engine

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

DOCUMENTS = [
    {"text": f"{i} and {i} make", "choices": [f"{2 * i}", f"{i}", "nothing at all"], "label": i % 3} for i in range(8)
]
TASKS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "label", "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """Return the harness's questions and answers, in the order of the documents."""
    (file,) = folder.glob(f"**/samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def loglikelihood(engine: Engine, text: str, more: str) -> float:
    given = engine.score(text + more)
    return math.fsum(one.logprob for one in given[len(text.encode()) :] if one is not None)


def test_local_completions(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'gptworks[harness]'")
    from gptworks.tokenizer import save_tokenizer

    alone, data = tiny_engine(), tmp_path / "data.jsonl"
    save_tokenizer(alone.tokenizer, tmp_path / "tokenizer")
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        tree = {"task": name, "dataset_path": "json", "test_split": "test", **task}
        tree["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(tree))
    environment = {
        **os.environ, "OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    with running({"tiny": tiny_engine(n_slots=8)}) as server:
        model_arguments = {
            "model": "tiny", "base_url": f"{server.url}/v1/completions", "num_concurrent": 4,
            "tokenizer": tmp_path / "tokenizer", "max_length": 128,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", ",".join(TASKS),
            "--model_args", ",".join(f"{name}={value}" for name, value in model_arguments.items()),
            "--include_path", tmp_path, "--output_path", tmp_path / "out", "--log_samples",
        ]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    n_chosen = 0
    for sample, document in zip(samples(tmp_path / "out", "choose"), DOCUMENTS, strict=True):
        expected = [loglikelihood(alone, document["text"], f" {choice}") for choice in document["choices"]]
        given = [float(response[0][0]) for response in sample["resps"]]
        assert given == pytest.approx(expected, abs=1e-3)
        n_chosen += expected.index(max(expected)) == document["label"]
    (results,) = (tmp_path / "out").glob("**/results_*.json")
    assert json.loads(results.read_text())["results"]["choose"]["acc,none"] == n_chosen / len(DOCUMENTS)
    for sample, document in zip(samples(tmp_path / "out", "rolling"), DOCUMENTS, strict=True):
        ids = [special_tokens(alone.tokenizer).eos or 0, *alone.encode_prompt(document["text"])]
        expected = math.fsum(one.logprob for one in alone.score(ids)[1:] if one is not None)
        assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=1e-3)
    settings = SamplingSettings(temperature=0, max_tokens=12, stop=("e",))
    for sample, document in zip(samples(tmp_path / "out", "write"), DOCUMENTS, strict=True):
        assert sample["resps"][0][0] == alone.generate(document["text"], settings)
