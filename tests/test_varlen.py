"""Attention within the texts of packed rows by flash attention, which has kernels on CUDA only.

`make test` checks the texts' bounds, when they replace the bias, and the model with a plain kernel of the same
contract; `make test-cuda` compares with the bias on a GPU.
"""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.data.conversations.packing import laid_out, stack
from gptworks.data.samples import Batch
from gptworks.kernels import dispatch
from gptworks.model import gpt
from gptworks.model.cost import Shapes
from gptworks.model.gpt import GPT
from gptworks.model.scores import Scores, attend, scores_cost, takes_bounds, text_bounds
from gptworks.planning.device_table import find_device
from gptworks.training.objectives.next_token import next_token
from gptworks.training.rehearsal.trace import LiveBytes
from tiny import plain_model

T = 128
ROWS = ((9, 1, 14, 20), (128,), (5, 90), (1, 1, 1, 1, 124))
"""Number of inputs of the texts in each row; the first and the third row end in padding."""

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "windows": {"window": 8, "window_pattern": ("window", "full")},
    "grouped in windows": {"n_kv_heads": 1, "window": 5, "qk_norm": True},
    "learned positions, scale": {"position": "learned", "attention_scale": 0.3},
    "laboratory": {"value_residual": True, "attention_gate": True, "smear": True},
}


def packed_batch(device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for lengths in ROWS:
        texts = [torch.randint(64, (n + 1,), generator=generator).numpy() for n in lengths]
        rows.append(laid_out([(ids, ids >= 0) for ids in texts], T, 7))
    return tuple(x.to(device) for x in stack(rows))


def of_shape(shape: str) -> GPT:
    torch.manual_seed(0)
    settings = {"position": "rope", "context_length": T, "n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 64}
    return GPT(plain_model(**settings | SHAPES[shape])).train()


def losses(model: GPT, batch: Batch) -> dict[str, Tensor]:
    """Return the loss of a batch, and its gradient with respect to each parameter."""
    model.zero_grad()
    loss = next_token(model, batch).objective
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **gradients}


def test_the_bounds_are_those_of_the_texts() -> None:
    *_, starts = packed_batch()
    expected = []
    for row, lengths in enumerate(ROWS):
        at = row * T
        for length in (*lengths, T - sum(lengths)):  # the last is the padding
            expected += [at] if length else []
            at += length
    bounds = text_bounds(starts, T)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == sorted(bounds.tolist())
    assert sorted(set(bounds.tolist())) == [*expected, len(ROWS) * T]
    assert len(bounds) == len(ROWS) * 7 + 1


@pytest.mark.parametrize(
    ("settings", "half", "has_flash", "taken"),
    [
        ({}, True, True, True),
        ({"window": 8, "n_kv_heads": 2}, True, True, True),
        ({}, False, True, False),
        ({}, True, False, False),
        ({"attention_softcap": 5.0}, True, True, False),
        ({"dropout_attention": 0.1}, True, True, False),
        ({"d_head": 12}, True, True, False),
        ({"d_head": 264}, True, True, False),
    ],
)
def test_bounds_are_taken_where_flash_attention_computes_the_same(
    settings: dict[str, Any], half: bool, has_flash: bool, taken: bool
) -> None:
    config = plain_model(context_length=T, n_layers=1, d_model=64, n_heads=4, **settings)
    assert takes_bounds(config, half, has_flash) is taken


def test_plans_know_the_devices_with_flash_attention() -> None:
    assert not dispatch.has_flash(torch.device("cpu")) and not dispatch.has_flash(torch.device("mps"))
    names = ("h100", "rtx 3090", "t4", "v100", "mi300x", "m2")
    assert [find_device(name).has_flash for name in names] == [True, True, False, False, False, False]


def kernel(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, of_keys: Tensor, longest: int, longest_keys: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The contract of torch.nn.attention.varlen.varlen_attn for texts, one text after the other."""
    assert bounds is of_keys and longest == longest_keys and enable_gqa and window_size[1] == 0
    out = []
    for first, end in itertools.pairwise(bounds.tolist()):
        assert 0 <= end - first <= longest
        at = torch.arange(end - first)
        seen = at <= at[:, None]
        if window_size[0] >= 0:
            seen &= at >= at[:, None] - window_size[0]
        heads = (x[first:end].transpose(0, 1) for x in (q, k, v))
        out.append(
            torch.nn.functional.scaled_dot_product_attention(*heads, seen, scale=scale, enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_within_bounds_are_those_separated_by_a_bias(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = of_shape(shape), packed_batch()
    expected, calls = losses(model, batch), []

    def counted(*tensors: Any, **settings: Any) -> Tensor:
        calls.append(settings["window_size"])
        return kernel(*tensors, **settings)

    monkeypatch.setattr("gptworks.kernels.flash.varlen_attn", counted)
    monkeypatch.setattr(gpt, "takes_bounds", lambda *_: True)
    found = losses(model, batch)
    windows = model.config.layer_windows
    assert calls == [(-1 if window is None else window - 1, 0) for window in windows]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_many_short_texts_keep_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "takes_bounds", lambda *_: True)
    monkeypatch.setattr(gpt, "text_bounds", lambda *_: pytest.fail("bounds were made"))
    inputs, targets, positions, starts = packed_batch()
    many = torch.cat((starts, starts.new_full((len(starts), 2), T)), dim=1)  # 9 places for 128 tokens
    assert losses(of_shape("plain"), (inputs, targets, positions, many))["loss"] > 0


@pytest.mark.parametrize("n_kv_heads", [1, 4])
def test_the_memory_within_bounds_is_as_planned(n_kv_heads: int) -> None:
    """What autograd saves for attention, and what its backward pass adds."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    shape = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    leaves = [torch.empty(2, 256, heads, 64, **shape) for heads in (4, n_kv_heads, n_kv_heads)]
    bounds = torch.empty(9, device="meta", dtype=torch.int32)
    with LiveBytes(counts_meta=True) as live:
        q, k, v = ((leaf * 1).transpose(1, 2) for leaf in leaves)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attend(q, k, v, Scores(bounds=bounds))
        gradient = torch.empty_like(out)
        before_bytes = live.peak_bytes = live.now_bytes
        found = torch.autograd.grad(out, (q, k, v), gradient)
    model = plain_model(vocab_size=9, context_length=256, n_layers=1, d_model=256, n_heads=4, n_kv_heads=n_kv_heads)
    stage = scores_cost(Shapes(model, 2, 256, 2, on_cpu=False, several_texts=True, has_flash=True), None)
    assert sum(stage.saved.values()) == pytest.approx(sum(kept.values()), rel=1e-3)
    assert sum(one.nbytes for one in found) == stage.leaves
    assert stage.leaves + stage.scratch == pytest.approx(live.peak_bytes - before_bytes, rel=0.02)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_computes_the_losses_and_gradients_of_the_bias(shape: str, dtype: torch.dtype, compiled: bool) -> None:
    """Against float32 with the bias, the errors are about those of the bias in the same dtype."""
    batch = packed_batch("cuda")
    exact = of_shape(shape).cuda()
    rounded = copy.deepcopy(exact)
    if compiled:
        for block in rounded.blocks:
            block.compile(dynamic=False)
    expected = losses(exact, batch[:3])
    with torch.autocast("cuda", dtype=dtype):
        by_bias = losses(copy.deepcopy(exact), batch[:3])
        assert takes_bounds(exact.config, True, dispatch.has_flash(torch.device("cuda")))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            within = losses(rounded, batch)
    assert any("_flash_attention_forward" in event.name for event in profile.events())
    for name, value in expected.items():
        scale = value.norm() + 1e-6
        errors = SimpleNamespace(
            bias=(by_bias[name] - value).norm() / scale, bounds=(within[name] - value).norm() / scale
        )
        assert errors.bounds <= 2 * errors.bias + 2e-3, (name, errors)
