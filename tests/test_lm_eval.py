"""Runs in lm-evaluation-harness: the same scores as from its own `hf` model with the exported folder."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.infer.engine import Engine, load
from gptworks.interop.huggingface import export_huggingface

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'gptworks[harness]'")

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
    """Write four tasks over one JSONL file of lines like the run's training text; some contexts are longer than the
    model's."""
    chance = random.Random(0)
    items = []
    for text in written:
        n = chance.randrange(600)
        line = f"line {n}: the quick brown fox jumps over the lazy dog, {n * n} times.\n"
        words = line.split()
        cut = chance.randrange(2, len(words))
        items.append(
            {
                "context": line * chance.choice([0, 0, 1, 5]) + " ".join(words[:cut]), "word": words[cut],
                "options": [words[cut], *chance.sample(words, 2)], "right": 0, "written": text,
                "long": line * chance.randint(1, 6),
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
def export(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "hf"
    export_huggingface(trained_run, folder)
    return folder


def evaluate(model: Any, files: list[Path]) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(files[0].parent), include_defaults=False)
    return simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


@pytest.mark.harness
def test_scores_equal_those_of_the_harness_own_model_on_the_export(
    trained_run: Path, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    from gptworks.interop.lm_eval import GptworksLM, run_harness

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    ours = GptworksLM(run=str(trained_run))
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
                assert found["results"][task][name] == pytest.approx(value, rel=1e-6), (task, name)
        pairs = zip(expected["samples"][task], found["samples"][task], strict=True)
        for theirs_one, ours_one in pairs:
            assert theirs_one["doc_id"] == ours_one["doc_id"]
            if task == "continue":
                assert ours_one["resps"] == theirs_one["resps"]
            else:
                assert numbers(ours_one["resps"]) == pytest.approx(numbers(theirs_one["resps"]), rel=2e-6, abs=2e-5)
    assert found["results"]["continue"]["exact_match,none"] == 16 / 24
    kept = {one.name: one for one in run_harness(ours.engine, [str(file) for file in files], run="run", step=200)}
    choices = kept["harness-choices"]
    assert choices.metrics["acc"].value == found["results"]["choices"]["acc,none"] and choices.shots == 2
    assert choices.metrics["acc"].statistics.shape == (24, 2)
    assert kept["harness-last_word"].metrics["perplexity"].value == found["results"]["last_word"]["perplexity,none"]
    for task in ("last_word", "choices"):
        assert 0 < found["results"][task]["acc,none"] < 1


PAIRS = """
task: {name}
dataset_path: json
test_split: train
dataset_kwargs: {{data_files: {file}, cache_dir: {cache}}}
output_type: multiple_choice
doc_to_text: ""
doc_to_target: 0
doc_to_choice: "{{{{[sentence_good, sentence_bad]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GROUP = """
group: pairs
task: [right, wrong]
aggregate_metric_list: [{{metric: acc, aggregation: mean, weight_by_size: {by_size}}}]
"""


def write_pairs(folder: Path, by_size: bool) -> Path:
    """Write a group of two tasks in the shape of BLiMP; a pair has the same tokens in another order. In `wrong`, the
    lines of the run's text are called bad."""
    order = [(f"line {n}: the quick brown fox jumps", f"line {n}: the brown quick fox jumps") for n in range(3, 90, 15)]
    pairs = {"right": order[:4], "wrong": [(second, first) for first, second in order[4:]]}
    for name, sentences in pairs.items():
        file = folder / f"{name}.jsonl"
        lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in sentences]
        file.write_text("\n".join(lines), encoding="utf-8")
        text = PAIRS.format(name=name, file=file, cache=folder / "cache")
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "pairs.yaml").write_text(GROUP.format(by_size=by_size), encoding="utf-8")
    return folder / "pairs.yaml"


@pytest.mark.harness
@pytest.mark.parametrize("by_size", [True, False])
def test_minimal_pairs_tie_at_half_where_the_model_knows_nothing(
    by_size: bool, trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptworks.interop.lm_eval import run_harness

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    file, engine = write_pairs(tmp_path, by_size), load(trained_run)
    found = {one.name: one for one in run_harness(engine, [str(file)], run="run", step=200)}
    assert list(found) == ["harness-pairs", "harness-right", "harness-wrong"]
    assert [one.n_items for one in found.values()] == [6, 4, 2]
    assert [one.metrics["acc"].value for one in found.values()] == pytest.approx([4 / 6 if by_size else 0.5, 1, 0])
    for one in found.values():
        assert one.metrics["acc, ties shared"].value == one.metrics["acc"].value, "no sentence ties with another"
        assert len(one.metrics["acc"].statistics) == one.n_items
    ignorant = load(trained_run)
    torch.nn.init.zeros_(ignorant.model.head_weight)
    ignorant = Engine(ignorant.model, ignorant.tokenizer)
    for one in run_harness(ignorant, [str(file)], run="run", step=0):
        assert one.metrics["acc"].value == 1.0, "the harness takes the first"
        assert one.metrics["acc, ties shared"].value == pytest.approx(0.5)
        assert one.fingerprint == found[one.name].fingerprint
    other = run_harness(engine, [str(file)], run="run", step=200, limit=2)
    assert {one.fingerprint for one in other}.isdisjoint(one.fingerprint for one in found.values() if one.n_items > 2)


BLANKS = """
task: blanks
dataset_path: json
test_split: train
dataset_kwargs: {{data_files: {file}, cache_dir: {cache}}}
output_type: multiple_choice
doc_to_text: "{{{{right}}}}"
doc_to_target: " jumps"
doc_to_choice: "{{{{[first, second]}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.harness
def test_contexts_of_one_continuation_have_no_shared_ties(trained_run: Path, tmp_path: Path) -> None:
    """In tasks like Winogrande, the choices are contexts, and the target is what follows each of them."""
    from gptworks.interop.lm_eval import run_harness

    lines = [{"first": f"line {n}: the fox", "second": f"line {n}: fox the", "right": n % 2} for n in range(6)]
    file, task = tmp_path / "blanks.jsonl", tmp_path / "blanks.yaml"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    task.write_text(BLANKS.format(file=file, cache=tmp_path / "cache"), encoding="utf-8")
    [found] = run_harness(load(trained_run), [str(task)], run="run", step=200)
    assert list(found.metrics) == ["acc"] and found.n_items == 6


def numbers(tree: Any) -> list[float]:
    """Return the numbers in nested lists; booleans become 0 and 1."""
    if isinstance(tree, list | tuple):
        return [number for one in tree for number in numbers(one)]
    return [{"True": 1.0, "False": 0.0}[tree] if tree in ("True", "False") else float(tree)]
