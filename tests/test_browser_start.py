"""The page's part Start in a browser: a recipe is changed, planned, started, stopped and resumed by clicks."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml

import commands
import tiny
from browser import HOSTILE, Studio, axe, open_studio, screenshot
from gptworks.describe.plan_tables import tables
from gptworks.estimates import plan
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.recipes import shipped_paths
from gptworks.training.changes import read_history
from gptworks.training.loop import train
from gptworks.training.run_folder import is_in_use
from serving import until

pytestmark = pytest.mark.browser


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    """A studio over a run that can be continued, started in the run's parent folder."""
    monkeypatch.chdir(tmp_path)
    tree = tiny.recipe_tree(tmp_path, schedule="constant", max_steps=8) | {"run_dir": "runs/old"}
    train(parse_recipe(tree))
    with open_studio(Path("runs")) as opened:
        yield opened


@pytest.fixture
def page(new_page: Callable[..., Any], runs: Studio) -> Any:
    return opened(new_page(), runs)


def opened(page: Any, studio: Studio, route: str = "start") -> Any:
    page.goto(f"{studio.url}/#/{route}")
    planned(page)
    return page


def planned(page: Any) -> None:
    """Wait until the plan matches the text that was typed."""
    page.wait_for_function(
        """() => document.querySelector(".start-plan[aria-busy=false] table")
          && !document.querySelector(".start-found.old")"""
    )


def field(page: Any, path: str) -> Any:
    return page.locator(f"[id='setting-of-{path}']")


def text(page: Any) -> Any:
    return page.get_by_label("Recipe", exact=True)


def process(page: Any, name: str) -> Any:
    return page.locator(".start-process", has=page.get_by_role("heading", name=name, exact=True))


def test_a_run_is_changed_started_stopped_and_resumed(page: Any, runs: Studio) -> None:
    page.get_by_label("Begin from").select_option(label="old")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.includes('schedule: constant')")
    assert page.get_by_label("Name").input_value() == "old-2"
    field(page, "train.max_steps").fill("100000")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.includes('max_steps: 100000')")
    planned(page)
    assert "100,000" in page.get_by_role("region", name="Plan").inner_text()
    field(page, "train.learning_rate").fill("0.002")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.includes('learning_rate: 0.002')")
    page.get_by_label("Name").fill("mine")
    page.get_by_role("button", name="Start", exact=True).click()
    process(page, "mine").get_by_text("training", exact=True).wait_for()
    log = runs.runs / "mine" / "metrics.jsonl"
    until(lambda: log.exists() and log.stat().st_size > 0, 240)
    assert load_recipe(runs.runs / "mine.yaml").train.learning_rate == 0.002
    page.get_by_role("button", name="Start", exact=True).click()
    page.get_by_role("alert").get_by_text("--at-once 2").wait_for()
    process(page, "mine").get_by_role("link", name="Curves").wait_for()
    screenshot(page, "start-training")
    process(page, "mine").get_by_role("button", name="Stop").click()
    process(page, "mine").get_by_text("ended", exact=True).wait_for()
    assert "stopped by SIGTERM" in process(page, "mine").inner_text()

    page.get_by_label("Begin from").select_option(label="old")
    page.get_by_role("button", name="Resume it").click()
    page.get_by_text("train.max_steps is raised from 8 to 16, to train as long again. 8 steps are left").wait_for()
    page.get_by_role("button", name="New run").click()
    page.wait_for_function("() => document.getElementById('setting-of-train.max_steps').value === '8'")
    page.get_by_role("button", name="Resume it").click()
    page.locator(".start-changes", has_text="8 → 16").wait_for()
    field(page, "train.max_steps").fill("8")
    page.get_by_role("alert").get_by_text("Checkpoint 8 is the last of max_steps=8: raise train.max_steps.").wait_for()
    field(page, "train.learning_rate").fill("0.004")
    page.get_by_text("the run folder records the change").wait_for()
    assert field(page, "model.d_model").count() == 0, "what a run cannot change is shown on request"
    page.get_by_label("All settings", exact=True).check()
    field(page, "model.d_model").fill("64")
    page.get_by_role("alert").get_by_text("so a run cannot change it").wait_for()
    field(page, "model.d_model").fill("32")
    page.get_by_label("All settings", exact=True).uncheck()
    field(page, "train.max_steps").fill("12")
    page.locator(".start-changes", has_text="8 → 12").wait_for()
    page.get_by_role("button", name="Resume", exact=True).click()
    process(page, "old").get_by_text("ended", exact=True).wait_for()
    assert load_recipe(runs.runs / "old").train.max_steps == 12
    assert read_history(runs.runs / "old").changes[0].settings["train.learning_rate"] == [0.003, 0.004]
    process(page, "old").get_by_role("button", name="Hide").click()
    assert process(page, "old").count() == 0


def test_a_checkpoint_is_forked_with_a_change(page: Any, runs: Studio) -> None:
    page.goto(f"{runs.url}/#/start/old")
    assert page.get_by_role("button", name="Fork it").get_attribute("aria-pressed") == "true"
    assert page.get_by_label("At step").input_value() == "8", "the newest"
    page.get_by_text("Step 8 is the run's last: train.max_steps is raised from 8 to 16").wait_for()
    page.get_by_text("8 steps are left to train").wait_for()
    page.get_by_label("At step").select_option("4")
    page.get_by_text("4 steps are left to train").wait_for()
    assert field(page, "train.max_steps").input_value() == "8"
    page.get_by_label("Name").fill("branch")
    field(page, "train.learning_rate").fill("0.006")
    changes, button = page.locator(".start-changes"), page.get_by_role("button", name="Fork", exact=True)
    changes.get_by_text("the run folder records the change").wait_for()
    page.get_by_label("At step").select_option("8")
    page.get_by_text("8 steps are left to train").wait_for()
    field(page, "train.max_steps").fill("8")
    last = "Checkpoint 8 is the last of max_steps=8: raise train.max_steps or choose an earlier checkpoint."
    page.get_by_role("alert").get_by_text(last, exact=True).wait_for()
    assert "train.learning_rate 0.003 → 0.006" in changes.inner_text() and button.is_disabled()
    field(page, "train.max_steps").fill("10")
    page.get_by_text("2 steps are left to train").wait_for()
    field(page, "train.max_steps").fill("8")
    page.get_by_role("alert").get_by_text(last, exact=True).wait_for()
    page.get_by_label("At step").select_option("4")
    page.get_by_text("4 steps are left to train").wait_for()
    screenshot(page, "start-fork")
    button.click()
    process(page, "branch").get_by_text("ended", exact=True).wait_for()
    (origin,) = read_history(runs.runs / "branch").origins
    assert (origin.run, origin.step) == ("old", 4) and load_recipe(runs.runs / "branch").train.learning_rate == 0.006


def test_a_run_is_begun_from_a_persons_own_recipe(new_page: Callable[..., Any], runs: Studio, tmp_path: Path) -> None:
    for path in (tmp_path / "mine.yaml", runs.runs / "next.yaml", tmp_path / f"{HOSTILE.replace('/', '')}.yaml"):
        path.write_text("# my notes\n" + shipped_paths()["demo"].read_text(encoding="utf-8"), encoding="utf-8")
    page = opened(new_page(), runs)
    page.get_by_label("Begin from").select_option(label="runs/next.yaml")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.startsWith('# my notes')")
    assert page.get_by_label("Name").input_value() == "next-2", "runs/next.yaml is not overwritten"
    page.get_by_label("Begin from").select_option(label="mine.yaml")
    page.get_by_text("mine.yaml is not changed. The recipe is written to runs/mine.yaml.").wait_for()


def test_settings_are_found_in_the_form_and_by_search(page: Any) -> None:
    tree = yaml.safe_load(text(page).input_value())
    del tree["train"]["batch_size"]
    text(page).fill(yaml.safe_dump(tree))
    page.wait_for_function("() => !document.getElementById('setting-of-train.batch_size').classList.contains('given')")
    planned(page)
    recipe = parse_recipe({"name": "demo"} | tree)
    for path in ("seed", "train.batch_size", "train.learning_rate", "model.dropout_residual"):
        section, _, name = path.rpartition(".")
        value = getattr(getattr(recipe, section) if section else recipe, name)
        assert field(page, path).get_attribute("placeholder") == f"default: {value}"
    search, legends = page.get_by_label("Search settings"), page.locator(".start-group legend")
    search.fill("learning_rate")
    legends.get_by_text("tokenizer").wait_for(state="detached")
    groups = page.locator(".start-group")
    assert "optimizer" in legends.all_inner_texts()
    with_a_hit = groups.filter(has=page.locator(".start-field, p:has-text('It has')"))
    assert groups.count() == with_a_hit.count()
    search.fill("adapter rank")
    page.get_by_text("It has rank").wait_for()
    search.fill("no such thing")
    page.get_by_text("No setting has no such thing").wait_for()
    assert groups.count() == 0
    search.fill("")
    assert field(page, "train.betas").count() == 0, "what is seldom changed is folded"
    page.get_by_role("button", name="more settings of optimizer").click()
    about = page.locator("[id='setting-of-train.grad_clip-help']").inner_text()
    assert about == "Largest global gradient norm. 0: no clipping. At least 0. Default: 1.0."
    assert field(page, "model.rope_theta").count() == 0


def test_what_was_changed_is_marked_and_reset_and_errors_stand_where_they_belong(page: Any) -> None:
    before = text(page).input_value()
    row = page.locator(".start-field", has=field(page, "train.max_steps"))
    was = field(page, "train.max_steps").input_value()
    field(page, "train.max_steps").fill("7")
    row.get_by_text(f"Changed: was {was}.").wait_for()
    field(page, "seed").fill("3")
    page.get_by_label("Changed only").check()
    assert page.locator(".start-field label").all_inner_texts() == ["seed", "max_steps"]
    planned(page)
    row.get_by_role("button", name="Reset max_steps").click()
    page.wait_for_function(
        "(was) => document.querySelector('#recipe-text').value.includes(`max_steps: ${was}`)", arg=was
    )
    page.get_by_label("Changed only").uncheck()
    field(page, "model.n_heads").fill("3")
    size = page.locator(".start-group", has=field(page, "model.n_heads"))
    size.get_by_role("alert").wait_for()
    field(page, "train.learning_rate").fill("-1")
    wrong = page.locator(".start-field", has=field(page, "train.learning_rate")).locator(".problem")
    wrong.wait_for()
    assert wrong.inner_text() not in page.get_by_role("alert").all_inner_texts(), "at its field only"
    page.get_by_text("2 settings are wrong.").wait_for()
    page.get_by_role("button", name="Show the first").click()
    assert size.get_by_role("alert").is_visible()
    screenshot(page, "start-changed")
    page.get_by_role("button", name="Reset all").click()
    page.wait_for_function("(text) => document.querySelector('#recipe-text').value === text", arg=before)
    assert page.locator(".start-was").count() == 0


def test_the_plans_tables_are_those_of_the_command(page: Any) -> None:
    page.locator(".start-plan select").select_option("a100-40gb")
    page.locator(".start-plan td", has_text="A100").wait_for()
    planned(page)
    shown = [[row.locator("th, td").all_inner_texts() for row in one.locator("tr").all()]
             for one in page.locator(".start-plan table").all()]  # fmt: skip
    expected = [[[*one.header], *map(list, one.rows)] for one in tables(plan("demo", device="a100-40gb"))]
    assert shown == expected


def test_a_run_is_stopped_where_its_curves_are(page: Any, runs: Studio) -> None:
    page.get_by_label("Begin from").select_option(label="old")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.includes('schedule: constant')")
    field(page, "train.max_steps").fill("100000")
    page.wait_for_function("() => document.querySelector('#recipe-text').value.includes('max_steps: 100000')")
    page.get_by_role("button", name="Start", exact=True).click()
    process(page, "old-2").get_by_role("link", name="Curves").click()
    log = runs.runs / "old-2" / "metrics.jsonl"
    until(lambda: log.exists() and log.stat().st_size > 0, 240)
    page.get_by_role("button", name="Stop old-2").click()
    page.locator(".run", has_text="old-2").get_by_text("stopped", exact=True).wait_for()
    assert "stopped by SIGTERM" in (runs.runs / "old-2" / "outcome.json").read_text()
    assert page.get_by_role("button", name="Stop old-2").count() == 0


def test_what_cannot_be_stopped_says_so_and_a_read_only_studio_stops_nothing(
    new_page: Callable[..., Any], runs: Studio
) -> None:
    with filelock.FileLock(runs.runs / "old" / ".lock"):  # held by the tests, which are no gptworks train
        (runs.runs / "old" / "outcome.json").unlink()
        with open_studio(runs.runs, read_only=True) as closed:
            page = new_page()
            page.goto(f"{closed.url}/#/runs/old")
            page.locator(".run").get_by_text("running").wait_for()
            assert page.get_by_role("button", name="Stop").count() == 0
        page = new_page()
        page.goto(f"{runs.url}/#/runs/old")
        page.get_by_role("button", name="Stop old").click()
        page.get_by_role("alert").get_by_text("stop it where it was started").wait_for()


def test_form_and_text_stay_equal_and_errors_stand_at_their_fields(page: Any) -> None:
    before = text(page).input_value()
    text(page).fill(re.sub(r"max_steps: \d+", "max_steps: 40", before))
    page.wait_for_function("() => document.getElementById('setting-of-train.max_steps').value === '40'")
    planned(page)
    field(page, "train.max_steps").fill("none")
    page.locator(".start-field", has=field(page, "train.max_steps")).locator(".problem").wait_for()
    assert field(page, "train.max_steps").get_attribute("aria-invalid") == "true"
    assert page.get_by_role("button", name="Start", exact=True).is_disabled()
    page.get_by_text("This was the plan before the last change.").wait_for()
    assert page.get_by_text("It fits in memory.").count() == 0
    field(page, "train.max_steps").fill("30")
    field(page, "tokenizer.type").select_option("char")
    page.wait_for_function("() => !document.querySelector('#recipe-text').value.includes('vocab_size')")
    assert yaml.safe_load(text(page).input_value())["tokenizer"] == {"type": "char"}
    text(page).fill("model: [")
    page.get_by_role("alert").get_by_text("not readable YAML").wait_for()
    text(page).fill(re.sub(r"  optimizer: \w+", "  optimizer: muon", before))
    planned(page)
    page.get_by_label("All settings", exact=True).check()
    assert page.locator(".start-field").count() > 90
    page.get_by_label("Use adapter").check()
    page.get_by_role("alert").get_by_text("train.optimizer=muon with an adapter").wait_for()
    page.get_by_label("Use adapter").uncheck()
    planned(page)


def test_advice_is_applied_by_a_click(page: Any) -> None:
    page.locator(".start-plan select").select_option("a100-40gb")
    field(page, "train.batch_size").fill("65536")
    page.get_by_text("It does not fit in memory.").wait_for()
    planned(page)
    page.get_by_role("group", name="Changes with which it fits").get_by_role("button").first.click()
    page.get_by_text("It fits in memory.").wait_for()


def test_a_read_only_studio_says_so_instead_of_the_buttons(new_page: Callable[..., Any], runs: Studio) -> None:
    with open_studio(runs.runs, read_only=True) as closed:
        page = opened(new_page(), closed)
        page.get_by_text("it starts and writes nothing").wait_for()
        assert page.get_by_role("button", name="Start", exact=True).count() == 0


def test_a_recipe_is_started_with_the_keys_alone(page: Any, runs: Studio) -> None:
    page.get_by_label("Begin from").focus()
    for key in ("Tab", "Tab"):
        page.keyboard.press(key)
    assert page.evaluate("() => document.activeElement.textContent.trim()") == "Start"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("by-keys")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    process(page, "by-keys").get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    process(page, "by-keys").get_by_text("ended").wait_for()
    assert (runs.runs / "by-keys.yaml").is_file()


def test_a_length_typed_before_the_server_suggests_one_is_kept(new_page: Callable[..., Any], runs: Studio) -> None:
    page = new_page()
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/studio/start/extension?*", hold)
    opened(page, runs, "start/old")
    field(page, "train.max_steps").fill("11")
    for route in held:
        route.continue_()
    page.locator(".start-changes").wait_for()
    planned(page)
    assert "max_steps: 11\n" in text(page).input_value()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_every_width_fits(new_page: Callable[..., Any], runs: Studio, scheme: str) -> None:
    for width in (360, 1280):
        page = opened(new_page(color_scheme=scheme, viewport={"width": width, "height": 900}), runs, "start/old")
        field(page, "train.max_steps").fill("-1")
        page.locator(".start-field .problem").wait_for()
        assert axe(page) == []
        screenshot(page, f"start-wrong-{width}-{scheme}")
        tabs = page.locator(".shell nav")
        assert tabs.evaluate("(one) => one.scrollWidth <= one.clientWidth"), "every part has its tab in sight"
        if width == 1280:
            places = [page.get_by_label("Name"), page.get_by_role("button", name="Fork", exact=True)]
            middles = [box["y"] + box["height"] / 2 for box in (one.bounding_box() for one in places)]
            assert abs(middles[0] - middles[1]) < 2, "the button is in the row of its name"
        page.get_by_role("button", name="Resume it").click()
        field(page, "train.max_steps").fill("20")
        page.locator(".start-changes").wait_for()
        planned(page)
        page.get_by_label("All settings", exact=True).check()
        assert axe(page) == []
        screenshot(page, f"start-{width}-{scheme}")
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.context.close()


def test_a_run_goes_on_when_the_studio_is_killed_and_another_studio_stops_it(tmp_path: Path) -> None:
    import httpx2 as httpx

    (tmp_path / "runs").mkdir()
    tree = tiny.recipe_tree(
        tmp_path, max_steps=100_000, schedule="constant", checkpoint_every=1000, evaluate_every=1000
    )
    words = ("-m", "gptworks", "studio", "runs", "--port", "0", "--no-open")

    def begun() -> tuple[Any, httpx.Client]:
        env = {"GPTWORKS_API_KEY": "sk-test"}
        process = commands.start(*words, new=True, cwd=tmp_path, stderr=subprocess.PIPE, env=env)
        line = next(line for line in process.stderr if "the studio is at" in line)
        headers = {"authorization": "Bearer sk-test"}
        return process, httpx.Client(base_url=line.partition(" at ")[2].split()[0], headers=headers, timeout=120)

    run = tmp_path / "runs" / "alive"
    first, http = begun()
    answer = http.post("/studio/start/new", json={"name": "alive", "text": yaml.safe_dump(tree)})
    assert answer.status_code == 200, answer.text
    until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0, 240)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = (run / "metrics.jsonl").stat().st_size
    until(lambda: (run / "metrics.jsonl").stat().st_size > before)
    second, http = begun()
    try:
        answer = http.post("/studio/start/stop", json={"run": "alive"})
        assert answer.status_code == 200, answer.text
        until(lambda: (run / "outcome.json").exists() and not is_in_use(run))
        assert "stopped by SIGTERM" in (run / "outcome.json").read_text()
        assert http.post("/studio/start/stop", json={"run": "alive"}).status_code == 400
    finally:
        second.kill()
        second.wait()
