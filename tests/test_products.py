"""Float32 products by oneDNN against float64: values, gradients, layouts; and where they are taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gptworks import machine
from gptworks.model import GPT, products
from gptworks.model.loss import linear_cross_entropy
from gptworks.native import passes
from tiny import plain_model

NEAR = 2e-6
"""Of the largest value: float32, whose sums take another order."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every product that may be is given to oneDNN; the shapes of their left factors."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch comes without oneDNN")
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = []
    times = products._product_nt

    def noted(a: Tensor, *others: Any) -> Tensor:
        shapes.append(tuple(a.shape))
        return times(a, *others)

    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "_product_nt", noted)
    return shapes


def near(ours: Tensor, exact: Tensor) -> None:
    assert ours.dtype == torch.float32 and ours.is_contiguous()
    torch.testing.assert_close(ours.double(), exact.double(), rtol=0, atol=NEAR * exact.abs().max().item())


def with_gradients(linear: Callable[..., Tensor], *inputs: Tensor, weights: Tensor) -> list[Tensor]:
    out = linear(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights.to(out.dtype))]


@pytest.mark.parametrize("shape", [(1300, 96, 40), (513, 33, 130), (2, 300, 48, 48), (3, 2, 5, 7, 9)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_a_linear_layer_equals_float64(
    taken: Any, shape: tuple[int, ...], has_bias: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    *rows, n_in, n_out = shape
    if not native:
        monkeypatch.setattr(passes, "training_library", lambda: None)
    inputs = [torch.randn(*rows, n_in), torch.randn(n_out, n_in), *([torch.randn(n_out)] if has_bias else [])]
    inputs = [x.requires_grad_() for x in inputs]
    weights = torch.randn(*rows, n_out)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return products.linear(x, weight, bias)

    ours, again = (with_gradients(linear, *inputs, weights=weights) for _ in range(2))
    exact = with_gradients(F.linear, *(x.detach().double().requires_grad_() for x in inputs), weights=weights)
    assert len(taken) >= 6
    for one, other, wanted in zip(ours, again, exact, strict=True):
        assert torch.equal(one, other)
        near(one, wanted)


def test_inputs_and_gradients_may_be_laid_out_anyhow(taken: Any) -> None:
    x = torch.randn(40, 24, 16).transpose(0, 1).requires_grad_()
    weight = torch.randn(16, 12).T.requires_grad_()
    products.linear(x, weight, None).sum().backward()  # an expanded 1
    wide, heavy = (t.detach().double().requires_grad_() for t in (x, weight))
    F.linear(wide, heavy).sum().backward()
    assert taken and x.grad is not None and weight.grad is not None
    for ours, exact in ((x.grad, wide.grad), (weight.grad, heavy.grad)):
        assert exact is not None
        near(ours.contiguous(), exact)


def test_what_needs_no_gradient_gets_none(taken: Any) -> None:
    x, weight = torch.randn(32, 8), torch.randn(4, 8, requires_grad=True)
    products.linear(x, weight, None).sum().backward()
    assert x.grad is None and weight.grad is not None
    with torch.no_grad():
        taken.clear()
        products.linear(x, weight, None)
    assert not taken, "only training takes this way"


@pytest.mark.parametrize("n", [1, 16, 511, 1100])
@pytest.mark.parametrize("into", [False, True])
def test_products_of_each_layout_equal_float64(taken: Any, n: int, into: bool) -> None:
    rows, other, matrix = torch.randn(n, 72), torch.randn(50, 72), torch.randn(72, 50)
    logits, features = torch.randn(n, 300), torch.randn(n, 20)
    pairs = [(rows, other.T), (rows, matrix), (logits.T[64:200], features), (features.T, logits)]
    for a, b in pairs:
        out = torch.full((a.size(0), b.size(1)), torch.nan) if into else None
        product = products.matmul(a, b, out=out)
        assert out is None or out is product
        near(product, a.double() @ b.double())
    assert len(taken) >= len(pairs)


def test_what_is_no_number_stays_none(taken: Any) -> None:
    x, weight = torch.ones(600, 8), torch.ones(4, 8)
    x[7, 3] = torch.nan
    product = products.matmul(x, weight.T)
    assert product[7].isnan().all() and product.isnan().sum() == 4
    gradient = products.matmul(product.T, torch.ones(600, 8))
    assert gradient.isnan().all()


def test_a_plan_counts_the_same_memory_on_every_machine(taken: Any) -> None:
    with FakeTensorMode():
        x, weight = torch.empty(64, 32, requires_grad=True), torch.empty(16, 32, requires_grad=True)
        products.linear(x, weight, None).sum().backward()
        products.matmul(torch.empty(64, 32), torch.empty(32, 16))
    assert not taken


def test_a_model_trains_with_them(taken: Any) -> None:
    """All of a step's gradients, the head's too, against the model in float64."""
    config = plain_model(
        vocab_size=300, context_length=64, n_layers=2, d_model=32, n_heads=2, mlp_bias=True, tie_embeddings=False
    )
    model, ids = GPT(config), torch.randint(300, (3, 65))

    def gradients(model: GPT) -> dict[str, Tensor]:
        features = model.features(ids[:, :-1])
        linear_cross_entropy(features, model.head_weight, ids[:, 1:]).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ours = gradients(model)
    assert {(192, 300), (3, 64, 32)} <= set(taken)
    model.zero_grad(set_to_none=True)
    exact = gradients(model.double())
    assert ours.keys() == exact.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(
            gradient.double(), exact[name].double(), rtol=0, atol=1e-4 * exact[name].abs().max().item(), msg=name
        )


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
def test_onednn_multiplies_where_mkl_would_be_slow(mkl: bool, amd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_amd", lambda: amd)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    products.onednn_is_faster.cache_clear()
    assert products.onednn_is_faster() is (mkl and amd)
    products.onednn_is_faster.cache_clear()
