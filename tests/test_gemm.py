"""The C++ products of float32 matrices against float64: values, gradients, layouts, memory, and when they are used."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gptworks import device, machine
from gptworks.kernels import dispatch, gemm, passes
from gptworks.kernels.library import training_library
from gptworks.model.gpt import GPT
from gptworks.model.loss import linear_cross_entropy
from gptworks.training.rehearsal.trace import LiveBytes
from tiny import plain_model

pytestmark = pytest.mark.skipif(training_library() is None, reason="training's C++ cannot be built or used here")

NEAR = 2e-6
"""Of the largest value: float32, whose sums take another order."""

TURNED = Tensor.contiguous, lambda x: x.T.contiguous().T
"""A matrix with contiguous rows, and with contiguous columns."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Force every possible product to run in C++; return the list of their sizes M, N, K."""
    torch.manual_seed(0)
    sizes: list[tuple[int, int, int]] = []
    call = gemm.call

    def noted(name: str, tensors: Any) -> None:
        a, b, *_ = tensors
        sizes.append((a.size(0), b.size(1), a.size(1)))
        call(name, tensors)

    monkeypatch.setattr(gemm, "is_faster", lambda: True)
    monkeypatch.setattr(gemm, "LEAST", 0)
    monkeypatch.setattr(gemm, "LEAST_ROWS", 0)
    monkeypatch.setattr(gemm, "call", noted)
    return sizes


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def near(ours: Tensor, exact: Tensor) -> None:
    assert ours.dtype == torch.float32 and ours.shape == exact.shape
    torch.testing.assert_close(ours.double(), exact.double(), rtol=0, atol=NEAR * exact.abs().max().item())


@pytest.mark.parametrize("m", [1, 7, 100, 1030])
@pytest.mark.parametrize("n", [1, 33, 600])
@pytest.mark.parametrize("k", [1, 50, 1024, 1700])
def test_products_equal_float64_in_each_layout(m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    exact = a.double() @ b.double()
    bound = NEAR * exact.abs().max().item()
    for left in TURNED:
        for right in TURNED:
            ours = gemm.product(left(a), right(b))
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=bound)
            torch.testing.assert_close(gemm.product(left(a), right(b), bias), ours + bias, rtol=0, atol=bound)


def test_what_lies_around_factors_and_results_is_neither_read_nor_written() -> None:
    torch.manual_seed(0)
    for m, n, k in ((13, 35, 20), (6, 16, 16), (12, 31, 830), (1, 1, 3)):
        a, b, out = (torch.full((size + 6, width + 40), torch.nan) for size, width in ((m, k), (k, n), (m, n)))
        a[3 : m + 3, 20 : k + 20], b[3 : k + 3, 20 : n + 20] = torch.randn(m, k), torch.randn(k, n)
        inside = out[3 : m + 3, 20 : n + 20]
        for left in (a[3 : m + 3, 20 : k + 20], a.T.contiguous().T[3 : m + 3, 20 : k + 20]):
            for right in (b[3 : k + 3, 20 : n + 20], b.T.contiguous().T[3 : k + 3, 20 : n + 20]):
                gemm.product(left, right, out=inside)
                near(inside, left.double() @ right.double())
                inside.fill_(torch.nan)
                assert out.isnan().all()


def test_bits_depend_neither_on_threads_nor_on_how_many_rows_and_columns_there_are(threads: Any) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 1200), torch.randn(1200, 200)
    for left in TURNED:
        whole = gemm.product(left(a), b)
        for n_threads in (1, 2, 3, 8):
            threads(n_threads)
            assert torch.equal(gemm.product(left(a), b), whole)
        assert torch.equal(gemm.product(left(a[17:48]), b), whole[17:48])
        assert torch.equal(gemm.product(left(a), b[:, 37:90]), whole[:, 37:90])


def test_more_threads_than_there_is_work_for(threads: Any) -> None:
    threads(16)
    a, b = torch.randn(2, 40), torch.randn(40, 3)
    near(gemm.product(a, b), a.double() @ b.double())


def test_what_is_no_number_stays_none() -> None:
    a, b = torch.ones(60, 80), torch.ones(80, 70)
    a[7, 3], b[5, 9] = torch.nan, torch.inf
    product = gemm.product(a, b)
    assert product[7].isnan().all() and product.isnan().sum() == 70
    assert product[:7, 9].isinf().all() and product.isinf().sum() == 59


def with_gradients(linear: Callable[..., Tensor], *inputs: Tensor, weights: Tensor) -> list[Tensor]:
    out = linear(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights.to(out.dtype))]


@pytest.mark.parametrize("shape", [(1300, 96, 40), (513, 33, 130), (2, 300, 48, 48), (3, 2, 5, 7, 9)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_equals_float64(taken: Any, shape: tuple[int, ...], has_bias: bool) -> None:
    *rows, n_in, n_out = shape
    inputs = [torch.randn(*rows, n_in), torch.randn(n_out, n_in), *([torch.randn(n_out)] if has_bias else [])]
    inputs = [x.requires_grad_() for x in inputs]
    weights = torch.randn(*rows, n_out)
    ours = with_gradients(dispatch.linear, *inputs, weights=weights)
    exact = with_gradients(F.linear, *(x.detach().double().requires_grad_() for x in inputs), weights=weights)
    assert len(taken) == 3
    for one, wanted in zip(ours, exact, strict=True):
        assert one.is_contiguous()
        near(one, wanted)


def test_inputs_and_gradients_may_be_laid_out_anyhow(taken: Any) -> None:
    x = torch.randn(40, 24, 16).transpose(0, 1).requires_grad_()
    weight = torch.randn(16, 12).T.requires_grad_()
    dispatch.linear(x, weight).sum().backward()  # an expanded 1
    wide, heavy = (t.detach().double().requires_grad_() for t in (x, weight))
    F.linear(wide, heavy).sum().backward()
    assert taken and x.grad is not None and weight.grad is not None
    for ours, exact in ((x.grad, wide.grad), (weight.grad, heavy.grad)):
        assert exact is not None
        near(ours, exact)


@pytest.mark.parametrize("trains", ["x", "weight", "bias", "nothing"])
def test_what_needs_no_gradient_gets_none_and_keeps_nothing(taken: Any, trains: str) -> None:
    inputs = {"x": torch.randn(64, 32), "weight": torch.randn(16, 32), "bias": torch.randn(16)}
    for name, x in inputs.items():
        x.requires_grad_(name == trains)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = dispatch.linear(*inputs.values())
    assert [x.shape for x in kept] == {"x": [(16, 32)], "weight": [(64, 32)]}.get(trains, [])
    if trains != "nothing":
        out.sum().backward()
    assert [name for name, x in inputs.items() if x.grad is not None] == [trains] * (trains != "nothing")


def test_a_product_holds_the_memory_that_torchs_does(taken: Any) -> None:
    """A plan is the same on every processor, so both products must need equal memory; on fake tensors too."""

    def peak(linear: Callable[..., Tensor]) -> int:
        x, weight, bias = (torch.ones(shape, requires_grad=True) for shape in ((8, 64, 32), (48, 32), (48,)))
        with LiveBytes() as live:
            torch.autograd.grad(linear(x.view(8, 64, 32), weight, bias).square().sum(), (x, weight, bias))
        return live.peak_bytes

    theirs = peak(F.linear)
    assert peak(dispatch.linear) == theirs and len(taken) == 3
    with FakeTensorMode():
        assert peak(dispatch.linear) == theirs
    assert len(taken) == 6


def test_a_model_trains_with_them(taken: Any) -> None:
    """All gradients of a step equal those of the model in float64, within rounding."""
    config = plain_model(
        vocab_size=300, context_length=64, n_layers=2, d_model=32, n_heads=2, mlp_bias=True, tie_embeddings=False
    )
    model, ids = GPT(config), torch.randint(300, (3, 65))

    def gradients(model: GPT) -> dict[str, Tensor]:
        features = model.features(ids[:, :-1])
        linear_cross_entropy(features, model.head_weight, ids[:, 1:]).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ours = gradients(model)
    assert {(192, 128, 32), (192, 32, 128), (192, 300, 32), (300, 32, 192)} <= set(taken)
    model.zero_grad(set_to_none=True)
    exact = gradients(model.double())
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient.double(), exact[name].double(), rtol=0, atol=1e-4 * exact[name].abs().max().item(), msg=name
        )


def test_a_device_is_measured_by_the_products_that_training_does(taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PROBE_SECONDS", 0)
    assert device.product_rate(torch.device("cpu"), torch.float32) > 1e8
    assert set(taken) == {(256, 256, 256)}  # test_throughput.py holds that a fast device gets larger ones


@pytest.mark.parametrize("learned", [0, 1])
def test_a_plain_product_that_is_differentiated_has_a_gradient(taken: Any, learned: int) -> None:
    factors = [torch.randn(64, 32), torch.randn(32, 16)]
    factors[learned].requires_grad_()
    dispatch.product(*factors).sum().backward()
    assert factors[learned].grad is not None
    with torch.no_grad():
        dispatch.product(*factors)
    assert taken == [(64, 16, 32)]


def test_factors_that_do_not_fit_get_torchs_error(taken: Any) -> None:
    for multiply in (dispatch.product, lambda a, b: dispatch.linear(a, b.T)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            multiply(torch.ones(64, 32), torch.ones(16, 8))
    assert not taken


def test_where_torch_multiplies_no_library_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_faster", lambda: False)
    monkeypatch.setattr(passes, "training_library", lambda: pytest.fail("it is asked for"))
    assert dispatch.linear(torch.ones(256, 256), torch.ones(256, 256)).sum() == 256**3


def test_other_dtypes_and_autocast_are_torchs(taken: Any) -> None:
    x, weight = torch.randn(64, 32), torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dispatch.linear(x, weight).dtype == torch.bfloat16
    for dtype in (torch.float64, torch.bfloat16):
        assert dispatch.linear(x.to(dtype), weight.to(dtype)).dtype == dtype
    assert not taken


@pytest.mark.parametrize(
    ("lines", "processor", "amd"),
    [
        (["processor\t: 0\n", "vendor_id\t: AuthenticAMD\n"], "", True),
        (["vendor_id\t: GenuineIntel\n"], "", False),
        (["CPU implementer\t: 0x41\n"], "aarch64", False),
        ([], "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD", True),
        ([], "Intel64 Family 6 Model 154 Stepping 3, GenuineIntel", False),
        ([], "arm", False),
    ],
)
def test_whose_processor_it_is(lines: list[str], processor: str, amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_lines", lambda path: lines)
    monkeypatch.setattr(machine.platform, "processor", lambda: processor)
    assert machine.is_amd() is amd


@pytest.mark.parametrize("mkl", [False, True])
@pytest.mark.parametrize("amd", [False, True])
def test_they_are_taken_where_mkl_would_be_slow(mkl: bool, amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "is_amd", lambda: amd)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    gemm.is_faster.cache_clear()
    assert gemm.is_faster() is (mkl and amd)
    gemm.is_faster.cache_clear()
