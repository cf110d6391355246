"""Times the passes and float32 products of gptworks.kernels, and Muon, against torch's own, forward and backward.

python bench/passes.py
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.device import device_name, keep_freed_memory
from gptworks.kernels import dispatch
from gptworks.model.loss import linear_cross_entropy
from gptworks.model.rotary import rotate
from gptworks.model.scores import Scores, attend, causal_mask
from gptworks.training.optim.muon import Muon

SHAPES = ((16, 6, 256, 64), (4, 12, 512, 64), (4, 12, 1024, 64), (8, 8, 1024, 64), (1, 16, 4096, 128))
"""Shapes of attention: batch, heads, length, head width."""


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median time of a call after a warm-up."""
    taken = []
    for _ in range(12):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken[2:])


def compare(name: str, ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Print both times of a forward and backward pass, and their ratio."""
    gradient = torch.randn_like(ours(*inputs))
    needed = [tensor for tensor in inputs if tensor.requires_grad]
    times = [milliseconds(lambda: torch.autograd.grad(f(*inputs), needed, gradient)) for f in (theirs, ours)]  # noqa: B023
    print(f"{name:<34} torch {times[0]:>7.2f} ms   gptworks {times[1]:>7.2f} ms   {times[0] / times[1]:>5.2f} ×")


def compare_rotation(batch: int, heads: int, length: int, width: int) -> None:
    """Print the times of the rotary embedding in C++ and in torch operations, to which `rotate` falls back."""
    x = torch.randn(batch, length, heads, width).bfloat16().requires_grad_()
    angles = torch.randn(length, width // 2)
    table = angles.cos().bfloat16(), angles.sin().bfloat16()

    def by_torch(x: Tensor) -> Tensor:
        a, b = x.transpose(1, 2).chunk(2, dim=-1)
        return torch.cat((a * table[0] - b * table[1], b * table[0] + a * table[1]), dim=-1)

    name = f"rotation, bf16, {batch} × {heads} × {length} × {width}"
    compare(name, lambda x: rotate(x.transpose(1, 2), table), by_torch, x)


def compare_losses(n_tokens: int, width: int, vocab_size: int) -> None:
    """Print the times of the head with cross-entropy: with all logits at once, and as gptworks computes it."""
    features = torch.randn(n_tokens, width).bfloat16().requires_grad_()
    weight = torch.randn(vocab_size, width).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab_size, (n_tokens,))

    def whole(features: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy((features @ weight.bfloat16().T).float(), targets, reduction="sum")

    name = f"head and loss, {n_tokens} × {vocab_size}"
    compare(name, lambda x, w: linear_cross_entropy(x, w, targets), whole, features, weight)


def compare_muon(n: int, rows: int, columns: int) -> None:
    """Print the times of a step of torch's Muon and of ours on n matrices."""
    matrices = [torch.nn.Parameter(torch.randn(rows, columns)) for _ in range(n)]
    for matrix in matrices:
        matrix.grad = torch.randn(rows, columns)
    theirs, ours = (milliseconds(kind(matrices, lr=1e-3).step) for kind in (torch.optim.Muon, Muon))
    name = f"Muon, {n} of {rows} × {columns}"
    print(f"{name:<34} torch {theirs:>7.2f} ms   gptworks {ours:>7.2f} ms   {theirs / ours:>5.2f} ×")


@torch.no_grad()
def compare_band(length: int, window: int) -> None:
    """Print the times, without gradients, of banded attention in blocks and of torch's kernel with a mask."""
    q, k, v = torch.randn(3, 1, 12, length, 64).bfloat16()
    mask = causal_mask(length, length, window, q.device)
    theirs = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, mask))
    ours = milliseconds(lambda: attend(q, k, v, Scores(window=window)))
    name = f"band of {window}, bf16, {length} tokens"
    print(f"{name:<34} torch {theirs:>7.2f} ms   gptworks {ours:>7.2f} ms   {theirs / ours:>5.2f} ×")


def main() -> None:
    keep_freed_memory()
    print(f"{device_name(torch.device('cpu'))}, torch {torch.__version__}")
    for shape in SHAPES:
        q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for _ in range(3))
        name = "attention, bf16, " + " × ".join(map(str, shape))
        compare(name, attend, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    for length in (2048, 4096):
        compare_band(length, window=256)
    x, weight = torch.randn(8192, 256, requires_grad=True), torch.ones(256, requires_grad=True)
    compare(
        "RMSNorm, 8192 × 256 to bf16",
        lambda x, weight: dispatch.norm(x, weight, None, 1e-5, torch.bfloat16, False)[1],
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5).bfloat16(),
        x,
        weight,
    )
    compare_rotation(8, 3, 512, 64)
    compare("dropout 0.05, 8192 × 256", lambda x: dispatch.dropout(x, 0.05), lambda x: F.dropout(x, 0.05), x)
    for n_tokens, width, vocab_size in ((2048, 768, 50_257), (4096, 128, 4096)):
        compare_losses(n_tokens, width, vocab_size)
    for n, rows, columns in ((16, 256, 256), (8, 1024, 256), (96, 256, 192)):
        compare_muon(n, rows, columns)
    for n_rows, width, n_out in ((4096, 384, 1536), (2048, 3072, 768)):
        x, weight = torch.randn(n_rows, width, requires_grad=True), torch.randn(n_out, width, requires_grad=True)
        name = f"linear layer, fp32, {n_rows} × {width} × {n_out}"
        compare(name, dispatch.linear, F.linear, x, weight)
    h = torch.randn(8192, 1024).bfloat16().requires_grad_()
    compare("ReLU², bf16, 8192 × 1024", lambda x: dispatch.activate(x, "relu2"), lambda x: F.relu(x).square(), h)


if __name__ == "__main__":
    main()
