"""Evaluating any text, calibration, memorization and the command, against float64 arithmetic and plain Python."""

import hashlib
import json
import math
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import hf
import tiny
from gptworks.api import evaluate
from gptworks.checkpoint import load_run
from gptworks.cli import main
from gptworks.config import CharTokenizer
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation import memorization
from gptworks.evaluation.calibration import measure_calibration
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.memorization import find_copied, measure_memorization
from gptworks.evaluation.text import PASSAGE_CHARACTERS, evaluate_text
from gptworks.infer.engine import Engine
from gptworks.model.gpt import GPT
from gptworks.tokenizer import load_tokenizer, train_tokenizer
from gptworks.training.checkpoint_files import save_checkpoint

TEXT = "The naïve café, née 1899 — “quoted”; 日本語 and more.\n\n" * 60
BYTES = hf.byte_tokenizer("<|endoftext|>")


def model_of(vocab_size: int, context_length: int = 32) -> GPT:
    config = tiny.plain_model(vocab_size=vocab_size, context_length=context_length, n_layers=2, d_model=32, n_heads=2)
    return hf.random_model(config)


@torch.no_grad()
def nats_of(model: GPT, ids: list[int], stride: int) -> list[float]:
    """Return the nats of each token but the first by definition, in float64: one window at a time, each token once."""
    exact = GPT(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    context, cost = model.config.context_length, []
    while len(cost) < len(ids) - 1:
        end = min(len(ids) - 1, len(cost) + (stride if cost else context))
        start = len(cost) - (context - stride) if cost else 0
        rows = exact(torch.tensor([ids[start:end]]))[0].softmax(-1)
        cost += [-math.log(rows[i - 1 - start, ids[i]].item()) for i in range(len(cost) + 1, end + 1)]
    return cost


@pytest.mark.parametrize("stride", [None, 32, 7])
def test_a_text_costs_what_float64_arithmetic_says(stride: int | None) -> None:
    model = model_of(257)
    ids = [0, *BYTES.encode(TEXT, add_special_tokens=False).ids]
    cost = nats_of(model, ids, stride or 16)
    found = evaluate_text(model, BYTES, TEXT, stride=stride)
    n_bytes = len(TEXT.encode("utf-8"))
    assert found.report.n_tokens == n_bytes == len(cost)
    assert found.report.loss == pytest.approx(sum(cost) / n_bytes, rel=1e-6)
    assert found.report.perplexity == pytest.approx(math.exp(sum(cost) / n_bytes), rel=1e-5)
    assert found.report.bits_per_byte == pytest.approx(sum(cost) / math.log(2) / n_bytes, rel=1e-6)
    measured = found.measured()
    assert measured["bits per byte"].value == pytest.approx(found.report.bits_per_byte, rel=1e-9)
    assert measured["perplexity"].value == pytest.approx(found.report.perplexity, rel=1e-9)
    assert measured["loss"].low < found.report.loss < measured["loss"].high
    assert [(part.first, part.last) for part in found.positions] == [(i, i + 3) for i in range(1, 33, 4)]


def test_passages_are_the_same_whatever_the_tokenizer() -> None:
    """Bytes, characters, and bytes without a start token, where the first byte is neither predicted nor counted."""
    sizes = [len(TEXT[i : i + PASSAGE_CHARACTERS].encode("utf-8")) for i in range(0, len(TEXT), PASSAGE_CHARACTERS)]
    characters = train_tokenizer(CharTokenizer(type="char"), iter([TEXT]))
    for tokenizer, n_tokens, unseen in (
        (BYTES, sum(sizes), 0), (characters, len(TEXT), 0), (hf.byte_tokenizer(), sum(sizes) - 1, 1)
    ):  # fmt: skip
        passages = evaluate_text(model_of(257), tokenizer, TEXT).passages
        assert passages[:, 2].tolist() == [sizes[0] - unseen, *sizes[1:]]
        assert passages[:, 1].sum() == n_tokens


def test_bits_per_byte_are_not_claimed_for_a_tokenizer_that_loses_text() -> None:
    characters = train_tokenizer(CharTokenizer(type="char"), iter(["abc \n"]))
    found = evaluate_text(model_of(characters.get_vocab_size()), characters, "a b c é " * 20)
    assert found.report.text_bytes is None and "bits per byte" not in found.measured()
    with pytest.raises(UserError, match="empty"):
        evaluate_text(model_of(257), BYTES, "")


@torch.no_grad()
def test_calibration_by_its_definition() -> None:
    model = model_of(40)
    tokens = torch.randint(40, (6, 33), generator=torch.Generator().manual_seed(1))
    measured, bins = measure_calibration(model, [(row[:-1], row[1:]) for row in tokens])
    probability, guess = model(tokens[:, :-1]).double().softmax(-1).max(-1)
    confidence, hit = probability.flatten().tolist(), (guess == tokens[:, 1:]).flatten().tolist()
    error = 0.0
    for low, high in pairwise([i / 15 for i in range(16)]):
        inside = [i for i, c in enumerate(confidence) if low < c <= high]
        one = bins[round(low * 15)]
        assert one["n_tokens"] == len(inside)
        if inside:
            accuracy, mean = sum(hit[i] for i in inside) / len(inside), sum(confidence[i] for i in inside) / len(inside)
            assert (one["accuracy"], one["confidence"]) == pytest.approx((accuracy, mean), rel=1e-6)
            error += abs(accuracy - mean) * len(inside) / len(confidence)
    assert measured["calibration error"].value == pytest.approx(error, rel=1e-6)
    assert measured["next-token accuracy"].value == pytest.approx(sum(hit) / len(hit))


# ------------------------------------------------------------------------------------------------- memorization


class Given:
    """Tokens in memory in place of a split."""

    split = "train"

    def __init__(self, tokens: Any) -> None:
        self.tokens = np.asarray(tokens, dtype=np.int64)
        self.n_tokens = len(self.tokens)

    def read(self, start: int, length: int) -> Any:
        return self.tokens[start : start + length]


def test_copied_ngrams_are_those_that_stand_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also across the borders of the chunks that are read, and with hash collisions."""
    monkeypatch.setattr(memorization, "_PIECE_TOKENS", 50)
    chance = np.random.default_rng(0)
    training = chance.integers(0, 3, 1000)
    texts = [chance.integers(0, 3, 40), training[45:85].copy(), training[-20:].copy(), chance.integers(0, 3, 7)]
    for multiplier in (memorization._MULTIPLIERS, (0,) * 5):
        monkeypatch.setattr(memorization, "_MULTIPLIERS", multiplier)
        found = find_copied(Given(training), texts, (4, 8, 16))
        for n in (4, 8, 16):
            grams = {tuple(training[i : i + n]) for i in range(len(training) - n + 1)}
            for text, hits in zip(texts, found[n], strict=True):
                assert hits.tolist() == [tuple(text[i : i + n]) in grams for i in range(len(text) - n + 1)]
    assert 0 < found[8][0].mean() < 1 and found[16][1].all() and found[16][2].all()


def test_a_model_that_repeats_its_training_text_is_found_out(trained_run: Path) -> None:
    run = EvaluatedRun(trained_run)
    folder = run.prepared.folder
    training, held_out = TokenShards(folder, "train"), TokenShards(folder, "validation")
    measured = measure_memorization(run.engine, training, held_out, n_texts=12, prompt_tokens=8, text_tokens=40)
    copied = {int(n) for name in measured for n in re.findall(r"generated (\d+)-grams", name)}
    n_grams = measured["generated 8-grams copied"].statistics[:, 1].tolist()
    assert copied == {8, 16, 32} and n_grams == [33.0] * len(n_grams)
    assert measured["generated 8-grams copied"].value > 0.3
    assert measured["generated 8-grams copied"].value > measured["generated 32-grams copied"].value
    assert measured["training loss"].value < measured["held-out loss"].value
    untaught = Engine(hf.random_model(run.model.config), run.tokenizer)
    other = measure_memorization(untaught, training, held_out, n_texts=12, prompt_tokens=8, text_tokens=40)
    assert other["generated 8-grams copied"].value == 0.0
    real = "held-out 8-grams copied"
    assert other[real].value == measured[real].value > 0.3


# ------------------------------------------------------------------------------------------------------ command


def test_the_command_keeps_its_results_and_compares_runs(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str | Path) -> tuple[int, str, str]:
        """Run the command line in this process; return the exit code, standard output and standard error."""
        monkeypatch.setattr(sys, "argv", ["gptworks", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(trained_run, first)
    shutil.copytree(trained_run, second)
    (tmp_path / "given.txt").write_text(tiny.TEXT[:5000], encoding="utf-8")
    items = [
        {"line": f"line {i}: the quick brown", "options": ["fox", "dog", "lazy"], "answer": "fox"} for i in range(30)
    ]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    settings = {"type": "multiple_choice", "data": "items.jsonl", "prompt": "line", "choices": "options"}
    (tmp_path / "foxes.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    given = ("--text", tmp_path / "given.txt", "--task", tmp_path / "foxes.yaml", "--shots", "0", "--shots", "1")
    code, out, err = command("evaluate", first, *given, "--calibration", "--memorization", "--json")
    assert code == 0, err
    found = {one["name"]: one for one in json.loads(out)}
    assert list(found) == ["text-given", "foxes", "foxes-1-shot", "calibration", "memorization"]
    assert found["foxes"]["metrics"]["accuracy"]["value"] > 0.8
    assert found["text-given"]["details"]["positions"][0]["bits_per_byte"] > 0
    card = (first / "model-card.md").read_text(encoding="utf-8")
    assert "## Results" in card and "| foxes-1-shot | 1 | 30 | accuracy |" in card
    weights = load_run(second).model.state_dict()
    weights["token_embedding.weight"] += 0.1 * torch.randn_like(weights["token_embedding.weight"])
    shutil.rmtree(second / "checkpoints")
    save_checkpoint(second, 7, weights, {}, {"best_step": 7})
    _, out, _ = command("evaluate", second, *given[:4], "--no-save")
    assert "bits per byte" in out and not (second / "evaluations").exists()
    code, _, err = command("compare", first, second, "--evaluations")
    assert code == 2 and "no evaluation of the same questions" in err
    assert command("evaluate", second, *given[:4])[0] == 0
    compared = json.loads(command("compare", first, second, "--evaluations", "--json")[1])["findings"]
    bits = next(one for one in compared if one["metric"] == "bits per byte")
    assert bits["difference"]["low"] > 0 and bits["certain"]  # the same passages, each dearer for the second
    assert bits["difference"]["value"] == pytest.approx(bits["second_value"] - bits["first_value"])
    assert {one["evaluation"] for one in compared} == {"text-given", "foxes"}
    assert command("report", first)[0] == 0
    assert "Loss by position" in (first / "report.html").read_text(encoding="utf-8")
    code, out, err = command("evaluate", first, "--shots", "1")
    assert (code, out) == (2, "") and "--shots is for tasks" in err


def test_a_moved_run_is_measured_on_the_shards_it_was_trained_on(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The raw texts may be gone; shards that have changed on disk are an error."""
    tree = yaml.safe_load((trained_run / "recipe.yaml").read_text())
    before = EvaluatedRun(trained_run, device="cpu").validation()
    moved, shards = tmp_path / "moved", tmp_path / "shards"
    shutil.copytree(trained_run, moved)
    shutil.copytree(Path(tree["data"]["cache_dir"]), shards)
    tree["data"] |= {"sources": [{"type": "text", "path": str(tmp_path / "gone")}], "cache_dir": str(shards)}
    (moved / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert EvaluatedRun(moved, device="cpu").validation() == before

    tree["data"]["cache_dir"] = "shards"  # relative, as it is by default: to the folder in which the run was made
    (moved / "recipe.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert EvaluatedRun("../moved", device="cpu").validation() == before
    away = shutil.copytree(moved, tmp_path / "1" / "2" / "3" / "4" / "away")
    with pytest.raises(UserError, match=r"gone: no such file .*data\.cache_dir=FOLDER.*--text FILE"):
        EvaluatedRun(away, device="cpu").validation()
    assert EvaluatedRun(away, device="cpu", overrides=[f"data.cache_dir={shards}"]).validation() == before

    [file] = shards.glob("*/validation-00000.tokens")
    content = bytearray(file.read_bytes())
    content[2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"validation-00000\.tokens is corrupt"):
        EvaluatedRun(moved, device="cpu").validation()


def test_a_byte_order_mark_is_no_text(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line 1 ends\n" * 9)
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + b"line 1 ends\n" * 9)
    found = evaluate(trained_run, text=[tmp_path / "a.txt", tmp_path / "b.txt"], save=False).evaluations
    assert found[0].metrics["bits per byte"].value == found[1].metrics["bits per byte"].value
    assert found[0].fingerprint == found[1].fingerprint


def test_line_ends_of_a_text_are_measured_as_they_are(trained_run: Path, tmp_path: Path) -> None:
    contents = b"the quick brown\r\nfox\r\n" * 20
    (tmp_path / "dos.txt").write_bytes(contents)
    done = tiny.gptworks("evaluate", trained_run, "--text", tmp_path / "dos.txt", "--no-save", "--json")
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["fingerprint"] == hashlib.sha256(contents).hexdigest()
    model = load_run(trained_run).model
    tokenizer = load_tokenizer(trained_run / "tokenizer")
    expected = evaluate_text(model, tokenizer, contents.decode()).measured()["bits per byte"].value
    assert found["metrics"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-3)
