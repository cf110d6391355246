"""The page's part Runs in a browser: each feature is clicked once. Its figures equal those of `gptworks compare`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from browser import HOSTILE, Studio, axe, open_studio, screenshot
from gptworks.runs import watch
from gptworks.runs.bands import make_band
from gptworks.runs.compare import compare
from gptworks.runs.history import read_history
from gptworks.training.changes import History, Origin, write_history
from gptworks.training.record.metrics import Record
from histories import training, validation, write_run

pytestmark = pytest.mark.browser
NAMES = ("grid/slow-1", "grid/slow-2", "grid/fast-1", "grid/fast-2", HOSTILE)


def records(seed: int, level: float) -> list[Record]:
    found: list[Record] = []
    for i in range(1, 3001):
        wave = 0.05 * ((i * 7919 * seed) % 13 - 6) / 6
        more = {
            "seconds_by_part": {"data": 0.1, "forward": 1.0 + wave, "backward": 2.0},
            "gradient_norm_by_layer": [1.0 + wave, 0.5, 0.25, 0.1],
            "resident_bytes": 1_250_000_000 + 100_000 * i,
        }
        found.append(training(i, level + 4 / (1 + i / 100) + wave + 5 * (i == 1234), **more))
        if i % 100 == 0:
            found.append(validation(i, level + 4 / (1 + i / 100) + wave / 10, level / 2))
            found.append({"kind": "sample", "step": i, "prompt": "Once ", "text": f"upon {HOSTILE} step {i}"})
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """Two recipes with two seeds each (the slow ones have a band), and one run whose name is markup."""
    folder = tmp_path_factory.mktemp("studio") / "runs"
    for i, name in enumerate(NAMES):
        rate = 0.002 if "fast" in name else 0.001
        write_run(
            folder / name, records(i + 1, 2.0 if "fast" in name else 2.5), seed=1 + i, train={"learning_rate": rate}
        )
    (folder / "linked").mkdir()
    (folder / "linked" / "recipe.yaml").write_bytes((folder / HOSTILE / "recipe.yaml").read_bytes())
    (folder / "linked" / "metrics.jsonl").symlink_to(folder.parent)
    slow = [read_history(folder / name) for name in (*NAMES[:2], HOSTILE)]
    band = make_band(slow)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "find_band", lambda recipe: band if recipe.train.learning_rate == 0.001 else None)
        with open_studio(folder) as opened:
            yield opened


@pytest.fixture
def page(new_page: Callable[..., Any], runs: Studio) -> Any:
    return opened(new_page(), runs)


def opened(page: Any, studio: Studio) -> Any:
    page.goto(f"{studio.url}/#/runs")
    page.wait_for_selector(".chart canvas")
    page.wait_for_function("() => !document.body.innerText.includes('reading…')")
    return page


def plot(page: Any, title: str) -> Any:
    return page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title)).locator(".u-over")


def steady_box(element: Any) -> dict[str, float]:
    """Return an element's place once it no longer moves: a chart's labels, drawn with its points, move its plot."""
    before = None
    while (box := element.bounding_box()) != before:
        before = box
        element.page.wait_for_timeout(200)
    return dict(box)


def asked(response: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(response.url).query)


def curves(
    page: Any, key: str, act: Callable[[], Any], holds: Callable[[dict[str, list[str]]], bool] = lambda asked: True
) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """Do `act`; return the parameters of the page's request for curves that satisfies `holds`, and the curves."""
    with page.expect_response(lambda answer: key in asked(answer).get("key", []) and holds(asked(answer))) as caught:
        act()
    return asked(caught.value), caught.value.json()["curves"]


def along(axis: str) -> Callable[[dict[str, list[str]]], bool]:
    return lambda asked: asked["x"] == [axis]


def is_window(asked: dict[str, list[str]]) -> bool:
    return "from" in asked


def is_whole(asked: dict[str, list[str]]) -> bool:
    return "from" not in asked


def test_the_list_is_searched_ordered_and_chosen_from(page: Any, runs: Studio) -> None:
    rows = page.locator(".run")
    assert rows.count() == len(NAMES) and HOSTILE in page.locator(".runs-rows").text_content()
    best = {name: read_history(runs.runs / name).best["loss"] for name in NAMES}
    for name in NAMES:
        assert f"best {best[name]:.4f}" in rows.filter(has_text=name).text_content()
    page.get_by_label("Search runs").fill("FAST grid")
    assert rows.count() == 2
    page.get_by_role("button", name="None").click()
    assert page.get_by_text("No run is chosen").is_visible()
    asked_for, found = curves(page, "validation.loss", rows.first.click, lambda asked: len(asked["run"]) == 1)
    assert asked_for["run"] == ["grid/fast-2"], "the newest run is the first"
    assert found[0]["y"] == [record["loss"] for record in read_history(runs.runs / "grid/fast-2").validation]
    page.get_by_role("button", name="All shown").click()
    page.get_by_label("Search runs").fill("")
    page.get_by_label("Order of the runs").select_option("best")
    first = page.locator(".run .name").first.text_content()
    assert best[first] == min(best.values())
    assert page.locator(".run.chosen").count() == 2 and "2 drawn" in page.locator(".runs-list").text_content()


def test_charts_zoom_to_a_window_whose_points_the_server_gives(page: Any) -> None:
    over = plot(page, "Training loss")
    over.scroll_into_view_if_needed()

    def drag() -> None:
        box = steady_box(over)
        page.mouse.move(box["x"] + 0.35 * box["width"], box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.45 * box["width"], box["y"] + 70, steps=4)
        page.mouse.up()

    whole, found = curves(
        page,
        "train.loss",
        lambda: page.get_by_label("Along").select_option("tokens"),
        along("tokens"),
    )
    assert "from" not in whole and all(max(one["y"]) > 6 for one in found)  # the spike of one step stays
    curves(page, "train.loss", lambda: page.get_by_label("Along").select_option("step"), along("step"))
    window, found = curves(page, "train.loss", drag, is_window)
    low, high = float(window["from"][0]), float(window["to"][0])
    assert 1000 < low < 1100 and 1300 < high < 1400
    assert all(len([x for x in one["x"] if low <= x <= high]) == int(high) - int(low) for one in found)
    assert page.get_by_role("button", name="Show all").is_enabled()
    whole, _ = curves(page, "train.loss", over.dblclick, is_whole)
    assert "from" not in whole
    plotted = page.get_by_role("group", name="Training loss")
    zoomed, _ = curves(page, "train.loss", lambda: plotted.press("+"), is_window)
    moved, _ = curves(
        page,
        "train.loss",
        lambda: plotted.press("ArrowRight"),
        lambda asked: asked.get("from", [""]) > zoomed["from"],
    )
    assert float(moved["from"][0]) > float(zoomed["from"][0]) > 1
    whole, _ = curves(page, "train.loss", lambda: plotted.press("0"), is_whole)
    assert "from" not in whole


def test_charts_share_a_cursor(page: Any) -> None:
    over = plot(page, "Validation loss")
    for i in range(100):  # until the points are there
        over.hover(position={"x": 180 + i % 2, "y": 80})
        texts = page.locator("figure.chart .readout").all_text_contents()[:2]
        if all("step 1," in text and "grid/slow-1 2." in text for text in texts):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"the charts show {texts}")


def test_axes_and_smoothing_are_chosen(page: Any) -> None:
    _, rough = curves(
        page,
        "train.loss",
        lambda: page.get_by_label("Along").select_option("seconds"),
        along("seconds"),
    )
    asked_for, smooth = curves(
        page, "train.loss", lambda: page.get_by_label("Smoothing of training figures").fill("0.9")
    )
    assert asked_for["smooth"] == ["0.9"] and asked_for["x"] == ["seconds"]
    assert max(smooth[0]["y"][5:]) < max(rough[0]["y"][5:])
    assert max(smooth[0]["raw"]["y"]) == max(rough[0]["y"]), "the points themselves are drawn behind"
    curves(page, "train.loss", lambda: page.get_by_label("Along").select_option("step"), along("step"))
    page.wait_for_timeout(500)
    screenshot(page, "runs-smoothed")
    asked_for, _ = curves(page, "train.loss", lambda: page.get_by_label("Log x").check(), lambda asked: "log" in asked)
    assert asked_for["log"] == ["true"]
    page.get_by_label("Log y").check()
    screenshot(page, "runs-log")


def hovered(page: Any, title: str, share: float, holds: str) -> str:
    """Point at a chart, at a share of its width, until its readout has some words; return what it has."""
    over, readout = plot(page, title), ""
    for i in range(100):  # until the points are there
        box = over.bounding_box()
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 50 + i % 2)
        readout = page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title)).locator(
            ".readout").text_content()  # fmt: skip
        if holds in readout:
            return str(readout)
        page.wait_for_timeout(100)
    pytest.fail(f"{holds!r} is not in {readout!r}")


def test_a_run_that_ended_before_the_pointer_has_no_figure_there(new_page: Callable[..., Any], tmp_path: Path) -> None:
    folder, long_name = tmp_path / "runs", "a-run-with-a-name-that-is-far-too-long-for-its-card-seed-1"
    write_run(folder / long_name, [training(i, 3.0) for i in range(1, 1001)])
    write_run(folder / "short", [training(i, 2.0) for i in range(1, 21)])
    with open_studio(folder) as studio:
        page = opened(new_page(), studio)
        early, late = (hovered(page, "Training loss", share, long_name) for share in (0.005, 0.5))
        assert f"{long_name} 3.0000" in early and "short 2.0000" in early
        assert f"{long_name} 3.0000" in late and "short" not in late
        readout = page.locator(".readout").first
        colours = readout.locator(".line").evaluate_all("(all) => all.map((e) => getComputedStyle(e).borderTopColor)")
        drawn = page.locator(".run", has_text=long_name).locator(".line").evaluate(
            "(e) => getComputedStyle(e).borderTopColor")  # fmt: skip
        assert colours == [drawn]
        name = page.locator(".run .cut-name").filter(has_text=long_name)
        begins, ends = name.locator("span").all()
        assert begins.evaluate("(e) => e.scrollWidth > e.clientWidth") and ends.text_content() == "-card-seed-1"
        assert ends.evaluate(
            "(e) => e.getBoundingClientRect().right <= e.closest('.run').getBoundingClientRect().right"
        )


def test_a_chart_fills_its_card(page: Any) -> None:
    over, card = plot(page, "Training loss").bounding_box(), page.locator("figure.chart").nth(1).bounding_box()
    assert over["width"] * over["height"] > 0.6 * card["width"] * card["height"]


def test_the_selected_run_alone_leads_to_other_parts_and_a_link_skips_the_list(page: Any) -> None:
    assert page.locator(".run.chosen").count() == 5 and page.locator(".run-links").count() == 0
    page.get_by_role("button", name="grid/slow-2").click()
    assert page.get_by_label("Other parts with grid/slow-2").is_visible() and page.locator(".run-links").count() == 1
    page.get_by_label("Draw grid/slow-2").uncheck()
    assert page.locator(".run.chosen").count() == 4 and page.locator(".run.selected").count() == 1
    page.locator(".shell").get_by_role("link", name="Runs").focus()
    skip = page.get_by_role("link", name="Skip to the first chart")
    for _ in range(12):
        page.keyboard.press("Tab")
        if skip.evaluate("(e) => e === document.activeElement"):
            break
    assert skip.bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert str(page.evaluate("() => document.activeElement.ariaLabel")).startswith("Validation loss")


def test_memory_is_drawn_in_bytes(page: Any) -> None:
    page.get_by_role("heading", name="Resident memory").scroll_into_view_if_needed()
    assert " GB" in hovered(page, "Resident memory", 0.5, "grid/slow-1 1.")
    screenshot(page, "runs-memory")


def test_runs_that_are_left_out_are_named(page: Any) -> None:
    page.get_by_text("1 run is left out").click()
    reason = page.locator(".left-out li").inner_text()
    assert reason.startswith("linked") and "is a link that leads out" in reason
    screenshot(page, "runs-left-out")


def test_bands_verdict_differences_samples_and_a_step(page: Any, runs: Studio) -> None:
    page.get_by_text("The shade is the band of tiny").first.wait_for()
    histories = {name: read_history(runs.runs / name) for name in NAMES}
    page.wait_for_selector("section[aria-label=Comparison] table")
    with runs.http() as http:
        ids = [run["id"] for run in http.get("/studio/runs").json()["runs"]]
    found = compare([histories[name] for name in ids], [watch.find_band(histories[name].recipe) for name in ids])
    section = page.get_by_role("region", name="Comparison")
    assert [note.strip() for note in section.locator(".notes li").all_inner_texts()] == found.notes
    assert "difference" in section.inner_text() and "the band of tiny" in section.inner_text()
    table = section.locator("table").last.inner_text()
    assert "train.learning_rate" in table and "0.002" in table
    rows = [
        row.locator("th, td").all_text_contents() for row in section.locator("table").first.locator("tbody tr").all()
    ]
    keys = ("parameters", "tokens", "tokens_per_second", "best_validation_loss", "last_validation_loss",
            "best_bits_per_byte")  # fmt: skip
    for (name, *cells), run in zip(rows, found.to_json()["runs"], strict=True):
        assert name.strip() == run["run"]
        assert cells == [f"{run[key]:,.0f}" if i < 3 else f"{run[key]:.4f}" for i, key in enumerate(keys)]
    samples = page.get_by_role("region", name="Samples")
    assert f"upon {HOSTILE} step 3000" in samples.inner_text()
    plot(page, "Training loss").click()
    details = page.get_by_role("region", name="One step")
    details.get_by_role("heading", name="Training: step").wait_for()
    text = details.inner_text()
    assert all(words in text for words in ("grad norm", "learning rate", "data 0.1 · forward "))
    details.get_by_role("button", name="Close").click()
    assert "Click a curve" in details.inner_text()
    _, layers = curves(
        page,
        "train.gradient_norm_by_layer.3",
        lambda: page.get_by_label("Layers and parts of").select_option("grid/fast-2"),
    )
    assert {one["key"] for one in layers} == {f"train.gradient_norm_by_layer.{i}" for i in range(4)}
    page.get_by_text("layer 4").wait_for()


def test_a_run_that_goes_on_is_drawn_on(new_page: Callable[..., Any], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "grows", records(1, 2.5)).folder
    with open_studio(tmp_path / "runs") as studio:
        page, answers = opened(new_page(), studio), list[Any]()
        page.on("response", lambda answer: answers.append(answer) if "key=train.loss" in answer.url else None)
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(training(4000, 1.75)) + "\n" + json.dumps(validation(4000, 1.625)) + "\n")
        page.get_by_text("last 1.6250").wait_for()
        for _ in range(100):
            found = [one for answer in answers for one in answer.json()["curves"]]
            if found and found[-1]["y"][-1] == 1.75:
                return
            page.wait_for_timeout(200)
    pytest.fail("the curve was not drawn on")


def test_a_fork_is_drawn_with_the_run_that_it_comes_from(new_page: Callable[..., Any], tmp_path: Path) -> None:
    shared, folder = [training(i, 5.0 - i / 10) for i in range(1, 11)], tmp_path / "runs"
    write_run(folder / "base", [*shared, *(training(i, 4.0) for i in range(11, 21))])
    write_run(folder / "fork", [*shared, *(training(i, 3.0) for i in range(11, 16))])
    write_history(folder / "fork", History(origins=[Origin("base", 10, "0" * 64)]))
    with open_studio(folder) as studio:
        page = new_page()
        _, found = curves(
            page, "train.loss", lambda: page.goto(f"{studio.url}/#/runs/fork"), lambda q: len(q["run"]) == 2
        )
        drawn = {one["run"]: one for one in found}
        assert drawn["fork"]["forked_at"] == 10 and "forked_at" not in drawn["base"]
        for name in ("base", "fork"):
            assert drawn[name]["y"] == [record["loss"] for record in read_history(folder / name).train]
        page.locator(".run", has_text="base").locator(".series-parent").wait_for()
        assert page.locator(".run.chosen").all_inner_texts()[0].startswith("fork")
        faint = page.get_by_label("Show parents of forks")
        page.wait_for_timeout(500)
        screenshot(page, "runs-fork")
        asked_for, _ = curves(page, "train.loss", faint.uncheck)
        assert asked_for["run"] == ["fork"] and page.locator(".series-parent").count() == 0
        faint.check()
        page.get_by_label("Draw base").check()
        page.wait_for_function("() => !document.querySelector('.series-parent')")  # it is drawn for itself
        assert faint.count() == 0


def test_the_page_says_what_its_list_leaves_out(new_page: Callable[..., Any], runs: Studio) -> None:
    with open_studio(runs.runs) as studio:
        studio.app.state.studio.library.most_runs = 2
        page = opened(new_page(), studio)
        page.get_by_role("status").get_by_text("There are more than 2 runs").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_use_the_page(new_page: Callable[..., Any], runs: Studio, scheme: str) -> None:
    page = opened(new_page(color_scheme=scheme, viewport={"width": 1440, "height": 1000}), runs)
    page.wait_for_selector("section[aria-label=Comparison] table")
    plot(page, "Training loss").click()
    page.wait_for_selector("dl.record")
    assert axe(page) == []
    screenshot(page, f"runs-{scheme}")


@pytest.mark.parametrize("width", [360, 3840])
def test_the_page_fits_narrow_and_wide_windows(new_page: Callable[..., Any], runs: Studio, width: int) -> None:
    page = opened(new_page(viewport={"width": width, "height": 900}), runs)
    page.wait_for_selector("section[aria-label=Comparison] table")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"runs-{width}")
