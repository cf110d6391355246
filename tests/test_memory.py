"""The formula for a step's memory against the step traced on fake tensors, and properties of the formula."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from gptworks.checkpoint import choose_checkpoint, load_run
from gptworks.config import LoRAConfig, ModelConfig
from gptworks.infer.backends.cache import SlotCache
from gptworks.interop.huggingface import import_huggingface
from gptworks.kernels import attention as native_attention
from gptworks.kernels import dispatch
from gptworks.kernels import passes as native_passes
from gptworks.model import lora, scores
from gptworks.model.cost import MLP_INNER, Shapes
from gptworks.model.gpt import GPT
from gptworks.model.lora import remove_lora
from gptworks.planning import memory
from gptworks.planning.arrange import rank_setting
from gptworks.planning.inference import BATCHES, inference_memory
from gptworks.planning.layout import Layout, rank_config
from gptworks.planning.memory import training_peak
from gptworks.planning.params import count_parameters, everything
from gptworks.planning.setting import Setting
from gptworks.planning.state import optimizer_scratch_bytes, trained_state_bytes
from gptworks.planning.timeline import GRADIENTS, OPTIMIZER, WEIGHTS
from gptworks.presets import PRESETS, preset
from gptworks.quantize.convert import quantize_model
from gptworks.recipe import parse_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.loop import train
from gptworks.training.record.metrics import read_metrics
from gptworks.training.rehearsal.trace import LiveBytes, Rehearsal, trace_step
from tiny import plain_model, plain_training

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
"""Tracing for a GPU runs nothing on it, and yet torch wants to see one."""

PRECISIONS = ("fp32", "bf16")
CHECKPOINTING = ("none", "selective", "block")


def combinations(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations: a third of them, in which each value occurs, for `make test`, the rest for `make
    test-memory`."""
    return [
        pytest.param(*values, marks=[] if sum(places) % 3 == 0 else [pytest.mark.grid])
        for places, values in zip(product(*map(range, map(len, axes))), product(*axes), strict=True)
    ]


def error(model: ModelConfig, device: str, precision: str, micro_batch_size: int = 1, **train: Any) -> float:
    """Return the formula's relative deviation from the trace."""
    settings = {"batch_size": micro_batch_size, "micro_batch_size": micro_batch_size, **train}
    settings["future_weights"] = (0.3,) * (model.n_future_tokens - 1)
    config = plain_training(max_steps=1, **settings)
    predicted = training_peak(Setting.of(model, config, precision, device == "cpu")).total_bytes
    return predicted / trace_step(Rehearsal(model, config, device, precision)).peak_bytes - 1


def shallow(name: str, n_layers: int = 2) -> ModelConfig:
    """Return a preset at its full width and context, with fewer layers."""
    model = preset(name)
    return model.model_copy(update={"n_layers": min(n_layers, model.n_layers)})


# formula and trace ------------------------------------------------------------------------------------------


CASES = [("fp32", "none", 1), ("fp32", "block", 3), ("bf16", "none", 3), ("bf16", "block", 1), ("bf16", "selective", 3)]
"""Precision, checkpointing and micro-batch size."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case"), combinations(["gpt2-mini", "modern-9m", "vaani-427m", "moe-115m", "smollm2-135m"], CASES)
)
def test_the_formula_is_the_trace(name: str, case: tuple[str, str, int], device: str) -> None:
    precision, checkpointing, micro_batch_size = case
    off = error(shallow(name), device, precision, micro_batch_size, activation_checkpointing=checkpointing)
    assert abs(off) < 0.02


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRESETS)
def test_the_formula_is_the_trace_for_every_preset(name: str, device: str) -> None:
    """With all layers up to 12, else with 12, since each layer adds the same."""
    model = shallow(name, 12)
    off = {
        (precision, checkpointing, size): error(model, device, precision, size, activation_checkpointing=checkpointing)
        for precision in PRECISIONS
        for checkpointing in CHECKPOINTING
        for size in (1, 4)
    }
    assert {case: share for case, share in off.items() if abs(share) > 0.05} == {}


SMALL: dict[str, Any] = {
    "vocab_size": 1000, "context_length": 256, "n_layers": 3, "d_model": 256, "n_heads": 4, "norm": "rmsnorm",
    "mlp": "swiglu", "d_ff": 640,
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "relu2": {"mlp": "relu2"},
    "geglu, untied, between norms, capped": {
        "mlp": "geglu_tanh", "tie_embeddings": False, "norm_placement": "both", "attention_softcap": 50.0,
        "logit_softcap": 30.0,
    },
    "dropout": {"dropout_embedding": 0.1, "dropout_attention": 0.1, "dropout_residual": 0.1},
    "dropout in the MLP": {"dropout_mlp": 0.1, "mlp": "gelu"},
    "dropout in a gated MLP": {"dropout_mlp": 0.1},
    "experts, dropout in them": {"n_experts": 4, "d_ff": 256, "dropout_mlp": 0.1},
    "learned positions, biases": {"position": "learned", "norm": "layernorm", "attention_bias": True, "mlp_bias": True},
    "no positions, QK-norm": {"position": "none", "qk_norm": True},
    "grouped queries, QK-norm": {"n_kv_heads": 2, "qk_norm": True},
    "partial rotation, in some layers": {"rope_fraction": 0.5, "rope_pattern": ("rope", "none")},
    "parallel residual, multipliers": {
        "parallel_residual": True, "residual_scale": 0.5, "embedding_scale": 2.0, "logit_divisor": 2.0,
    },
    "norms behind": {"norm_placement": "after", "qk_norm": "whole", "n_kv_heads": 2},
    "narrow window, turned otherwise": {
        "window": 64, "window_pattern": ("full", "window"), "window_rope_theta": 500.0,
    },
    "the stack repeated": {"layer_repeats": 3},
    "blocks repeated": {"layer_repeats": (1, 3, 2), "qk_norm": True},
    "token pairs": {"bigram_vocab_size": 3000, "zero_init_projections": True},
    "experts": {"n_experts": 4, "d_ff": 256},
    "experts, one shared": {"n_experts": 4, "d_ff": 256, "d_ff_shared": 128},
    "skips": {"unet_skips": True, "n_layers": 4},
    "skips, norms behind, values of the first layer": {
        "unet_skips": True, "n_layers": 5, "norm_placement": "after", "value_residual": True,
    },
    "values of the first layer": {"value_residual": True, "n_kv_heads": 2},
    "value embeddings": {"value_embeddings": ("none", "table"), "gate_channels": 32, "n_kv_heads": 2},
    "projected value embeddings": {"value_embeddings": ("projected",)},
    "smeared": {"smear": True},
    "four tokens ahead": {"n_future_tokens": 4, "vocab_size": 5000, "logit_softcap": 30.0},
    "two tokens ahead, untied": {"n_future_tokens": 2, "tie_embeddings": False, "context_length": 1024, "n_layers": 1},
    "gated heads": {"attention_gate": True},
    "gated heads, some channels": {"attention_gate": True, "gate_channels": 12, "n_kv_heads": 2, "qk_norm": True},
    "beyond blocked attention": {"context_length": 2560},
    "beyond it, windowed": {"context_length": 2560, "window": 2000},
    "beyond it, banded": {"context_length": 2560, "window": 512, "window_pattern": ("window", "full")},
    "beyond it, capped": {"context_length": 2560, "attention_softcap": 50.0, "n_kv_heads": 2},
    "beyond it, dropout": {"context_length": 2560, "dropout_attention": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("variant", "precision", "checkpointing"), combinations(list(VARIANTS), PRECISIONS, CHECKPOINTING)
)
def test_variants(variant: str, precision: str, checkpointing: str, device: str) -> None:
    model = plain_model(**SMALL | VARIANTS[variant])
    assert abs(error(model, device, precision, 2, activation_checkpointing=checkpointing)) < 0.05


@pytest.mark.parametrize(("precision", "checkpointing"), [("bf16", "none"), ("fp32", "block")])
@pytest.mark.parametrize("variant", ["dropout", "grouped queries, QK-norm", "beyond it, windowed"])
def test_variants_without_the_native_library(
    monkeypatch: pytest.MonkeyPatch, variant: str, precision: str, checkpointing: str
) -> None:
    monkeypatch.setattr(dispatch, "trains_in_cpp", lambda: False)
    for module in (native_attention, native_passes):
        monkeypatch.setattr(module, "training_library", lambda: None)
    model = plain_model(**SMALL | VARIANTS[variant])
    assert abs(error(model, "cpu", precision, 2, activation_checkpointing=checkpointing)) < 0.05


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("batch_size", [2, 6])
def test_accumulation_and_optimizers(batch_size: int, optimizer: str, precision: str) -> None:
    model = plain_model(**SMALL)
    assert abs(error(model, "cpu", precision, 2, batch_size=batch_size, optimizer=optimizer)) < 0.02


@pytest.mark.parametrize("train", [
    {"optimizer": "adamw", "cautious_weight_decay": True},
    {"optimizer": "adamw", "cautious_weight_decay": True, "optimizer_state": "int8"},
    {"optimizer": "muon", "cautious_weight_decay": True},
    {"optimizer": "normuon"},
    {"optimizer": "soap", "soap_frequency": 1},
])  # fmt: skip
def test_the_scratch_memory_of_an_optimizer(train: dict[str, Any]) -> None:
    """Only of the update, not of the passes; a matrix has four times the elements that a cautious decay processes at
    once."""
    model = plain_model(**SMALL | {"n_layers": 1, "context_length": 16, "d_model": 512, "d_ff": 2048})
    config, count = plain_training(max_steps=1, batch_size=1, **train), count_parameters(model)
    state = trained_state_bytes(count, config.optimizer, everything(count), config.optimizer_state)
    scratch = optimizer_scratch_bytes(
        count, config.optimizer, config.optimizer_state, everything(count), True, config.cautious_weight_decay
    )
    found = trace_step(Rehearsal(model, config, "cpu", "bf16")).optimizer_bytes
    assert scratch >= 4 * 2**18
    assert found == pytest.approx(2 * 4 * count.total + state + scratch, abs=20_000)  # with weights and gradients


@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", "none"), ("bf16", "block")])
def test_moments_in_8_bits(precision: str, checkpointing: str) -> None:
    model = plain_model(**SMALL)
    settings: dict[str, Any] = {"optimizer": "adamw", "activation_checkpointing": checkpointing}
    assert abs(error(model, "cpu", precision, 2, optimizer_state="int8", **settings)) < 0.02
    whole, small = (
        training_peak(Setting.of(model, plain_training(max_steps=1, optimizer_state=kind, **settings), precision, True))
        for kind in ("fp32", "int8")
    )
    large = count_parameters(model).block_matrices
    assert whole.parts[OPTIMIZER] - small.parts[OPTIMIZER] == 8 * large - 2 * large - 8 * large // 256


@pytest.mark.parametrize(
    ("base", "case"), combinations(["full", "int8", "int4"], [("fp32", "none"), ("bf16", "block"), ("bf16", "none")])
)
def test_adapters_beside_a_base_of_smollm2s_shape(base: Any, case: tuple[str, str]) -> None:
    assert abs(adapted_error(2, base, *case)) < 0.02


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("precision", "checkpointing"), [("fp32", "none"), ("bf16", "block")])
def test_an_adapter_over_int4_of_a_whole_135m(precision: str, checkpointing: str) -> None:
    assert abs(adapted_error(30, "int4", precision, checkpointing)) < 0.05


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_over_int4_of_an_imported_135m_the_loss_is_that_over_the_same_base_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    import hf

    config = transformers.LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, rope_theta=100_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    hf.byte_tokenizer("<|endoftext|>").save(str(tmp_path / "hf" / "tokenizer.json"))
    import_huggingface(tmp_path / "hf", tmp_path / "base", verify=False)
    tree = tiny.recipe_tree(tmp_path, max_steps=2, batch_size=2, micro_batch_size=1, optimizer="adamw", warmup_steps=0,
                            evaluate_every=2, evaluate_sequences=1, checkpoint_every=2, precision="fp32")  # fmt: skip
    tree = {key: value for key, value in tree.items() if key != "tokenizer"} | {"model": {"context_length": 64}}

    def drawn(x: Tensor, **_: Any) -> None:  # the same A, whatever was drawn before it
        nn.init.normal_(x, std=0.02, generator=torch.Generator().manual_seed(x.numel()))

    monkeypatch.setattr(lora.nn.init, "kaiming_uniform_", drawn)

    def losses(name: str, base: str, start: str) -> list[float]:
        own = {"run_dir": str(tmp_path / name), "initialize_from": str(tmp_path / start), "adapter": {"base": base}}
        train(parse_recipe(tree | own))
        return [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row]

    over_int4 = losses("int4", "int4", "base")
    model = remove_lora(load_run(tmp_path / "int4", merge=False).model)
    shutil.copytree(tmp_path / "base", tmp_path / "unpacked", ignore=shutil.ignore_patterns("checkpoints"))
    save_checkpoint(tmp_path / "unpacked", 0, model.state_dict(), {}, choose_checkpoint(tmp_path / "base").state())
    assert len(over_int4) == 3
    assert over_int4 == pytest.approx(losses("full", "full", "unpacked"), rel=1e-6)
    assert over_int4 != pytest.approx(losses("other", "full", "base"), rel=1e-6), "int4 rounds"


def adapted_error(n_layers: int, base: Any, precision: str, checkpointing: str) -> float:
    """Return the formula's relative deviation from the trace for a model shaped like SmolLM2-135M with an adapter."""
    model = preset("smollm2-135m").model_copy(update={"n_layers": n_layers, "context_length": 512})
    config = plain_training(
        max_steps=1, batch_size=1, micro_batch_size=1, activation_checkpointing=checkpointing, optimizer="adamw"
    )
    adapter = LoRAConfig(base=base)
    planned = training_peak(Setting.of(model, config, precision, True, adapter)).total_bytes
    return planned / trace_step(Rehearsal(model, config, "cpu", precision, adapter)).peak_bytes - 1


def test_muons_own_buffers_are_the_peak_of_a_wide_model_over_a_short_text() -> None:
    model = plain_model(**SMALL | {"context_length": 16, "d_model": 512, "d_ff": 4096})
    peak = training_peak(Setting.of(model, plain_training(max_steps=1, batch_size=1, optimizer="muon"), "bf16", True))
    assert peak.moment == "optimizer"
    assert abs(error(model, "cpu", "bf16", 1, optimizer="muon")) < 0.02


def test_rows_of_a_shorter_length_are_planned_as_a_model_of_that_context() -> None:
    """With as many tokens in rows of a quarter of the length: the plan's peak is the larger of the two."""
    for length, heads in ((256, 8), (2560, 1)):
        model = plain_model(**SMALL | {"context_length": length, "n_heads": heads, "position": "none"})
        short = model.model_copy(update={"context_length": length // 4})
        settings = {"max_steps": 9, "batch_size": 2}
        cut = Setting.of(model, plain_training(shorter_contexts=[[3, length // 4]], **settings), "fp32", True)
        whole = Setting.of(model, plain_training(**settings), "fp32", True)
        quarters = Setting.of(short, plain_training(max_steps=9, batch_size=8), "fp32", True)
        peaks = [training_peak(setting).total_bytes for setting in (whole, quarters)]
        assert training_peak(cut).total_bytes == max(peaks)


class EfficientKernel:
    """torch's functions with the attention kernel that CUDA uses for masks; as on a GPU, it does not accept groups."""

    pad = staticmethod(torch.nn.functional.pad)

    @staticmethod
    def scaled_dot_product_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *,
        scale: float | None,
        enable_gqa: bool,
        is_causal: bool = False,
        **_: Any,
    ) -> Tensor:
        assert not enable_gqa
        bias = scores.as_bias(mask, q.dtype) if mask is not None and mask.dtype == torch.bool else mask
        bias = None if bias is None else bias.expand(q.size(0), q.size(1), q.size(2), k.size(2))
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize(
    ("length", "window", "several_texts"),
    [(256, 200, False), (1024, 128, False), (256, None, True), (256, 64, True), (256, None, False)],
)
def test_grouped_queries_on_cuda_under_a_mask_or_without_flash_attention(
    length: int,
    window: int | None,
    several_texts: bool,
    n_kv_heads: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks the tensors that autograd saves for attention, on fake tensors, and the peak of its backward pass: keys
    and values are repeated in any precision. A row of one text without a window is on a GPU without flash attention."""
    takes_groups = scores.takes_groups
    monkeypatch.setattr(scores, "takes_groups", lambda _, masked: takes_groups(torch.device("cuda"), masked))
    monkeypatch.setattr(scores, "F", EfficientKernel)
    fuses = window is not None or several_texts
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    leaves = [torch.empty(2, heads, length, 64, device="meta", dtype=dtype) for heads in (4, n_kv_heads, n_kv_heads)]
    with LiveBytes(counts_meta=True) as live:
        q, k, v = (leaf.requires_grad_() * 1 for leaf in leaves)
        bias = torch.zeros(2, length, length, device="meta", dtype=dtype) if several_texts else None
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = scores.attend(q, k, v, scores.Scores(window=window, bias=bias, fuses_groups=fuses))
        saved = sum(kept.values()) - (0 if bias is None else bias.nbytes)  # which all layers share
        gradient = torch.empty_like(out)
        before_bytes = live.peak_bytes = live.now_bytes
        out.backward(gradient)  # type: ignore[no-untyped-call]
    model = plain_model(
        vocab_size=9, context_length=length, n_layers=1, d_model=256, n_heads=4, n_kv_heads=n_kv_heads, window=window,
        window_pattern=("full",) if window is None else ("window",),
    )  # fmt: skip
    shapes = Shapes(model, 2, length, dtype.itemsize, on_cpu=False, several_texts=several_texts, fuses_groups=fuses)
    stage = scores.scores_cost(shapes, window)
    assert sum(stage.saved.values()) == pytest.approx(saved, rel=1e-3)
    assert stage.leaves + stage.scratch == pytest.approx(live.peak_bytes - before_bytes, rel=0.02)


class MathKernel:
    """torch's functions with attention as plain products, which MPS uses wherever gradients are needed."""

    pad, dropout = staticmethod(torch.nn.functional.pad), staticmethod(torch.nn.functional.dropout)

    @staticmethod
    def scaled_dot_product_attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, **options: Any
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_attention_math
        return kernel(q, k, v, mask, scale=scale, **options)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize(("length", "window"), [(256, None), (256, 200), (1024, 128)])
def test_attention_on_mps_keeps_the_weights_of_all_pairs(
    length: int, window: int | None, n_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the tensors that autograd saves for attention and the peak of its backward pass, on the meta device."""
    monkeypatch.setattr(scores, "F", MathKernel)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    leaves = [torch.empty(2, heads, length, 64, device="meta") for heads in (4, n_kv_heads, n_kv_heads)]
    with LiveBytes(counts_meta=True) as live:
        q, k, v = (leaf.requires_grad_() * 1 for leaf in leaves)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = scores.attend(q, k, v, scores.Scores(window=window))
        gradient = torch.empty_like(out)
        before_bytes = live.peak_bytes = live.now_bytes
        out.backward(gradient)  # type: ignore[no-untyped-call]
    model = plain_model(
        vocab_size=9, context_length=length, n_layers=1, d_model=256, n_heads=4, n_kv_heads=n_kv_heads, window=window,
        window_pattern=("full",) if window is None else ("window",),
    )  # fmt: skip
    stage = scores.scores_cost(Shapes(model, 2, length, 4, on_cpu=False, has_fused=False), window)
    assert sum(stage.saved.values()) == pytest.approx(sum(kept.values()), rel=0.05)
    assert stage.leaves + stage.scratch == pytest.approx(live.peak_bytes - before_bytes, rel=0.1)


# what must hold of any sum ----------------------------------------------------------------------------------

SETTING = Setting(preset("gpt2"), micro_batch_size=4, on_cpu=False, precision="bf16")


def test_persistent_parts_are_exact() -> None:
    parts = training_peak(replace(SETTING, accumulates=True)).parts
    total = 124_439_808
    assert (parts[WEIGHTS], parts[OPTIMIZER], parts[GRADIENTS]) == (4 * total, 8 * total, 4 * total)
    assert training_peak(replace(SETTING, averages=True)).parts[memory.AVERAGE] == 4 * total
    saving = training_peak(replace(SETTING, on_cpu=True, saves=True))
    assert saving.parts[memory.CHECKPOINT] == 12 * total
    assert saving.total_bytes - training_peak(replace(SETTING, on_cpu=True)).total_bytes == 12 * total


def test_tensor_parallel_ranks_hold_shares_of_the_matrices() -> None:
    model = preset("gpt2")
    rank = rank_config(model, 4)
    groups, whole = count_parameters(rank).groups, count_parameters(model).groups
    for name in ("attention_weights", "mlp_weights"):
        assert groups[name].total == whole[name].total // 4
    for name in ("norms", "token_embedding"):
        assert groups[name].total == whole[name].total
    split, alone = (training_peak(replace(SETTING, layout=Layout("none", 1, n))) for n in (4, 1))
    assert split.parts[MLP_INNER] == alone.parts[MLP_INNER] // 4
    assert split.parts[memory.LOSS] == alone.parts[memory.LOSS]
    assert split.total_bytes < alone.total_bytes


def test_checkpointing_and_halves_save_memory() -> None:
    peaks = [
        training_peak(replace(SETTING, micro_batch_size=16, precision=precision, checkpointing=checkpointing))
        for precision, checkpointing in (("fp32", "none"), ("bf16", "none"), ("bf16", "block"))
    ]
    assert peaks[0].total_bytes > peaks[1].total_bytes > peaks[2].total_bytes
    assert training_peak(replace(SETTING, precision="fp16")).parts == training_peak(SETTING).parts


def test_memory_grows_with_the_batch() -> None:
    totals = [training_peak(replace(SETTING, micro_batch_size=size)).total_bytes for size in range(1, 9)]
    assert totals == sorted(totals)


# inference --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "gpt3-125m-banded"])
def test_the_cache_is_the_engines(name: str) -> None:
    model = preset(name)
    by_weights = {row.weights: row for row in inference_memory(model)}
    for n_texts in BATCHES:
        n_bytes = cache_bytes(SlotCache(model, n_texts, model.context_length, dtype=torch.bfloat16, device="meta"))
        assert by_weights["bf16"].cache_bytes[n_texts] == n_bytes
        assert by_weights["fp32"].cache_bytes[n_texts] == 2 * n_bytes


def cache_bytes(cache: SlotCache) -> int:
    """Bytes of a cache's tensors."""
    return sum(vectors.data.nbytes for vectors in (*cache.keys, *cache.values))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": "learned", "norm": "layernorm", "attention_bias": True, "mlp_bias": True, "tie_embeddings": False},
        {"d_model": 48, "d_ff": 80, "mlp": "swiglu", "n_kv_heads": 1, "qk_norm": True},
        {"mlp": "swiglu", "n_experts": 4, "d_ff_shared": 32},
        {"n_future_tokens": 3},
    ],
)
def test_weights_in_each_precision_are_those_that_are_written(changes: dict[str, Any]) -> None:
    model = plain_model(
        **{"vocab_size": 50, "context_length": 16, "n_layers": 2, "d_model": 64, "n_heads": 2} | changes
    )
    weights = GPT(model)
    for row in inference_memory(model):
        kept = weights if row.weights == "fp32" else quantize_model(weights, row.weights)  # type: ignore[arg-type]
        assert row.weights_bytes == sum(t.numel() * t.element_size() for t in kept.state_dict().values()), row.weights


# other objectives -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "checkpointing", "precision"), combinations(["gpt2-mini", "modern-9m"], CHECKPOINTING, PRECISIONS)
)
def test_rows_of_several_texts(name: str, checkpointing: str, precision: str) -> None:
    train = plain_training(max_steps=1, batch_size=3, activation_checkpointing=checkpointing)
    setting = replace(Setting.of(shallow(name), train, precision, True), several_texts=True)
    traced = trace_step(Rehearsal(shallow(name), train, "cpu", precision, several_texts=True))
    assert abs(training_peak(setting).total_bytes / traced.peak_bytes - 1) < 0.02


@pytest.mark.parametrize(
    ("kind", "name", "checkpointing", "precision"),
    combinations(["preference", "odds_ratio", "distillation"], ["gpt2-mini", "gpt2"], CHECKPOINTING, PRECISIONS),
)
def test_other_objectives(kind: str, name: str, checkpointing: str, precision: str, tmp_path: Path) -> None:
    model, pairs = shallow(name), kind != "distillation"
    tree: dict[str, Any] = {
        "name": "memory",
        "model": model.model_dump(mode="json"),
        "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1, "batch_size": 2, "activation_checkpointing": checkpointing},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))  # the teacher's
    if pairs:
        tree["data"] = {"sources": [{"type": "preferences", "path": "pairs.json"}]}
        tree["tokenizer"]["chat_template"] = "plain"
    recipe = parse_recipe(tree | {"objective": {"type": kind} | ({} if pairs else {"teacher": str(tmp_path)})})
    planned = replace(rank_setting(recipe, precision, True), saves=False)
    rows = recipe.train.model_copy(update={"batch_size": 4, "micro_batch_size": 4}) if pairs else recipe.train
    traced = trace_step(Rehearsal(model, rows, "cpu", precision, objective=recipe.objective))
    assert planned.objective.rows_per_sample == (2 if pairs else 1)
    assert abs(training_peak(planned).total_bytes / traced.peak_bytes - 1) < 0.02
