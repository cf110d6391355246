"""The studio's routes for runs: the figures of `compare`, live and bounded, and only contents of the folder."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from browser import open_studio
from gptworks.runs.bands import find_band
from gptworks.runs.compare import compare
from gptworks.runs.history import read_history
from gptworks.serve.settings import MAX_WATCHING_EACH
from gptworks.studio import runs as module
from gptworks.training.changes import History, Origin, write_history
from histories import curve, training, validation, write_run
from serving import Running, running_studio, until

NAMES = ("sweep/a", "sweep/b", "other")
KEYS = [f"train.{i}" for i in range(64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("studio") / "runs"
    for i, name in enumerate(NAMES):
        records = [
            *curve([3.0, 2.5 + i / 10, 2.0 + i / 10]),
            {"kind": "sample", "step": 15, "prompt": "<b>", "text": "x" * 50_000},
        ]
        write_run(root / name, records, seed=i, train={"learning_rate": 0.001 * (1 + i // 2)})
    write_run(root / "nan", [training(1, float("nan")), validation(1, float("nan"))])
    write_history(root / "other", History(origins=[Origin("a", 10, "0" * 64)]))
    write_run(root / "linked", [])
    (root / "linked" / "metrics.jsonl").unlink()
    (root.parent / "secret").write_text(json.dumps(training(1, 1.0)) + "\n")
    (root / "linked" / "metrics.jsonl").symlink_to(root.parent / "secret")
    return root


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with open_studio(folder) as studio, studio.http() as client:
        yield client


@pytest.fixture(scope="module")
def studio(folder: Path) -> Iterator[Running]:
    with running_studio(folder) as one:
        yield one


def get(http: httpx.Client, path: str, **query: Any) -> Any:
    answer = http.get(f"/studio/runs{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_and_the_curves_have_the_figures_of_the_logs(http: httpx.Client, folder: Path) -> None:
    for name in NAMES:
        (found,) = get(http, "/curves", run=name, key="validation.loss", x="tokens")["curves"]
        history = read_history(folder / name)
        assert (found["run"], found["whole"]) == (name, True)
        assert found["x"] == [record["tokens"] for record in history.validation]
        assert found["y"] == [record["loss"] for record in history.validation]
    get(http, "/curves", run=["nan"], key="train.loss")
    listed = get(http, "")
    rows = {row["id"]: row for row in listed["runs"]}
    assert set(rows) == {*NAMES, "nan"}  # what lies behind a link that leads out is not read
    assert listed["left_out"].keys() == {"linked"} and "is a link that leads out" in listed["left_out"]["linked"]
    assert rows["other"]["best"] == {"step": 15, "loss": 2.2, "bits_per_byte": None}
    assert rows["other"]["origin"] == {"run": "a", "step": 10, "id": "sweep/a"} and rows["nan"]["origin"] is None
    assert rows["other"]["recipe"] == "tiny" and rows["nan"]["train_loss"] == "nan"
    assert get(http, "/step", run="other", at=12)["records"]["train"]["step"] == 10


def test_a_forks_curve_says_where_on_the_axis_it_begins(http: httpx.Client, folder: Path) -> None:
    (at,) = [record for record in read_history(folder / "other").train if record["step"] == 10]
    for axis in ("step", "tokens", "seconds"):
        fork, plain = get(http, "/curves", run=["other", "sweep/a"], key="train.loss", x=axis)["curves"]
        assert fork["forked_at"] == at[axis] and "forked_at" not in plain


def test_the_comparison_is_that_of_the_command(http: httpx.Client, folder: Path) -> None:
    histories = [read_history(folder / name) for name in NAMES]
    expected = compare(histories, [find_band(history.recipe) for history in histories]).to_json()
    found = get(http, "/compare", run=list(NAMES))
    assert found.pop("ids") == list(NAMES) and found.pop("whole") is True
    assert found == json.loads(json.dumps(expected, default=str)) and found["findings"]


def test_samples_come_newest_first_and_are_cut(http: httpx.Client) -> None:
    found = get(http, "/samples", run=list(NAMES), most=2)["samples"]
    assert [sample["run"] for sample in found] == ["sweep/a", "sweep/b"]
    assert found[0]["prompt"] == "<b>" and len(found[0]["text"]) < 50_000


def test_a_smoothed_curve_comes_with_the_one_that_was_logged(http: httpx.Client) -> None:
    query = {"run": "other", "key": "validation.loss"}
    plain, smooth = (get(http, "/curves", **query | more)["curves"][0] for more in ({}, {"smooth": 0.9, "raw": True}))
    assert smooth["raw"] == {"x": plain["x"], "y": plain["y"]} and smooth["y"] != plain["y"]
    assert smooth["y"] == get(http, "/curves", **query, smooth=0.9)["curves"][0]["y"]
    assert "raw" not in get(http, "/curves", **query, raw=True)["curves"][0]


def test_the_live_feed_sends_all_rows_and_then_those_that_change(http: httpx.Client, folder: Path) -> None:
    with http.stream("GET", "/studio/runs/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
        first = next(lines)
        assert first["all"] and {row["id"] for row in first["runs"]} == {*NAMES, "nan"}
        assert first["left_out"].keys() == {"linked"}
        with (folder / "sweep" / "a" / "metrics.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(training(400, 1.5)) + "\n")
        changed = next(row for event in lines for row in event["runs"] if row["id"] == "sweep/a" and row["step"] == 400)
        assert changed["train_loss"] == 1.5
        (folder / "nan" / "tokenizer").symlink_to(folder.parent)
        event = next(event for event in lines if event["gone"])
        assert event["gone"] == ["nan"] and event["left_out"].keys() == {"linked", "nan"}
        (folder / "nan" / "tokenizer").unlink()
        assert next(event["left_out"].keys() for event in lines if "left_out" in event) == {"linked"}


def test_pages_that_are_open_are_no_work_and_have_a_bound_of_their_own(studio: Running) -> None:
    """Twenty live feeds, more than a studio without a loaded model processes requests at once, exclude nobody."""
    service = studio.service
    assert service.max_in_flight < 20 < MAX_WATCHING_EACH
    with ExitStack() as stack:

        def opened() -> int:
            http = stack.enter_context(studio.http())
            return stack.enter_context(http.stream("GET", "/studio/runs/live")).status_code

        assert {opened() for _ in range(20)} == {200} and service.n_working == 0
        with studio.http() as http:
            assert http.get("/studio/state").status_code == http.get("/").status_code == 200
        assert {opened() for _ in range(MAX_WATCHING_EACH - 20)} == {200}
        assert opened() == 429
    until(lambda: service.in_flight == 0)
    assert service.n_working == 0


@pytest.mark.parametrize(
    "path, query, status",
    [
        ("/curves", {"run": "nope", "key": "train.loss"}, 404),
        ("/curves", {"run": "../secret", "key": "train.loss"}, 404),
        ("/curves", {"run": "other"}, 400),
        ("/curves", {"run": "other", "key": "train.loss", "points": 10**9}, 400),
        ("/curves", {"run": "other", "key": "train.loss", "smooth": 1}, 400),
        ("/curves", {"run": "other", "key": "train.loss", "x": "key"}, 400),
        ("/curves", {"run": "other", "key": "train.loss", "from": "nan"}, 400),
        ("/curves", {"run": "other", "key": "train.loss", "from": 2, "to": 1}, 400),
        ("/curves", {"run": ["other"] * 300, "key": "train.loss"}, 400),
        ("/curves", {"run": "other", "key": [f"train.{i}" for i in range(64)], "points": 10_000}, 400),
        ("/curves", {"run": "other", "key": [f"train.{i}" for i in range(64)], "points": 9000}, 200),
        (
            "/curves",
            {"run": "other", "key": [f"train.{i}" for i in range(64)], "points": 9000, "smooth": 0.5, "raw": 1},
            400,
        ),
        ("/samples", {"run": "other", "most": 10**6}, 400),
        ("/compare", {"run": ["other"] * 65}, 400),
        ("/compare", {"run": "linked"}, 404),
        ("/step", {"run": "other", "at": "inf"}, 200),
    ],
)
def test_requests_are_bounded(http: httpx.Client, path: str, query: dict[str, Any], status: int) -> None:
    answer = http.get(f"/studio/runs{path}", params=query)
    assert answer.status_code == status and ("error" in answer.json()) == (status != 200)
    assert module.MOST_DRAWN < 10_000 * 64
