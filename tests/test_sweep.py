"""Sweeps: ranges refused before work, trials that are runs, pruning that stops a process, and continuing after a
kill."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

import commands
import tiny
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe
from gptworks.runs.sweep import Sweep, load_sweep, read_sweep, run_sweep
from gptworks.runs.sweep_page import to_html, write_sweep_page
from test_html import Reader

pytest.importorskip("optuna")

TRAINER = '''
"""Stands for `gptworks train RECIPE --resume`: a quadratic in the learning rate, ten steps, without torch."""
import json, os, signal, sys, time
from pathlib import Path
import yaml

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
recipe = yaml.safe_load(open(sys.argv[1]))
folder = Path(recipe["run_dir"])
folder.mkdir(exist_ok=True)
(folder / "recipe.yaml").write_text(Path(sys.argv[1]).read_text().replace("vocab_size: 0", "vocab_size: 43"))
with (folder / "started").open("a") as file:
    file.write("x")
rate = recipe["train"]["learning_rate"]
if rate > 0.9:
    print("error: no space left on device")
    sys.exit(1)
metrics = folder / "metrics.jsonl"
kind = "skipped" if 0.5 < rate <= 0.9 else "validation"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
with metrics.open("a") as file:
    for step in range(done + 1, 11):
        loss = (rate - 0.01) ** 2 * 1e4 + 1 / step
        line = {"kind": kind, "step": step, "tokens": step, "loss": loss, "perplexity": loss, "bits_per_byte": None}
        file.write(json.dumps(line) + "\\n")
        file.flush()
        while step == 3 and folder.name == os.environ.get("HELD") and not folder.with_suffix(".go").exists():
            time.sleep(0.01)
sys.exit(kind == "skipped")
'''

RATES = {"train.learning_rate": {"low": 0.001, "high": 0.1, "log": True}}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make trials fake, so that they take no time; return the trainer's file."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text(TRAINER, encoding="utf-8")
    monkeypatch.setattr("gptworks.runs.trials.TRAIN", (sys.executable, str(trainer)))
    return trainer


def write_sweep(folder: Path, ranges: dict[str, Any] | None = None, train: dict[str, Any] | None = None,
                **sweep: Any) -> Path:  # fmt: skip
    tree = tiny.recipe_tree(folder, **(train or {}))
    tree["sweep"] = {"ranges": ranges or RATES, "n_trials": 4, "startup_trials": 2, **sweep}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def tried(sweep: Sweep) -> list[tuple[int, str, dict[str, Any], float | None]]:
    return [(trial.number, trial.state, trial.values, trial.loss) for trial in sweep.trials]


def starts(sweep: Sweep) -> list[int]:
    return [len((trial.folder / "started").read_text(encoding="utf-8")) for trial in sweep.trials]


# ------------------------------------------------------------------------------------------------ ranges


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("train.learning_rat", {"low": 0.1, "high": 1.0}, "unknown key `train.learning_rat`; did you mean"),
        ("train.learning_rate", {"low": 1.0, "high": 0.1}, "low=1 is not below high=0.1: exchange them"),
        ("train.learning_rate", {"low": 0, "high": 1, "log": True}, "low=0 with log=true"),
        ("train.learning_rate", {"low": 0.0, "high": 1.0}, "reaches 0.0, which the recipe refuses"),
        ("train.learning_rate", {"low": 0.1, "high": 1.0, "step": 0.4}, "step=0.4 does not divide high - low"),
        ("train.learning_rate", {"low": 0.1, "high": 1.0, "step": 0.3, "log": True}, "step=0.3 with log=true"),
        ("train.learning_rate", {"low": 0.1}, "neither choices nor both of low and high"),
        ("train.learning_rate", {"choices": [0.1]}, "give at least two"),
        ("train.learning_rate", {"choices": [0.1, 0.2], "log": True}, "give only choices"),
        ("train.learning_rate", {"lo": 0.1, "high": 1.0}, "unknown key `sweep.ranges.train.learning_rate.lo`"),
        ("train.log_every", {"low": 2.0, "high": 8.0}, "sweep.ranges.train.log_every reaches 4.22"),
        ("train.schedule", {"choices": ["cosine", "sine"]}, "reaches sine, which the recipe refuses"),
        ("model.n_heads", {"low": 1, "high": 3}, "reaches 3, which the recipe refuses"),
        ("seed", {"low": 1, "high": 9}, "the same in all trials"),
        ("tokenizer.vocab_size", {"low": 300, "high": 900}, "`tokenizer.vocab_size` is the same in all trials"),
        ("data.sources.0.path", {"choices": ["a", "b"]}, "the same in all trials"),
        ("train.evaluate_sequences", {"choices": [8, 16]}, "decides what the validation loss measures"),
        ("model.context_length", {"choices": [16, 32]}, "each length may be evaluated on other text"),
        ("sweep.n_trials", {"low": 1, "high": 9}, "the same in all trials"),
    ],
)  # fmt: skip
def test_bad_ranges_are_refused_before_work(tmp_path: Path, key: str, values: dict[str, Any], message: str) -> None:
    path = write_sweep(tmp_path, {key: values})
    with pytest.raises(UserError) as refused:
        load_sweep(path)
    assert message in str(refused.value)
    assert key.rpartition(".")[2] in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("objective", "key", "choices"),
    [
        ({"type": "preference"}, "objective.beta", [0.1, 0.5]),
        ({"type": "preference"}, "objective.loss", ["dpo", "ipo"]),
        ({"type": "preference"}, "objective.label_smoothing", [0.0, 0.1]),
        ({"type": "preference"}, "objective.type", ["preference", "next_token"]),
        ({"type": "reward", "reward": "r.py:f", "group_size": 4}, "objective.reward", ["r.py:f", "r.py:g"]),
        ({"type": "reward", "reward": "r.py:f", "group_size": 4}, "objective.max_tokens", [8, 16]),
    ],
)
def test_what_the_loss_measures_is_not_tuned(
    tmp_path: Path, objective: dict[str, Any], key: str, choices: list[Any]
) -> None:
    path = write_sweep(tmp_path, {key: {"choices": choices}})
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) | {"objective": objective}
    kind = "preferences" if objective["type"] == "preference" else "conversations"
    tree["data"] = {"sources": [{"type": kind, "path": "x.jsonl"}]}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.raises(UserError, match="decides what the validation loss measures"):
        load_sweep(path)


def test_a_recipe_without_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no `sweep` section"):
        load_sweep(tiny.write_recipe(tmp_path))


def test_training_ignores_the_section(tmp_path: Path) -> None:
    assert load_recipe(write_sweep(tmp_path)).train == load_recipe(tiny.write_recipe(tmp_path)).train


# ---------------------------------------------------------------------------------------------- a search


def test_trials_are_runs_and_the_best_is_written(tmp_path: Path, quick: Path) -> None:
    said: list[str] = []
    ranges = {**RATES, "model.n_layers": {"low": 1, "high": 3}, "train.schedule": {"choices": ["wsd", "constant"]}}
    sweep = run_sweep(write_sweep(tmp_path, ranges, n_trials=8, pruner="none"), report=said.append)
    assert [(trial.state, trial.reason) for trial in sweep.trials] == [("complete", "")] * 8
    assert len(said) == 8 and "(best)" in said[0]
    for trial in sweep.trials:
        recipe = load_recipe(trial.folder)
        assert recipe.train.learning_rate == trial.values["train.learning_rate"]
        assert recipe.model.n_layers == trial.values["model.n_layers"] in (1, 2, 3)
        assert recipe.train.schedule == trial.values["train.schedule"]
        assert trial.loss == pytest.approx((recipe.train.learning_rate - 0.01) ** 2 * 1e4 + 0.1)
        assert recipe.sweep is None
    best = min(sweep.trials, key=lambda trial: trial.loss or 9e9)
    assert sweep.best == best
    written = load_recipe(tmp_path / "run" / "best.yaml")
    assert written.train == load_recipe(best.folder).train
    assert written.run_dir == tmp_path / "run" / "best"
    assert len({trial.values["train.learning_rate"] for trial in sweep.trials}) == 8


def test_the_page_has_the_numbers(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, {**RATES, "train.schedule": {"choices": ["wsd", "cosine"]}})
    sweep = run_sweep(path, after_trial=write_sweep_page)
    page = (tmp_path / "run" / "sweep.html").read_text(encoding="utf-8")
    assert page == to_html(sweep)
    exact = {value for value, _ in Reader(page).data}
    assert {trial.loss for trial in sweep.trials} | {t.values["train.learning_rate"] for t in sweep.trials} <= exact


def test_a_trial_that_cannot_be_or_diverges_does_not_end_the_sweep(tmp_path: Path, quick: Path) -> None:
    """Each width and each number of heads is allowed, but width 33 with 2 heads is not; a rate of 0.7 diverges."""
    ranges = {
        "model.d_model": {"choices": [32, 33]}, "model.n_heads": {"choices": [1, 2]},
        "train.learning_rate": {"choices": [0.01, 0.7]},
    }  # fmt: skip
    path = write_sweep(tmp_path, ranges, n_trials=14, startup_trials=14)
    with pytest.raises(UserError, match="reaches 33"):  # with the recipe's own two heads
        load_sweep(path)
    text = path.read_text(encoding="utf-8").replace("n_heads: 2", "n_heads: 1\n  position: learned")
    path.write_text(text, encoding="utf-8")
    sweep = run_sweep(path)
    assert len(sweep.trials) == 14
    for trial in sweep.trials:
        impossible = trial.values["model.d_model"] == 33 and trial.values["model.n_heads"] == 2
        diverges = trial.values["train.learning_rate"] == 0.7
        assert trial.state == ("failed" if impossible else "pruned" if diverges else "complete")
        assert ("not a multiple of n_heads=2" in trial.reason) == impossible
        assert (trial.reason == "it diverged") == (diverges and not impossible)
    assert {trial.state for trial in sweep.trials} == {"complete", "pruned", "failed"}


def test_what_is_no_settings_fault_ends_the_sweep(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, {"train.learning_rate": {"low": 1.0, "high": 2.0}})
    with pytest.raises(RunError, match=r"3 trials in a row failed, the last because no space left on device\. Its log"):
        run_sweep(path)


# ----------------------------------------------------------------------------------------------- pruning


def test_a_pruned_trial_is_really_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real training: a long trial that learns nothing is stopped at its first evaluation, and no process is
    left."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    drawn = [
        {"train.max_steps": 40, "train.learning_rate": 0.01},
        {"train.max_steps": 10**6, "train.learning_rate": 1e-9},
    ]
    monkeypatch.setattr("gptworks.runs.sweep._suggest", lambda trial, key, _: drawn[trial.number][key])
    ranges = {"train.max_steps": {"choices": [40, 10**6]}, "train.learning_rate": {"choices": [0.01, 1e-9]}}
    train = {"evaluate_every": 20, "optimizer": "adamw", "warmup_steps": 0}
    sweep = run_sweep(write_sweep(tmp_path, ranges, train, n_trials=2, startup_trials=1))
    good, bad = sweep.trials
    assert (good.state, bad.state) == ("complete", "pruned")
    steps = [json.loads(line)["step"] for line in (bad.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert 20 <= max(steps) < 10_000
    assert "stopped by SIGTERM" in bad.folder.with_suffix(".log").read_text(encoding="utf-8")
    size = (bad.folder / "metrics.jsonl").stat().st_size
    time.sleep(0.5)
    assert (bad.folder / "metrics.jsonl").stat().st_size == size


def test_the_median_decides(tmp_path: Path, quick: Path) -> None:
    sweep = run_sweep(write_sweep(tmp_path, n_trials=6, startup_trials=2))
    assert sweep.count("pruned") > 0
    assert sweep.trials[0].state == sweep.trials[1].state == "complete"
    worst_of_first = max(trial.loss or 0 for trial in sweep.trials[:2])
    for trial in sweep.trials:
        evaluations = (trial.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if trial.state == "complete":
            assert len(evaluations) == 10
            assert (trial.loss or 0) <= worst_of_first + 1


# ------------------------------------------------------------------------------------------- going on


def test_a_sweep_that_goes_on_is_as_one_that_never_stopped(tmp_path: Path, quick: Path) -> None:
    whole = run_sweep(write_sweep(tmp_path, n_trials=7))
    path = write_sweep(tmp_path, n_trials=7)
    place = [f"run_dir={tmp_path / 'parts'}"]
    first = run_sweep(path, [*place, "sweep.n_trials=3"])
    assert len(first.trials) == 3
    with pytest.raises(UserError, match="already holds a sweep: add --resume"):
        run_sweep(path, place)
    second = run_sweep(path, place, resume=True)
    assert tried(second) == tried(whole)
    assert starts(second) == [1] * 7
    assert tried(run_sweep(path, place, resume=True)) == tried(whole)  # nothing is left to do


def test_a_killed_sweep_goes_on_with_the_trial_it_was_at(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, n_trials=3, pruner="none")
    trial = tmp_path / "run" / "trials" / "001"
    process = begin(quick, path, held=trial.name)
    wait_for(lambda: has_lines(trial / "metrics.jsonl", 3))
    process.kill()
    process.wait()
    interrupted = read_sweep(tmp_path / "run")
    assert [trial.state for trial in interrupted.trials] == ["complete", "running"]
    trial.with_suffix(".go").touch()
    wait_for(lambda: has_lines(trial / "metrics.jsonl", 10))  # it outlives its parent
    sweep = run_sweep(path, resume=True)
    assert [trial.state for trial in sweep.trials] == ["complete"] * 3
    assert tried(sweep)[:1] == tried(interrupted)[:1]
    assert sweep.trials[1].values == interrupted.trials[1].values
    assert starts(sweep) == [1, 2, 1]


def test_a_sweep_that_is_asked_to_stop_stops_its_trial(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, n_trials=3, pruner="none")
    process = begin(quick, path, held="000")
    metrics = tmp_path / "run" / "trials" / "000" / "metrics.jsonl"
    wait_for(lambda: has_lines(metrics, 3))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    n_lines = len(metrics.read_text(encoding="utf-8").splitlines())
    time.sleep(0.5)
    assert len(metrics.read_text(encoding="utf-8").splitlines()) == n_lines < 10
    assert [trial.state for trial in run_sweep(path, resume=True).trials] == ["complete"] * 3


def test_a_process_that_is_still_at_work_in_a_trial_is_waited_for(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, n_trials=2, pruner="none")
    place = tmp_path / "run" / "trials" / "000"
    process = begin(quick, path, held=place.name)
    wait_for(lambda: has_lines(place / "metrics.jsonl", 3))
    process.kill()
    process.wait()
    place.with_suffix(".go").touch()
    wait_for(lambda: has_lines(place / "metrics.jsonl", 10))
    lock, said = FileLock(place / ".lock", thread_local=False), []
    lock.acquire()

    def report(line: str) -> None:
        said.append(line)
        lock.release(force=True)  # the process ends when the sweep waits for it

    sweep = run_sweep(path, resume=True, report=report)
    assert said[0] == f"waiting for the process that is at work in {place}"
    assert [trial.state for trial in sweep.trials] == ["complete"] * 2


def begin(trainer: Path, path: Path, held: str) -> commands.Process:
    """Start a sweep in a process of its own; one of its trials waits after its third step for a file `NUMBER.go`."""
    code = (
        "import sys\nfrom gptworks.runs import sweep, trials\n"
        f"trials.TRAIN = (sys.executable, {str(trainer)!r})\nsweep.run_sweep({str(path)!r})\n"
    )
    return commands.start("-c", code, env={"HELD": held})


def has_lines(path: Path, n: int) -> bool:
    return path.exists() and len(path.read_text(encoding="utf-8").splitlines()) >= n


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def test_other_settings_do_not_go_on(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path, n_trials=1)
    run_sweep(path)
    with pytest.raises(
        UserError, match=r"started with another `sweep\.ranges\.train\.learning_rate\.high`: it was 0\.1"
    ):
        run_sweep(write_sweep(tmp_path, {"train.learning_rate": {"low": 0.001, "high": 0.2, "log": True}}), resume=True)
    with pytest.raises(UserError, match=r"another `train\.batch_size`"):
        run_sweep(path, ["train.batch_size=16"], resume=True)


def test_folders_that_are_not_a_sweeps_are_left_alone(tmp_path: Path, quick: Path) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(UserError, match="exists and holds no sweep"):
        run_sweep(path, [f"run_dir={tmp_path / 'other'}"])
    (tmp_path / "other" / "recipe.yaml").write_text("a: b", encoding="utf-8")
    with pytest.raises(UserError, match="holds a run, and a sweep needs a folder of its own"):
        run_sweep(path, [f"run_dir={tmp_path / 'other'}"])


@pytest.mark.parametrize("name", ["journal.log", "trials", "trials/000", "sweep.yaml", "best.yaml"])
def test_a_sweep_with_a_link_to_elsewhere_is_neither_read_nor_resumed(name: str, tmp_path: Path, quick: Path) -> None:
    path, outside = write_sweep(tmp_path, n_trials=1), tmp_path / "outside"
    run_sweep(path)
    folder = tmp_path / "run"
    outside.mkdir()
    (folder / name).rename(outside / "moved")
    (folder / name).symlink_to(outside / "moved")
    with pytest.raises(UserError, match=f"{name} leads out of"):
        run_sweep(path, ["sweep.n_trials=2"], resume=True)


def test_a_journal_that_is_a_fifo_is_not_waited_for(tmp_path: Path, quick: Path) -> None:
    run_sweep(write_sweep(tmp_path, n_trials=1))
    folder = tmp_path / "run"
    (folder / "journal.log").unlink()
    os.mkfifo(folder / "journal.log")
    with pytest.raises(UserError, match=r"journal\.log is a FIFO"):
        read_sweep(folder)
