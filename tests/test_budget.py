"""Plans the other way round: what hours or money suffice for, and what a run costs."""

import json
from typing import Any

import pytest

import gptworks
import tiny
from gptworks.errors import UserError
from gptworks.overrides import apply_overrides
from gptworks.planning.budget import size_overrides
from gptworks.presets import PRESETS, preset
from gptworks.recipe import parse_model


def planned(*arguments: str) -> dict[str, Any]:
    shown = tiny.gptworks("plan", *arguments, "--json")
    assert shown.returncode in (0, 3), shown.stderr
    sheet: dict[str, Any] = json.loads(shown.stdout)
    return sheet


def test_a_run_costs_its_hours_times_its_devices_times_the_price() -> None:
    sheet = gptworks.plan("gpt3-125m", device="h100", world_size=8, price=2.49)
    assert sheet.seconds is not None
    assert sheet.cost == pytest.approx(sheet.seconds / 3600 * 8 * 2.49)
    assert f"{sheet.cost:,.2f}: " in repr(sheet) and "at 2.49" in repr(sheet)


def test_a_budget_is_the_hours_that_it_pays() -> None:
    by_money = gptworks.plan("modern-110m", device="rtx 3060", world_size=2, price=0.25, budget=6).affordable
    by_time = gptworks.plan("modern-110m", device="rtx 3060", world_size=2, hours=12).affordable
    assert by_money == by_time and by_money is not None and by_money.seconds == 12 * 3600


def test_the_largest_model_is_compute_optimal_fits_and_the_next_size_is_too_large() -> None:
    sheet = planned("gpt3-125m", "--device", "rtx 4060", "--hours", "24")
    found = sheet["affordable"]["largest"]
    assert found["tokens"] == 20 * found["parameters"] and not found["limited_by_memory"]
    again = planned("gpt3-125m", *found["overrides"], "--device", "rtx 4060")
    assert again["parameters"]["total"] == found["parameters"] and again["fit"]["fits"]
    assert again["time"]["seconds"] == pytest.approx(found["seconds"], rel=0.01) and found["seconds"] <= 24 * 3600
    groups = int(next(one.partition("=")[2] for one in found["overrides"] if one.startswith("model.n_kv_heads=")))
    larger = planned("gpt3-125m", *size_overrides(preset("gpt3-125m"), groups + 1), "--device", "rtx 4060")
    assert larger["time"]["seconds"] > 24 * 3600


def test_where_memory_limits_the_model_it_reads_all_that_the_time_allows() -> None:
    sheet = gptworks.plan("gpt3-1.3b", device="4060 laptop", hours=2000)
    assert sheet.affordable is not None and (found := sheet.affordable.largest) is not None
    assert found.limited_by_memory and found.tokens > 20 * found.parameters
    assert "memory limits the model" in repr(sheet)


def test_this_model_reads_as_many_tokens_as_its_rate_allows() -> None:
    sheet = gptworks.plan("gpt2", device="8 GB", flops=20e12, hours=10)
    assert sheet.affordable is not None and sheet.tokens_per_second is not None
    assert sheet.affordable.tokens == int(sheet.tokens_per_second * 36_000)
    assert sheet.affordable.steps == sheet.affordable.tokens // 2**19
    assert sheet.affordable.flops == pytest.approx(sheet.affordable.tokens * sheet.flops_per_token)


def test_each_architecture_can_be_made_smaller() -> None:
    for name in PRESETS:
        own = preset(name)
        groups = own.n_kv_heads if own.n_kv_heads > 1 else own.n_heads
        same, half = (
            parse_model(apply_overrides({"model": {"preset": name}}, size_overrides(own, n))["model"], name)
            for n in (groups, max(1, groups // 2))
        )
        sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head")
        assert [getattr(same, size) for size in sizes] == [getattr(own, size) for size in sizes], name
        assert abs(same.d_ff - own.d_ff) <= 32 and half.d_model < own.d_model, name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 5}, "needs --price"),
        ({"budget": 5, "price": 1, "hours": 2}, "give one"),
        ({"price": -1}, "--price -1 is not above 0"),
        ({"hours": float("nan")}, "--hours nan is not above 0"),
        ({"hours": 1e-9}, "too few for a step"),
        ({"hours": 1e308}, "are more than 1,000,000"),
        ({"budget": 1e300, "price": 1e-300}, "are more than 1,000,000"),
        ({"hours": 1, "device": "8 GB"}, "speed of GPU, which is unknown"),
    ],
)
def test_mistakes_are_explained(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        gptworks.plan("gpt2", **{"device": "h100"} | options)


def test_a_fine_tuned_model_has_no_largest_size() -> None:
    sheet = gptworks.plan("gpt2", "adapter.rank=8", device="t4", hours=1)
    assert sheet.affordable is not None and sheet.affordable.largest is None and sheet.affordable.tokens > 0
    assert "has the size of its base" in repr(sheet)
