"""Attention against its definition on every code path, and the rotary embedding against its properties."""

import pytest
import torch
from torch import Tensor

from gptworks.kernels import cpu
from gptworks.model.rotary import Rotary, rotate
from gptworks.model.scores import Scores, attend, attend_banded, attend_reference, causal_mask
from tiny import plain_model

HEADS, WIDTH = 4, 6


def random_inputs(n_queries: int, n_keys: int, n_kv_heads: int, *, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_queries * 100 + n_keys)
    shapes = ((2, HEADS, n_queries, WIDTH), (2, n_kv_heads, n_keys, WIDTH), (2, n_kv_heads, n_keys, WIDTH))
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2).requires_grad_(grad) for shape in shapes
    )
    return q, k, v


SHAPES = pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
GROUPS = pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 3, 9, 20])


@WINDOWS
@GROUPS
@SHAPES
def test_the_fused_kernel_equals_the_definition(
    n_queries: int, n_keys: int, n_kv_heads: int, window: int | None
) -> None:
    inputs = random_inputs(n_queries, n_keys, n_kv_heads)
    expected = attend_reference(*inputs, Scores(window=window))
    torch.testing.assert_close(attend(*inputs, Scores(window=window)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [2, 3, 128])
@WINDOWS
@GROUPS
@SHAPES
def test_blocked_attention_and_its_gradients_equal_the_definition(
    monkeypatch: pytest.MonkeyPatch, n_queries: int, n_keys: int, n_kv_heads: int, window: int | None, block: int
) -> None:
    monkeypatch.setattr(cpu, "BLOCK", block)
    inputs = random_inputs(n_queries, n_keys, n_kv_heads, grad=True)
    out, expected = attend(*inputs, Scores(window=window)), attend_reference(*inputs, Scores(window=window))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    gradients = torch.autograd.grad(out, inputs, direction)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, inputs, direction), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [6, 7, 12, 13])
@pytest.mark.parametrize("window", [1, 2, 3, 6])
@GROUPS
def test_banded_attention_in_blocks_equals_the_definition(n_kv_heads: int, window: int, length: int) -> None:
    inputs = random_inputs(length, length, n_kv_heads, grad=True)
    out, expected = attend_banded(*inputs, Scores(window=window)), attend_reference(*inputs, Scores(window=window))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    gradients = torch.autograd.grad(out, inputs, direction)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, inputs, direction), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-11)


def test_banded_attention_equals_the_dense_kernel_under_a_mask() -> None:
    """With GPT-3's band of 256, its context of 2,048 and the shapes of a head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 2048, 64, generator=generator)
    mask = causal_mask(2048, 2048, 256, torch.device("cpu"))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(attend(q, k, v, Scores(window=256)), dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, None), (0.3, 0.4)])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_scale_of_its_own_and_a_soft_cap(scale: float, softcap: float | None, grad: bool, window: int | None) -> None:
    inputs = random_inputs(9, 9, 2, grad=grad)
    expected = attend_reference(*inputs, Scores(window=window, scale=scale, softcap=softcap))
    ours = attend(*inputs, Scores(window=window, scale=scale, softcap=softcap))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_attend_is_right_whatever_path_it_chooses(grad: bool, window: int | None) -> None:
    """Without gradients the fused kernel runs; with gradients, on a CPU, blocks of 128 queries: 130 queries need
    two."""
    q, k, v = random_inputs(130, 260, 2, grad=grad)
    out = attend(q, k, v, Scores(window=window))
    torch.testing.assert_close(out, attend_reference(q, k, v, Scores(window=window)), rtol=0, atol=1e-12)


def test_the_mask_and_the_window_count_the_token_itself() -> None:
    assert causal_mask(2, 4, None, torch.device("cpu")).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(3, 4, 2, torch.device("cpu")).int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_right_under_dropout(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Compared with finite differences, with the same dropped weights each time."""
    monkeypatch.setattr(cpu, "BLOCK", 2)

    def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        return attend(q, k, v, Scores(window=window, dropout=0.4))

    assert torch.autograd.gradcheck(dropping, random_inputs(5, 5, 2, grad=True))


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "blocked"])
def test_dropout_drops_weights_and_rescales_the_rest(grad: bool) -> None:
    """One key has weight 1; at probability 1/2, it is dropped or doubled."""
    q, k, v = (torch.ones(1, 1000, 1, 2, requires_grad=grad) for _ in range(3))
    torch.manual_seed(0)
    out = attend(q, k, v, Scores(dropout=0.5)).detach()
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert 0.9 < out.mean() < 1.1  # 3 standard deviations of the mean of 1,000 are 0.095
    assert torch.equal(attend(q, k, v), v)


def rotary(theta: float = 10_000.0) -> Rotary:
    return Rotary(
        plain_model(vocab_size=5, context_length=64, n_layers=1, d_model=16, n_heads=2, d_head=8, rope_theta=theta)
    )


def test_rotation_is_the_complex_product_of_the_paper() -> None:
    """Elements i and i + D/2 form a complex number, rotated by m·θ^(−2i/D) at position m (Su et al., 2021)."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    frequency = 500.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(x[:, :4], x[:, 4:]) * torch.exp(1j * torch.outer(torch.arange(64), frequency))
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    result = rotate(x, rotary(500.0).at(slice(0, 64), 64, torch.float64))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)  # the tables are float32


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    table = rotary()

    def product(query_at: int, key_at: int) -> float:
        places = (slice(place, place + 1) for place in (query_at, key_at))
        at_query, at_key = (table.at(place, 64, torch.float32) for place in places)
        return (rotate(q, at_query) * rotate(k, at_key)).sum().item()

    assert product(10, 3) == pytest.approx(product(60, 53), abs=1e-5)
    assert product(10, 3) != pytest.approx(product(10, 4), abs=1e-3)


def test_rotary_tables_of_a_later_part_are_those_of_the_whole() -> None:
    parts, wholes = (rotary().at(places, 64, torch.float32) for places in (slice(20, 25), slice(0, 64)))
    for part, whole in zip(parts, wholes, strict=True):
        assert torch.equal(part, whole[20:25])
