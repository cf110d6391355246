"""The C++ passes of training against torch in float64: values and gradients."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.kernels import cpu, dispatch, passes
from gptworks.kernels.library import training_library
from gptworks.model.rotary import rotate

DTYPES = (torch.float32, torch.bfloat16)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Of the largest value: sums in float32, and a rounding or two to bf16."""


@pytest.fixture(autouse=True)
def there() -> None:
    if training_library() is None:
        pytest.skip("no native kernels here")
    torch.manual_seed(0)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def gradients(outputs: Tensor | tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the outputs' sum, weighted by numbers that are the same in each dtype."""
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    weights = [torch.linspace(-1, 1, y.numel()).bfloat16().to(y.dtype).view(y.shape) for y in outputs]
    return list(torch.autograd.grad(outputs, inputs, weights))


def with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    return [y.detach() for y in outputs] + gradients(tuple(outputs), list(inputs))


def check(ours: Callable[..., Any], exact: Callable[..., Any], *inputs: Tensor) -> None:
    """Check that values and gradients in C++ equal torch's in float64 within the dtype's rounding, and repeat
    exactly."""
    assert passes.serve(*inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    first, again, wanted = (with_gradients(*call) for call in ((ours, inputs), (ours, inputs), (exact, wide)))
    coarse = max((x.dtype for x in (*inputs, *first)), key=lambda dtype: NEAR[dtype])
    for a, b, exactly in zip(first, again, wanted, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a.double(), exactly, rtol=0, atol=NEAR[coarse] * max(1, exactly.abs().max().item()))
    for x, gradient in zip(inputs, first[-len(inputs) :], strict=True):
        assert gradient.dtype == x.dtype


def exact_activation(kind: str) -> Callable[[Tensor], Tensor]:
    return (lambda x: F.relu(x).square()) if kind == "relu2" else cpu.ACTIVATIONS[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu2", "swiglu"])
def test_activations_equal_float64(kind: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(700), torch.linspace(-30, 30, 307), torch.tensor([-1e18, 1e4, 0.0])])
    x = x.to(dtype).requires_grad_()
    check(lambda x: dispatch.activate(x, kind), exact_activation(kind), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
def test_gates_equal_float64(kind: str, dtype: torch.dtype, threads: int) -> None:
    gate, up = (torch.randn(33, 1031).to(dtype).requires_grad_() for _ in range(2))
    check(lambda g, u: dispatch.activate(g, kind, u), lambda g, u: exact_activation(kind)(g) * u, gate, up)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gates_of_other_layouts_equal_float64(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(9, 7).to(dtype).T.requires_grad_() for _ in range(2))
    assert not passes.serve(gate)
    ours, exact = dispatch.activate(gate, "swiglu", up), F.silu(gate.double()) * up.double()
    torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=1e-3 if dtype != torch.float64 else 1e-12)
    for a, b in zip(gradients(ours, [gate, up]), gradients(exact, [gate, up]), strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2e-2 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 33, 384])
def test_norms_equal_float64(width: int, dtype: torch.dtype, threads: int) -> None:
    x = (torch.randn(3, 67, width) + 0.5).to(dtype).requires_grad_()
    weight, bias = torch.randn(width).requires_grad_(), torch.randn(width).requires_grad_()
    for out in DTYPES:
        check(
            lambda x, w, b, out=out: dispatch.norm(x, w, b, 1e-5, out, True)[1],
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
            x, weight, bias,
        )  # fmt: skip
        check(
            lambda x, w, out=out: dispatch.norm(x, w, None, 1e-5, out, False)[1],
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
            x,
            weight,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["B T H D", "B H T D"])
@pytest.mark.parametrize("tables", ["T", "B 1 T"])
@pytest.mark.parametrize("width, turned", [(64, 64), (80, 80), (16, 2), (40, 24)])
def test_rotation_equals_float64(
    width: int, turned: int, tables: str, stored: str, dtype: torch.dtype, threads: int
) -> None:
    batch, heads, length = 3, 5, 37
    x = torch.randn((batch, length, heads, width) if stored == "B T H D" else (batch, heads, length, width))
    angles = torch.randn((length, turned // 2) if tables == "T" else (batch, 1, length, turned // 2))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = x.to(dtype).requires_grad_()

    def ours(x: Tensor) -> Tensor:
        heads_first = x.transpose(1, 2) if stored == "B T H D" else x
        assert passes.rotates(heads_first, cos, sin)
        return rotate(heads_first, (cos, sin))

    def exact(x: Tensor) -> Tensor:
        heads_first = x.transpose(1, 2) if stored == "B T H D" else x
        return rotate(heads_first, (cos.double(), sin.double()))

    check(ours, exact, x)


def test_what_has_no_memory_on_the_cpu_is_left_to_torch() -> None:
    x, angles = torch.randn(2, 3, 7, 32, device="meta"), torch.randn(7, 8, device="meta")
    assert not passes.serve(x) and not passes.rotates(x, angles, angles)
    assert rotate(x, (angles, angles)).shape == x.shape


def test_a_nan_stays_in_its_pair() -> None:
    x, angles = torch.randn(2, 3, 7, 32), torch.randn(7, 8)
    x[1, 2, 3, 5] = float("nan")
    turned = rotate(x, (angles.cos(), angles.sin()))
    assert turned.isnan().nonzero().tolist() == [[1, 2, 3, 5], [1, 2, 3, 13]]


def test_norms_of_transposed_heads_equal_float64() -> None:
    x = torch.randn(2, 17, 3, 16).bfloat16().requires_grad_()
    weight = torch.randn(16).requires_grad_()
    check(
        lambda x, w: dispatch.norm(x.transpose(1, 2), w, None, 1e-5, torch.bfloat16, False)[1],
        lambda x, w: F.rms_norm(x.transpose(1, 2), w.shape, w, 1e-5),
        x, weight,
    )  # fmt: skip


@pytest.mark.parametrize("branch_dtype", DTYPES)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_sum_and_its_norm_equal_float64(alpha: float, branch_dtype: torch.dtype, threads: int) -> None:
    x, branch = torch.randn(5, 41, 40).requires_grad_(), torch.randn(5, 41, 40).to(branch_dtype).requires_grad_()
    weight, bias = torch.randn(40).requires_grad_(), torch.randn(40).requires_grad_()

    def exact(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + alpha * branch
        return stream, F.layer_norm(stream, weight.shape, weight, bias, 1e-5)

    check(
        lambda x, y, w, b: dispatch.norm(x, w, b, 1e-5, torch.bfloat16, layer=True, branch=y, alpha=alpha),
        exact, x, branch, weight, bias,
    )  # fmt: skip
    check(lambda x, y: dispatch.add(x, y, alpha), lambda x, y: x + alpha * y, x, branch)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, branch = torch.randn(300, 257).requires_grad_(), torch.randn(300, 257).bfloat16().requires_grad_()
    weight, bias = torch.randn(257).requires_grad_(), torch.randn(257).requires_grad_()
    results, before = [], torch.get_num_threads()
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        both = dispatch.norm(x, weight, bias, 1e-5, torch.bfloat16, layer=True, branch=branch)
        results.append([*both, *gradients(both, [x, branch, weight, bias])])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for others in results[1:] for a, b in zip(results[0], others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.randn(4, 33).to(dtype)
    x[1, 5] = x[2, 32] = float("nan")
    x.requires_grad_()
    weight = torch.ones(33, requires_grad=True)
    for kind in ("gelu", "gelu_tanh", "relu2", "swiglu"):
        y = dispatch.activate(x, kind)
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(gradients(y, [x])[0].isnan(), x.isnan())
    for y in (
        dispatch.norm(x, weight, None, 1e-5, dtype, False)[1],
        dispatch.norm(x, weight, None, 1e-5, dtype, True)[1],
    ):
        assert torch.equal(y.isnan().all(1), x.isnan().any(1)) and not y[0].isnan().any()
        assert gradients(y, [weight])[0].isnan().all()


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(8, requires_grad=True)
    (d_x,) = torch.autograd.grad(dispatch.activate(x, "gelu").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_x.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 33, 5003])
@pytest.mark.parametrize("weighed", [False, True])
def test_cross_entropy_equals_float64(width: int, dtype: torch.dtype, weighed: bool, threads: int) -> None:
    logits = torch.randn(57, width).mul_(8).sub_(40).to(dtype)
    targets = torch.randint(width, (57,)).where(torch.rand(57) < 0.8, IGNORED)
    factors = torch.randn(57) if weighed else None
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="none")
    (slope,) = torch.autograd.grad(exact, wide, torch.ones(57) if factors is None else factors)
    nats = passes.cross_entropy(logits.clone(), targets, gradient=False)
    gradient = logits.clone()
    again = passes.cross_entropy(gradient, targets, factors, gradient=True)
    assert torch.equal(nats, again) and nats.dtype == torch.float32
    torch.testing.assert_close(nats.double(), exact.detach(), rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(gradient.double(), slope, rtol=NEAR[dtype], atol=1e-6)
    assert not gradient[targets == IGNORED].any()
    rows = [passes.cross_entropy(logits[i : i + 1].clone(), targets[i : i + 1], gradient=False) for i in range(57)]
    assert torch.equal(torch.cat(rows), nats), "a row's result does not depend on the number of rows"


def test_cross_entropy_of_what_is_no_number_and_of_far_logits() -> None:
    logits = torch.randn(4, 40)
    logits[0, 7], logits[1, 39], logits[2, 3] = torch.nan, torch.nan, 1e30
    targets = torch.tensor([1, 2, 5, 6])
    for dtype in DTYPES:
        gradient = logits.to(dtype, copy=True)
        nats = passes.cross_entropy(gradient, targets, gradient=True)
        assert nats[:2].isnan().all() and gradient[:2].isnan().all()
        assert nats[2] == logits[2, 3].to(dtype) and nats[3].isfinite() and gradient[2, 3] == 1 and gradient[2, 5] == -1


@pytest.mark.parametrize("target", [-1, 40])
def test_a_target_that_is_no_column_is_refused(target: int) -> None:
    with pytest.raises(IndexError, match=f"{target}.*there are 40 logits"):
        passes.cross_entropy(torch.randn(2, 40), torch.tensor([0, target]), gradient=True)
