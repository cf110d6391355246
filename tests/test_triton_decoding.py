"""Triton's attention over the cache against attention without one: on a GPU, and on a CPU in Triton's interpreter."""

from contextlib import nullcontext

import pytest
import torch

from gptworks.infer.backends.cache import Vectors
from gptworks.model.scores import Scores, attend_reference
from triton_interpreter import interpret

CASES = [
    # cache, key/value heads, query heads, width, window, softcap, programs
    (torch.float32, 4, 4, 64, None, None, 1024),
    (torch.float32, 2, 6, 80, 7, None, 64),
    (torch.float32, 2, 2, 24, None, 5.0, 1),
    (torch.bfloat16, 2, 4, 64, None, None, 8),
    (torch.float16, 1, 4, 128, 100, None, 1024),
    (torch.int8, 2, 4, 64, 20, None, 64),
]


def check_all(device: str) -> None:
    from gptworks.kernels import triton_decoding

    for dtype, n_groups, n_heads, width, window, softcap, programs in CASES:
        torch.manual_seed(0)
        triton_decoding.PROGRAMS = programs
        full = torch.float32 if dtype == torch.int8 else dtype
        keys, values = (Vectors((5, n_groups, 200, width), dtype, torch.device(device), 1) for _ in range(2))
        for slot in range(5):
            keys[slot], values[slot] = torch.randn(2, n_groups, 200, width, dtype=full).to(device)
        slots, last = torch.tensor([3, 0, 4, 1], device=device), torch.tensor([150, 0, 63, 64], device=device)
        q = torch.randn(n_heads, 4, width, dtype=full).to(device).transpose(0, 1)
        found = triton_decoding.attend(q, keys, values, slots, last, width**-0.5, softcap, window)
        for i, (slot, end) in enumerate(zip(slots.tolist(), (last + 1).tolist(), strict=True)):
            k, v = (x[slot : slot + 1, :, :end].double().cpu() for x in (keys, values))
            wanted = attend_reference(q[i, :, None][None].double().cpu(), k, v, Scores(window, softcap=softcap))
            off = (found[i].double().cpu() - wanted[0, :, 0]).abs().max()
            assert off < (2e-6 if full == torch.float32 else 2e-2), (dtype, i, float(off))


def test_cached_attention_in_tritons_interpreter() -> None:
    interpret(__file__)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_cached_attention_on_a_gpu() -> None:
    check_all("cuda")


if __name__ == "__main__":
    torch.cuda.device_of = lambda _: nullcontext()  # type: ignore[assignment, misc]
    check_all("cpu")
