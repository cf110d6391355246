"""The studio's routes that draft a recipe for a folder: the one of `gptworks init`, for allowed folders only."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

import commands
import kinds_of_files
import tiny
from browser import HOSTILE, Studio, open_studio
from gptworks.draft.texts import look_at
from gptworks.recipe import load_recipe
from gptworks.studio import drafting, folders, processes
from histories import training, validation, write_run
from serving import until
from test_draft import prose


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Studio]:
    for module in (drafting, processes):
        monkeypatch.setattr(module, "Popen", lambda words, **options: commands.start(*words[1:], **options))
    texts = tmp_path / "here" / "texts"
    texts.mkdir(parents=True)
    (texts / "a.txt").write_text(prose(60_000), encoding="utf-8")
    (texts / "b.txt").write_bytes("Der Fluß führt im Frühling überall mehr Wasser, sagte sie.\n".encode("cp1252") * 9)
    (texts / "c.pdf").write_bytes(b"broken")
    write_run(tmp_path / "here" / "runs" / "old", [])
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret " * 9000)
    monkeypatch.chdir(tmp_path / "here")
    with open_studio(Path("runs")) as opened:
        yield opened


@pytest.fixture
def http(studio: Studio) -> Iterator[httpx.Client]:
    with studio.http() as client:
        yield client


def look(http: httpx.Client, folder: str, status: int = 200, minutes: float = 0.1, name: str = "mine") -> Any:
    answer = http.post("/studio/home/look", json={"folder": folder, "minutes": minutes, "name": name})
    assert answer.status_code == status, answer.text
    return answer.json()["drafting" if status == 200 else "error"]


def ended(http: httpx.Client) -> Any:
    until(lambda: http.get("/studio/home").json()["drafting"]["state"] != "working", 240)
    return http.get("/studio/home").json()["drafting"]


def test_a_folder_is_looked_at_its_recipe_drafted_and_its_run_started(http: httpx.Client) -> None:
    assert http.get("/studio/home").json()["drafting"] is None
    assert look(http, "texts")["state"] == "working"
    assert "wait until that ends" in look(http, "texts", 400)["message"]
    found = ended(http)
    assert found["state"] == "ready" and found["problem"] is None
    expected = look_at(Path("texts"))
    assert found["texts"]["n_bytes"] == expected.n_bytes and found["texts"]["n_read"] == 2
    kinds = {kind["kind"]: kind for kind in found["texts"]["kinds"]}
    assert kinds[".txt"]["notes"] == ["1 read as cp1252 (guessed)"] and kinds[".pdf"]["n_skipped"] == 1
    assert [kind["reasons"] for kind in kinds.values()] == [kind.reasons for kind in expected.table()]
    passages = [one["text"] for one in found["texts"]["passages"]]
    assert passages and all(passage in "\n".join(expected.sample) for passage in passages)
    draft = found["draft"]
    Path("drafted.yaml").write_text(draft["text"], encoding="utf-8")
    recipe = load_recipe("drafted.yaml")
    assert draft["tokens"] == recipe.train.max_steps * recipe.train.batch_size * recipe.model.context_length
    assert f"{draft['parameters']:,}" in draft["text"] and draft["disk_bytes"] > draft["weights_bytes"] > 0
    answer = http.post("/studio/start/new", json={"name": "mine", "text": draft["text"]})
    assert answer.status_code == 200, answer.text
    assert load_recipe("runs/mine.yaml").data.sources == recipe.data.sources
    http.post("/studio/start/stop", json={"run": "mine"})


def test_of_a_folder_of_30_kinds_all_is_read_that_can_be_and_every_skip_is_named(http: httpx.Client) -> None:
    """Each kind is also broken, in another encoding, empty, huge and unreadable: nothing stops."""
    for package in ("all2md", "pyarrow", "warcio", "trafilatura"):
        pytest.importorskip(package, exc_type=ImportError)
    Path("kinds").mkdir()
    expected = kinds_of_files.write_folder(Path("kinds")) | {"letters.txt": ""}
    Path("kinds/letters.txt").write_text(prose(300_000), encoding="utf-8")
    look(http, "kinds")
    found = ended(http)
    assert found["state"] == "ready" and found["problem"] is None and found["draft"]["parameters"] > 0
    texts = found["texts"]
    reasons = dict(line.split(": ", 1) for line in texts["left_out"])
    for name, why in expected.items():
        if why:
            assert re.search(why, reasons.pop(name)), name
    assert {Path(name).suffix for name in reasons} == {".zip"}, "of these only a part, a picture, is left out"
    assert (texts["n_read"], texts["n_files"]) == (list(expected.values()).count(""), len(expected))
    assert {kind["kind"] for kind in texts["kinds"]} >= kinds_of_files.KINDS.keys()
    assert texts["n_bytes"] == look_at(Path("kinds")).n_bytes and len(texts["passages"]) == 6


def test_only_folders_inside_are_read_and_nothing_long_begins_in_vain(http: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "here" / "link").symlink_to(tmp_path / "outside")
    outside = (str(tmp_path / "outside"), "link", "../outside", "texts/../../outside", "/", "~", "/etc/passwd")
    for folder in (*outside, "file:///etc", "https://x.org/a"):
        assert "lies outside of" in look(http, folder, 400)["message"], folder
    assert "lies outside of" not in look(http, "texts", 400, name="../up")["message"]
    assert "exists" in look(http, "texts", 409, name="old")["message"]
    for body in ({"folder": "a\0b"}, {"folder": ""}, {"minutes": 0}, {"minutes": 1e9}):
        answer = http.post("/studio/home/look", json={"folder": "texts", "minutes": 1, "name": "mine"} | body)
        assert answer.status_code == 400, answer.text
    assert http.get("/studio/home").json()["drafting"] is None
    look(http, "~nobody-of-this-name")
    found = ended(http)
    assert found["state"] == "failed" and "no such file or folder" in found["problem"]


def inside(http: httpx.Client, status: int = 200, **query: str) -> Any:
    answer = http.get("/studio/home/folders", params=query)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]["message"]


def test_the_picker_lists_what_may_be_read_and_follows_no_link(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    for name in (HOSTILE, "line\nbreak", "Größe", ".hidden", os.fsdecode(b"\xff")):
        (here / name).mkdir()
    for name, where in (("out", tmp_path / "outside"), ("texts2", here / "texts"), ("round", here)):
        (here / name).symlink_to(where)
    found = inside(http)
    names = [one["name"] for one in found["folders"]]
    assert found["path"] == str(here) and names == [HOSTILE, "Größe", "line\nbreak", "runs", "texts", "\\udcff"]
    assert found["folders"][-1]["path"] is None, "no request can state this name"
    assert found["notes"] == ["Not listed: 1 hidden name and 3 links."]
    assert [one["path"] for one in inside(http, words="TEX")["folders"]] == [str(here / "texts")]
    texts = inside(http, folder=str(here / "texts"))
    assert [one["name"] for one in texts["above"]] == ["here", "texts"] and texts["folders"] == []
    sizes = {path.name: path.stat().st_size for path in (here / "texts").iterdir()}
    assert {one["name"]: one["n_bytes"] for one in texts["files"]} == sizes
    for folder in (str(tmp_path), "/", "..", "texts/..", "out", str(here / "out"), "~", "file:///etc"):
        assert "lies outside of" in inside(http, 400, folder=folder), folder
    for folder in ("none", "texts/a.txt"):
        assert "cannot be read" in inside(http, 400, folder=folder), folder
    monkeypatch.setattr(folders, "MOST_SHOWN", 2)
    assert len(inside(http)["folders"]) == 2 and inside(http)["n_folders"] == len(names)
    monkeypatch.setattr(folders, "MOST_ENTRIES", 3)
    assert "Only 3 entries" in inside(http)["notes"][-1]
    with open_studio(Path("runs"), read_only=True) as closed, closed.http() as other:
        assert "--read-only" in inside(other, 403)


def test_the_picker_begins_with_the_places_if_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "elsewhere/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with open_studio(tmp_path / "elsewhere" / "runs") as opened, opened.http() as http:
        places = [str(tmp_path / "here"), str(tmp_path / "elsewhere" / "runs")]
        assert [one["path"] for one in inside(http)["folders"]] == places
        assert inside(http, folder=places[1])["above"] == [{"name": "runs", "path": places[1]}]


def test_cancelling_ends_the_process(http: httpx.Client, studio: Studio) -> None:
    picked = look(http, str(Path("texts").absolute()), minutes=100)
    assert picked["folder"] == "texts", "so that the recipe moves with its folder"
    answer = http.post("/studio/home/cancel", json={})
    assert answer.json()["drafting"]["state"] == "cancelled"
    assert studio.app.state.studio.drafts.last.process.poll() is not None
    look(http, "texts", minutes=100)
    studio.app.state.studio.drafts.last.process.kill()
    assert "ended with exit code" in ended(http)["problem"]


def test_a_read_only_studio_looks_at_no_folder(studio: Studio) -> None:
    with open_studio(Path("runs"), read_only=True) as closed, closed.http() as http:
        assert "--read-only" in look(http, "texts", 403)["message"]
        assert http.post("/studio/home/cancel", json={}).status_code == 403
        assert http.get("/studio/home").json()["read_only"] is True


def test_the_first_run_makes_the_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "Popen", lambda words, **options: commands.start(*words[1:], **options))
    monkeypatch.chdir(tmp_path)
    with open_studio() as begun, begun.http() as http:
        assert http.get("/studio/home").json()["makes"] == "runs" and not Path("runs").exists()
        recipe = yaml.safe_dump(tiny.recipe_tree(tmp_path))
        answer = http.post("/studio/start/new", json={"name": "first", "text": recipe})
        assert answer.status_code == 200, answer.text
        assert Path("runs/first.yaml").is_file() and http.get("/studio/home").json()["makes"] is None
        http.post("/studio/start/stop", json={"run": "first"})


def test_a_run_that_trains_says_how_far_it_is(http: httpx.Client, studio: Studio) -> None:
    def progress(run: str) -> Any:
        return http.get("/studio/home/run", params={"run": run}).json()

    assert progress("old") == progress("no such run") | {"steps": 20}, "nothing is recorded yet"
    sample = {"kind": "sample", "step": 10, "tokens": 2560, "prompt": "Once", "text": " upon"}
    records = [training(5, 3.0), training(10, 2.0), validation(10, 2.1), sample | {"step": 5}, sample]
    write_run(studio.runs / "half", records, train={"max_steps": 40})
    write_run(studio.runs / "timed", records, train={"max_steps": None, "max_minutes": 0.5})
    until(lambda: progress("half")["step"] == progress("timed")["step"] == 10, 60)
    found = progress("half")
    assert (found["share"], found["seconds_left"], found["steps"]) == (0.25, 15.0, 40)
    assert (found["first_loss"], found["loss"], found["unit"]) == (3.0, 2.0, "nats per token")
    assert found["samples"] == [{"step": 10, "prompt": "Once", "text": " upon"}], "those of the newest step"
    timed = progress("timed")
    assert (timed["steps"], timed["seconds_left"]) == (None, 25.0) and timed["share"] == 5 / 30
