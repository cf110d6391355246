"""The figures of a plan for any objective: they add up, keys are identifiers, and unknown or missing figures are
reported."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tiny
from gptworks.describe.plan_tables import plan_json, tables
from gptworks.planning.device_table import find_device
from gptworks.planning.run import Plan, plan
from gptworks.planning.steps import DataSize
from gptworks.recipe import parse_recipe
from gptworks.training.rehearsal import measure
from gptworks.training.rehearsal.trace import Rehearsal

H100 = find_device("h100")
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}

KINDS: dict[str, dict[str, Any]] = {
    "next_token": {},
    "instruction": {"objective": {"type": "instruction"}},
    "preference": {"objective": {"type": "preference"}},
    "odds_ratio": {"objective": {"type": "odds_ratio"}},
    "distillation": {"objective": {"type": "distillation"}},
    "reward": {"objective": {"type": "reward", "reward": "r.py:f", "group_size": 4, "beta": 0.1, "max_tokens": 64}},
    "adapter": {"adapter": {"rank": 8}},
    "freeze": {"freeze": {"first_blocks": 2, "embeddings": True}},
}


def planned(kind: str, folder: Path, **train: Any) -> Plan:
    changes = KINDS[kind]
    objective = changes.get("objective", {"type": "next_token"})
    texts = {"type": "python-stdlib"}
    records = {
        "instruction": {"type": "conversations", "path": "chats.jsonl"},
        "preference": {"type": "preferences", "path": "pairs.jsonl"},
        "odds_ratio": {"type": "preferences", "path": "pairs.jsonl"},
        "reward": {"type": "conversations", "path": "chats.jsonl"},
    }.get(objective["type"])
    tree: dict[str, Any] = {
        "name": kind,
        "model": {"vocab_size": 4000, "context_length": 256, "n_layers": 4, "d_model": 256, "n_heads": 4},
        "tokenizer": {"type": "char"} | ({"chat_template": "plain"} if records else {}),
        "data": {"sources": [records or texts]},
        "train": {"max_steps": 1000, "batch_size": 16, "micro_batch_size": 8} | train,
    } | changes
    if objective["type"] == "distillation":
        (folder / "recipe.yaml").write_text(json.dumps(tree | {"objective": {"type": "next_token"}}), encoding="utf-8")
        tree["objective"] = objective | {"teacher": str(folder)}
    return plan(parse_recipe(tree), DataSize(samples_per_epoch=500 if records else None), device=H100)


def size(cell: str) -> float:
    """Parse `12.3 MB` as a number."""
    found = re.fullmatch(r"([\d.,]+) ([kMGTP]?)(?:B|FLOP)", cell)
    assert found, cell
    return float(found[1].replace(",", "")) * UNITS[found[2]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_every_table_add_up_to_its_total(kind: str, tmp_path: Path) -> None:
    sheet = planned(kind, tmp_path)
    with_totals = [table for table in tables(sheet, details=True) if table.rows and table.rows[-1][0] == "total"]
    assert len(with_totals) == 2
    for table in with_totals:
        *rows, total = table.rows
        for column in range(1, len(total)):
            if total[column]:
                parts = [size(row[column]) for row in rows]
                assert sum(parts) == pytest.approx(size(total[column]), rel=2e-3), table.header
    assert sum(sheet.peak.parts.values()) == sheet.peak.total_bytes
    by_part = sheet.flops_by_part.values()
    assert sum(map(sum, by_part)) == pytest.approx(sheet.flops_per_token)


def test_what_is_frozen_or_adapted_costs_less_and_what_is_read_besides_costs_more(tmp_path: Path) -> None:
    flops = {kind: planned(kind, tmp_path).flops_per_token for kind in KINDS}
    whole = flops["next_token"]
    assert flops["freeze"] < 0.8 * whole and flops["adapter"] < 0.8 * whole
    assert flops["distillation"] == pytest.approx(whole * 4 / 3)  # a teacher as large as the student
    sampled = (64 + 192 / 4) / 256  # answers, and prompts once a group
    assert flops["reward"] == pytest.approx(whole * (3 + 2 + sampled) / 3)
    pairs = planned("preference", tmp_path)
    assert pairs.flops_before_first_step == pytest.approx(500 * 2 * 256 * whole / 3)
    assert pairs.total_flops == pytest.approx(pairs.flops_before_first_step + 1000 * 16 * 2 * 256 * whole)
    odds = planned("odds_ratio", tmp_path)  # without a reference
    assert odds.flops_before_first_step == 0 and odds.total_flops == pytest.approx(1000 * 16 * 2 * 256 * whole)
    answers = planned("reward", tmp_path)
    assert answers.sampling_seconds_per_step == pytest.approx(64 * 4 * answers.parameters.total / H100.bandwidth)  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_what_rows_of_unknown_lengths_bound_is_said_to_be_a_bound(kind: str, tmp_path: Path) -> None:
    sheet = planned(kind, tmp_path)
    facts = dict(next(iter(tables(sheet))).rows)  # type: ignore[arg-type]
    bounds = [facts[name].startswith("at most ") for name in ("tokens in all", "training FLOPs in all", "time")]
    assert bounds == [kind in ("preference", "odds_ratio", "reward")] * 3 == [plan_json(sheet)["at_most"]] * 3


@pytest.mark.parametrize("kind", ["next_token", "distillation", "reward", "adapter"])
def test_keys_of_the_json_are_identifiers(kind: str, tmp_path: Path) -> None:
    def keys(node: Any) -> Any:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            if isinstance(key, str):
                yield key
            if key != "tensors":  # of which each has its name in the model
                yield from keys(value)

    found = set(keys(plan_json(planned(kind, tmp_path))))
    assert {key for key in found if not re.fullmatch(r"[a-z][a-z0-9_]*", key)} == set()


def test_checkpoints_on_disk_count_those_that_stay(tmp_path: Path) -> None:
    """Saved are the multiples of 100 and step 1050; all are multiples of 50, so they stay."""
    settings = {"checkpoint_every": 100, "evaluate_every": 150, "max_steps": 1050}
    without, kept = (planned("next_token", tmp_path, **settings, keep_every=every) for every in (0, 50))
    assert without.most_checkpoints == 2 + 2  # the newest, the best, and one being written
    assert kept.most_checkpoints == 4 + len([*range(100, 1050, 100), 1050])
    for found, n_light in ((without, 2), (kept, 3)):  # between the saves the best, and the one before it; and step 0
        saved = found.most_checkpoints * found.checkpoint_bytes + n_light * found.weights_bytes
        assert found.checkpoints_bytes == saved == plan_json(found)["disk"]["checkpoints_bytes"]


def write(tmp_path: Path, **changes: Any) -> Path:
    tree = tiny.recipe_tree(tmp_path)
    tree["model"]["vocab_size"] = 64
    del tree["train"]["max_steps"]
    tree["train"] |= {"epochs": 2, "warmup_steps": 0}
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(tree | changes), encoding="utf-8")
    return path


def test_tokens_of_data_that_is_not_prepared_are_estimated_from_its_size(tmp_path: Path) -> None:
    result = tiny.gptworks("plan", write(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    sheet = json.loads(result.stdout)
    assert sheet["train_tokens"] == int(0.9 * len(tiny.TEXT.encode()))
    assert sheet["train_tokens_estimated"] and sheet["steps"] > 0
    assert "about" in sheet["steps_reason"]


def test_a_plan_whose_data_is_missing_is_printed_and_ends_with_an_error(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "text.txt").unlink()
    result = tiny.gptworks("plan", path)
    assert result.returncode == 2
    assert "text.txt: no such file or folder" in result.stderr and "unknown" in result.stderr
    assert "memory of a device" in result.stdout and "unknown" in result.stdout


@pytest.mark.parametrize(
    "model",
    [
        {"init": "induction", "n_layers": 2},
        {"gate_channels": 80, "smear": True, "d_model": 96, "n_heads": 3},
        {"n_experts": 2, "d_ff_shared": 32, "layer_repeats": 2, "bigram_vocab_size": 300},
        {"value_residual": True, "unet_skips": True, "value_embeddings": ["none", "table"], "n_future_tokens": 3},
        {"rope_scaling": {"type": "longrope", "factor": 2, "short_factors": [1.0] * 8, "long_factors": [2.0] * 8},
         "window": 8, "norm_placement": "after", "qk_norm": "whole"},
    ],
    ids=lambda model: next(iter(model)),
)  # fmt: skip
def test_every_architecture_is_measured(model: dict[str, Any], tmp_path: Path) -> None:
    """The warm-up step uses a small valid model, whatever the recipe's model is."""
    tree = tiny.recipe_tree(tmp_path, batch_size=2, micro_batch_size=2)
    tree["model"] |= {"vocab_size": 64} | model
    recipe = parse_recipe(tree)
    assert measure._small(recipe.model).n_layers == 1
    rehearsal = Rehearsal(recipe.model, recipe.train, precision="fp32")
    assert measure._measure(rehearsal).tokens_per_second > 0


def test_the_demo_is_measured_by_the_command() -> None:
    one = ("train.batch_size=1", "train.micro_batch_size=1", "model.context_length=64")
    result = tiny.gptworks("plan", "demo", *one, "--measure", "--json")
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)["measured"]
    assert measured["tokens_per_second"] > 0 and measured["kept_bytes"] > 0
