"""The calls that gptworks makes on CUDA and MPS, seen through fakes; no test here runs on either device."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks import device as devices
from gptworks.config import RopeScaling
from gptworks.model import scores
from gptworks.model.gpt import GPT
from gptworks.model.scores import texts_bias
from gptworks.training.distributed.parallel import compile_blocks
from gptworks.training.objectives.next_token import next_token
from gptworks.training.record.speed import Stopwatch
from tiny import plain_model

# ------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("window", [None, 4, 8])
@pytest.mark.parametrize("texts", [True, False])
def test_cuda_is_never_given_a_mask_with_grouped_keys(
    monkeypatch: pytest.MonkeyPatch, texts: bool, window: int | None
) -> None:
    """On CUDA, torch has no fused kernel for both together and would compute all scores at once."""
    seen: list[tuple[bool, bool]] = []
    fused, takes_groups = F.scaled_dot_product_attention, scores.takes_groups

    def recorded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append((mask is not None, options["enable_gqa"]))
        return fused(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(scores, "takes_groups", lambda _, masked: takes_groups(torch.device("cuda"), masked))
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 12, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 8)
    one_text = texts_bias(torch.arange(12).expand(2, 12), window, torch.float32)
    out = scores.attend(q, k, v, scores.Scores(window=window, bias=one_text if texts else None))
    assert (out - scores.attend_reference(q, k, v, scores.Scores(window=window))).abs().max() < 1e-5
    masked = texts or window is not None
    assert seen == [(masked, not masked)], "without a mask, flash attention takes the groups as they are"


# ------------------------------------------------------------------------------------------- compiled blocks


@pytest.mark.parametrize("varying", [True, False])
def test_one_graph_serves_every_width_where_widths_vary(monkeypatch: pytest.MonkeyPatch, varying: bool) -> None:
    """Without the passes that only a CPU has, blocks are traced as on CUDA."""
    counter, compiled = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled(self, backend=counter, **options))
    monkeypatch.setattr("gptworks.kernels.dispatch.trains", lambda *x: False)
    torch._dynamo.reset()
    config = plain_model(
        vocab_size=31, context_length=96, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, norm="rmsnorm", mlp="swiglu"
    )
    model = GPT(config)
    compile_blocks(model, "block", torch.device("cpu"), varying_widths=varying)
    widths = [16, 32, 48, 64, 80, 96]
    for rows, width in enumerate(widths, start=2):
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        next_token(model, (tokens, tokens)).objective.backward()
    assert counter.frame_count == (1 if varying else len(widths))
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------- float64


class NoFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses float64 away from the CPU, as MPS does."""

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
                assert tensor.dtype != torch.float64, f"{function} makes float64 on {tensor.device}"
        return out


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_a_model_is_made_and_run_without_float64_on_its_device(kind: str) -> None:
    scaling = RopeScaling.model_validate({"type": kind, "factor": 2.0, "original_context_length": 16})
    config = plain_model(
        vocab_size=31, context_length=64, n_layers=2, d_model=32, n_heads=4, position="rope", rope_scaling=scaling
    )
    with NoFloat64():
        with torch.device("meta"):
            model = GPT(config)
        assert model.features(torch.zeros(2, 40, dtype=torch.int64, device="meta")).shape == (2, 40, 32)
    assert model.rotary is not None and model.rotary.cos.device.type == "meta"


# ------------------------------------------------------------------------------------------------------- time


def test_products_on_mps_are_timed_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = SimpleNamespace(now=0.0), []

    def wait() -> None:
        clock.now += 2.0 * len(given)  # what was given takes two seconds each
        given.clear()

    monkeypatch.setattr(torch.mps, "synchronize", wait)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    assert devices._best_seconds(lambda: given.append(1), torch.device("mps")) == 2.0


class Gpu:
    """A fake device that executes its work in order, asynchronously to Python, with events."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.n_waits = 0

    def give(self, seconds: float) -> None:
        """Enqueue work of this length; the host does not wait for it."""
        self.device = max(self.host, self.device) + seconds

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, -1.0

    def record(self, stream: object) -> None:
        self.at = max(self.gpu.host, self.gpu.device)

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.n_waits += 1
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, other: "Event") -> float:
        assert other.query(), "asked before it was done"
        return 1000 * (other.at - self.at)


def test_parts_on_cuda_are_timed_without_a_wait_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("it waited"))
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(3):
        with watch.part("data"):
            gpu.host += 0.5
        with watch.part("forward"):
            gpu.give(2.0)
        with watch.part("backward"):
            gpu.give(4.0)
            with watch.part("gradients of all ranks"):
                gpu.give(1.0)
    assert gpu.n_waits == 0 and gpu.host == 1.5
    taken = watch.take()
    assert gpu.n_waits == 1
    assert taken == {"data": 0.5, "forward": 6.0, "backward": 12.0, "gradients of all ranks": 3.0}, (
        "later data is made while the device works"
    )
    assert watch.take() == {}
