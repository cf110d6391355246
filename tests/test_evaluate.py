"""Loss, perplexity and bits per byte against float64 arithmetic, Hugging Face and the command-line compressors."""

import itertools
import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tiny
from gptworks.config import IGNORED, BPETokenizer
from gptworks.data.batches import evaluation_windows
from gptworks.data.prepare import prepare
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation import loss as loss_module
from gptworks.evaluation.loss import LossReport, compressor_bits_per_byte, evaluate_by_position, evaluate_loss, watched
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train

CONTEXT, VOCABULARY = 12, 40


def random_model(**settings: Any) -> GPT:
    torch.manual_seed(0)
    base = {
        "vocab_size": VOCABULARY,
        "context_length": CONTEXT,
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "init_std": 0.3,
    }
    return GPT(tiny.plain_model(**base | settings))


def windows(*lengths: int, ignore: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for length in lengths:
        inputs, targets = torch.randint(VOCABULARY, (2, length), generator=generator)
        targets[torch.rand(length, generator=generator) < ignore] = IGNORED
        pairs.append((inputs, targets))
    return pairs


@torch.no_grad()
def independent(model: GPT, pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Return the nats and the number of targets by definition: one window at a time, all in float64."""
    exact = GPT(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    nats, count = 0.0, 0
    for inputs, targets in pairs:
        probabilities = exact(inputs[None])[0].softmax(-1)
        for row, target in zip(probabilities, targets.tolist(), strict=True):
            if target != IGNORED:
                nats -= math.log(row[target].item())
                count += 1
    return nats, count


@pytest.mark.parametrize("batch_tokens", [1, 30, 4096])
@pytest.mark.parametrize("ignore", [0.0, 0.5])
def test_loss_equals_float64_arithmetic_however_windows_are_grouped(
    monkeypatch: pytest.MonkeyPatch, batch_tokens: int, ignore: float
) -> None:
    monkeypatch.setattr(loss_module, "BATCH_TOKENS", batch_tokens)
    model, pairs = random_model(), windows(12, 12, 12, 12, 5, 12, 1, ignore=ignore)
    nats, count = independent(model, pairs)
    report = evaluate_loss(model, pairs, text_bytes=321)
    assert report.n_tokens == count
    assert report.loss == pytest.approx(nats / count, rel=1e-6)
    assert report.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert report.bits_per_byte == pytest.approx(nats / math.log(2) / 321, rel=1e-6)


def test_windows_may_come_as_batches() -> None:
    model, pairs = random_model(), windows(12, 12, 12)
    stacked = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    assert evaluate_loss(model, [stacked]).loss == pytest.approx(evaluate_loss(model, pairs).loss, rel=1e-6)


def test_loss_equals_hugging_faces() -> None:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=CONTEXT)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = random_model(position="learned", mlp="gelu_tanh", attention_bias=True, mlp_bias=True)
    renamed = {
        "token_embedding.weight": "wte.weight", "position_embedding.weight": "wpe.weight", "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }  # fmt: skip
    with torch.no_grad():
        for name, value in ours.named_parameters():
            if name in renamed:
                theirs.transformer.get_parameter(renamed[name]).copy_(value)
        for block, h in zip(ours.blocks, theirs.transformer.h, strict=True):
            attention, mlp = block.attention, block.mlp
            for name in ("weight", "bias"):
                fused = torch.cat([getattr(part, name) for part in (attention.query, attention.key, attention.value)])
                getattr(h.attn.c_attn, name).copy_(fused.T if name == "weight" else fused)  # Conv1D is [in, out]
                for theirs_part, ours_part in (
                    (h.attn.c_proj, attention.out), (h.mlp.c_fc, mlp.up), (h.mlp.c_proj, mlp.down),
                ):  # fmt: skip
                    value = getattr(ours_part, name)
                    getattr(theirs_part, name).copy_(value.T if name == "weight" else value)
        text = torch.randint(VOCABULARY, (3, CONTEXT), generator=torch.Generator().manual_seed(2))
        expected = theirs(text, labels=text).loss.item()  # shifts the labels itself
    assert expected > 3
    assert evaluate_loss(ours, [(text[:, :-1], text[:, 1:])]).loss == pytest.approx(expected, rel=1e-6)


def test_evaluation_is_without_dropout_and_restores_the_mode() -> None:
    model, pairs = random_model(dropout_residual=0.5, dropout_embedding=0.5), windows(12, 12)
    first = evaluate_loss(model, pairs)
    assert first == evaluate_loss(model, pairs)
    assert model.training and all(module.training for module in model.modules())
    model.eval()
    assert evaluate_loss(model, pairs) == first
    assert not model.training


def test_evaluation_leaves_no_gradients_and_a_model_that_can_be_trained() -> None:
    model = random_model()
    evaluate_loss(model, windows(12))
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()


def test_autocast_is_used_and_stays_near_float32() -> None:
    model, pairs = random_model(), windows(12, 12, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = evaluate_loss(model, pairs)
    exact = evaluate_loss(model, pairs)
    assert half.loss != exact.loss
    assert half.loss == pytest.approx(exact.loss, rel=0.01)


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary() -> None:
    model = random_model()
    with torch.no_grad():
        model.token_embedding.weight.zero_()
    report = evaluate_loss(model, windows(12, 7))
    assert report.loss == pytest.approx(math.log(VOCABULARY), rel=1e-6)
    assert report.perplexity == pytest.approx(VOCABULARY, rel=1e-5)
    assert report.bits_per_byte is None


def test_a_report_of_a_broken_model_can_still_be_read() -> None:
    assert LossReport(1e6, 1).perplexity == math.inf
    assert math.isnan(LossReport(math.nan, 1).perplexity)


def test_nothing_to_evaluate_is_said() -> None:
    for pairs in ([], windows(12, ignore=1.1)):
        with pytest.raises(UserError, match="no token to evaluate"):
            evaluate_loss(random_model(), pairs)


def test_bits_per_byte_of_a_prepared_split(tmp_path: Path) -> None:
    """From text to bits per byte, with real shards: a uniform model needs log₂ V bits for each token but the first."""
    (tmp_path / "text.txt").write_text("the quick brown fox, the lazy dog; " * 400, encoding="utf-8")
    recipe = parse_recipe(
        {
            "model": {"context_length": CONTEXT, "n_layers": 1, "d_model": 8, "n_heads": 1},
            "tokenizer": BPETokenizer(type="bpe", vocab_size=270).model_dump(),
            "data": {
                "sources": [{"type": "text", "path": str(tmp_path / "text.txt")}],
                "cache_dir": str(tmp_path / "cache"), "processes": 1,
            },
            "train": {"max_steps": 1},
        }
    )  # fmt: skip
    shards = TokenShards(prepare(recipe).folder, "validation")
    model = random_model(vocab_size=270)
    with torch.no_grad():
        model.token_embedding.weight.zero_()
    report = evaluate_loss(model, evaluation_windows(shards, CONTEXT), text_bytes=shards.text_bytes)
    assert report.n_tokens == shards.n_tokens - 1
    assert report.bits_per_byte == pytest.approx(math.log2(270) * (shards.n_tokens - 1) / shards.text_bytes, rel=1e-6)


class Counted:
    """Tokens 0, 1, 2, … within the vocabulary."""

    split = "validation"

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def read(self, start: int, length: int) -> Any:
        return torch.arange(start, start + length).numpy() % VOCABULARY


def test_overlapping_windows_count_each_token_once() -> None:
    model, shards = random_model(), Counted(50)
    report = evaluate_loss(model, evaluation_windows(shards, CONTEXT, stride=3))
    assert report.n_tokens == 49
    shown: list[tuple[int, int]] = []
    windows = evaluation_windows(shards, CONTEXT)
    evaluate_loss(model, watched(windows, shards.n_tokens, None, lambda *each: shown.append(each)))
    assert shown[0] == (12, 49) and shown[-1] == (49, 49)
    nats, _ = independent(model, list(evaluation_windows(shards, CONTEXT, stride=3)))
    assert report.total_nats == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("n_tokens", [2, 9, 13, 14, 50])
@pytest.mark.parametrize("stride", [None, 1, 3, CONTEXT])
def test_progress_ends_with_all_targets_and_counts_each_once(n_tokens: int, stride: int | None) -> None:
    tokens = Counted(n_tokens)
    targets = [int((targets != IGNORED).sum()) for _, targets in evaluation_windows(tokens, CONTEXT, stride=stride)]
    shown: list[tuple[int, int]] = []
    windows = evaluation_windows(tokens, CONTEXT, stride=stride)
    for _ in watched(windows, n_tokens, stride, lambda *each: shown.append(each)):
        pass
    assert shown == [(done, n_tokens - 1) for done in itertools.accumulate(targets)]


def test_progress_ends_with_all_targets_if_rows_cover_fewer() -> None:
    """Of preference pairs, only the chosen answers are evaluated."""
    shown: list[tuple[int, int]] = []
    for _ in watched(windows(12, 12), 100, None, lambda *each: shown.append(each)):
        pass
    assert shown == [(12, 99), (24, 99), (99, 99)]


def test_compressors_equal_the_command_line_programs() -> None:
    """gzip(1) and xz(1) write the same streams except for headers: a file name, or a checksum 4 bytes longer or
    shorter."""
    text = Path(loss_module.__file__).read_bytes() * 3
    ours = compressor_bits_per_byte(text)
    assert list(ours) == ["gzip_9", "xz_9e"]
    for name, bits in ours.items():
        command = name.replace("_", " -")
        if shutil.which(command.split()[0]):
            n_bytes = len(subprocess.run([*command.split(), "-c"], input=text, capture_output=True, check=True).stdout)
            assert bits * len(text) / 8 == pytest.approx(n_bytes, abs=16)
        assert 0 < bits < 4
    with pytest.raises(UserError):
        compressor_bits_per_byte(b"")


@torch.no_grad()
def test_loss_by_position_equals_float64_arithmetic() -> None:
    model, pairs = random_model(), windows(12, 12, 5, 12, ignore=0.3)
    sizes = list(range(VOCABULARY))
    parts = evaluate_by_position(model, pairs, 3, token_bytes=sizes)
    assert [(part.first, part.last) for part in parts] == [(1, 4), (5, 8), (9, 12)]
    whole = [pair for pair in pairs if len(pair[0]) == CONTEXT]
    for part in parts:
        hidden = []
        for inputs, targets in whole:
            kept = torch.full_like(targets, IGNORED)
            kept[part.first - 1 : part.last] = targets[part.first - 1 : part.last]
            hidden.append((inputs, kept))
        nats, count = independent(model, hidden)
        n_bytes = sum(int(targets[targets != IGNORED].sum()) for _, targets in hidden)
        assert part.report.n_tokens == count
        assert part.report.loss == pytest.approx(nats / count, rel=1e-5)
        assert part.report.bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)


@torch.no_grad()
def test_loss_by_position_has_no_part_without_targets() -> None:
    """A context may have fewer positions than there are parts; a position may have no target or no text."""
    parts = evaluate_by_position(random_model(context_length=5), windows(5, 5))
    assert [(part.first, part.last) for part in parts] == [(i, i) for i in range(1, 6)]
    assert all(part.report.n_tokens == 2 and part.report.loss > 0 for part in parts)
    (pair,) = windows(12)
    pair[1][4:8] = IGNORED
    parts = evaluate_by_position(random_model(), [pair], 3, token_bytes=[0] * VOCABULARY)
    assert [(part.first, part.report.bits_per_byte) for part in parts] == [(1, None), (9, None)]


def test_loss_by_position_needs_a_whole_window() -> None:
    with pytest.raises(UserError, match="no whole window of context_length=12"):
        evaluate_by_position(random_model(), windows(5, 11))


def test_a_run_is_evaluated_in_a_longer_context_than_it_was_trained_with(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=2, warmup_steps=0)
    train(parse_recipe(tree))
    longer = ["model.context_length=64", "model.rope_scaling.type=yarn", "model.rope_scaling.factor=2"]
    done = tiny.gptworks("evaluate", tmp_path / "run", *longer, "--by-position", "--json")
    report = json.loads(done.stdout)
    assert [part["last"] for part in report["positions"]] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert report["positions"][-1]["bits_per_byte"] > 0
    wrong = tiny.gptworks("evaluate", tmp_path / "run", "model.d_ff=7")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "does not hold the recipe's model" in wrong.stderr
