"""Triton's cross-entropy against the definition in float64: on a GPU, and on a CPU in Triton's interpreter."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.kernels import dispatch, fused_loss
from gptworks.model.loss import (
    linear_cross_entropies,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    target_logprobs,
    token_nats,
)
from triton_interpreter import interpret

COLUMNS = (1, 5, 257, 4096, 4097, 9001)
"""Vocabulary sizes: less than a block of the kernel, one, and several with a part."""

on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


def check_rows(device: str, dtype: torch.dtype, n_columns: int) -> None:
    """Compare nats and gradients of 7 rows, within a wider matrix, with those of float64."""
    generator = torch.Generator().manual_seed(n_columns)
    wide = (4 * torch.randn(7, n_columns + 3, generator=generator)).to(dtype)
    targets = torch.randint(n_columns, (7,), generator=generator)
    targets[2] = IGNORED
    wide[4, targets[4]] = -300.0  # its probability underflows in float32
    factors = torch.rand(7, generator=generator) - 0.5
    exact = wide[:, :n_columns].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    for scale in (None, factors):
        weights = torch.ones(7) if scale is None else scale
        (gradient,) = torch.autograd.grad(expected, exact, weights.double(), retain_graph=True)
        here = [wide.to(device, copy=True) for _ in range(3)]
        wanted, factor = targets.to(device), None if scale is None else scale.to(device)
        nats = [fused_loss.cross_entropy(x[:, :n_columns], wanted, factor, gradient=True) for x in here[:2]]
        scored = fused_loss.cross_entropy(here[2][:, :n_columns], wanted, gradient=False)
        assert nats[0].dtype == torch.float32
        torch.testing.assert_close(nats[0].double().cpu(), expected.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(here[0], here[1]) and torch.equal(nats[0], nats[1]) and torch.equal(nats[0], scored)
        found = here[0].cpu()
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 2e-6
        torch.testing.assert_close(found[:, :n_columns].double(), gradient, rtol=rounding, atol=3e-7)
        assert not found[2, :n_columns].any() and not nats[0][2]
        assert torch.equal(found[:, n_columns:], wide[:, n_columns:]) and torch.equal(here[2].cpu(), wide)


def check_unknown_targets(device: str) -> None:
    logits = torch.zeros(3, 5, device=device)
    nats = fused_loss.cross_entropy(logits, torch.tensor([5, -1, 0], device=device), gradient=True)
    assert nats[:2].isnan().all() and logits[:2].isnan().all()
    assert not nats[2].isnan() and not logits[2].isnan().any()


def check_overflowed_logits(device: str) -> None:
    """fp16 training skips a step whose gradients are not finite, so an overflow must reach them."""
    for value in (float("inf"), float("nan")):
        logits = torch.zeros(1, 5, device=device)
        logits[0, 3] = value
        nats = fused_loss.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=device), gradient=True)
        assert not nats.isfinite().any() and logits.isnan().any()
    masked = torch.tensor([[0.0, float("-inf"), 0.0]], device=device)
    nats = fused_loss.cross_entropy(masked, torch.zeros(1, dtype=torch.int64, device=device), gradient=True)
    torch.testing.assert_close(nats.cpu(), torch.tensor([2.0]).log())
    torch.testing.assert_close(masked.cpu(), torch.tensor([[-0.5, 0.0, 0.5]]))


def check_all(device: str) -> None:
    for dtype in dispatch.GPU_DTYPES:
        for n_columns in COLUMNS:
            check_rows(device, dtype, n_columns)
    check_unknown_targets(device)
    check_overflowed_logits(device)
    empty = torch.empty(0, 5, device=device)
    assert len(fused_loss.cross_entropy(empty, torch.empty(0, dtype=torch.int64, device=device), gradient=True)) == 0


def test_rows_in_tritons_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("dtype", dispatch.GPU_DTYPES)
def test_fake_logits_need_no_triton(dtype: torch.dtype) -> None:
    logits = torch.empty(3, 5, device="meta", dtype=dtype)
    targets = torch.empty(3, device="meta", dtype=torch.int64)
    nats = fused_loss.cross_entropy(logits, targets, gradient=True)
    assert nats.shape == (3,) and nats.dtype == torch.float32 and nats.is_meta


def test_a_triton_that_does_not_compile_is_reported_with_all_that_torch_computes_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(fused_loss.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.warns(UserWarning, match="the loss and, in decoding, attention, because .*no C compiler"):
        assert not fused_loss.works.__wrapped__()


class TestOnCuda:
    pytestmark = on_cuda

    def test_rows(self) -> None:
        check_all("cuda")

    def test_offsets_exceed_32_bits(self) -> None:
        n_columns = 50257
        n_rows = 2**31 // n_columns + 2
        if torch.cuda.mem_get_info()[0] < 3 * n_rows * n_columns:
            pytest.skip("the GPU has too little free memory")
        logits = torch.zeros(n_rows, n_columns, device="cuda", dtype=torch.bfloat16)
        targets = torch.full((n_rows,), n_columns - 1, device="cuda")
        nats = fused_loss.cross_entropy(logits, targets, gradient=True)
        assert nats.allclose(torch.tensor(float(n_columns)).log().cuda())
        for row in (0, n_rows - 1):
            assert logits[row, -1] == -1 and logits[row, 0].item() == pytest.approx(1 / n_columns, rel=0.01)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)]
    )
    @pytest.mark.parametrize("softcap", [None, 5.0])
    def test_losses_equal_the_reference(self, dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
        features, weight, targets = problem(dtype)
        assert dispatch.chosen("cross_entropy", weight.detach()).by == dispatch.TRITON
        exact = [x.detach().double().requires_grad_() for x in (features, weight)]
        expected = reference(exact[0], exact[1], targets, softcap)
        value = linear_cross_entropy(features, weight, targets, softcap)
        again = linear_cross_entropy(features, weight, targets, softcap)
        assert torch.equal(value, again)
        assert value.item() == pytest.approx(expected.sum().item(), rel=tolerance)
        gradients = torch.autograd.grad(value, (features, weight))
        assert all(map(torch.equal, gradients, torch.autograd.grad(again, (features, weight))))
        close(gradients, torch.autograd.grad(expected.sum(), exact, retain_graph=True), tolerance)
        assert not gradients[0][targets == IGNORED].any()

        in_float32 = linear_cross_entropy_reference(features, weight, targets, softcap)
        assert value.item() == pytest.approx(in_float32.item(), rel=tolerance)

        nats = token_nats(features, weight, targets, softcap)
        with torch.inference_mode():  # as in evaluation
            assert torch.equal(nats, token_nats(features, weight, targets, softcap))
        close([nats], [expected], tolerance)

        factors = torch.linspace(-1, 1, len(targets), device="cuda")
        logprobs = target_logprobs(features, weight, targets, softcap)
        close([-logprobs], [expected], tolerance)
        gradients = torch.autograd.grad(logprobs, (features, weight), factors)
        close(gradients, torch.autograd.grad(expected, exact, -factors.double()), tolerance)

    def test_losses_with_factors_equal_the_reference(self) -> None:
        features, weight, targets = problem(torch.float32)
        features, targets = features.detach().view(3, -1, features.size(1)).requires_grad_(), targets.view(3, -1)
        loss, nats = linear_cross_entropies(features, weight, targets, (1.0, 0.5, 0.25))
        exact = [x.detach().double().requires_grad_() for x in (features, weight)]
        expected = reference(exact[0], exact[1], targets, None).sum(1)
        close([nats], [expected], 1e-5)
        total = (expected * torch.tensor([1.0, 0.5, 0.25], device="cuda")).sum()
        assert loss.item() == pytest.approx(total.item(), rel=1e-5)
        close(torch.autograd.grad(loss, (features, weight)), torch.autograd.grad(total, exact), 1e-5)


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return features of 9,000 tokens, more than a chunk, a head with 5,003 rows, and targets, some ignored."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(9000, 32, generator=generator).to("cuda", dtype).requires_grad_()
    weight = torch.randn(5003, 32, generator=generator).to("cuda", dtype).requires_grad_()
    targets = torch.randint(5003, (9000,), generator=generator)
    targets[torch.rand(9000, generator=generator) < 0.3] = IGNORED
    return features, weight, targets.cuda()


def reference(features: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    logits = features @ weight.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return nats.view(targets.shape)


def close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


if __name__ == "__main__":
    check_all("cpu")
