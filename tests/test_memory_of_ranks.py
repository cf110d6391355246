"""The planned memory of sharded and tensor-parallel training, against the tensors of real ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.config import FreezeConfig
from gptworks.planning.arrange import rank_setting
from gptworks.planning.layout import Layout
from gptworks.planning.memory import generation_peak, training_peak
from gptworks.recipe import parse_recipe
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.optim.trainable import trainable_model
from test_parallel import ranks_of

MODEL = {
    "vocab_size": 2000, "context_length": 128, "n_layers": 4, "d_model": 256, "n_heads": 4, "norm": "rmsnorm",
    "mlp": "swiglu", "d_ff": 768,
}  # fmt: skip
NARROW = {"vocab_size": 300, "context_length": 32, "d_model": 256, "n_heads": 4, "d_ff": 1024}
"""So few tokens that weights and what gathers and reduces them are nearly all."""
LABORATORY = {
    "unet_skips": True, "value_residual": True, "value_embeddings": ("table", "projected"),
    "attention_gate": True, "smear": True, "gate_channels": 32, "bigram_vocab_size": 3000,
    "n_future_tokens": 3,
}  # fmt: skip
GELU = {"norm": "layernorm", "mlp": "gelu", "tie_embeddings": False, "attention_bias": True, "mlp_bias": True}


def case(
    sharding: str, data: int, tensor: int, precision: str = "bf16", model: Any = None, **train: Any
) -> dict[str, Any]:
    gathers = precision if sharding != "none" else "fp32"
    return {
        "recipe": {
            "model": MODEL | (model or {}),
            "tokenizer": {"type": "char"},
            "data": {"sources": [{"type": "python-stdlib"}]},
            "train": {
                "max_steps": 1,
                "optimizer": "adamw",
                "batch_size": 4 * data,
                "micro_batch_size": 4,
                "precision": precision,
            }
            | train,
        },
        "layout": {"sharding": sharding, "data_parallel": data, "tensor_parallel": tensor, "gathers": gathers},
    }


FEW = {
    2: {
        "fsdp, bf16": case("fsdp", 2, 1),
        "fsdp, bf16, little but weights": case("fsdp", 2, 1, model=NARROW, batch_size=4, micro_batch_size=1),
        "fsdp, bf16, laboratory": case("fsdp", 2, 1, model=LABORATORY),
        "fsdp, bf16, muon, little but weights": case(
            "fsdp", 2, 1, model=NARROW, batch_size=4, micro_batch_size=1, optimizer="muon"
        ),
        "fsdp, soap, little but weights": case(
            "fsdp", 2, 1, "fp32", NARROW, batch_size=2, micro_batch_size=1, optimizer="soap", soap_frequency=1
        ),
        "tensor, bf16": case("none", 1, 2),
    }
}

MANY = {
    2: {
        "fsdp, fp32": case("fsdp", 2, 1, "fp32"),
        "fsdp, fp32, little but weights": case("fsdp", 2, 1, "fp32", NARROW, batch_size=2, micro_batch_size=1),
        "fsdp, accumulating": case("fsdp", 2, 1, batch_size=16),
        "fsdp, checkpointed": case("fsdp", 2, 1, activation_checkpointing="block"),
        "fsdp, biased and untied": case("fsdp", 2, 1, model=GELU),
        "fsdp, experts": case("fsdp", 2, 1, model={"n_experts": 4, "d_ff": 256}),
        "fsdp, laboratory, own head, experts": case(
            "fsdp", 2, 1, "fp32", LABORATORY | {"tie_embeddings": False, "n_experts": 4, "d_ff": 256}
        ),
        "fsdp, laboratory, checkpointed": case("fsdp", 2, 1, model=LABORATORY, activation_checkpointing="block"),
        "without resharding": case("zero2", 2, 1),
        "without resharding, laboratory": case("zero2", 2, 1, model=LABORATORY),
        "without resharding, little but weights": case("zero2", 2, 1, model=NARROW, batch_size=2, micro_batch_size=1),
        "ddp": case("none", 2, 1),
        "ddp, laboratory": case("none", 2, 1, model=LABORATORY),
        "ddp, repeated": case("none", 2, 1, model={"layer_repeats": 2, "bigram_vocab_size": 3000}),
        "ddp, little but weights": case("none", 2, 1, "fp32", NARROW, batch_size=2, micro_batch_size=1),
        "ddp, normuon, little but weights": case(
            "none", 2, 1, "fp32", NARROW, batch_size=2, micro_batch_size=1, optimizer="normuon"
        ),
        "ddp, soap, little but weights": case(
            "none", 2, 1, "fp32", NARROW, batch_size=2, micro_batch_size=1, optimizer="soap", soap_frequency=1
        ),
        "tensor, soap, little but weights": case(
            "none", 1, 2, "fp32", NARROW, batch_size=2, micro_batch_size=1, optimizer="soap", soap_frequency=1
        ),
        "tensor, fp32": case("none", 1, 2, "fp32"),
        "tensor, muon, little but weights": case(
            "none", 1, 2, "fp32", NARROW, batch_size=2, micro_batch_size=1, optimizer="muon"
        ),
    },
    4: {
        "fsdp, bf16": case("fsdp", 4, 1),
        "fsdp, bf16, little but weights": case("fsdp", 4, 1, model=NARROW, batch_size=8, micro_batch_size=1),
        "fsdp × tensor": case("fsdp", 2, 2),
        "fsdp × tensor, normuon, little but weights": case(
            "fsdp", 2, 2, model=NARROW, batch_size=8, micro_batch_size=1, optimizer="normuon"
        ),
        "fsdp × tensor, soap, little but weights": case(
            "fsdp", 2, 2, model=NARROW, batch_size=8, micro_batch_size=1, optimizer="soap", soap_frequency=1
        ),
        "ddp × tensor, soap, little but weights": case(
            "none", 2, 2, model=NARROW, batch_size=8, micro_batch_size=1, optimizer="soap", soap_frequency=1
        ),
        "tensor": case("none", 1, 4),
    },
}


GENERATING = {"sample_every": 1, "sample_prompts": ["a", "bcd", "efghij"], "sample_tokens": 24}
TEXTS = {
    2: {"fsdp": case("fsdp", 2, 1, "fp32", **GENERATING)},
    4: {
        "fsdp × tensor": case("fsdp", 2, 2, "fp32", **GENERATING),
        "fsdp, little but weights": case("fsdp", 4, 1, "bf16", NARROW | {"context_length": 64}, **GENERATING),
        "without resharding": case("zero2", 4, 1, "fp32", **GENERATING),
    },
}


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_blocks_are_gathered_once_for_samples_or_once_a_step_of_all_texts(n_ranks: int, tmp_path: Path) -> None:
    """And once a batch for evaluations. The texts are those of one device, and the memory is the planned."""
    cases = [(name, each | {"once": once}) for name, each in TEXTS[n_ranks].items() for once in (True, False)]
    (tmp_path / "cases").write_text(json.dumps([each for _, each in cases]), encoding="utf-8")
    ranks_of(n_ranks, "texts", tmp_path / "cases")
    for (name, each), found in zip(cases, json.loads((tmp_path / "cases.results").read_text()), strict=True):
        recipe, layout, once = parse_recipe(each["recipe"]), Layout(**each["layout"]), each["once"]
        n_generating = layout.tensor_parallel if once else n_ranks
        assert (found["wrong"], found["found"], found["texts"]) == (0, 3 * n_generating, 3), name
        n_layers, root = recipe.model.n_layers, 1
        n_times = 1 if once or layout.sharding == "zero2" else GENERATING["sample_tokens"]
        assert found["gathers"] == n_layers * n_times + root, name
        assert found["in_evaluation"] == n_layers * (1 if layout.sharding == "zero2" else 3) + root, name
        setting = replace(rank_setting(recipe, recipe.train.precision, True, layout), saves=False)
        planned = generation_peak(setting, gathered=once).total_bytes
        print(
            f"{name}, once: {once}: {found['peak'] / 1e6:.1f} MB measured, {planned / found['peak'] - 1:+.1%} planned"
        )
        assert planned == pytest.approx(found["peak"], rel=0.05), name


def hold(n_ranks: int, cases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())), encoding="utf-8")
    ranks_of(n_ranks, "memory", tmp_path / "cases")
    measured = json.loads((tmp_path / "cases.results").read_text(encoding="utf-8"))
    off = {}
    for (name, each), peak_bytes in zip(cases.items(), measured, strict=True):
        recipe, layout = parse_recipe(each["recipe"]), Layout(**each["layout"])
        setting = replace(rank_setting(recipe, recipe.train.precision, on_cpu=True, layout=layout), saves=False)
        off[name] = training_peak(setting).total_bytes / peak_bytes - 1
        print(f"{n_ranks} ranks, {name}: {peak_bytes / 1e6:.1f} MB measured, planned is off by {off[name]:+.1%}")
    assert {name: share for name, share in off.items() if abs(share) > 0.05} == {}


def test_two_ranks_hold_what_is_planned(tmp_path: Path) -> None:
    hold(2, FEW[2], tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_every_layout_holds_what_is_planned(n_ranks: int, tmp_path: Path) -> None:
    hold(n_ranks, MANY[n_ranks], tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
@pytest.mark.parametrize("freeze", [None, FreezeConfig(embeddings=True), FreezeConfig(first_blocks=3, embeddings=True)])
def test_a_tensor_parallel_rank_keeps_the_state_of_what_it_trains(optimizer: str, freeze: FreezeConfig | None) -> None:
    """Against the state of an optimizer of a rank's model, which has half the heads and half the inner width."""
    each = case("none", 1, 2, optimizer=optimizer)
    recipe = parse_recipe(each["recipe"]).model_copy(update={"freeze": freeze})
    setting = replace(rank_setting(recipe, "fp32", on_cpu=True, layout=Layout(**each["layout"])), saves=False)
    halves = {"n_heads": 2, "n_kv_heads": 2, "d_ff": 384, "d_head": recipe.model.d_head}
    model = trainable_model(recipe.model.model_copy(update=halves), None, freeze)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    step = Optimizer(model, recipe.train)
    step.step(torch.amp.GradScaler("cpu", enabled=False))
    kept = sum(tensor.nbytes for tensor in step.state_tensors().values() if tensor.ndim)
    assert training_peak(setting).parts["optimizer_state"] == kept
