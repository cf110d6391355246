"""The dress rehearsal: what it shows of a run on many GPUs, and what it finds."""

import json
from typing import Any

import pytest
import yaml
from markupsafe import escape

import tiny
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.devices import DeviceOptions, find_device
from gptworks.planning.run import Plan, plan
from gptworks.planning.steps import UNKNOWN_SIZE, DataSize


def planned(name: str, n_ranks: int, *overrides: str, data: DataSize = UNKNOWN_SIZE) -> Plan:
    device = DeviceOptions().in_node(find_device("h100"), n_ranks)
    recipe, reason = preset_recipe(name, overrides, device, n_ranks)

    def apply(more: Any, n: int) -> Any:
        return preset_recipe(name, [*overrides, *more], device, n)[0]

    return plan(recipe, data, steps_reason=reason, device=device, n_ranks=n_ranks, apply=apply)


# a whole rehearsal ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a rehearsal of FSDP with Muon on 8 ranks, and its page."""
    folder = tmp_path_factory.mktemp("rehearsal")
    settings = {"parallel": {"strategy": "fsdp"}, "batch_size": 64, "precision": "bf16", "compile": "none"}
    recipe = tiny.recipe_tree(folder, **settings)
    recipe["model"] |= {"vocab_size": 200, "dropout_attention": 0.0, "dropout_residual": 0.0}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    shown = tiny.gptworks(
        "rehearse", folder / "tiny.yaml", "--device", "h100", "--world-size", "8", "--price", "2.5",
        "--html", folder / "page.html", "--json",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout) | {"page": (folder / "page.html").read_text(encoding="utf-8")}


def lines(rehearsed: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {line["what"]: line for line in rehearsed["sections"][section]}


def test_each_line_says_whether_it_was_shown_planned_or_not_checked(rehearsed: dict[str, Any]) -> None:
    statuses = {line["status"] for section in rehearsed["sections"].values() for line in section}
    assert statuses == {"shown", "planned", "not checked"}
    for section in rehearsed["sections"].values():
        for line in section:
            assert line["found"], line["what"]
            assert escape(line["what"]) in rehearsed["page"]


def test_the_collectives_shown_are_those_planned(rehearsed: dict[str, Any]) -> None:
    shown = [line["figures"] for line in rehearsed["sections"]["ranks"] if "kind" in line["figures"]]
    assert {figures["kind"] for figures in shown} == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    for figures in shown:
        if figures["kind"] != "all_to_all":  # rank 0 sends what it owns
            assert figures["bytes"] == pytest.approx(figures["planned_bytes"], rel=0.01, abs=64), figures


def test_a_rank_holds_what_is_planned(rehearsed: dict[str, Any]) -> None:
    parts = lines(rehearsed, "ranks")["parts of the model on rank 0"]["figures"]
    assert parts["bytes"] == pytest.approx(parts["planned_bytes"], rel=0.1)
    held = lines(rehearsed, "ranks")["memory of rank 0's tensors in a step"]["figures"]
    assert held["bytes"] == pytest.approx(held["planned_bytes"], rel=0.05)
    assert lines(rehearsed, "ranks")["building rank 0's parts in memory"]["status"] == "shown"


def test_ranks_begin_the_same_collectives(rehearsed: dict[str, Any]) -> None:
    order = lines(rehearsed, "ranks")["order of collectives"]
    assert order["figures"]["same"] and order["figures"]["collectives"] > 4


def test_cost_is_hours_of_devices_times_the_price(rehearsed: dict[str, Any]) -> None:
    found = lines(rehearsed, "data, disk and cost")
    time = found["time"]["figures"]
    assert time["device_hours"] == pytest.approx(8 * time["seconds"] / 3600)
    assert found["cost"]["figures"]["cost"] == pytest.approx(2.5 * time["device_hours"])
    assert found["a checkpoint"]["figures"]["bytes"] == rehearsed["plan"]["disk"]["checkpoint_bytes"]
