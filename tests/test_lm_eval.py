"""Runs in lm-evaluation-harness: the same scores as its own `hf` model gives the exported folder."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import hf
import tiny
from gptworks.config import ModelConfig
from gptworks.infer.engine import load
from gptworks.interop.huggingface import export_huggingface

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'gptworks[harness]'")

WORDS = "the a cat dog bird sat ran on under mat tree quickly slowly and then it was 12 34 , .".split()

TASKS = {
    "last_word": """
        output_type: loglikelihood
        doc_to_text: "{{context}}"
        doc_to_target: " {{word}}"
        metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}, {metric: acc}]
    """,
    "choices": """
        output_type: multiple_choice
        doc_to_text: "Question: {{context}}\\nAnswer:"
        doc_to_choice: "{{options}}"
        doc_to_target: "{{right}}"
        num_fewshot: 2
        metric_list: [{metric: acc}, {metric: acc_norm}]
    """,
    "continue": """
        output_type: generate_until
        doc_to_text: "{{context}}"
        doc_to_target: "{{written}}"
        generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
    "whole_texts": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{long}}"
        metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
    """,
}


def write_tasks(folder: Path, written: list[str]) -> list[Path]:
    """Four local tasks over one JSONL; contexts of all lengths, some beyond the model's."""
    chance = random.Random(0)
    items = []
    for text in written:
        length = chance.choice([3, 8, 20, 60])
        items.append(
            {
                "context": " ".join(chance.choices(WORDS, k=length)), "word": chance.choice(WORDS),
                "options": [" ".join(chance.choices(WORDS, k=chance.randint(1, 3))) for _ in range(3)],
                "right": chance.randrange(3), "written": text, "long": " ".join(chance.choices(WORDS, k=50)),
            }
        )  # fmt: skip
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    for name, text in TASKS.items():
        lines = "\n".join(line[8:] for line in text.strip("\n").splitlines())
        head = (
            f"task: {name}\ndataset_path: json\ntest_split: train\nfewshot_split: train\n"
            f"dataset_kwargs: {{data_files: {folder / 'items.jsonl'}, cache_dir: {folder / 'cache'}}}\n"
        )
        (folder / f"{name}.yaml").write_text(head + lines + "\n", encoding="utf-8")
    return [folder / f"{name}.yaml" for name in TASKS]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with random weights, and its export."""
    folder = tmp_path_factory.mktemp("harness")
    config = ModelConfig(vocab_size=257, context_length=128, n_layers=2, d_model=32, n_heads=2, position="learned")
    run = hf.make_run(folder / "run", hf.random_model(config), hf.byte_tokenizer("<|endoftext|>"))
    export_huggingface(run, folder / "hf")
    return run, folder / "hf"


def evaluate(model: Any, files: list[Path]) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(files[0].parent), include_defaults=False)
    return simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def test_scores_equal_those_of_the_harness_own_model_on_the_export(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    from gptworks.interop.lm_eval import GptworksLM

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    run, export = places
    ours = GptworksLM(run=str(run))
    theirs = HFLM(pretrained=str(export), device="cpu", batch_size=4, dtype="float32")
    files = write_tasks(tmp_path, ["?"] * 24)
    first = evaluate(theirs, files)
    made = [one["resps"][0][0] for one in sorted(first["samples"]["continue"], key=lambda one: one["doc_id"])]
    files = write_tasks(tmp_path, [text if i % 3 else "no" for i, text in enumerate(made)])  # a score between 0 and 1
    expected, found = evaluate(theirs, files), evaluate(ours, files)
    for task, figures in expected["results"].items():
        for name, value in figures.items():
            if "acc" in name or "exact_match" in name:
                assert found["results"][task][name] == value, (task, name)
            elif "," in name and isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
        pairs = zip(expected["samples"][task], found["samples"][task], strict=True)
        for theirs_one, ours_one in pairs:
            assert theirs_one["doc_id"] == ours_one["doc_id"]
            if task == "continue":
                assert ours_one["resps"] == theirs_one["resps"]
            else:
                assert numbers(ours_one["resps"]) == pytest.approx(numbers(theirs_one["resps"]), abs=2e-4)
    assert found["results"]["continue"]["exact_match,none"] == 16 / 24
    assert 0 < found["results"]["choices"]["acc,none"] < 1


def numbers(tree: Any) -> list[float]:
    """The numbers in nested lists, truths as 0 and 1."""
    if isinstance(tree, list | tuple):
        return [number for one in tree for number in numbers(one)]
    return [{"True": 1.0, "False": 0.0}[tree] if tree in ("True", "False") else float(tree)]
