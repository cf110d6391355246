"""The Python interface: `gptworks.train`, `plan`, `evaluate`, an engine that chats, and notebook output."""

import base64
import inspect
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import gptworks
import tiny
from gptworks import api, estimates
from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.cli import app
from gptworks.errors import UserError
from gptworks.infer.chat import TurnSession
from gptworks.infer.engine import Engine
from gptworks.overrides import overrides_of
from gptworks.pages.parts import MOST_CHARACTERS
from gptworks.recipe import load_recipe
from gptworks.runs.trained_run import TrainedRun
from gptworks.training.record import display as displays
from gptworks.training.record.display import MOST_LINES, Display, NotebookDisplay
from histories import training as step_record
from histories import validation, write_run

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interface")


@pytest.fixture(scope="module")
def run(folder: Path) -> TrainedRun:
    """A run given by nested dictionaries and named settings."""
    return gptworks.train(tiny.recipe_tree(folder), "train.max_steps=5", evaluate_sequences=4, sample_every=5)


@pytest.fixture(scope="module")
def engine(run: TrainedRun) -> Engine:
    plain = gptworks.load(run)
    return gptworks.load(run, chat_template=ChatTemplate(BUILT_IN["plain"], plain.tokenizer))


# ----------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "order",
    [
        "import gptworks; gptworks.train, gptworks.plan, gptworks.evaluate; assert not heavy()",
        "import gptworks.training.progress, gptworks.planning.run, gptworks.evaluation.metrics",
        "from gptworks import train, plan, evaluate; from gptworks.planning.run import Plan",
    ],
)
def test_functions_stay_functions_whatever_was_imported_first(order: str) -> None:
    code = f"""
import inspect, sys
def heavy(): return {{"torch", "numpy", "pydantic"}} & set(sys.modules)
{order}
import gptworks, gptworks.planning.run
from gptworks.planning.run import Plan
assert all(map(inspect.isfunction, (gptworks.train, gptworks.plan, gptworks.evaluate)))
assert isinstance(gptworks.plan("gpt2-tiny"), Plan)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_help_shows_the_functions_arguments_and_every_name_that_is_offered_exists() -> None:
    for package, function in (("train", api.train), ("plan", estimates.plan), ("evaluate", api.evaluate)):
        called = getattr(gptworks, package)
        assert next(iter(inspect.signature(called).parameters)) in ("recipe", "run")
        assert called is function
    assert all(hasattr(gptworks, name) for name in gptworks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = gptworks.trane


# -------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("text", ["a\x85b", "a\x7fb", "a\u2028b", "é 😀", "'\"\\"])
def test_texts_in_a_list_are_read_from_an_override_as_they_were_given(text: str) -> None:
    (override,) = overrides_of({"train": {"sample_prompts": [text]}})
    assert load_recipe("demo", [override]).train.sample_prompts == (text,)


def test_settings_by_name_are_overrides_as_they_are_typed() -> None:
    assert overrides_of({"max_steps": 20, "model": {"n_layers": 2, "rope_scaling": None}, "run_dir": Path("a b")}) == [
        "train.max_steps=20", "model.n_layers=2", "model.rope_scaling=null", "run_dir=a b",
    ]  # fmt: skip


def test_a_recipe_is_the_same_as_a_file_as_dictionaries_and_as_an_object(folder: Path) -> None:
    tree = tiny.recipe_tree(folder, muon_learning_rate=1e-5, sample_prompts=["a: b", "null"], precision="fp32")
    path = tiny.write_recipe(folder, **tree["train"])
    given = overrides_of({"muon_learning_rate": 1e-5, "sample_prompts": ["a: b", "null"], "precision": "fp32"})
    whole = load_recipe(path)
    assert whole == load_recipe(tree) == load_recipe(whole) == load_recipe(tiny.recipe_tree(folder), given)
    unset = {**tree, "train": {key: value for key, value in tree["train"].items() if key != "micro_batch_size"}}
    assert load_recipe(load_recipe(unset), ["train.batch_size=6"]).train.micro_batch_size == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_stepz": 2}, "train.max_stepz=2.*unknown key `train.max_stepz`; did you mean"),
        ({"max_steps": -1}, "train.max_steps=-1.*greater than 0"),
        ({"change": ["train.max_steps=9"]}, "for a resumed run"),
    ],
)
def test_a_mistake_is_a_user_error_before_any_work(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        gptworks.train(tiny.recipe_tree(folder), run_dir=folder / "never", **settings)
    with pytest.raises(UserError, match="no such recipe file"):
        gptworks.train("no-such-recipe")
    assert not (folder / "never").exists()


# ------------------------------------------------------------------------------------------------------ runs


def test_training_returns_the_run_with_its_figures(run: TrainedRun, folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert run.folder == folder / "run" and run.step == 5 and run.recipe.train.evaluate_sequences == 4
    assert run.best is not None and run.best["loss"] == min(r["loss"] for r in records if r["kind"] == "validation")
    assert [one["text"] for one in run.samples] == [r["text"] for r in records if r["kind"] == "sample"] != []
    assert "finished at step 5" in repr(run) and f"{run.parameters:,} parameters" in repr(run)
    assert gptworks.read_run(folder / "run") == run
    figure = run.curves()
    assert figure.svg.startswith("<svg") and "validation" in figure.svg
    for shown in (figure._repr_html_(), run._repr_html_()):
        [drawing] = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', shown)
        assert base64.b64decode(drawing).decode("utf-8") == figure.svg and len(drawing) > MOST_CHARACTERS
    figure.save(folder / "curves.svg")
    assert (folder / "curves.svg").read_text() == (folder / "run" / "curves.svg").read_text().replace("tiny", "run")


def test_a_run_stands_for_its_folder(run: TrainedRun, folder: Path) -> None:
    assert load_recipe(run) == run.recipe
    with pytest.raises(UserError, match="already holds a run"):
        gptworks.train(tiny.recipe_tree(folder), max_steps=5, evaluate_sequences=4, sample_every=5)
    other = gptworks.train(run, run_dir=folder / "longer", max_steps=3)
    assert other.folder == folder / "longer" and other.step == 3
    longer = gptworks.train(other, resume=True, change=["train.max_steps"], max_steps=4)
    assert longer.step == 4 and "from step 3" in (folder / "longer" / "recipe.yaml").read_text()


def test_a_notebook_shows_a_run_and_nothing_that_its_files_say_is_markup(tmp_path: Path) -> None:
    sample = {"kind": "sample", "step": 5, "prompt": HOSTILE, "text": HOSTILE}
    folder = tmp_path / "<img src=x onerror=alert(3)>"
    write_run(folder, [step_record(5, 2.0), validation(5, 2.1, 1.5), sample])
    shown = gptworks.read_run(folder)._repr_html_()
    assert "<script" not in shown and "<img src=x" not in shown and shown.count("&lt;script&gt;") == 2
    assert "2.1000" in shown and "best validation loss" in shown and 'src="data:image/svg+xml;base64,' in shown
    assert gptworks.read_run(write_run(tmp_path / "empty", []).folder)._repr_html_().count("nothing yet") == 1


# ----------------------------------------------------------------------------------------------------- plans


def test_a_plan_is_what_the_command_prints(run: TrainedRun, folder: Path) -> None:
    """The run has prepared the text, without which the vocabulary size would be unknown."""
    path = tiny.write_recipe(folder)
    printed = CliRunner().invoke(app, ["plan", str(path), "train.max_steps=7", "--device", "h100"]).stdout
    sheet = gptworks.plan(path, device="h100", max_steps=7)
    assert repr(sheet).split() == printed.split() and sheet.steps == 7
    assert repr(gptworks.plan(path, "train.max_steps=7", device="h100", details=True)).split() != printed.split()
    shown = sheet._repr_html_()
    assert "7 (max_steps=7)" in shown and shown.count("<table>") == 2
    assert all(str(cell) in shown for cell in ("tokens a step", "largest micro-batch that fits", "total"))


def test_a_plan_without_its_data_says_so_in_text(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path)
    tree["data"]["sources"][0]["path"] = f"<img src=x>{tmp_path.name}"
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 300}
    sheet = gptworks.plan(tree)
    assert "<img src=x>" in repr(sheet) and "<img src=x>" not in sheet._repr_html_()
    assert "&lt;img src=x&gt;" in sheet._repr_html_()


# ---------------------------------------------------------------------------------------------- measurements


def test_an_evaluation_is_what_the_command_prints(run: TrainedRun) -> None:
    found = gptworks.evaluate(run, compressors=True, by_position=True)
    printed = CliRunner().invoke(app, ["evaluate", str(run.folder), "--compressors", "--by-position"]).stdout
    assert repr(found) == printed.strip()
    assert found.validation is not None and found.to_json() == found.validation
    assert f"{found.validation['loss']:.4f} nats per token" in found._repr_html_()
    with pytest.raises(UserError, match="no such run folder"):
        gptworks.evaluate("runs/no-such-run")
    with pytest.raises(UserError, match="stride is for text"):
        gptworks.evaluate(run, calibration=True, stride=4)


def test_an_evaluation_of_a_text_is_kept_and_its_name_is_text(run: TrainedRun, folder: Path) -> None:
    path = folder / "<b>.txt"
    path.write_text(tiny.TEXT[:2000], encoding="utf-8")
    found = gptworks.evaluate(run, text=path)
    [one] = found.evaluations
    assert found.to_json()[0]["name"] == one.name == "text-<b>"
    assert "<b>" not in found._repr_html_() and "text-&lt;b&gt;" in found._repr_html_()
    assert json.loads((run.folder / "evaluations" / f"{one.name}.json").read_text())["n_items"] == one.n_items
    (run.folder / "evaluations" / f"{one.name}.json").unlink()
    gptworks.evaluate(run, text=[path], save=False)
    assert not list((run.folder / "evaluations").iterdir())


# --------------------------------------------------------------------------------------------------- engines


def test_an_engine_chats_as_a_session_does(engine: Engine) -> None:
    session = TurnSession(engine, max_tokens=8, seed=1)
    expected = "".join(session.send("line 1"))
    message = {"role": "user", "content": "line 1"}
    assert engine.chat("line 1", max_tokens=8, seed=1) == engine.chat([message], max_tokens=8, seed=1) == expected
    parts = list(engine.stream_chat([message], max_tokens=8, seed=1))
    assert "".join(parts) == expected and len(parts) > 1
    with pytest.raises(UserError, match="temperatur"):
        engine.chat("line 1", temperatur=1.0)


def test_a_base_model_refuses_to_chat_and_says_what_to_do(run: TrainedRun) -> None:
    with pytest.raises(UserError, match=r"no chat template.*generate, stream or complete"):
        gptworks.load(run).chat("Hello")


# -------------------------------------------------------------------------------------------------- notebooks


class Output:
    """IPython's output: outputs by number, each with the values that replaced it."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, shown: dict[str, str], raw: bool, display_id: bool) -> "Output":
        assert raw and display_id
        self.outputs.append([shown["text/plain"]])
        return self

    def update(self, shown: dict[str, str], raw: bool) -> None:
        self.outputs[-1].append(shown["text/plain"])


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Iterator[Output]:
    output = Output()
    module = types.ModuleType("IPython.display")
    module.display = output.display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return output


def test_a_notebook_has_one_output_that_stays_short(output: Output) -> None:
    with NotebookDisplay() as display:
        for step in range(1, 2001):
            display.step(f"step {step}/2000", step / 2000, 3.0, 1.0)
            if step % 20 == 0:
                display.validation(step, 2.0, "")
        display.sample(2000, "def ", "\x1b[31mf(x):\n    return x")
    display.message("finished")
    assert len(output.outputs) == 1
    last = output.outputs[0][-1].splitlines()
    assert len(last) <= MOST_LINES and last[-1] == "finished" and last[-2].endswith("f(x):⏎    return x")
    assert "\x1b" not in output.outputs[0][-1] and "step 2000/2000  loss 3.000" in output.outputs[0][-4]


def test_training_in_a_notebook_shows_the_run_there(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(displays, "in_notebook", lambda: True)
    gptworks.train(tiny.recipe_tree(tmp_path), max_steps=3, evaluate_sequences=2)
    assert len(output.outputs) == 1
    assert output.outputs[0][0].startswith("tokenizer") and "finished at step 3" in output.outputs[0][-1]
    assert capfd.readouterr() == ("", "")


def test_elsewhere_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(Console(file=sys.stdout, width=80))
    display.step("step 1/1", 1.0, 3.0, 0.0)
    assert "step 1/1  loss 3.000" in capsys.readouterr().out
