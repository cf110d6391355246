"""docs/scaling.md: each figure in its tables is what the command of its row prints."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.planning.fit import layout_words
from gptworks.planning.layout import Layout
from gptworks.units import duration, readable

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading of the page, without its header."""
    part = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def printed(command: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    shown = CliRunner().invoke(app, [*shlex.split(command), "--json"])
    assert shown.exit_code in (0, 3), shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def planned_row(arguments: str) -> list[str]:
    plan = printed(f"plan {arguments}")
    step, network, host = plan["step"], plan["network"], plan["host_memory"]
    layout = Layout(step["sharding"], step["data_parallel"], step["tensor_parallel"])
    seconds = plan["tokens_per_step"] / plan["time"]["tokens_per_second"]
    sent = sum(network["sent_bytes_per_step"].values()) if network else 0
    fits = "" if plan["fit"]["fits"] else ": does not fit"
    return [
        f"`{arguments}`", layout_words(layout), readable(plan["memory"]["peak_bytes"], "B") + fits,
        readable(host["total_bytes"], "B") if host else "shared", readable(sent, "B") if sent else "nothing",
        duration(seconds), f"{plan['time']['seconds'] / 3600 * layout.world_size:,.0f}",
    ]  # fmt: skip


def test_what_the_page_says_that_runs_cost_is_what_plan_prints() -> None:
    shown = rows("What it costs")
    assert len(shown) >= 6
    for row in shown:
        assert row == planned_row(row[0].strip("`"))


def rehearsed_rows(arguments: str) -> list[list[str]]:
    found = printed(f"rehearse {arguments}")
    of_ranks = {line["what"]: line for line in found["sections"]["ranks"]}
    made = []
    for line in of_ranks.values():
        if "kind" in line["figures"]:
            figures = line["figures"]
            assert figures["as_planned"], line
            sizes = (readable(figures[name], "B") for name in ("bytes", "planned_bytes"))
            made.append([f"`{arguments}`", line["what"], *sizes])
    assert of_ranks["order of collectives"]["figures"]["same"]
    return made


@pytest.mark.ranks
@pytest.mark.timeout(1200)  # 1,024 fake ranks of 2.7B
@pytest.mark.parametrize("arguments", dict.fromkeys(row[0].strip("`") for row in rows("What was shown")))
def test_what_the_page_says_was_shown_is_what_rehearse_shows(arguments: str) -> None:
    shown = [row for row in rows("What was shown") if row[0] == f"`{arguments}`"]
    assert shown == rehearsed_rows(arguments)


def test_commands_of_the_page_are_commands() -> None:
    there = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"`gptworks (\w+)", PAGE)) <= there
