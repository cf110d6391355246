"""The studio's routes to start runs: the form matches the schema, the plan the command's, and a run is a process."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import httpx2 as httpx
import pytest
import yaml

import commands
import tiny
from browser import Studio, open_studio
from gptworks.confined import Limits
from gptworks.describe.plan_tables import plan_json, tables
from gptworks.errors import UserError
from gptworks.estimates import plan
from gptworks.recipe import load_recipe, parse_recipe, recipe_schema
from gptworks.recipes import shipped_paths
from gptworks.studio import processes
from gptworks.studio.checking import edited, read_text
from gptworks.studio.form import COMMON, GIVEN_BY_THE_START, form
from gptworks.studio.library import RunFolder
from gptworks.studio.resuming import Resumption, extension, resumption
from gptworks.training.changes import read_history
from gptworks.training.record.outcome import RunOutcome
from histories import curve, write_run
from serving import until


def paths(schema: dict[str, Any], section: dict[str, Any], path: str = "") -> set[str]:
    """Return every setting in a JSON schema, including nested sections of any `type`."""
    found = set()
    for name, one in section.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        options = [one, *one.get("anyOf", []), *one.get("oneOf", [])]
        inner = [schema["$defs"][each["$ref"].rpartition("/")[2]] for each in options if "$ref" in each]
        below = set().union(*(paths(schema, each, where) for each in inner)) if inner else set()
        found |= below or {where}
    return found


def test_the_form_has_the_settings_of_the_schema() -> None:
    schema = recipe_schema()
    fields = [field for group in form() for field in group["fields"]]
    assert {field["path"] for field in fields} == paths(schema, schema) - {*GIVEN_BY_THE_START}
    inputs = {field["path"]: field["input"] for field in fields}
    assert inputs["train.learning_rate"] == inputs["train.max_steps"] == "number"
    assert inputs["model.norm"] == inputs["tokenizer.type"] == inputs["model.qk_norm"] == "choice"
    assert inputs["model.tie_embeddings"] == "switch" and inputs["data.sources"] == "yaml"
    assert {field["path"] for field in fields if field["common"]} == COMMON
    bounds = {field["path"]: field["bounds"] for field in fields}
    assert bounds["train.decay_fraction"] == "Above 0, at most 1." and bounds["data.validation.fraction"].startswith(
        "A"
    )
    assert bounds["model.n_layers"] == "From 1 to 1,000." and bounds["train.max_steps"] == "At least 1."
    assert bounds["model.dropout_mlp"] == "At least 0, below 1." and bounds["train.optimizer"] == ""
    titles = {field["path"]: group["title"] for group in form() for field in group["fields"]}
    assert len({titles[f"train.{name}"] for name in ("max_steps", "optimizer", "schedule", "sample_every")}) == 4
    assert titles["model.n_heads"] == titles["model.d_model"] != titles["model.rope_theta"]
    assert max(len(group["fields"]) for group in form()) < 25
    (kinds,) = [group["kinds"] for group in form() if group["path"] == "tokenizer"]
    assert {*kinds} == {"bpe", "char", "word", "gpt2", "file", "dataset"}


COMMENTED = """# About it.
model: {preset: gpt2, n_layers: 2}  # small
train:
  # as long as this
  max_steps: 10  # ten
  betas: [0.9, 0.95]
"""


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("train.max_steps", "20", "  max_steps: 20  # ten"),
        ("model.n_layers", "3", "model: {preset: gpt2, n_layers: 3}  # small"),
        ("train.batch_size", "4", "  batch_size: 4"),
        ("train.betas", "[0.9, 0.99]", "  betas: [0.9, 0.99]"),
        ("seed", "7", "seed: 7"),
    ],
)
def test_an_edit_of_the_form_changes_one_line_of_the_text(path: str, value: str, line: str) -> None:
    text, tree = edited(COMMENTED, read_text(COMMENTED), path, value)
    assert read_text(text) == tree
    assert line in text.splitlines() and "# as long as this" in text
    without, tree = edited(text, tree, path, None)
    assert read_text(without) == tree and ("# About it." in without or path == "model.n_layers")
    assert value not in without.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs `old` and `files`; the recipe of `files` was not written by the studio."""
    root: Path = tmp_path_factory.mktemp("studio") / "runs"
    write_run(root / "old", curve([3.0, 2.0]), train={"max_steps": 20})
    return root


@pytest.fixture(scope="module")
def studio(folder: Path) -> Iterator[Studio]:
    with open_studio(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(studio: Studio) -> Iterator[httpx.Client]:
    with studio.http() as client:
        yield client


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = http.post(f"/studio/start/{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def message(answer: Any) -> str:
    return str(answer["error"]["message"])


def checked(http: httpx.Client, text: str | None = None, *edits: tuple[str, str | None], **body: Any) -> Any:
    return post(http, "check", text=text, edits=edits, **body)


def test_the_plan_is_that_of_the_command(http: httpx.Client) -> None:
    text = checked(http, origin={"recipe": "demo"})["text"]
    assert text == shipped_paths()["demo"].read_text(encoding="utf-8")
    text = checked(http, text, ("train.batch_size", "16384"), ("train.micro_batch_size", "16384"))["text"]
    overrides = ["train.batch_size=16384", "train.micro_batch_size=16384", "name=big"]
    found = post(http, "plan", text=text, name="big", device="a100-40gb")
    expected = plan("demo", *overrides, device="a100-40gb")
    assert found["plan"] == json.loads(json.dumps(plan_json(expected), default=str)) and found["missing"] is None
    assert found["plan"]["fit"]["fits"] is False and found["plan"]["fit"]["changes"]
    shown, printed = ([(list(one["header"]), [[*row] for row in one["rows"]]) for one in all_tables]
                      for all_tables in (found["tables"], map(asdict, tables(expected))))  # fmt: skip
    assert shown == printed
    (table, *_) = post(http, "plan", text=text)["tables"]
    assert dict(table["rows"])["time"] == "unknown (the run shows this machine's speed once it trains)"


def test_a_runs_recipe_is_as_short_as_it_can_be_and_means_the_same(http: httpx.Client, folder: Path) -> None:
    found = checked(http, origin={"run": "old"})
    assert found["problems"] == [] and "rope_theta" not in found["text"] and "run_dir" not in found["text"]
    assert found["given"]["train.max_steps"] == "20" and found["defaults"]["model.rope_theta"] == "10000.0"
    assert {"model.d_model", "tokenizer.type"} < {*found["fixed"]} and "train.learning_rate" not in found["fixed"]
    run = load_recipe(folder / "old")
    tree = yaml.safe_load(found["text"]) | {"name": run.name, "run_dir": str(run.run_dir)}
    tree["model"]["vocab_size"] = run.model.vocab_size
    assert parse_recipe(tree) == run


def test_what_is_wrong_is_said_at_its_place_in_the_parsers_words(http: httpx.Client) -> None:
    text = checked(http, origin={"recipe": "demo"})["text"]
    found = checked(http, text, ("train.max_steps", "-1"), ("model.n_heads", "3"), ("train.lerning_rate", "1"))
    with pytest.raises(UserError) as caught:
        load_recipe("demo", ["train.max_steps=-1", "model.n_heads=3", "train.lerning_rate=1"])
    lines = [line.partition(": ")[2] for line in str(caught.value).splitlines()]
    assert sorted(one["message"] for one in found["problems"]) == sorted(lines)
    assert {one["path"] for one in found["problems"]} == {"train.max_steps", "model", "train.lerning_rate"}
    assert checked(http, "model: [")["problems"][0]["path"] is None
    kind = checked(http, text, ("tokenizer.type", "char"))
    assert kind["problems"] == [] and "tokenizer.vocab_size" not in kind["given"]


def test_a_persons_own_recipes_are_begun_from_valid_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, runs, outside = tmp_path / "here", tmp_path / "elsewhere" / "runs", tmp_path / "outside.yaml"
    here.mkdir()
    write_run(runs / "trained", [])
    recipe = "# my notes\n" + yaml.safe_dump({"name": "kept"} | tiny.recipe_tree(tmp_path))
    for path in (here / "mine.yaml", here / "nested" / "b.yaml", runs / "next.yml", runs / "trained.yaml", outside):
        path.parent.mkdir(exist_ok=True)
        path.write_text(recipe, encoding="utf-8")
    (here / "broken.yaml").write_text(f"{recipe}train: [", encoding="utf-8")
    (here / "compose.yaml").write_text("services: {web: {image: nginx}}\ndata: {}\n", encoding="utf-8")
    (here / "linked.yaml").symlink_to(outside)
    os.mkfifo(here / "waits.yaml")
    monkeypatch.chdir(here)
    with open_studio(runs) as studio, studio.http() as http:
        found = http.get("/studio/start").json()["own"]
        names = [one["file"] for one in found]
        assert names == ["broken.yaml", "mine.yaml", str(runs / "next.yml")]
        assert [one["name"] for one in found if one["taken"]] == ["next"], "NAME.yaml would be written there"
        mine = checked(http, origin={"file": "mine.yaml"})
        assert mine["text"].startswith("# my notes") and "kept" not in mine["text"] and mine["problems"] == []
        broken = checked(http, origin={"file": "broken.yaml"})
        assert broken["text"].startswith("# my notes") and broken["problems"]
        mended = checked(http, mine["text"], ("train.max_steps", "7"), origin={"file": "broken.yaml"})
        assert [one["message"] for one in mended["problems"] if "lies outside of" not in one["message"]] == []
        for file in ("linked.yaml", "compose.yaml", "nested/b.yaml", str(outside), "../outside.yaml", "none.yaml"):
            answer = post(http, "check", 404, origin={"file": file})
            assert "no recipe" in message(answer), file


HOSTILE_NAMES = ("../up", "a/b", ".hidden", "", "-x", "a\0b", "x" * 101, "recipe", "a b", "$(id)", "a\nb", "é", "a\\b")


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_is_one_plain_name(http: httpx.Client, folder: Path, name: str) -> None:
    before = sorted(folder.parent.rglob("*"))
    assert "name" in message(post(http, "new", 400, name=name, text="model: {}", origin=None))
    assert sorted(folder.parent.rglob("*")) == before


def test_nothing_is_overwritten(http: httpx.Client, folder: Path) -> None:
    text = checked(http, origin={"run": "old"})["text"]
    assert "exists" in message(post(http, "new", 409, name="old", text=text, origin={"run": "old"}))
    (folder / "kept.yaml").write_text("mine")
    assert "exists" in message(post(http, "new", 409, name="kept", text=text, origin={"run": "old"}))
    assert (folder / "kept.yaml").read_text() == "mine" and not (folder / "kept").exists()


def test_a_recipe_reads_and_writes_nothing_outside_and_runs_no_code(http: httpx.Client, folder: Path) -> None:
    text = checked(http, origin={"recipe": "demo"})["text"]
    (folder.parent / "outside").mkdir()
    outside = folder.parent / "outside" / "text.txt"
    outside.write_text("secret " * 100)
    edits = {
        "data.sources": f"- {{type: text, path: {outside}}}",
        "data.clean": f"- {{type: decontaminate, tasks: [{outside}]}}",
        "data.cache_dir": str(outside.parent),
        "tokenizer.chat_template": str(outside),
        "initialize_from": str(outside.parent),
    }
    for path, value in edits.items():
        for hidden in (value, value.replace(str(folder.parent), f"{folder}/..")):
            (problem,) = checked(http, text, (path, hidden))["problems"]
            assert "lies outside of" in problem["message"], problem
    (folder / "texts").symlink_to(outside.parent)
    (problem,) = checked(http, text, ("data.sources", f"- {{type: text, path: {folder}/texts/text.txt}}"))["problems"]
    assert "lies outside of" in problem["message"], "links are followed before it is asked where they lead"
    for pattern in ("te*ts/text.txt", "**/text.txt", "te[x]ts/*"):
        (problem,) = checked(http, text, ("data.sources", f"- {{type: text, path: '{folder}/{pattern}'}}"))["problems"]
        assert "lies outside of" in problem["message"], "a pattern follows links too"
    inside = checked(http, text, ("data.sources", f"- {{type: text, path: '{folder}/old/**/*.md'}}"))
    assert inside["problems"] == []
    changed = edited(text, read_text(text), "data.sources", edits["data.sources"])[0]
    for route, more in (("plan", {"name": "x"}), ("new", {"name": "x"})):
        assert "lies outside of" in message(post(http, route, 400, text=changed, **more))
    assert not (folder / "x.yaml").exists() and not (folder / "x").exists()
    reward = {"type": "reward", "reward": f"{folder}/reward.py:f"}
    records = [{"type": "conversations", "path": str(folder / "c.jsonl")}]
    tree = yaml.safe_load(text) | {"objective": reward, "train": {"max_steps": 10, "batch_size": 8}}
    tree["data"] = {"sources": records}
    (problem,) = checked(http, yaml.safe_dump(tree))["problems"]
    assert "file of Python" in problem["message"]
    assert checked(http, origin={"run": "old"})["problems"] == []  # whose text lies outside: it names it itself


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "only https"), ("http://127.0.0.1:1/a", "only https"), ("data:,a", "only https"),
        ("https://127.0.0.1/a", "or its network"), ("https://[::ffff:10.0.0.1]/a", "or its network"),
        ("https://169.254.169.254/latest", "or its network"), ("https://localhost:8080/a", "or its network"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["sources", "mixture"])
def test_a_recipe_names_public_https_addresses_only(
    http: httpx.Client, url: str, words: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the person who started the studio may download from this machine."""
    monkeypatch.setenv("GPTWORKS_DOWNLOADS", "private")
    tree = yaml.safe_load(checked(http, origin={"recipe": "demo"})["text"])
    source = {"type": "text", "url": url, "sha256": "0" * 64}
    if where == "mixture":
        tree["data"] = {"mixture": [{"name": "a", "weight": 1, "sources": [source]}]}
    else:
        tree["data"]["sources"] = [source]
    found = checked(http, yaml.safe_dump(tree))["problems"]
    assert len(found) == 1 and words in found[0]["message"], found


def test_a_dataset_is_of_the_hub_or_a_folder_inside(http: httpx.Client, folder: Path) -> None:
    text = checked(http, origin={"recipe": "demo"})["text"]
    for dataset in ("https://x.org/a", "../outside", "/etc", "~/texts", "hf://a/b", "./../x", "file:///etc"):
        source = f"- {{type: huggingface, dataset: '{dataset}', split: train}}"
        (problem,) = checked(http, text, ("data.sources", source))["problems"]
        assert "lies outside of" in problem["message"], (dataset, problem)
    for dataset in ("owner/name", "wikitext"):
        source = f"- {{type: huggingface, dataset: '{dataset}', split: train}}"
        assert not checked(http, text, ("data.sources", source))["problems"]


def test_what_a_sweep_would_try_is_asked_too(http: httpx.Client) -> None:
    text = checked(http, origin={"recipe": "demo"})["text"]
    sweep = "{ranges: {data.cache_dir: {choices: [data, /etc]}}, n_trials: 2}"
    (problem,) = checked(http, text, ("sweep", sweep))["problems"]
    assert "sweep.ranges.data.cache_dir=/etc lies outside of" in problem["message"], problem


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b]\n"
        "d: &d [*c, *c, *c, *c, *c, *c, *c]\ne: &e [*d, *d, *d, *d, *d, *d, *d]\nf: [*e, *e, *e, *e, *e, *e, *e]",
        "[" * 5000,
        "model: !!python/object/apply:os.system ['id']",
        "<script>alert(1)</script>",
        "model: {preset: gpt2, n_layers: 10000}\ntokenizer: {type: gpt2}\ndata: {sources: [{type: python-stdlib}]}\n"
        "train: {max_steps: 10}",
    ],
)
def test_a_hostile_recipe_is_answered_within_limits(
    http: httpx.Client, studio: Studio, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(http, "")
    monkeypatch.setattr(studio.app.state.studio.checks.children, "limits", Limits(seconds=0.8, n_bytes=1 << 30))
    found = http.post("/studio/start/check", json={"text": text})
    assert found.status_code == 400 or found.json()["problems"] or found.json()["defaults"]
    assert http.post("/studio/start/plan", json={"text": text}).status_code == 400


def test_only_json_of_this_page_is_taken(http: httpx.Client) -> None:
    for path in ("check", "plan", "new", "stop", "resume", "changes", "fork"):
        body = b'{"run": "old", "text": "", "name": "a"}'
        assert http.post(f"/studio/start/{path}", content=body).status_code == 415
        other = {"origin": "http://evil.example", "content-type": "application/json"}
        assert http.post(f"/studio/start/{path}", content=body, headers=other).status_code == 403
        cross = {"sec-fetch-site": "cross-site", "content-type": "application/json"}
        assert http.post(f"/studio/start/{path}", content=body, headers=cross).status_code == 403
        assert http.get(f"/studio/start/{path}").status_code == 405


def test_a_studio_that_is_read_only_starts_and_writes_nothing(folder: Path) -> None:
    with open_studio(folder, read_only=True) as studio, studio.http() as http:
        assert http.get("/studio/start").json()["read_only"] is True
        text = checked(http, origin={"recipe": "demo"})["text"]
        for path, body in (
            ("new", {"name": "a", "text": text}),
            ("stop", {"run": "old"}),
            ("resume", {"run": "old"}),
            ("fork", {"run": "old"}),
        ):
            assert "--read-only" in message(post(http, path, 403, **body))
    assert not (folder / "a").exists()


# -------------------------------------------------------------------------------------------------------- what is run


def lines(http: httpx.Client, name: str) -> Any:
    found = http.get("/studio/start/processes").json()["processes"]
    return next(one for one in found if one["run"] == name)


def ended(http: httpx.Client, name: str) -> Any:
    end = time.monotonic() + 240
    while (found := lines(http, name))["running"]:
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def test_a_run_that_is_stopped_while_it_starts_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python loses an interrupt that arrives within a callback of an import."""
    lines = ("import time", "try:", "  print('imports', flush=True)", "  time.sleep(99)", "except KeyboardInterrupt:")
    loses = "\n".join((*lines, "  time.sleep(99)"))
    monkeypatch.setattr(processes, "COMMAND", ("-c", loses))
    found = processes.Processes()
    training = found.start("run", tmp_path, [])
    try:
        until(lambda: processes.console_lines(tmp_path) == ["imports"])
        found.stop("run", tmp_path)
        training.process.wait(30)
    finally:
        training.process.kill()


def test_a_run_is_started_watched_stopped_resumed_with_a_change_and_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "Popen", lambda words, **options: commands.start(*words[1:], **options))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    settings = {"max_steps": 100_000, "schedule": "constant", "checkpoint_every": 1000, "evaluate_every": 1000}
    tree = tiny.recipe_tree(tmp_path, **settings)
    tree["data"]["cache_dir"] = "data"
    text = "# mine\n" + yaml.safe_dump(tree)
    with open_studio(Path("runs")) as studio, studio.http() as http:
        assert post(http, "new", name="first", text=text) == {"run": "first"}
        written = tmp_path / "runs" / "first.yaml"
        assert written.read_text().startswith("# mine\n")
        assert load_recipe(written).run_dir == Path("runs/first") and load_recipe(written).name == "first"
        assert "--at-once 2" in message(post(http, "new", 400, name="second", text=text))
        assert not (tmp_path / "runs" / "second.yaml").exists()
        log = tmp_path / "runs" / "first" / "metrics.jsonl"
        until(lambda: log.exists() and log.stat().st_size > 0)
        assert lines(http, "first")["running"] is True
        post(http, "stop", run="first")
        found = ended(http, "first")
        assert found["code"] == 0 and "stopped by SIGTERM" in "\n".join(found["lines"]), found
        assert "nothing to stop" in message(post(http, "stop", 400, run="first"))

        run = tmp_path / "runs" / "first"
        done = json.loads((run / "outcome.json").read_text())["step"]
        text = checked(http, origin={"run": "first"})["text"]
        refused, _ = edited(text, read_text(text), "model.n_layers", "3")
        found = post(http, "changes", run="first", text=refused)
        assert "so a run cannot change it" in found["problem"] and found["changes"][0]["path"] == "model.n_layers"
        assert "so a run cannot change it" in message(post(http, "resume", 400, run="first", text=refused))
        for path, value in (
            ("train.learning_rate", "0.001"),
            ("train.max_steps", str(done + 2)),
            ("train.log_every", "2"),
        ):
            text, _ = edited(text, read_text(text), path, value)
        found = post(http, "changes", run="first", text=text)
        assert {one["path"]: one["recorded"] for one in found["changes"]} == {
            "train.learning_rate": True, "train.max_steps": False, "train.log_every": False,
        }  # fmt: skip
        assert found["problem"] is None and found["steps_left"] == 2
        post(http, "resume", run="first", text=text)
        assert ended(http, "first")["code"] == 0, lines(http, "first")
        assert json.loads((run / "outcome.json").read_text())["step"] == done + 2
        (change,) = read_history(run).changes
        assert change.step == done and change.settings["train.learning_rate"] == [0.003, 0.001]
        assert load_recipe(run).train.learning_rate == 0.001

        text = checked(http, origin={"run": "first"})["text"]
        text, _ = edited(text, read_text(text), "train.weight_decay", "0.2")
        last = done + 2
        for step, more in ((None, "."), (last, " or choose an earlier checkpoint.")):
            found = post(http, "changes", run="first", text=text, step=step)
            assert found["problem"] == f"Checkpoint {last} is the last of max_steps={last}: raise train.max_steps{more}"
            assert [one["path"] for one in found["changes"]] == ["train.weight_decay"] and found["steps_left"] == 0
        ended_at = message(post(http, "fork", 400, run="first", step=last, name="branch", text=text))
        assert ended_at == found["problem"] and not (run.parent / "branch").exists()
        text, _ = edited(text, read_text(text), "train.max_steps", str(done + 4))
        found = post(http, "changes", run="first", text=text, step=done)
        assert {one["path"] for one in found["changes"] if one["recorded"]} == {"train.weight_decay"}
        assert found["problem"] is None and found["steps_left"] == 4
        assert "there is no such checkpoint" in message(
            post(http, "fork", 400, run="first", step=1, name="branch", text=text)
        )
        assert post(http, "fork", run="first", step=done, name="branch", text=text) == {"run": "branch"}
        assert ended(http, "branch")["code"] == 0, lines(http, "branch")
        branch = tmp_path / "runs" / "branch"
        assert json.loads((branch / "outcome.json").read_text())["step"] == done + 4
        assert load_recipe(branch).train.weight_decay == 0.2 and load_recipe(run).train.weight_decay == 0.1
        (origin,) = read_history(branch).origins
        assert (origin.run, origin.step) == ("first", done)


def test_a_run_that_ended_by_its_epochs_has_nothing_left_to_train(tmp_path: Path) -> None:
    ends = {"max_steps": None, "epochs": 2}
    folder = write_run(tmp_path / "done", [], train=ends).folder
    outcome = dict.fromkeys(RunOutcome.model_fields, 0) | {"reason": "finished", "step": 9, "training": {}}
    (folder / "outcome.json").write_text(json.dumps(outcome))
    text = (folder / "recipe.yaml").read_text()
    run = RunFolder("done", folder, tmp_path)
    assert resumption(run, text, 8) == Resumption([], None, None)
    problem = "Checkpoint 9 is the last of epochs=2: raise train.epochs or choose an earlier checkpoint."
    assert resumption(run, text, 9) == Resumption([], problem, None)
    assert resumption(run, text.replace("epochs: 2", "epochs: 3"), 9).problem is None


def test_a_run_that_is_continued_after_its_end_trains_as_long_again(tmp_path: Path) -> None:
    def ends(step: int | None, done: int, reason: str = "finished", **settings: Any) -> Any:
        folder = write_run(tmp_path / str(len([*tmp_path.iterdir()])), [], train=settings).folder
        outcome = dict.fromkeys(RunOutcome.model_fields, 0) | {"reason": reason, "step": done, "training": {}}
        (folder / "outcome.json").write_text(json.dumps(outcome))
        found = extension(RunFolder("done", folder, tmp_path), step)
        return dict(found.edits), found.why

    edits, why = ends(1000, 1000, max_steps=1000)
    assert edits == {"train.max_steps": "2000"}
    assert why == "Step 1,000 is the run's last: train.max_steps is raised from 1000 to 2000, to train as long again."
    assert ends(997, 1000, max_steps=1000)[0] == {"train.max_steps": "1997"}, "3 steps are no run"
    assert ends(500, 1000, max_steps=1000) == ({"train.max_steps": "1000"}, None)
    assert ends(997, 997, "stopped by SIGTERM", max_steps=1000)[0] == {"train.max_steps": "1997"}
    for step in (None, 9):
        both, why = ends(step, 9, max_steps=None, epochs=2, max_minutes=1.5)
        assert both == {"train.epochs": "4.0", "train.max_minutes": "3.0"} and why is not None
    assert ends(None, 4, "stopped by SIGTERM", max_steps=20) == ({"train.max_steps": "20"}, None)


def test_only_training_of_the_folder_is_signalled(tmp_path: Path, http: httpx.Client, folder: Path) -> None:
    assert "nothing to stop" in message(post(http, "stop", 400, run="old"))
    with filelock.FileLock(folder / "old" / ".lock"):  # held by the tests, which are no gptworks train
        assert "stop it where it was started" in message(post(http, "stop", 400, run="old"))
    assert "nothing to stop" in message(post(http, "stop", 400, run="../../etc"))
