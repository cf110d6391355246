"""The tracer against torch's own memory tracker, real steps, and the training loop's steps."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import tiny
from gptworks.data.prepare import prepare
from gptworks.device import choose_precision, peak_growth_bytes, reset_peak
from gptworks.errors import UserError
from gptworks.planning.memory import training_peak
from gptworks.planning.setting import Setting
from gptworks.presets import preset
from gptworks.recipe import parse_recipe, with_vocab_size
from gptworks.training.loop import Run
from gptworks.training.record.display import Display
from gptworks.training.record.metrics import MetricsLog
from gptworks.training.rehearsal import measure
from gptworks.training.rehearsal.measure import measure_speed, measure_step
from gptworks.training.rehearsal.trace import LiveBytes, Rehearsal, take, trace_step
from gptworks.training.setup import PreparedRun

CPU = torch.device("cpu")
MODEL = preset("gpt2-tiny").model_copy(update={"dropout_residual": 0.1, "dropout_attention": 0.1})
TRAIN = tiny.plain_training(max_steps=1, batch_size=4, micro_batch_size=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_live_bytes_are_what_torchs_tracker_counts(precision: str, checkpointing: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 2, "activation_checkpointing": checkpointing})
    with FakeTensorMode(), LiveBytes() as live:
        step = Rehearsal(MODEL, train, precision=precision).new_step()
        tokens = torch.zeros(2, MODEL.context_length, dtype=torch.int64)
        take(step, train, (tokens, tokens))
        tracker = MemTracker()
        tracker.track_external(step.model, *(optimizer for optimizer, _ in step.optimizer._optimizers.values()), tokens)
        live.peak_bytes = 0
        with tracker:
            take(step, train, (tokens, tokens))
    theirs = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert live.peak_bytes == pytest.approx(theirs, rel=1e-3)


def test_steps_whose_scaled_gradients_overflow_are_skipped_as_in_training() -> None:
    """Gradients times float32's largest power of two overflow on the CPU as in fp16 on CUDA."""
    step = Rehearsal(MODEL, TRAIN).new_step()
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    step.model.token_embedding.weight.register_hook(lambda gradient: 1000 * gradient)
    before = {name: parameter.clone() for name, parameter in step.model.named_parameters()}
    tokens = torch.randint(MODEL.vocab_size, (TRAIN.batch_size, MODEL.context_length))
    take(step, TRAIN, (tokens, tokens))
    assert step.scaler.get_scale() < 2.0**127
    after = dict(step.model.named_parameters())
    assert all(bool(parameter.isfinite().all()) for parameter in after.values())
    assert any(not torch.equal(before[name], parameter) for name, parameter in after.items())
    norm = step.gradient_norm
    step.gradient_norm = lambda: math.inf * norm()  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"gradients of \d+ steps in fp16 are not finite"):
        take(step, TRAIN, (tokens, tokens))


def test_tensors_on_the_meta_device_take_no_memory() -> None:
    meta = torch.empty(1000, device="meta")
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        made = torch.empty_like(meta, device="cpu")
    assert live.found_bytes == 0 and live.now_bytes == made.nbytes == 4000


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_real_step_holds_what_the_fake_one_does(optimizer: str) -> None:
    train = TRAIN.model_copy(update={"optimizer": optimizer})
    with LiveBytes() as live:
        step = Rehearsal(MODEL, train, precision="bf16").new_step()
        tokens = torch.randint(MODEL.vocab_size, (train.batch_size, MODEL.context_length))
        take(step, train, (tokens, tokens))
        live.peak_bytes = 0
        take(step, train, (tokens, tokens))
    assert trace_step(Rehearsal(MODEL, train, "cpu", "bf16")).peak_bytes == pytest.approx(live.peak_bytes, rel=2e-3)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_training_loop_holds_what_the_trace_and_the_formula_say(experts: int, tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, precision="fp32", log_every=1000, device="cpu")
    tree["model"] |= {"n_experts": experts, "context_length": 128, "d_model": 128, "n_layers": 3}
    recipe = parse_recipe(tree)
    prepared = prepare(recipe)
    recipe = with_vocab_size(recipe, prepared.manifest.vocab_size)
    with LiveBytes() as live:
        run = Run(PreparedRun(recipe, prepared, CPU, choose_precision("fp32", CPU)), Display())
        run.reporter.log = MetricsLog(tmp_path / "metrics.jsonl", 0)
        run.training_step()
        live.peak_bytes = 0
        run.training_step()
    assert trace_step(Rehearsal(recipe.model, recipe.train)).peak_bytes == pytest.approx(live.peak_bytes, rel=0.02)
    setting = Setting.of(recipe.model, recipe.train, "fp32", on_cpu=True)
    assert training_peak(setting).total_bytes == pytest.approx(live.peak_bytes, rel=0.05)


def test_nothing_is_allocated() -> None:
    model = preset("gpt3-175b").model_copy(update={"n_layers": 2})
    trace_step(Rehearsal(MODEL, TRAIN))  # what torch loads
    before = reset_peak(CPU)
    assert trace_step(Rehearsal(model, tiny.plain_training(max_steps=1, batch_size=1))).peak_bytes > 60e9
    assert (peak_growth_bytes(CPU, before) or 0) < 200e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_tracing_for_a_gpu_needs_one() -> None:
    with pytest.raises(UserError, match="needs a machine with a CUDA GPU"):
        trace_step(Rehearsal(MODEL, TRAIN, "cuda"))


def test_other_devices_are_not_traced() -> None:
    with pytest.raises(UserError, match="cpu and cuda, not on mps"):
        trace_step(Rehearsal(MODEL, TRAIN, "mps"))


def test_a_measured_step_holds_what_was_predicted() -> None:
    model = tiny.plain_model(
        vocab_size=8192, context_length=512, n_layers=4, d_model=256, n_heads=4, norm="rmsnorm", mlp="swiglu"
    )
    train = tiny.plain_training(max_steps=1, batch_size=4)
    measured = measure_step(Rehearsal(model, train))
    predicted = training_peak(Setting.of(model, train, "fp32", on_cpu=True)).total_bytes
    assert predicted == pytest.approx(measured.peak_bytes, rel=0.1)
    assert measured.kept_bytes > 0.95 * measured.peak_bytes
    assert measured.tokens_per_second > 0


def test_the_speed_of_short_steps_is_that_of_the_median_and_a_long_step_is_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "keep_freed_memory", lambda: None)  # of this process
    rehearsal = Rehearsal(tiny.plain_model(vocab_size=64, context_length=32, n_layers=1, d_model=32, n_heads=2), TRAIN)
    assert (measure_speed(rehearsal).tokens_per_second or 0) > 0
    tokens, most = TRAIN.batch_size * 32, measure.SPEED_SECONDS
    for seconds, median in (([0.5, 0.1, 0.2, 0.1, 9.0], 0.2), ([most, 1.0], most), ([0.25, *[0.01] * 99], 0.01)):
        steps = iter(seconds)
        monkeypatch.setattr(measure, "step_times", lambda _, steps=steps: steps)
        assert measure_speed(rehearsal).tokens_per_second == pytest.approx(tokens / median)
    assert len(list(steps)) == 100 - measure.SPEED_STEPS


PEAKS = """
import torch
from gptworks.device import peak_growth_bytes, reset_peak

cpu = torch.device("cpu")
before = reset_peak(cpu)
torch.ones(30_000_000)
print(peak_growth_bytes(cpu, before))
print(peak_growth_bytes(cpu, reset_peak(cpu)))
"""


def test_a_peak_is_of_what_came_after_its_reset() -> None:
    """In a process of its own: here, memory that other tests freed may be reused without growth."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    if first == "None":
        pytest.skip("this system does not tell a process's memory")
    assert float(first) > 100e6
    assert float(second) < 50e6


def test_a_peak_that_reads_as_less_than_what_was_held_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.device._resident", {"VmRSS": 130_000, "VmHWM": 101_328}.get)
    assert peak_growth_bytes(CPU, reset_peak(CPU)) == 0
