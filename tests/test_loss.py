"""The chunked cross-entropy of the head against the definition with all logits."""

import pytest
import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.kernels import passes
from gptworks.kernels.library import training_library
from gptworks.model import loss as loss_module
from gptworks.model.loss import linear_cross_entropy, linear_cross_entropy_reference

TOKENS, WIDTH, VOCABULARY = 37, 16, 101


@pytest.fixture(autouse=True, params=["C++", "torch"])
def _both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(passes, "training_library", lambda: None)
    elif training_library() is None:
        pytest.skip("no native kernels here")


def random_problem(dtype: torch.dtype = torch.float32, ignore: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < ignore] = IGNORED
    return features, weight, targets


@pytest.mark.parametrize("chunk_tokens", [1, 5, 36, 37, 1000])
@pytest.mark.parametrize(("ignore", "softcap"), [(0.0, None), (0.4, None), (0.4, 3.0)])
def test_value_and_gradients_equal_the_definition(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, ignore: float, softcap: float | None
) -> None:
    monkeypatch.setattr(loss_module, "chunk_tokens", lambda device, vocab_size: chunk_tokens)
    features, weight, targets = random_problem(ignore=ignore)
    value = linear_cross_entropy(features, weight, targets, softcap)
    exact_inputs = features.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = exact_inputs[0] @ exact_inputs[1].T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    exact = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    assert value.item() == pytest.approx(exact.item(), rel=1e-6)
    gradients, expected = (
        torch.autograd.grad(value / 7, (features, weight)),
        torch.autograd.grad(exact / 7, exact_inputs),
    )
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=0, atol=2e-6)
    if ignore:
        assert not gradients[0][targets == IGNORED].any()


def test_the_reference_is_the_definition() -> None:
    features, weight, targets = random_problem(ignore=0.4)
    by_hand = 0.0
    for x, target in zip(features.double(), targets.tolist(), strict=True):
        if target != IGNORED:
            scores = weight.double() @ x
            by_hand += (scores.exp().sum().log() - scores[target]).item()
    assert linear_cross_entropy_reference(features, weight, targets).item() == pytest.approx(by_hand, rel=1e-6)


def test_batched_shapes_are_the_flat_sum() -> None:
    features, weight, targets = random_problem()
    flat = linear_cross_entropy(features[:36], weight, targets[:36])
    assert torch.equal(linear_cross_entropy(features[:36].view(4, 9, WIDTH), weight, targets[:36].view(4, 9)), flat)


def test_nothing_to_count_is_zero_with_zero_gradients() -> None:
    features, weight, targets = random_problem()
    value = linear_cross_entropy(features, weight, torch.full_like(targets, IGNORED))
    assert value.item() == 0
    for gradient in torch.autograd.grad(value, (features, weight)):
        assert not gradient.any()


def test_huge_logits_do_not_overflow() -> None:
    features, weight, targets = random_problem()
    value = linear_cross_entropy(features * 1e4, weight, targets)
    expected = linear_cross_entropy_reference(features.double() * 1e4, weight.double(), targets)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_bf16_stays_within_its_rounding() -> None:
    """A logit of size ~10 in bf16 is off by up to 2⁻⁹ of itself, here 0.02 nats; gradients are rounded to bf16."""
    features, weight, targets = random_problem(torch.bfloat16)
    value = linear_cross_entropy(features, weight, targets)
    exact_features, exact_weight = (x.detach().float().requires_grad_() for x in (features, weight))
    exact = linear_cross_entropy_reference(exact_features, exact_weight, targets)
    assert value.dtype == torch.float32
    assert value.item() / TOKENS == pytest.approx(exact.item() / TOKENS, abs=0.02)
    gradients = torch.autograd.grad(value, (features, weight))
    for gradient, reference in zip(gradients, torch.autograd.grad(exact, (exact_features, exact_weight)), strict=True):
        assert gradient.dtype == torch.bfloat16
        error = (gradient.float() - reference).norm() / reference.norm()
        assert error < 2**-7


def test_under_autocast_the_weights_gradient_stays_float32() -> None:
    features, weight, targets = random_problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = torch.nn.functional.linear(features, torch.eye(WIDTH))
        value = linear_cross_entropy(half, weight, targets)
    (gradient,) = torch.autograd.grad(value, weight)
    assert (half.dtype, gradient.dtype, value.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(half.detach(), weight, targets), weight)
    assert (gradient - expected).norm() / expected.norm() < 2**-7


def test_without_gradients_none_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    features, weight, targets = random_problem()
    with torch.no_grad():
        value = linear_cross_entropy(features, weight, targets)
        monkeypatch.setattr(loss_module, "_into_gradient", None)
        assert linear_cross_entropy(features, weight, targets).item() == value.item()
    assert not value.requires_grad
