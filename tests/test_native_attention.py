"""Attention in C++ for training: values and gradients against the definition and the torch code, in float64."""

import pytest
import torch
from torch import Tensor

from gptworks.kernels import attention as native
from gptworks.kernels import cpu
from gptworks.kernels.library import training_library
from gptworks.model.scores import Scores, as_bias, attend, attend_reference, causal_mask, texts_bias

pytestmark = pytest.mark.skipif(training_library() is None, reason="training's C++ cannot be built or used here")

NEAR = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
"""Allowed difference, as a share of the largest value."""


def inputs(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k, v of shape (batch, heads, groups, queries, keys, width), with the memory layout of a projection."""
    batch, heads, groups, n_queries, n_keys, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    return [
        torch.randn(batch, length, n, width, generator=generator).mul_(1.5).to(dtype).transpose(1, 2).requires_grad_()
        for n, length in ((heads, n_queries), (groups, n_keys), (groups, n_keys))
    ]


def gradients(out: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, of, direction)


def assert_near(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], share: float) -> None:
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=share * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "window", "softcap"),
    [
        ((2, 4, 2, 130, 130, 64), None, None),
        ((1, 2, 1, 77, 77, 6), None, None),
        ((1, 2, 2, 9, 33, 17), 5, None),
        ((1, 2, 2, 300, 300, 32), 50, None),
        ((1, 4, 1, 65, 130, 80), 100, 2.0),
        ((1, 1, 1, 1, 1, 8), None, None),
        ((1, 1, 1, 330, 330, 128), None, 0.5),
    ],
)
def test_values_and_gradients_are_those_of_the_definition(
    shape: tuple[int, int, int, int, int, int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    ours = inputs(shape, dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    out = attend(*ours, Scores(window=window, softcap=softcap))
    expected = attend_reference(*exact, Scores(window=window, softcap=softcap))
    assert out.dtype == dtype
    assert_near((out, *gradients(out, *ours)), (expected, *gradients(expected, *exact)), NEAR[dtype])


@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
def test_rows_of_several_texts(dtype: torch.dtype) -> None:
    positions = torch.tensor([[*range(40), *range(7), *range(33)], [*range(64), *range(1), *range(15)]])
    ours = inputs((2, 4, 2, 80, 80, 24), dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    out = attend(*ours, Scores(bias=texts_bias(positions, 20, dtype)))
    expected = cpu.Attention.apply(
        *exact, texts_bias(positions, 20, torch.float64), 20, 0.0, exact[0].size(-1) ** -0.5, None
    )
    assert_near((out, *gradients(out, *ours)), (expected, *gradients(expected, *exact)), NEAR[dtype])


@pytest.mark.parametrize("length", [1, 16, 17, 33, 40, 49])
@pytest.mark.parametrize("dtype", NEAR, ids=["fp32", "bf16"])
def test_rows_of_several_texts_of_any_length(dtype: torch.dtype, length: int) -> None:
    """bf16 reads two vectors of keys at a time, which the last keys of a row may fill only partly."""
    n = min(5, length)
    positions = torch.tensor([[*range(n), *range(length - n)]])
    ours = inputs((1, 2, 1, length, length, 24), dtype)
    exact = [x.detach().double().requires_grad_() for x in ours]
    out = attend(*ours, Scores(bias=texts_bias(positions, None, dtype)))
    expected = cpu.Attention.apply(
        *exact, texts_bias(positions, None, torch.float64), None, 0.0, exact[0].size(-1) ** -0.5, None
    )
    assert_near((out, *gradients(out, *ours)), (expected, *gradients(expected, *exact)), NEAR[dtype])


def test_a_query_without_keys_is_zero_and_has_no_gradient() -> None:
    q, k, v = inputs((1, 1, 1, 20, 20, 8))
    bias = as_bias(causal_mask(20, 20, None, q.device), q.dtype)
    bias[3] = float("-inf")
    out = attend(q, k, v, Scores(bias=bias))
    assert torch.equal(out[0, 0, 3], torch.zeros(8))
    d_q, d_k, d_v = gradients(out, q, k, v)
    assert torch.equal(d_q[0, 0, 3], torch.zeros(8))
    assert all(x.isfinite().all() for x in (out, d_q, d_k, d_v))


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v = inputs((3, 4, 2, 70, 70, 32), torch.bfloat16)
    n_threads, results = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            torch.manual_seed(0)
            out = attend(q, k, v, Scores(dropout=0.3))
            results.append((out, *gradients(out, q, k, v)))
    finally:
        torch.set_num_threads(n_threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_drops_its_share_and_the_same_weights_backward(probability: float) -> None:
    """With v the identity, the output equals the weights; with an identity gradient, so does v's gradient."""
    length = 128
    q, k, _ = inputs((2, 2, 2, length, length, length))
    v = torch.eye(length).expand(2, 2, length, length).clone().requires_grad_()
    torch.manual_seed(3)
    dropped = attend(q, k, v, Scores(dropout=probability))
    whole = attend(q, k, v).detach()
    seen = torch.ones(length, length).tril().bool().expand_as(whole)
    kept = (dropped.detach() != 0)[seen]
    deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(1 - kept.double().mean().item() - probability) < 4 * deviation
    factors = torch.where(dropped.detach() != 0, 1 / (1 - probability), 0.0)
    torch.testing.assert_close(dropped.detach(), whole * factors, rtol=1e-5, atol=1e-7)
    (d_v,) = torch.autograd.grad(dropped, v, v.detach(), retain_graph=True)
    torch.testing.assert_close(d_v.transpose(2, 3), dropped.detach(), rtol=1e-5, atol=1e-7)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(2, 3) * length**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1) * factors
    expected = gradients(weights @ exact[2], *exact)
    assert_near(gradients(dropped, q, k, v), expected, NEAR[torch.float32])
    assert not torch.equal(attend(q, k, v, Scores(dropout=probability)), dropped), "each call draws anew"


def test_nan_stays_nan_where_it_is_seen() -> None:
    for dtype in NEAR:
        q, k, v = inputs((1, 1, 1, 40, 40, 16), dtype)
        with torch.no_grad():
            k[0, 0, 20, 3] = float("nan")
        out = attend(q, k, v)
        assert out[0, 0, 20:].isnan().all()
        assert out[0, 0, :20].isfinite().all()
        assert gradients(out, q, k, v)[0][0, 0, 20:].isnan().all()


def test_float64_and_machines_without_the_library_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs((1, 2, 1, 9, 9, 8))
    ours = attend(q, k, v)
    assert not native.takes(*(x.double() for x in (q, k, v)))
    monkeypatch.setattr(native, "training_library", lambda: None)
    assert not native.takes(q, k, v)
    torch.testing.assert_close(attend(q, k, v), ours, rtol=1e-5, atol=1e-6)
