"""The dress rehearsal: what it shows of a run on many GPUs, and what it finds."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from markupsafe import escape

import tiny
from gptworks.planning.assumed import preset_recipe
from gptworks.planning.device_options import DeviceOptions
from gptworks.planning.device_table import find_device
from gptworks.planning.run import Plan, plan
from gptworks.planning.steps import UNKNOWN_SIZE, DataSize
from gptworks.runs.rehearsal_sheet import sections
from gptworks.training.rehearsal import fake_ranks
from gptworks.training.rehearsal.dress import MOST_LOST_SECONDS, Rehearsed, advice
from gptworks.training.rehearsal.fake_ranks import Placement, RankSteps, Sent
from gptworks.training.rehearsal.new_process import ProcessFailed


def planned(name: str, n_ranks: int, *overrides: str, data: DataSize = UNKNOWN_SIZE) -> Plan:
    device = DeviceOptions().in_node(find_device("h100"), n_ranks)
    recipe, reason = preset_recipe(name, overrides, device, n_ranks)

    def apply(more: Any, n: int) -> Any:
        return preset_recipe(name, [*overrides, *more], device, n)[0]

    return plan(recipe, data, steps_reason=reason, device=device, n_ranks=n_ranks, apply=apply)


# a whole rehearsal ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a rehearsal of FSDP with Muon on 6 ranks, which pads, and its page."""
    folder = tmp_path_factory.mktemp("rehearsal")
    settings = {"parallel": {"strategy": "fsdp"}, "batch_size": 48, "precision": "bf16", "compile": "none"}
    recipe = tiny.recipe_tree(folder, **settings)
    recipe["model"] |= {"vocab_size": 200, "dropout_attention": 0.0, "dropout_residual": 0.0}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    shown = tiny.gptworks(
        "rehearse", folder / "tiny.yaml", "--device", "h100", "--world-size", "6", "--price", "2.5",
        "--html", folder / "page.html", "--json",
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout) | {"page": (folder / "page.html").read_text(encoding="utf-8")}


def lines(rehearsed: dict[str, Any], section: str) -> dict[str, dict[str, Any]]:
    return {line["what"]: line for line in rehearsed["sections"][section]}


def test_ranks_whose_process_fails_keep_the_reason_why_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> bytes:
        raise ProcessFailed("ended by signal 9")

    monkeypatch.setattr(fake_ranks, "ask", fail)
    monkeypatch.setattr(fake_ranks, "MOST_DRAWN", 1)
    asked = planned("gpt2-tiny", 2)
    placement = fake_ranks.place_ranks(asked)
    failed, not_built = sections(Rehearsed(asked, (), None, placement, 1.0))["ranks"]
    assert failed.what == "placement" and "ended by signal 9" in failed.found
    assert not_built.status == "not checked" and "draws at most 1" in not_built.found


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
    assert parts["bytes"] == pytest.approx(parts["planned_bytes"], rel=0.01)
    held = lines(rehearsed, "ranks")["memory of rank 0's tensors in a step"]["figures"]
    assert held["bytes"] == pytest.approx(held["planned_bytes"], rel=0.05)
    assert lines(rehearsed, "ranks")["building rank 0's parts in memory"]["status"] == "shown"


def test_ranks_begin_the_same_collectives(rehearsed: dict[str, Any]) -> None:
    order = lines(rehearsed, "ranks")["order of collectives"]
    assert order["figures"]["same"] and order["figures"]["collectives"] > 4


def test_cost_is_hours_of_devices_times_the_price(rehearsed: dict[str, Any]) -> None:
    found = lines(rehearsed, "data, disk and cost")
    time = found["time"]["figures"]
    assert time["device_hours"] == pytest.approx(6 * time["seconds"] / 3600)
    assert found["cost"]["figures"]["cost"] == pytest.approx(2.5 * time["device_hours"])
    assert found["a checkpoint"]["figures"]["bytes"] == rehearsed["plan"]["disk"]["checkpoint_bytes"]


def test_what_is_found_is_printed_with_the_settings_to_write(rehearsed: dict[str, Any]) -> None:
    padding = [one for one in rehearsed["to_change"] if "pads" in one["reason"]]
    assert padding[0]["settings"] == ["--world-size 3"]
    assert "--world-size 3" in rehearsed["page"]


@pytest.mark.parametrize("arguments", [("--price", "0"), ("--price", "nan"), ("--disk-gb-s", "-1")])
def test_prices_and_rates_are_above_0(arguments: tuple[str, str]) -> None:
    refused = tiny.gptworks("rehearse", "gpt2", "--device", "h100", *arguments)
    assert refused.returncode == 2 and f"{arguments[0]} {arguments[1]} is not above 0" in refused.stderr


# what to change ---------------------------------------------------------------------------------------------


def with_settings(name: str, n_ranks: int, found: Plan, settings: tuple[str, ...]) -> Plan:
    return planned(name, n_ranks, *(one for one in " ".join(settings).split()), data=found.data)


def test_a_run_that_does_not_fit_gets_settings_with_which_it_fits() -> None:
    found = planned("gpt3-175b", 1024)
    first = next(advice(found, 1))
    assert "does not fit" in first.reason
    assert with_settings("gpt3-175b", 1024, found, first.settings).fits


def test_a_faster_layout_is_recommended_and_is_as_fast_as_it_says() -> None:
    slow = ("train.activation_checkpointing=block", "train.micro_batch_size=1")
    found = planned("gpt3-125m", 8, *slow)
    first = next(advice(found, 1))
    assert "faster" in first.reason
    faster = with_settings("gpt3-125m", 8, found, (*slow[1:], *first.settings))
    assert faster.fits and faster.tokens_per_second and found.tokens_per_second
    gain = faster.tokens_per_second / found.tokens_per_second - 1
    assert gain > 0.1 and f"{gain:.0%} faster" in first.reason
    assert not any("faster" in one.reason for one in advice(faster, 1))


def test_checkpoints_are_written_between_those_due_and_often_enough() -> None:
    found = planned("gpt3-2.7b", 64, "train.checkpoint_every=5000")
    (often,) = [one for one in advice(found, 30) if "failure" in one.reason]
    key, every = often.settings[0].split("=")
    assert key == "train.checkpoint_every" and found.tokens_per_second
    assert int(every) * found.tokens_per_step / found.tokens_per_second <= MOST_LOST_SECONDS
    (seldom,) = [
        one for one in advice(planned("gpt3-2.7b", 64, "train.checkpoint_every=1"), 30) if "write" in one.reason
    ]
    assert int(seldom.settings[0].split("=")[1]) * found.tokens_per_step / found.tokens_per_second > 30


def test_text_that_is_read_too_often_is_named() -> None:
    found = planned("gpt3-125m", 8, data=DataSize(10**8))
    (repeated,) = [one for one in advice(found, 1) if "100,000,000 tokens 25.1 times" in one.reason]
    assert repeated.settings == ("train.epochs=4",)
    assert not any("times" in one.reason for one in advice(replace(found, data=DataSize(10**10)), 1))


def test_ranks_that_begin_other_collectives_are_found() -> None:
    first = [Sent("all_gather", "data", 96), Sent("all_to_all", "data", 8)]
    found = planned("gpt3-125m", 8)

    def placed(*last: Sent) -> Rehearsed:
        ranks = [RankSteps(n, 1, 1, [], list(sent), 1, 1.0) for n, sent in ((0, first), (7, last))]
        return Rehearsed(found, (), None, Placement(tuple(ranks)), 1.0)

    assert placed(first[0], Sent("all_to_all", "data", 16)).in_order, "owners may send more"
    for last in ([first[0]], [*reversed(first)], [Sent("all_gather", "data", 64), first[1]]):
        assert not placed(*last).in_order
