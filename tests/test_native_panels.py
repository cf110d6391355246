"""Matrices in panels: the layout itself, and a model with some matrices in it."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.config import LoRAConfig
from gptworks.infer.backends import native, placement
from gptworks.infer.backends.backend import Chunk, TorchBackend
from gptworks.infer.backends.placement import matrices, settle
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora
from gptworks.quantize.convert import quantize_model
from gptworks.quantize.linear import QuantizedGPT, packed_matrices
from gptworks.quantize.panels import from_panels, panel_of, rows_from_panels, to_panels
from test_native import text, variant

ALL_KINDS = {torch.bfloat16: 48, torch.int8: 48, torch.uint8: 32}


@pytest.mark.parametrize("dtype", [*ALL_KINDS, torch.float16])
@pytest.mark.parametrize("panel", [16, 32, 48])
@pytest.mark.parametrize("rows", [1, 15, 16, 48, 96, 100, 145])
def test_the_layout_is_as_documented(rows: int, panel: int, dtype: torch.dtype) -> None:
    """Compared word by word with the definition."""
    matrix = torch.randint(99, (rows, 16), generator=torch.Generator().manual_seed(rows)).to(dtype)
    per_word = 1 if dtype == torch.float16 else 4 // dtype.itemsize
    nothing = matrix.new_zeros(per_word)
    wanted = []
    for first in range(0, rows, panel):
        width = min(panel, -(-(rows - first) // 16) * 16)
        for word in range(0, 16, per_word):
            rows_here = range(first, first + width)
            wanted += [matrix[row, word : word + per_word] if row < rows else nothing for row in rows_here]
    flat = to_panels(matrix, panel)
    assert torch.equal(flat, torch.cat(wanted))
    assert torch.equal(from_panels(flat, rows, panel), matrix)
    which = torch.tensor([[0, rows - 1], [rows // 2, rows // 3]])
    assert torch.equal(rows_from_panels(flat, which, rows, panel), matrix[which])


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("rows", [16, 48, 256, 768, 1024, 50257])
def test_no_thread_has_many_more_rows_than_another(rows: int, n_threads: int) -> None:
    """At most a tenth more than with panels of 16 rows, the narrowest."""
    panel = panel_of(rows, n_threads, 48)
    most, least_most = (-(-rows // (size * n_threads)) * size for size in (panel, 16))
    assert panel in (16, 32, 48) and most <= 1.1 * least_most
    assert panel_of(rows, n_threads, 32) in (16, 32)


def quantized(kind: str, name: str = "qwen3") -> QuantizedGPT:
    torch.manual_seed(0)
    return quantize_model(variant(name), kind)  # type: ignore[arg-type]


def logits_of(model: GPT, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]))


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "narrow"])
def test_torch_computes_a_model_in_panels_as_before(name: str, kind: str) -> None:
    """With the same bits, and the same file."""
    model, ids = quantized(kind, name), text(20)
    before, weights = logits_of(model, ids), {name: x.clone() for name, x in model.state_dict().items()}
    settle(list(matrices(model)), ALL_KINDS)
    assert all(matrix.weight.dim() == 1 and matrix.panel for _, matrix in packed_matrices(model))
    assert torch.equal(logits_of(model, ids), before)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    settle(list(matrices(model)), {})
    assert all(matrix.weight.dim() == 2 for _, matrix in packed_matrices(model))
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("kind", ["fp16", "int4"])
def test_placing_frees_each_matrix_as_it_is_placed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a model would be in memory twice while it is placed, in panels or in rows as fp16."""
    model = quantized(kind, "gpt2")
    modules = list(matrices(model))
    before, alive = [weakref.ref(module.weight) for module in modules], []
    parts = placement._parts

    def counting(*arguments: Any) -> dict[str, Tensor]:
        alive.append(sum(weight() is not None for weight in before))
        return parts(*arguments)

    monkeypatch.setattr(placement, "_parts", counting)
    settle(modules, ALL_KINDS)
    assert alive[-len(modules) :] == list(range(len(modules), 0, -1))


def test_a_model_in_panels_accepts_an_adapter() -> None:
    ids, models = text(20), [quantized("int8"), quantized("int8")]
    settle(list(matrices(models[0])), ALL_KINDS)
    for model in models:
        torch.manual_seed(1)
        add_lora(model, LoRAConfig(rank=4))
    found, wanted = (logits_of(model, ids) for model in models)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_the_width_of_panels_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, ids = [], text(41)
    for panel in (16, 32, 32 if kind == "int4" else 48):
        monkeypatch.setattr(placement, "panel_of", lambda rows, n_threads, widest, panel=panel: min(panel, widest))
        backend = native.NativeBackend(quantized(kind, "gpt2"), 1, 64)
        found += [torch.cat([backend.compute([Chunk(0, 0, ids[:n], n)])[0] for n in (1, 3, 7, 41)])]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_only_the_head(kind: str) -> None:
    """As draft heads use it, with few rows and with many."""
    model: GPT = variant("qwen3") if kind == "fp32" else quantized(kind)
    features = torch.randn(2, 20, model.config.d_model, generator=torch.Generator().manual_seed(0))
    wanted = TorchBackend(model, 1, 64).logits(features)
    backend = native.NativeBackend(model, 1, 64)
    near = (3e-6 if kind == "fp32" else 0.02 if kind == "bf16" else 3e-4) * float(wanted.abs().max())
    torch.testing.assert_close(backend.logits(features), wanted, rtol=0, atol=near)
    torch.testing.assert_close(backend.logits(features[:1, :3]), wanted[:1, :3], rtol=0, atol=near)
