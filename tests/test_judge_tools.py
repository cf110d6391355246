"""The judge's tools, called by a client of the Model Context Protocol."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters

import judging
import tiny
from gptworks.cli import main
from gptworks.judge import Campaign
from gptworks.judge.tools import Judge, _Lines, server_of
from in_process import Command

GOOD = {"train.learning_rate": 0.05}

STAND_IN = """
import sys
sys.path.insert(0, {tests!r})
import pytest, judging
from gptworks.cli import main
judging.without_training(pytest.MonkeyPatch())
main()
"""


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Campaign]:
    judging.without_training(monkeypatch)
    made = Campaign.create(judging.write_recipe(tmp_path), tmp_path / "campaign", budget_seconds=3600, steps=20)
    yield made
    made.close()


def called(server: Any, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return the structured answer of each call, or the text of its error."""

    async def run() -> list[Any]:
        found = []
        async with Client(server) as client:
            for name, arguments in calls:
                result = await client.call_tool(name, arguments)
                found.append(result.content[0].text if result.is_error else result.structured_content)
        return found

    return anyio.run(run)


def test_an_agent_looks_around_tries_compares_and_ends_the_campaign(campaign: Campaign) -> None:
    begin, plan, tried, worse, both, measured, league, end, late = called(
        server_of(Judge(campaign)),
        ("init", {}),
        ("plan", {"changes": {"model.n_layers": 4}}),
        ("try", {"changes": GOOD}),
        ("fork", {"number": 1, "patch": "train: {learning_rate: 0.2}", "pairs": 3}),
        ("compare", {"first": 1, "second": 2}),
        ("evaluate", {"number": 1}),
        ("league", {}),
        ("finish", {}),
        ("try", {"changes": {"train.learning_rate": 0.04}}),
    )
    assert begin["settings"]["train.learning_rate"] == 0.1 and "train.max_steps" not in begin["settings"]
    assert plan["parameters"] > plan["parameters_before"] and plan["differing"]["model.n_layers"] == [2, 4]
    assert tried["last"]["accepted"] and tried["champion"] == 1 and tried["running"] == ""
    assert worse["last"]["verdict"] == "harm" and worse["next_needed_log_e"] > worse["last"]["needed_log_e"]
    assert "different champions" in both["note"] and len(measured["gains"]) == tried["last"]["pairs"]
    assert [row["number"] for row in league["rows"]] == [1, 2]
    assert end["finished"] and "over 5 fresh seeds" in end["final"]
    assert "the campaign has ended" in late


def test_mistakes_are_answered_with_value_rule_and_fix(campaign: Campaign) -> None:
    errors = called(
        server_of(Judge(campaign)),
        ("try", {"changes": {"train.max_steps": 10}}),
        ("try", {"changes": {"train.learning_rate": 0.95}}),
        ("try", {"changes": GOOD, "pairs": 1000}),
        ("try", {"patch": "x" * 50_000}),
        ("evaluate", {"number": 9}),
        ("plan", {}),
    )
    for text, part in zip(
        errors,
        ("may not be changed", "no space left", "less than or equal to 20", "at most 20000", "no try 9", "give either"),
        strict=True,
    ):
        assert part in text


def test_one_training_runs_at_a_time_and_status_waits_for_it(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def held(*arguments: Any) -> bool:
        gate.wait(20)
        return judging.train(*arguments)

    monkeypatch.setattr("gptworks.runs.try_run.train_to_end", held)

    async def run() -> list[Any]:
        async with Client(server_of(Judge(campaign))) as client:
            first = await client.call_tool("try", {"changes": GOOD, "wait_seconds": 0.5})
            second = await client.call_tool("try", {"changes": {"train.learning_rate": 0.3}})
            gate.set()
            last = await client.call_tool("status", {"wait_seconds": 30})
        return [first.structured_content, second.content[0].text, last.structured_content]

    first, second, last = anyio.run(run)
    assert first["running"] == "try 1, 0 pairs so far" and "try 1 is running" in second
    assert last["running"] == "" and last["last"]["accepted"]


def over_stdio(*given: str | Path, before: str = "") -> StdioServerParameters:
    code = before or STAND_IN.format(tests=str(Path(__file__).parent))
    arguments = ["-c", code, "judge", *map(str, given)]
    return StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))


def test_a_campaign_over_standard_input_and_output(tmp_path: Path) -> None:
    recipe, folder = judging.write_recipe(tmp_path), tmp_path / "campaign"
    server = over_stdio(recipe, "--folder", folder, "--budget", "1h", "--steps", "20")
    tried, after = called(server, ("try", {"changes": GOOD}), ("status", {}))
    assert tried["last"]["accepted"] and after["last"] == tried["last"] and after["champion"] == 1
    Campaign(folder).close()


def test_a_mistake_in_a_new_campaign_is_one_line(tmp_path: Path) -> None:
    recipe = judging.write_recipe(tmp_path)
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("max_steps", "epochs"), encoding="utf-8")
    done = tiny.gptworks("judge", recipe, "--folder", tmp_path / "campaign", input="")
    expected = f"error: {recipe} sets no train.max_steps: give --steps, the length of each run.\n"
    assert (done.returncode, done.stderr) == (2, expected)


@pytest.mark.tries
@pytest.mark.timeout(1800)
def test_a_campaign_with_real_runs_over_standard_input_and_output(tmp_path: Path) -> None:
    """Two tries of a tiny model whose learning rate is too low: one raises it, one lowers it; the final comparison."""
    recipe, folder = judging.write_recipe(tmp_path), tmp_path / "campaign"
    given = (recipe, "train.learning_rate=0.0005", "--folder", folder, "--budget", "1h", "--steps", "40")
    server = over_stdio(*given, before="from gptworks.cli import main; main()")
    better, worse, end = called(
        server,
        ("try", {"changes": {"train.learning_rate": 0.01}, "wait_seconds": 600}),
        ("try", {"patch": "train: {learning_rate: 0.001}", "pairs": 3, "wait_seconds": 600}),
        ("finish", {"wait_seconds": 600}),
    )
    print(better, worse, end, sep="\n")
    assert better["last"]["accepted"] and worse["last"]["verdict"] != "gain"
    assert end["final"].startswith("+") and "over 5 fresh seeds on text that no try has seen" in end["final"]


def test_a_request_that_is_too_long_is_refused_and_the_next_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_bytes(b"{}\n" + b"x" * (3 << 20) + b"\n[1]\n")
    with path.open("rb") as file:
        lines = _Lines(file)
        assert [lines.readline() for _ in range(4)] == ["{}\n", "too long\n", "[1]\n", ""]


def test_the_command_verifies_and_ends_a_campaign(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.try_change(GOOD)
    campaign.close()
    for option, text in (
        ("--verify", f"nothing was changed: entries {campaign.verify()}, tries 1"),
        ("--finish", "over 5 fresh seeds on text that no try has seen"),
    ):
        monkeypatch.setattr(sys, "argv", ["gptworks", "judge", "--folder", str(campaign.folder), option])
        with pytest.raises(SystemExit, match="0"):
            main()
        assert text in capsys.readouterr().out
    monkeypatch.setattr(campaign, "close", lambda: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--verify"], "holds no campaign"),
        (["--budget", "an hour"], "--budget an hour is not a time: give one such as 90min"),
        (["--error", "five"], "--error five is not a share: give one such as 5% or 0.05"),
    ],
)
def test_mistakes_on_the_command_line(command: Command, tmp_path: Path, arguments: list[str], message: str) -> None:
    code, text = command("judge", "--folder", tmp_path / "none", *arguments)
    assert code == 2 and message in text


def test_without_the_sdk_the_command_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "gptworks.judge.tools")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.setitem(sys.modules, name, None)
    code, text = command("judge", "--folder", tmp_path / "none")
    assert code == 2 and "the judge's server needs mcp, which is not installed: pip install 'gptworks[judge]'" in text
