"""Rates, utilization, norms by layer and compiled blocks: the figures that a run reports."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from gptworks.device import PROBE_SECONDS, choose_precision, product_rate
from gptworks.model.gpt import GPT
from gptworks.planning.flops import forward_flops
from gptworks.presets import preset
from gptworks.recipe import parse_recipe
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.loop import train
from gptworks.training.objectives.next_token import next_token
from gptworks.training.record import speed
from gptworks.training.record.metrics import read_metrics
from gptworks.training.record.speed import Throughput
from gptworks.training.step import LayerNorms, TrainStep

CPU = torch.device("cpu")


def test_rates_are_of_the_time_since_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    model = preset("gpt2-mini")
    monkeypatch.setattr(speed, "product_rate", lambda device, dtype: 1e12)
    measured = Throughput(model, CPU, choose_precision("fp32", CPU), n_devices=2)
    measured.start(tokens=1000, seconds=50.0)  # what a run had behind it when it was resumed
    first = measured.pace(1500, 55.0)
    assert (first.tokens_per_second, first.utilization) == (100.0, None)  # 5 seconds: the device is not measured yet
    second = measured.pace(2500, 60.0)
    flops = 200 * forward_flops(model).training_per_token_dense
    assert (second.tokens_per_second, second.flops_per_second) == (200.0, flops)
    assert second.utilization == pytest.approx(flops / 2e12)


def test_a_device_that_was_busy_when_it_was_measured_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run can use more than 100% of a device."""
    model = preset("gpt2-mini")
    flops = 100 * forward_flops(model).training_per_token_dense
    rates = [flops / 2, flops / 1.5, 4 * flops]
    monkeypatch.setattr(speed, "product_rate", lambda device, dtype: rates.pop(0))
    measured = Throughput(model, CPU, choose_precision("fp32", CPU), n_devices=1)
    found = [measured.pace(1000 * n, 10.0 * n).utilization for n in range(1, 4)]
    assert found == [None, None, pytest.approx(1 / 4)]


def test_measuring_the_device_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert product_rate(CPU, torch.float32) > 1e8
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("flops", "largest"), [(1e12, 2048), (1e9, 512), (1e6, 256)])
def test_a_slow_device_is_measured_by_smaller_products(
    flops: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a device that takes a minute for a large product, and a fake clock."""
    clock, sides = [0.0], []

    def product(a: Tensor, b: Tensor) -> None:
        sides.append(len(a))
        clock[0] += 2 * len(a) ** 3 / flops

    monkeypatch.setattr("gptworks.device.dispatch.product", product)
    monkeypatch.setattr("gptworks.device.time.perf_counter", lambda: clock[0])
    assert product_rate(CPU, torch.bfloat16) == pytest.approx(flops)
    assert sides[-1] == max(sides) == largest
    if largest > 256:
        assert clock[0] < 6 * PROBE_SECONDS


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_norms_by_layer_are_those_of_outputs_and_gradients(checkpointing: str) -> None:
    torch.manual_seed(0)
    model = GPT(preset("gpt2-mini").model_copy(update={"n_layers": 3, "vocab_size": 50, "context_length": 16})).train()
    model.activation_checkpointing = checkpointing
    parallel = Parallel(tiny.plain_training(max_steps=1))
    parallel.place(model, CPU)
    outputs: list[list[Tensor]] = []

    def keep(module: nn.Module, inputs: object, output: tuple[Tensor, None]) -> None:
        outputs[-1].append(output[0].detach())

    for block in model.blocks:
        block.register_forward_hook(keep)
    watch = LayerNorms(model, parallel, every=10)
    for step in (8, 9):  # the tenth step is reported
        watch.begin_step(step)
        for _ in range(2):  # micro-batches: gradients of both, outputs of the first
            outputs.append([])
            tokens = torch.randint(50, (2, 16))
            next_token(model, (tokens, tokens)).objective.backward()  # type: ignore[no-untyped-call]
        seen = watch.figures()
        if step == 8:
            assert not seen
    rms = [x.double().square().mean().sqrt().item() for x in outputs[2][:3]]
    assert seen["activation_rms_by_layer"] == pytest.approx(rms, rel=1e-4)
    norms = [
        math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters() if p.grad is not None))
        for block in model.blocks
    ]
    assert seen["gradient_norm_by_layer"] == pytest.approx(norms, rel=1e-4)
    assert not watch.figures()


def test_a_run_records_them_at_the_steps_it_reports(tmp_path: Path) -> None:
    train(parse_recipe(tiny.recipe_tree(tmp_path, max_steps=4, log_every=2)))
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert len(row["activation_rms_by_layer"]) == len(row["gradient_norm_by_layer"]) == 2
        assert math.hypot(*row["gradient_norm_by_layer"]) < row["grad_norm"]
        assert row["flops_per_second"] > 0


# One block of few kernels, since each takes a second or more to compile.
ONE_BLOCK: dict[str, Any] = {
    "n_layers": 1, "qk_norm": False, "position": "learned", "dropout_residual": 0.0, "dropout_attention": 0.0,
}  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_blocks_train_and_evaluate_as_eager_ones() -> None:
    model = tiny.plain_model(
        vocab_size=43, context_length=32, d_model=32, n_heads=2, norm="rmsnorm", mlp="relu2", **ONE_BLOCK
    )
    tokens = torch.randint(43, (4, 33), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses: dict[str, list[float]] = {}
    for setting in ("none", "block"):
        settings = tiny.plain_training(max_steps=3, batch_size=4, learning_rate=0.01, compile=setting)
        torch.manual_seed(0)
        parallel = Parallel(settings)
        placed = parallel.place(GPT(model).train(), CPU)
        step = TrainStep(placed, settings, next_token, choose_precision("fp32", CPU), parallel)
        losses[setting] = []
        for _ in range(3):
            losses[setting].append(step.accumulate([batch], batch[1].numel()).loss)
            step.apply(step.gradient_norm())
        with torch.no_grad():
            losses[setting].append(next_token(placed.eval(), batch).loss.item() / batch[1].numel())
    assert losses["block"] == pytest.approx(losses["none"], rel=1e-5)
    assert losses["none"][-1] < losses["none"][0] - 0.01


def test_a_run_of_compiled_blocks_evaluates_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Blocks are traced and differentiated as for compilation, then run without a compiler."""
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled(self, backend="aot_eager", **options))
    losses = {}
    for setting in ("none", "block"):
        folder = tmp_path / setting
        folder.mkdir()
        tree = tiny.recipe_tree(
            folder, max_steps=3, compile=setting, precision="fp32", sample_every=3, sample_prompts=["line "]
        )
        tree["model"] |= ONE_BLOCK
        train(parse_recipe(tree))
        rows = list(read_metrics(folder / "run" / "metrics.jsonl"))
        losses[setting] = [row["loss"] for row in rows if "loss" in row]
        assert [row["text"] for row in rows if row["kind"] == "sample"]
    assert losses["block"] == pytest.approx(losses["none"], rel=1e-5)
    assert not [str(warning.message) for warning in recwarn if "Dynamo" in str(warning.message)]
