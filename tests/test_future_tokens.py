"""Prediction of several tokens (`model.n_future_tokens`), against the definition in float64."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.cli.generate import drafter_of
from gptworks.config import ModelConfig, TrainConfig
from gptworks.device import choose_precision
from gptworks.errors import UserError
from gptworks.infer.speculate import HeadsDraft, PromptLookup
from gptworks.interop.gguf import export_gguf
from gptworks.interop.huggingface import export_huggingface
from gptworks.model.gpt import GPT
from gptworks.planning.arrange import refusal
from gptworks.planning.flops import forward_flops, training_work
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import parse_recipe
from gptworks.training.changes import check_changes
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.loop import train
from gptworks.training.objectives.next_token import Losses, next_token
from gptworks.training.record.metrics import read_metrics
from gptworks.training.step import TrainStep
from test_equivalence import random_model
from tiny import plain_model, plain_training

SHAPE: dict[str, Any] = {"vocab_size": 29, "context_length": 12, "n_layers": 2, "d_model": 16, "n_heads": 2}
WEIGHTS = (0.3, 0.7)


def double(**more: Any) -> GPT:
    """Return a model that predicts three tokens, in float64, with random parameters."""
    return random_model(plain_model(**SHAPE, n_future_tokens=3, **more)).double()


def by_definition(model: GPT, texts: list[list[int]], learned: set[tuple[int, int]]) -> list[Tensor]:
    """Return the sum of the nats of each of the three tokens, text by text, token by token.

    Args:
        learned: text and place of the tokens that are learned.
    """
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    for number, text in enumerate(texts):
        features = model.features(torch.tensor([text]))[0]
        for k in range(3):
            for place, target in enumerate(text):
                if place <= k or (number, place) not in learned:
                    continue
                x = features[place - 1 - k]
                if k:
                    y = model.future_heads[k - 1].weight @ x
                    x = x + y / (1 + torch.exp(-y))
                logits = model.head_weight @ x
                if (softcap := model.config.logit_softcap) is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                sums[k] = sums[k] + torch.logsumexp(logits, 0) - logits[target]
    return sums


def row_of(texts: list[list[int]], learned: set[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return texts packed in one row: inputs, targets and positions, [1, T] each."""
    columns = [
        (token, text[place + 1] if (number, place + 1) in learned else -100, place)
        for number, text in enumerate(texts)
        for place, token in enumerate(text)
    ]
    inputs, targets, positions = (torch.tensor([column]) for column in zip(*columns, strict=True))
    return inputs, targets, positions


@pytest.mark.parametrize("more", [{}, {"logit_softcap": 3.0, "tie_embeddings": False, "logit_divisor": 2.0}])
def test_the_loss_and_its_gradients_are_the_definition(more: dict[str, Any]) -> None:
    """Targets end with their text, and are learned where the targets of the next token are."""
    model, texts = double(**more), [[3, 9, 4, 4, 28], [7], [1, 0, 2, 5], [11, 12]]
    learned = {(n, place) for n, text in enumerate(texts) for place in range(1, len(text))} - {(0, 2), (2, 1)}
    found = next_token(model, row_of(texts, learned), future_weights=WEIGHTS)
    sums = by_definition(model, texts, learned)
    expected = sums[0] + 0.3 * sums[1] + 0.7 * sums[2]
    torch.testing.assert_close(found.objective, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.loss, sums[0].detach(), rtol=0, atol=1e-10)
    assert {name: value.item() for name, value in found.figures.items()} == pytest.approx(
        {"loss_of_token_2": sums[1].item(), "loss_of_token_3": sums[2].item()}
    )
    assert {name: count.item() for name, count in found.counts.items()} == {"loss_of_token_2": 4, "loss_of_token_3": 3}
    parameters = list(model.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters) for x in (found.objective, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_windows_of_text_are_learned_to_their_end_and_short_rows_have_fewer_tokens() -> None:
    model, window = double(), [5, 6, 7, 8, 9, 10]
    batch = torch.tensor([window[:-1]]), torch.tensor([window[1:]])
    found, sums = (
        next_token(model, batch, future_weights=WEIGHTS),
        by_definition(model, [window], {(0, i) for i in range(6)}),
    )
    assert found.loss.item() == pytest.approx(sums[0].item())
    assert found.figures["loss_of_token_3"].item() == pytest.approx(sums[2].item())
    short = next_token(model, (torch.tensor([[5]]), torch.tensor([[6]])), future_weights=WEIGHTS)
    assert short.objective.item() == pytest.approx(short.loss.item())
    assert [count.item() for count in short.counts.values()] == [0, 0]


def test_a_step_of_several_micro_batches_is_that_of_one_and_reports_each_tokens_mean() -> None:
    batch = torch.randint(29, (4, 12), generator=torch.Generator().manual_seed(0))
    config = plain_model(**SHAPE, n_future_tokens=3)

    def step_of(micro: int) -> tuple[TrainStep, Any]:
        settings = plain_training(max_steps=1, batch_size=4, micro_batch_size=micro, future_weights=WEIGHTS)
        model = random_model(config).double()

        def loss(model: GPT, rows: tuple[Tensor, ...]) -> Losses:
            return next_token(model, rows, future_weights=WEIGHTS)

        parallel = Parallel(settings)
        parallel.place(model, torch.device("cpu"))
        step = TrainStep(model, settings, loss, choose_precision("fp32", torch.device("cpu")), parallel)
        rows = [(part[:, :-1], part[:, 1:]) for part in batch.split(micro)]
        return step, step.accumulate(rows, 44)

    (one, whole), (other, parts) = step_of(4), step_of(1)
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    everywhere = {(n, place) for n in range(4) for place in range(12)}
    sums = by_definition(one.model, batch.tolist(), everywhere)
    means = {f"loss_of_token_{k + 1}": sums[k].item() / (4 * (11 - k)) for k in (1, 2)}
    assert whole.figures == parts.figures == pytest.approx(means, rel=1e-4)
    assert whole.loss == pytest.approx(sums[0].item() / 44)


def test_the_next_tokens_logits_do_not_depend_on_heads_and_all_else_begins_as_without_them() -> None:
    torch.manual_seed(0)
    plain = GPT(plain_model(**SHAPE, init="gpt2"))
    torch.manual_seed(0)
    model = GPT(plain_model(**SHAPE, init="gpt2", n_future_tokens=3))
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(tokens), plain(tokens))
    named = dict(model.named_parameters())
    assert all(torch.equal(named.pop(name), parameter) for name, parameter in plain.named_parameters())
    assert list(named) == ["future_heads.0.weight", "future_heads.1.weight"]
    assert not any(parameter.any() for parameter in named.values())
    rounded = quantize_model(model, "int8")
    assert torch.equal(rounded(tokens), quantize_model(plain, "int8")(tokens))


def test_the_flops_of_training_are_what_torch_counts() -> None:
    model = {**SHAPE, "n_future_tokens": 3, "tie_embeddings": False}
    recipe = recipe_of(model)
    for freeze in (None, {"embeddings": True, "first_blocks": 2, "patterns": ["norm.*", "*heads.1.*", "*untied*"]}):
        recipe = recipe_of(model, freeze=freeze)
        with torch.device("meta"):
            built, tokens = GPT(recipe.model), torch.zeros(1, 12, dtype=torch.long)
            for name, parameter in built.named_parameters():
                parameter.requires_grad_(recipe.freeze is None or not recipe.freeze.freezes(name))
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                next_token(built, (tokens, tokens), future_weights=(0.3, 0.3)).objective.backward()
        assert training_work(recipe).per_token * 12 == pytest.approx(counter.get_total_flops())
    flops = forward_flops(recipe.model)
    assert flops.total_dense == forward_flops(recipe.model.model_copy(update={"n_future_tokens": 1})).total_dense
    assert flops.training_per_token_dense == pytest.approx(training_work(recipe_of(model)).per_token)


def recipe_of(model: dict[str, Any], **more: Any) -> Any:
    return parse_recipe({
        "model": model, "tokenizer": {"type": "char"}, "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1}, **more,
    })  # fmt: skip


# --------------------------------------------------------------------------------------------------------- runs


def tree_of(folder: Path, name: str, n: int | None, start: str = "", **more: Any) -> dict[str, Any]:
    tree = (
        tiny.recipe_tree(folder, max_steps=2, evaluate_every=2, checkpoint_every=2, optimizer="adamw", warmup_steps=1)
        | more
    )
    tree["run_dir"] = str(folder / name)
    if start:
        del tree["tokenizer"]
        tree |= {"initialize_from": str(folder / start), "model": {}}
    if n is not None:
        tree["model"]["n_future_tokens"] = n
    return tree


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(checkpoints(folder)[0].folder / "model.safetensors")


def test_runs_start_from_others_with_more_fewer_and_no_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(parse_recipe(tree_of(tmp_path, "base", 2)))
    rows = read_metrics(tmp_path / "base" / "metrics.jsonl")
    assert all(0 < row["loss_of_token_2"] < 10 for row in rows if row["kind"] == "train")
    assert not any("loss_of_token_2" in row for row in rows if row["kind"] == "validation")
    base = weights_of(tmp_path / "base")["future_heads.0.weight"]
    assert base.any()

    def tuned(name: str, n: int | None, start: str = "base", **more: Any) -> tuple[dict[str, Tensor], str]:
        train(parse_recipe(tree_of(tmp_path, name, n, start, **more)))
        there = {key: x for key, x in weights_of(tmp_path / name).items() if key.startswith("future_heads")}
        return there, " ".join("".join(capsys.readouterr()).split())

    same, said = tuned("same", None)
    assert list(same) == ["future_heads.0.weight"] and not torch.equal(same["future_heads.0.weight"], base)
    assert "n_future_tokens" not in said
    more, said = tuned("more", 3)
    assert len(more) == 2 and "future_heads.1.weight (new, zero at first)" in said
    none, said = tuned("none", 1, "more")
    assert not none and "future_heads.0.weight, future_heads.1.weight (left out)" in said
    drafters = [drafter_of(tmp_path / name, 2, None, {}) for name in ("more", "none")]
    assert list(map(type, drafters)) == [HeadsDraft, PromptLookup]
    kept, _ = tuned("adapter", None, adapter={"rank": 2})
    assert torch.equal(kept["future_heads.0.weight"], base)
    with pytest.raises(UserError, match="n_future_tokens=3 with an adapter"):
        tuned("adapter of new ones", 3, adapter={"rank": 2})
    taught = parse_recipe(
        tree_of(tmp_path, "taught", None, "base", objective={"type": "distillation", "teacher": str(tmp_path / "base")})
    )
    assert taught.model.n_future_tokens == 1


def test_an_export_leaves_the_heads_out_and_says_so(tmp_path: Path) -> None:
    run = tiny.trained(tmp_path, steps=11, n_future_tokens=3)
    exported = export_huggingface(run, tmp_path / "hf")  # which compares it with the run, in transformers
    assert exported.verification is not None and exported.architecture == "LlamaForCausalLM"
    [note] = [note for note in exported.notes if "n_future_tokens=3" in note]
    assert "heads of 2 tokens beyond the next" in note
    assert export_gguf(run, tmp_path / "model.gguf").notes == (note,)
    assert exported.parameters == sum(x.numel() for x in load_run(run).model.parameters()) - 2 * 32**2


# ------------------------------------------------------------------------------------------------------ settings


def test_weights_are_a_third_nearly_for_each_token_and_fall_if_asked() -> None:
    recipe = recipe_of(SHAPE | {"n_future_tokens": 3})
    assert recipe.train.future_weights == (0.3, 0.3)
    falling = TrainConfig(max_steps=9, future_weights=(0.5, 0.2), future_weights_fall=True)
    assert falling.future_weights_at(0) == (0.5, 0.2) and falling.future_weights_at(1) == (0, 0)
    assert falling.future_weights_at(0.25) == pytest.approx((0.375, 0.15))


def test_a_run_whose_weights_fall_learns_with_those_of_its_step(tmp_path: Path) -> None:
    """Two runs differ only in whether the weights fall: their first step is equal, the second is not."""

    def rows(name: str, fall: bool) -> list[float]:
        tree = tree_of(tmp_path, name, 2)
        tree["train"] |= {"schedule": "constant", "max_steps": 3, "future_weights_fall": fall, "precision": "fp32"}
        train(parse_recipe(tree))
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        return [row["grad_norm"] for row in found if row["kind"] == "train"]

    constant, falling = rows("constant", False), rows("falling", True)
    assert constant[0] == falling[0] and constant[1] != falling[1]
    now, longer = (
        parse_recipe(tree_of(tmp_path, "falling", 2) | {"train": {"max_steps": steps, "schedule": "constant",
                     "future_weights_fall": True, "optimizer": "adamw"}}) for steps in (3, 5)
    )  # fmt: skip
    with pytest.raises(UserError, match="future_weights_fall, the weights of tokens beyond the next depend"):
        check_changes(now, longer)


@pytest.mark.parametrize(
    ("model", "more", "named"),
    [
        ({"n_future_tokens": 13}, {}, "n_future_tokens=13 is more than context_length=12"),
        ({"n_future_tokens": 3}, {"train": {"max_steps": 1, "future_weights": [0.3]}}, "has 1 numbers .*give 2"),
        ({}, {"train": {"max_steps": 1, "future_weights": [0.3]}}, "n_future_tokens=1: give 0"),
        ({}, {"train": {"max_steps": 1, "future_weights_fall": True}}, "future_weights_fall=true without tokens"),
        (
            {"n_future_tokens": 2},
            {"objective": {"type": "distillation", "teacher": "runs/one"}},
            "objective.type=distillation, .*set model.n_future_tokens=1",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(model: dict[str, Any], more: dict[str, Any], named: str) -> None:
    with pytest.raises((UserError, ValidationError), match=named):
        recipe_of(SHAPE | model, **more)


def test_tensor_parallel_ranks_refuse_heads_by_name() -> None:
    tensor = {"max_steps": 1, "optimizer": "adamw", "batch_size": 4, "parallel": {"tensor_parallel": 2}}
    found = refusal(recipe_of(SHAPE | {"n_future_tokens": 2}, train=tensor), 2)
    assert found is not None and "n_future_tokens=2" in found


def test_a_new_model_predicts_every_token_as_its_next() -> None:
    """Heads start as the identity: each predicts like the next token's head, scored with later targets."""
    model = GPT(ModelConfig(**SHAPE, n_future_tokens=2)).double()
    tokens = torch.randint(29, (1, 12), generator=torch.Generator().manual_seed(2))
    found = next_token(model, (tokens[:, :-1], tokens[:, 1:]), future_weights=(1.0,))
    logits = model(tokens)[0]
    later = F.cross_entropy(logits[: 12 - 2], tokens[0, 2:], reduction="sum").item()
    assert found.figures["loss_of_token_2"].item() == pytest.approx(later)
    assert math.isfinite(found.objective.item())
