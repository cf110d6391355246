"""The C++ passes for training on a CPU against plain torch code: values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.kernels import cpu, dispatch
from gptworks.model.scores import Scores, attend, attend_reference


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), inputs)


@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 64), (2, 4, 3, 8)])
def test_rms_norm_equals_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    ours = dispatch.norm(x, weight, None, 1e-5, torch.float64, False)[1]
    theirs = F.rms_norm(x, weight.shape, weight, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(ours, x, weight), gradients(theirs, x, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rms_norm_of_bf16_computes_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 32).bfloat16().requires_grad_()
    weight = torch.randn(32, requires_grad=True)
    ours = dispatch.norm(x, weight, None, 1e-5, torch.bfloat16, False)[1]
    exact = F.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-6)  # one rounding to bf16
    d_x, d_weight = gradients(ours, x, weight)
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)


def test_relu2_equals_its_definition() -> None:
    x = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)
    ours, theirs = dispatch.activate(x, "relu2"), F.relu(x).square()
    assert torch.equal(ours, theirs)
    assert torch.equal(*gradients(ours, x), *gradients(theirs, x))


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_and_the_mean(probability: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 333, requires_grad=True)
    out = dispatch.dropout(x, probability)
    n, dropped = x.numel(), int((out == 0).sum())
    deviation = (n * probability * (1 - probability)) ** 0.5
    assert abs(dropped - n * probability) < 4 * deviation
    assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())  # the same elements, scaled alike


def test_dropout_follows_the_seed_and_differs_between_calls() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(5)
    first, second = dispatch.dropout(x, 0.5), dispatch.dropout(x, 0.5)
    torch.manual_seed(5)
    again = dispatch.dropout(x, 0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("longest", [cpu.LONGEST, 100])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (7, 0.4)])
def test_attention_longer_than_a_block_equals_the_definition(
    window: int | None, softcap: float | None, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "LONGEST", longest)
    torch.manual_seed(0)
    length = 2 * cpu.BLOCK + 3
    q, k, v = (torch.randn(1, n, length, 8, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))
    ours = attend(q, k, v, Scores(window=window, softcap=softcap))
    theirs = attend_reference(q, k, v, Scores(window=window, softcap=softcap))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for a, b in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
