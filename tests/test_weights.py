"""Histograms, moments and singular values of stored weights, against numpy in float64 on the loaded model."""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf
from gptworks.checkpoint import Checkpoint, load_model
from gptworks.config import LoRAConfig, Recipe
from gptworks.errors import UserError
from gptworks.interpret import weights as room
from gptworks.interpret.weights import (
    StoredWeights,
    bin_edges,
    count_tensors,
    histogram,
    moments,
    relative_change,
    spectrum,
    stored_weights,
)
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora
from gptworks.quantize.convert import base_kinds, pack_for, quantize_model
from gptworks.quantize.linear import PackedMatrix, hold_packed
from gptworks.recipe import parse_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.progress import Progress
from tiny import plain_model

MODEL = plain_model(vocab_size=70, context_length=16, n_layers=2, d_model=32, n_heads=2, d_ff=96, mlp="swiglu")
UP, DOWN, EMBEDDING = "blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight", "token_embedding.weight"
LORA = LoRAConfig(rank=3)


def recipe_of(**more: object) -> Recipe:
    return parse_recipe({
        "model": MODEL.model_dump(mode="json"), "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]}, "train": {"max_steps": 1, "optimizer": "adamw"}, **more,
    })  # fmt: skip


def saved(folder: Path, tensors: dict[str, Tensor], step: int = 7) -> Checkpoint:
    return save_checkpoint(folder, step, tensors, {}, asdict(Progress(step=step, best_step=step)))


def kept(folder: Path, kind: str) -> tuple[Checkpoint, Recipe, dict[str, Tensor]]:
    """Return a checkpoint with weights stored in this kind, its recipe, and the weights of the loaded model."""
    model, recipe = hf.random_model(MODEL), recipe_of()
    if kind == "adapter over int4":
        recipe = recipe_of(adapter={"rank": 3, "base": "int4"})
        tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        model = hold_packed(GPT(MODEL), base_kinds(model, "int4"))
        model.load_state_dict(pack_for(model, tensors), assign=True)
    elif kind == "adapter":
        recipe = recipe_of(adapter={"rank": 3})
    elif kind != "fp32":
        model = quantize_model(model, kind)  # type: ignore[arg-type]
    if "adapter" in kind:
        add_lora(model, LORA)
        hf.shake(model, seed=1)
    checkpoint = saved(folder, model.state_dict())
    loaded = load_model(checkpoint, MODEL, adapter=recipe.adapter)
    whole = dict(loaded.state_dict())
    packed = {f"{name}.weight": m.dequantized() for name, m in loaded.named_modules() if isinstance(m, PackedMatrix)}
    return checkpoint, recipe, whole | packed


def one(checkpoint: Checkpoint, name: str, recipe: Recipe | None = None) -> StoredWeights:
    return stored_weights(checkpoint, recipe or recipe_of(), [name])[0]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4", "adapter", "adapter over int4"])
def test_what_is_read_is_what_the_model_computes_with(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, recipe, whole = kept(tmp_path, kind)
    monkeypatch.setattr(room, "AT_ONCE", 1100)  # several parts of each matrix
    for name in (UP, DOWN, EMBEDDING, "blocks.0.attention.query.weight", "norm.weight"):
        (weights,) = stored_weights(checkpoint, recipe, [name])
        parts = list(weights.parts())
        read = torch.cat(parts, dim=0 if len(weights.shape) == 1 or weights.shape[0] >= weights.shape[1] else 1)
        assert read.dtype == torch.float32 and max(part.numel() for part in parts) <= 32 * 96
        torch.testing.assert_close(read, whole[name], rtol=1e-6, atol=1e-7)
        assert len(parts) > 1 or weights.size <= 1100
    assert one(checkpoint, UP, recipe).kind == {"adapter": "fp32", "adapter over int4": "int4"}.get(kind, kind)
    stored = load_file(checkpoint.folder / "model.safetensors")
    own = [stored[name].nbytes for name in (UP, "blocks.1.mlp.up.scale") if name in stored]
    assert one(checkpoint, UP, recipe).stored_bytes == sum(own)


def test_figures_are_numpys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AT_ONCE", 640)
    checkpoint, _, whole = kept(tmp_path, "fp32")
    for name in (UP, DOWN, EMBEDDING, "blocks.0.norm1.weight"):
        weights, values = one(checkpoint, name), whole[name].double().numpy()
        found = moments(weights)
        assert (found.size, found.n_zero, found.n_not_finite) == (values.size, 0, 0)
        assert (found.least, found.most) == (values.min(), values.max())
        assert (found.mean, found.std) == pytest.approx((values.mean(), values.std()), rel=1e-12)
        counts, edges = np.histogram(values, room.BINS)
        assert bin_edges([found]).tolist() == edges.tolist()
        assert histogram(weights, edges).tolist() == counts.tolist() and counts.sum() == math.prod(weights.shape)


@pytest.mark.parametrize("name", [UP, DOWN, EMBEDDING])
def test_singular_values_are_numpys(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AT_ONCE", 640)
    checkpoint, _, whole = kept(tmp_path, "fp32")
    values = np.linalg.svd(whole[name].double().numpy(), compute_uv=False)
    found = spectrum(one(checkpoint, name))
    np.testing.assert_allclose(found.values, values, rtol=1e-6)
    assert found.stable_rank == pytest.approx((np.linalg.norm(whole[name].double()) / values[0]) ** 2)
    shares = values / values.sum()
    assert found.effective_rank == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))


def test_ranks_of_matrices_that_have_one(tmp_path: Path) -> None:
    tensors = dict(hf.random_model(MODEL).state_dict())
    generator = torch.Generator().manual_seed(0)
    tensors[UP] = torch.randn(96, 2, generator=generator) @ torch.randn(2, 32, generator=generator)
    tensors[DOWN] = torch.zeros(32, 96)
    tensors[EMBEDDING] = torch.eye(70, 32)
    checkpoint = saved(tmp_path, tensors)
    low, zero, even = (spectrum(one(checkpoint, name)) for name in (UP, DOWN, EMBEDDING))
    values = np.linalg.svd(tensors[UP].double().numpy(), compute_uv=False)
    np.testing.assert_allclose(low.values, values, atol=1e-6 * values[0])
    assert 1 < low.stable_rank < low.effective_rank < 2.001
    assert not zero.values.any() and (zero.stable_rank, zero.effective_rank) == (0, 0)
    assert (even.stable_rank, even.effective_rank) == pytest.approx((32, 32))
    found = moments(one(checkpoint, DOWN))
    assert (found.n_zero, found.mean, found.std) == (32 * 96, 0, 0)
    assert histogram(one(checkpoint, DOWN), bin_edges([found])).sum() == 32 * 96


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    tensors = dict(hf.random_model(MODEL).state_dict())
    tensors[UP] = torch.full((96, 32), math.nan)
    tensors[DOWN] = torch.tensor([1.0, 3.0, math.inf, -math.inf]).repeat(32, 24)
    checkpoint = saved(tmp_path, tensors)
    found = moments(one(checkpoint, DOWN))
    assert (found.n_not_finite, found.least, found.most, found.mean, found.std) == (32 * 48, 1, 3, 2, 1)
    edges = bin_edges([found])
    assert histogram(one(checkpoint, DOWN), edges).sum() + found.n_not_finite == 32 * 96
    none = moments(one(checkpoint, UP))
    assert (none.n_not_finite, none.mean, none.least) == (96 * 32, None, None)
    assert not len(bin_edges([none])) and not len(histogram(one(checkpoint, UP), bin_edges([none])))
    with pytest.raises(UserError, match="holds weights that are not finite: it has no singular values"):
        spectrum(one(checkpoint, DOWN))
    assert relative_change(one(checkpoint, UP), one(checkpoint, UP)) is None


def test_two_checkpoints_share_bins(tmp_path: Path) -> None:
    before = dict(hf.random_model(MODEL).state_dict())
    after = before | {UP: before[UP] * 2.5}
    first, second = saved(tmp_path, before, 7), saved(tmp_path, after, 8)
    old, new = one(first, UP), one(second, UP)
    edges = bin_edges([moments(old), moments(new)])
    assert (edges[0], edges[-1]) == (float(after[UP].min()), float(after[UP].max()))
    assert histogram(old, edges).sum() == histogram(new, edges).sum() == 96 * 32
    assert relative_change(old, new) == pytest.approx(1.5) and relative_change(old, old) == 0
    zero = one(saved(tmp_path, before | {UP: torch.zeros(96, 32)}, 9), UP)
    assert relative_change(zero, new) is None


def test_long_work_ends_where_its_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "AT_ONCE", 640)
    weights = one(kept(tmp_path, "fp32")[0], UP)

    class Gone(Exception):
        pass

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Gone

    for work in (moments, spectrum, lambda of, check: histogram(of, bin_edges([moments(of)]), check)):
        calls: list[int] = []
        with pytest.raises(Gone):
            work(weights, check)


def test_large_and_hostile_ones_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, recipe, _ = kept(tmp_path, "fp32")
    with pytest.raises(UserError, match="has no tensor `up`"):
        one(checkpoint, "up")
    with pytest.raises(UserError, match="is a vector"):
        spectrum(one(checkpoint, "norm.weight"))
    for limit, value in (("MOST_SIDE", 31), ("MOST_PRODUCTS", 96 * 32 * 32 - 1)):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="is 96 × 32: singular values are computed"):
            patch.setattr(room, limit, value)
            spectrum(one(checkpoint, UP))
    monkeypatch.setattr(room, "MOST_TENSORS", 20)
    with pytest.raises(UserError, match="at most 20 can be shown"):
        count_tensors(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: torch.zeros(95, 32)}, r"is float32 \[95, 32\] there and float32 \[96, 32\]"),
        ({UP: torch.zeros(96, 32, dtype=torch.float64)}, r"is float64 \[96, 32\] there"),
        ({UP: torch.zeros(96, 32, dtype=torch.int8)}, r"`blocks.1.mlp.up.scale` is missing there"),
        ({UP: torch.zeros(96, 32, dtype=torch.uint8)}, r"is uint8 \[96, 32\] there and uint8 \[96, 16\]"),
        ({"blocks.1.mlp.up.lora_a": torch.zeros(9, 32)}, r"lora_a` is float32 \[9, 32\] there and float32 \[3, 32\]"),
        ({UP: None}, "`blocks.1.mlp.up.weight` is missing"),
    ],
)
def test_a_file_that_is_not_the_recipes_is_refused(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = dict(hf.random_model(MODEL).state_dict()) | changes
    folder = tmp_path / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        one(Checkpoint(folder), UP, recipe_of(adapter={"rank": 3}))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(UserError, match="is damaged or no safetensors file"):
        one(Checkpoint(folder), UP)
