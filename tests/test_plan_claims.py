"""Drawn recipes of every objective: what `plan` holds for a step against the traced step, and for a run against the
growth of a real process."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gptworks.config import Recipe
from gptworks.errors import UserError
from gptworks.plan.arrange import rank_setting
from gptworks.plan.memory import training_peak
from gptworks.plan.params import count_parameters
from gptworks.recipe import parse_recipe
from gptworks.train.rehearsal.measure import _in_new_process
from gptworks.train.rehearsal.trace import Rehearsal, trace_step
from test_arrangements import SOURCES

KINDS = ["next_token", "instruction", "preference", "odds_ratio", "distillation", "adapter", "freeze"]
"""A reward's step needs answers that a model writes: it is traced by no rehearsal."""


def tree_of(draw: random.Random, kind: str, teacher: Path, widths: tuple[int, ...]) -> dict[str, Any]:
    """A recipe that plan, trace and a process can follow: one rank, a vocabulary that is known."""
    objective = kind if kind in SOURCES else "next_token"
    width, layers = draw.choice(widths), draw.choice([2, 3, 6])
    model: dict[str, Any] = {
        "vocab_size": 2000, "context_length": draw.choice([64, 128, 256]), "n_layers": layers, "d_model": width,
        "n_heads": draw.choice([2, 4]), "norm": draw.choice(["rmsnorm", "layernorm"]),
        "mlp": draw.choice(["gelu", "swiglu", "relu2"]), "tie_embeddings": draw.random() < 0.6,
        "qk_norm": draw.random() < 0.5, "position": draw.choice(["rope", "rope", "learned"]),
        "zero_init_projections": False,
    }  # fmt: skip
    if draw.random() < 0.2:
        model |= {"window": 32, "window_pattern": ["window", "full"]}
    if draw.random() < 0.2 and kind not in ("adapter", "freeze"):
        model |= {"residual_scalars": True, "value_residual": True, "attention_gate": True}
    micro = draw.choice([1, 2, 4])
    tree: dict[str, Any] = {
        "name": "drawn",
        "model": model,
        "tokenizer": {"type": "char"} | ({} if "python" in SOURCES[objective]["type"] else {"chat_template": "plain"}),
        "data": {"sources": [SOURCES[objective]]},
        "objective": {"type": objective},
        "train": {
            "max_steps": 10, "micro_batch_size": micro, "batch_size": micro * draw.choice([1, 1, 2]),
            "optimizer": draw.choice(["adamw", "adamw", "muon"]) if kind != "adapter" else "adamw",
            "precision": draw.choice(["fp32", "bf16"]),
            "activation_checkpointing": draw.choice(["none", "none", "selective", "block"]), "compile": "none",
        },
    }  # fmt: skip
    if objective == "distillation":
        tree["objective"]["teacher"] = str(teacher)
    if kind == "adapter":
        tree["adapter"] = {"rank": 4, "base": draw.choice(["full", "int8", "int4"])}
        tree["initialize_from"] = str(teacher)
    if kind == "freeze":
        tree["freeze"] = {"first_blocks": 1, "embeddings": draw.random() < 0.5}
    return tree


def drawn(seed: int, teacher: Path, widths: tuple[int, ...]) -> tuple[str, Recipe]:
    draw = random.Random(seed)
    while True:
        kind = draw.choice(KINDS)
        try:
            return kind, parse_recipe(tree_of(draw, kind, teacher, widths))
        except UserError:
            continue  # the recipe itself is refused: no run has it


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    tree = {
        "name": "teacher",
        "model": {"vocab_size": 2000, "context_length": 256, "n_layers": 2, "d_model": 128, "n_heads": 4},
        "tokenizer": {"type": "char"},
        "data": {"sources": [{"type": "python-stdlib"}]},
        "train": {"max_steps": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(tree), encoding="utf-8")
    return folder


def step_of(recipe: Recipe) -> tuple[int, Rehearsal]:
    """What is planned for a step without checkpoints, and the same step to be followed."""
    setting = replace(rank_setting(recipe, recipe.train.precision, on_cpu=True), saves=False)
    rows = recipe.objective.rows_per_sample
    size = setting.micro_batch_size * rows * (2 if setting.accumulates else 1)
    train = recipe.train.model_copy(update={"batch_size": size, "micro_batch_size": setting.micro_batch_size * rows})
    rehearsal = Rehearsal(
        recipe.model, train, "cpu", recipe.train.precision, recipe.adapter, recipe.freeze, recipe.objective,
        setting.several_texts,
    )  # fmt: skip
    return training_peak(setting).total_bytes, rehearsal


def off_by(seeds: range, teacher: Path) -> dict[str, float]:
    found = {}
    for seed in seeds:
        kind, recipe = drawn(seed, teacher, (64, 128, 192))
        planned, rehearsal = step_of(recipe)
        found[f"{seed} {kind}"] = planned / trace_step(rehearsal).peak_bytes - 1
    return found


def hold(found: dict[str, float]) -> None:
    """Nineteen of twenty within 3%, and none more than 3% below: where it is off, the plan is a bound. Pairs whose
    blocks are computed again in bf16 are planned up to 8% too large."""
    shares = sorted(map(abs, found.values()))
    within = sum(share <= 0.03 for share in shares) / len(shares)
    print(f"{len(shares)} recipes: {within:.1%} within 3%, half within {shares[len(shares) // 2]:.2%}, "
          f"the furthest {shares[-1]:.2%}")  # fmt: skip
    assert {name: share for name, share in found.items() if not -0.03 <= share <= 0.08} == {}
    assert within >= 0.95


def test_drawn_recipes_hold_what_the_trace_of_their_step_says(teacher: Path) -> None:
    hold(off_by(range(20), teacher))


@pytest.mark.arrangements
@pytest.mark.timeout(3600)
def test_five_hundred_drawn_recipes(teacher: Path) -> None:
    hold(off_by(range(500), teacher))


KERNELS_BYTES = 30e6
"""What a process grows by at most besides tensors, whatever the size of the model: code run for the first time, what
kernels take inside, and in bf16 a kernel that oneDNN compiles for each shape. The plan counts it to the process."""


@pytest.mark.arrangements
@pytest.mark.timeout(3600)
def test_real_processes_of_every_objective_grow_by_what_is_planned_and_their_kernels(teacher: Path) -> None:
    """Models of 1 to 30 million parameters, freed memory given back: not less than planned but for 8%, and not more but
    for 3% and the kernels."""
    found = {}
    for seed in range(1000, 1021):
        kind, recipe = drawn(seed, teacher, (192, 256, 384, 512))
        planned, rehearsal = step_of(recipe)
        grown = _in_new_process(rehearsal, "return").peak_bytes
        assert grown is not None
        size = count_parameters(recipe.model).total / 1e6
        found[f"{seed} {kind}"] = planned, grown
        print(f"{seed} {kind}, {size:.1f}M, {recipe.train.precision}: {planned / 1e6:.1f} MB planned, "
              f"{grown / 1e6:.1f} MB grown")  # fmt: skip
    off = {
        name: (planned, grown)
        for name, (planned, grown) in found.items()
        if not 0.92 * planned <= grown <= 1.03 * planned + KERNELS_BYTES
    }
    assert off == {}
