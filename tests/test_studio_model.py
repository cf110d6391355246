"""The studio's part Model: each figure equals that of `describe --json`, of the plan, or of the package that reads
weights."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hf
import serving
import tiny
from gptworks.checkpoint import load_run
from gptworks.describe.sheet import describe
from gptworks.interpret import weights as room
from gptworks.planning.run import plan
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.serve.settings import ServerSettings
from gptworks.studio.app import create_studio
from gptworks.training.loop import train
from serving import KEY, Running, posted, running_app, running_studio
from tiny import plain_model

QUERY = "blocks.1.attention.query.weight"
MOE = plain_model(vocab_size=260, context_length=32, n_layers=3, d_model=16, n_heads=2, d_ff=24, n_experts=4,
                  tie_embeddings=False, window=8, window_pattern=("full", "window"), mlp="swiglu",
                  n_future_tokens=3)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, and one with experts."""
    home = tmp_path_factory.mktemp("model")
    tree = tiny.recipe_tree(home, max_steps=4, checkpoint_every=2, evaluate_every=4, evaluate_sequences=2)
    train(parse_recipe(tree | {"run_dir": str(home / "runs" / "demo")}))
    hf.make_run(home / "runs" / "moe", hf.random_model(MOE), serving.byte_tokenizer())
    return home / "runs"


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Running]:
    with running_studio(runs) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


def asked(http: httpx.Client, what: str, **body: Any) -> Any:
    return posted(http, f"/studio/model/{what}", **({"model": "demo"} | body))


def refused(http: httpx.Client, status: int, part: str, what: str, **body: Any) -> None:
    assert part in posted(http, f"/studio/model/{what}", status, **({"model": "demo"} | body))["error"]["message"]


@pytest.mark.parametrize("run", ["demo", "moe"])
def test_the_sheet_is_describes(run: str, http: httpx.Client, runs: Path) -> None:
    recipe = load_recipe(runs / run)
    sheet, planned = describe(recipe.model), plan(recipe)
    data = json.loads(json.dumps(sheet.to_json()))
    found = asked(http, "sheet", model=run, layer=1)
    assert {setting["name"].removeprefix("model."): setting["value"] for setting in found["settings"]} == data["model"]
    facts = {fact["name"]: fact["text"] for fact in found["facts"]}
    assert list(sheet.facts) == [(fact["name"], fact["text"]) for fact in found["facts"]][: len(sheet.facts)]
    assert len(facts) == len(sheet.facts) + 3
    rows = {part["key"]: {row["key"]: row for row in part["figures"]} for part in found["parts"]}

    def total(key: str) -> float:
        return sum(part[key]["all"] for part in rows.values() if key in part)

    assert total("parameters") == data["parameters"]["total"] and sum(
        p["share"] for p in found["parts"]
    ) == pytest.approx(1)
    of_heads = data["flops"].get("future_heads_per_token", 0)  # which training alone computes
    assert (of_heads > 0) == (run == "moe")
    assert total("forward") == pytest.approx(data["flops"]["forward_per_token"] + of_heads)
    assert total("training") == pytest.approx(planned.flops_per_token)
    assert total("weights_bytes") == planned.weights_bytes and total("optimizer_bytes") == planned.optimizer_state_bytes
    assert total("kv_cache_bytes") == data["memory"]["kv_cache_fp16_bytes"]
    for key in ("forward", "training", "optimizer_bytes"):
        assert sum(part[key]["share"] for part in rows.values() if key in part) == pytest.approx(1)
    tensors = {one["name"]: one["shape"] for part in found["parts"] for one in part["tensors"]}
    groups = data["parameters"]["groups"].values()
    due = {f"blocks.1.{name}" if group["per_layer"] is not None else name: shape
           for group in groups for name, shape in group["tensors"].items()}  # fmt: skip
    assert tensors == due
    assert (found["layer"], found["n_layers"], found["window"]) == (
        1,
        recipe.model.n_layers,
        recipe.model.layer_window(1),
    )


def test_a_windowed_layer_costs_less(http: httpx.Client) -> None:
    full, windowed = (
        next(part for part in asked(http, "sheet", model="moe", layer=layer)["parts"] if part["key"] == "scores")
        for layer in (0, 1)
    )
    (first, *_), (second, *_) = full["figures"], windowed["figures"]
    assert first["all"] == second["all"] == first["layer"] * 2 + second["layer"] and first["layer"] > second["layer"]
    refused(http, 400, "blocks are numbered from 0 to 2", "sheet", model="moe", layer=3)


def test_weights_are_numpys(http: httpx.Client, runs: Path) -> None:
    found = asked(http, "weights", tensor=QUERY, checkpoint=4, against=2)
    own, other = (load_run(runs / "demo", str(step)).model.state_dict()[QUERY].double().numpy() for step in (4, 2))
    ends = min(own.min(), other.min()), max(own.max(), other.max())
    for values, one in zip((own, other), found["checkpoints"], strict=True):
        counts, edges = np.histogram(values, room.BINS, ends)
        assert one["counts"] == counts.tolist() and found["edges"] == edges.tolist()
        assert sum(one["counts"]) == one["parameters"] == values.size
        assert (one["moments"]["mean"], one["moments"]["std"]) == pytest.approx((values.mean(), values.std()))
        assert (one["stored"], one["stored_bytes"], one["values"]) == ("fp32", 4 * values.size, None)
    assert [one["step"] for one in found["checkpoints"]] == [4, 2] and found["shape"] == [32, 32]
    change = np.linalg.norm(own - other) / np.linalg.norm(other)
    assert found["relative_change"] == pytest.approx(change, rel=1e-6) and change > 0
    spectrum = asked(http, "spectrum", tensor=QUERY, checkpoint=4, against=2)["checkpoints"]
    for values, one in zip((own, other), spectrum, strict=True):
        singular = np.linalg.svd(values, compute_uv=False)
        np.testing.assert_allclose(one["values"], singular / singular[0], atol=1e-6)
        assert one["largest"] == pytest.approx(singular[0])
        assert one["stable_rank"] == pytest.approx(np.square(singular / singular[0]).sum(), rel=1e-6)
    alone = asked(http, "weights", tensor="norm.weight", checkpoint=4)
    stored = load_file(runs / "demo" / "checkpoints" / "step-000004" / "model.safetensors")
    assert alone["checkpoints"][0]["values"] == stored["norm.weight"].tolist() and alone["relative_change"] is None


def test_what_cannot_be_shown_is_refused(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(http, 400, "the model has no tensor `../x`", "weights", tensor="../x")
    refused(http, 400, "is a vector", "spectrum", tensor="norm.weight")
    refused(http, 404, "no checkpoint of step 3", "weights", tensor=QUERY, checkpoint=3)
    refused(http, 404, "there is no run", "sheet", model="other")
    refused(http, 400, "tensor: Field required", "weights")
    monkeypatch.setattr(room, "MOST_SIDE", 16)
    refused(http, 400, "shorter side is at most 16", "spectrum", tensor=QUERY)


def test_hostile_run_folders_are_refused(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    model = hf.random_model(plain_model(vocab_size=260, context_length=8, n_layers=1, d_model=8, n_heads=2))
    names = ("changed", "wide", "linked", "odd", "many")
    for name in names:
        hf.make_run(runs / name, model, serving.byte_tokenizer())
    weights = {name: runs / name / "checkpoints" / "step-000007" / "model.safetensors" for name in names}
    weights["changed"].write_bytes(weights["changed"].read_bytes()[:-4] + b"\0\0\0\0")
    outside = tmp_path / "outside.safetensors"
    weights["linked"].rename(outside)
    weights["linked"].symlink_to(outside)
    hf.make_run(tmp_path / "more" / "wide", hf.random_model(model.config.model_copy(update={"d_ff": 64})))
    for path in (runs / "wide" / "checkpoints").rglob("*.*"):
        path.write_bytes((tmp_path / "more" / "wide" / path.relative_to(runs / "wide")).read_bytes())
    model.blocks[0].norm1.weight.data.fill_(math.nan)
    hf.make_run(runs / "odd", model, serving.byte_tokenizer())
    recipe = runs / "many" / "recipe.yaml"
    recipe.write_text(
        recipe.read_text().replace("n_layers: 1", "n_layers: 999").replace("n_experts: 0", "n_experts: 999")
    )
    with (
        running_app(create_studio([runs], ServerSettings(api_keys=(KEY,), client_share=1.0))) as one,
        one.http() as http,
    ):
        up = "blocks.0.mlp.up.weight"
        refused(http, 400, "its sha256 differs", "weights", model="changed", tensor=up)
        refused(http, 400, "is float32 [64, 8] there and float32 [32, 8]", "weights", model="wide", tensor=up)
        refused(http, 400, "is float32 [64, 8] there", "sheet", model="wide")
        refused(http, 400, "a link that leads out", "sheet", model="linked")
        refused(http, 400, "tensors, and at most 200,000 can be shown", "sheet", model="many")
        refused(http, 400, "tensors, and at most 200,000 can be shown", "weights", model="many", tensor=up)
        found = asked(http, "weights", model="odd", tensor="blocks.0.norm1.weight")
        assert found["checkpoints"][0]["moments"]["n_not_finite"] == 8 and found["edges"] == []
        assert found["checkpoints"][0]["values"] == [None] * 8
        assert torch.isnan(model.blocks[0].norm1.weight).all()
