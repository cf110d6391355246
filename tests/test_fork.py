"""A fork continues from any checkpoint of a run in its own folder: identically, or with settings changed."""

import errno
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import tiny
from gptworks.checkpoint import all_checkpoints, checkpoint_of_step, checkpoints, choose_checkpoint
from gptworks.cli import app
from gptworks.errors import RunError, UserError
from gptworks.files import sha256_file
from gptworks.recipe import load_recipe, parse_recipe, save_recipe
from gptworks.runs import history
from gptworks.runs.compare import compare
from gptworks.runs.report import to_html
from gptworks.training.changes import check_changes, read_history
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.fork import fork, origin_of
from gptworks.training.loop import train
from gptworks.training.progress import Progress
from halves import assert_same_end, without_timings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 2, 4, 6 and 7, and the weights of step 3, the best before 4. Tests must not
    change it."""
    folder = tmp_path_factory.mktemp("fork")
    every = {"checkpoint_every": 2, "evaluate_every": 3, "keep_checkpoints": 9}
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=7, ema_decay=0.5, **every)))
    return folder / "run"


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def go_on(folder: Path, *overrides: str) -> None:
    change = [override.partition("=")[0] for override in overrides]
    train(load_recipe(folder, overrides), resume=True, change=change, overrides=overrides)


def test_with_nothing_changed_it_ends_bit_for_bit_as_the_run_did(run: Path, tmp_path: Path) -> None:
    before, source = files_of(run), Path(shutil.copytree(run, tmp_path / "source"))
    assert fork(source, 2, tmp_path / "new") == tmp_path / "new"
    assert files_of(source) == before
    shutil.rmtree(source)
    there = [record for record in without_timings(run) if record["step"] <= 2]
    assert without_timings(tmp_path / "new") == there, "the curve is there before the fork trains"
    result = CliRunner().invoke(app, ["train", str(tmp_path / "new" / "recipe.yaml"), "--resume"])
    assert result.exit_code == 0, result.output
    assert f"resuming {tmp_path / 'new'} from step 2" in result.output.replace("\n", "")
    assert_same_end(run, tmp_path / "new")
    assert "repeats the run" in (tmp_path / "new" / "model-card.md").read_text(encoding="utf-8")


def test_with_a_change_it_goes_on_as_the_run_would_have(run: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(run, tmp_path / "changed"))
    for later in checkpoints(changed)[:2]:
        shutil.rmtree(later.folder)
    go_on(changed, "train.learning_rate=0.0005", "train.batch_size=4")
    new = fork(run, 4, tmp_path / "new", ["train.learning_rate=0.0005", "train.batch_size=4"])
    assert read_history(new).changes == read_history(changed).changes
    assert read_history(new).changes[0].settings["train.learning_rate"] == [0.003, 0.0005]
    go_on(new)
    assert_same_end(changed, new)
    assert without_timings(new) != without_timings(run)
    assert "up to step 4 they are one run, which was forked there" in compared(run, new)
    assert "one run" not in compared(run, changed), "which is no fork"


def compared(*runs: Path) -> str:
    found = compare([history.read_history(folder) for folder in runs], [None] * len(runs))
    assert len(found.findings) == 1, "their losses are of the same text"
    return str(found.findings[0])


def test_where_it_is_from_is_recorded_and_shown(run: Path, tmp_path: Path) -> None:
    new = fork(run, 4, tmp_path / "my fork", ["train.learning_rate=0.0005", "train.max_steps=5"])
    recipe = load_recipe(new / "recipe.yaml")
    assert (recipe.name, recipe.run_dir) == ("my-fork", new)
    weights = sha256_file(run / "checkpoints" / "step-000004" / "model.safetensors")
    assert [asdict(origin) for origin in read_history(new).origins] == [
        {"run": "run", "step": 4, "weights_sha256": weights}
    ]
    words = f"the run run at step 4 (sha256 of its weights: {weights[:12]}…)"
    assert words in to_html(history.read_history(new)), "before it trains"
    go_on(new)
    card = (new / "model-card.md").read_text(encoding="utf-8")
    change = "train.max_steps 7 → 5, train.learning_rate 0.003 → 0.0005"
    assert f"| forked from | {words} |" in card and f"| from step 4 | {change} |" in card
    head = (new / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    assert head[1:3] == [f"# forked from {words}", f"# from step 4: {change}"]
    again = fork(new, None, tmp_path / "again", ["name=other"])
    assert [(origin.run, origin.step) for origin in read_history(again).origins] == [("my fork", 5), ("run", 4)]
    assert read_history(again).changes == read_history(new).changes
    assert load_recipe(again).name == "other"


def test_what_the_run_changed_later_is_as_it_was_at_that_step(run: Path, tmp_path: Path) -> None:
    longer = Path(shutil.copytree(run, tmp_path / "longer"))
    go_on(longer, "train.max_steps=8", "train.learning_rate=0.001", "train.sample_prompts=[a, 'b: é😀']")
    go_on(longer, "train.max_steps=9", "train.precision=fp32")
    early, late = fork(longer, 4, tmp_path / "early"), fork(longer, 7, tmp_path / "late")
    assert load_recipe(early).train == load_recipe(run).train
    assert not read_history(early).changes
    settings = load_recipe(late).train
    assert (settings.max_steps, settings.learning_rate, settings.precision) == (8, 0.001, "auto")
    assert [change.step for change in read_history(late).changes] == [7]
    go_on(early)
    assert_same_end(run, early)


@pytest.mark.parametrize("override", ["train.optimizer=adamw", "seed=2", "model.n_layers=3", "data.shard_tokens=1000"])
def test_what_a_run_cannot_change_is_refused_as_resume_refuses_it(run: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError) as by_resume:
        check_changes(load_recipe(run), load_recipe(run, [override]), [override.partition("=")[0]])
    with pytest.raises(UserError) as by_fork:
        fork(run, 4, tmp_path / "new", [override])
    assert str(by_fork.value) == str(by_resume.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "overrides", "words"),
    [
        ("{run}@5", [], r"no such checkpoint\. Training can continue from 2, 4, 6, 7; initialize_from="),
        ("{run}@{weights}", [], r"at step \d: there are weights only\. Training can continue from 2, 4, 6, 7"),
        ("{run}@x", [], "what follows @ is a step, best or last"),
        (f"{{run}}@{'9' * 30}", [], "what follows @ is a step, best or last"),
        ("{run}/nothing", [], "no such run folder"),
        ("{run}@4", ["train.max_steps=3"], r"train\.max_steps=3 and the fork begins after 4 steps"),
        ("{run}@4", ["train.max_minutes=0.00001"], r"train\.max_minutes=1e-05 and the fork begins after"),
        ("{run}@4", ["train.lerning_rate=1"], "learning_rate"),
        ("{run}@4", ["run_dir=elsewhere"], "run_dir cannot be set"),
    ],
)
def test_what_cannot_be_is_refused(run: Path, tmp_path: Path, place: str, overrides: list[str], words: str) -> None:
    weights = next(one.step for one in all_checkpoints(run) if one.weights_only)
    with pytest.raises(UserError, match=words):
        fork(*origin_of(place.format(run=run, weights=weights)), tmp_path / "new", overrides)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_nothing_half_made_is_left(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("kept")
    with pytest.raises(UserError, match="there exists and is not an empty folder"):
        fork(run, 4, tmp_path / "there")
    with pytest.raises(UserError, match="is not a name of a new folder"):
        fork(run, 4, Path())
    with pytest.raises(UserError, match="would be deleted with it"):
        fork(run, 4, run / "inside")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(RunError, match="No space left"):
        fork(run, 4, tmp_path / "new")

    def gone(file: Path, _: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))

    monkeypatch.setattr(os, "link", gone)
    with pytest.raises(UserError, match=r"model\.safetensors is gone: the run deletes old checkpoints as it trains"):
        fork(run, 4, tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "mine"]


def test_a_damaged_checkpoint_is_named_and_one_before_it_can_be_forked(run: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(run, tmp_path / "damaged"))
    file = checkpoints(damaged)[0].folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"damaged/checkpoints/step-000007/optimizer\.safetensors is damaged"):
        fork(damaged, None, tmp_path / "new")
    assert checkpoints(fork(damaged, 6, tmp_path / "new"))[0].step == 6


def test_where_the_disk_has_no_links_files_are_copied(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    new = fork(run, 4, tmp_path / "new")
    checkpoint, theirs = checkpoints(new)[0], run / "checkpoints" / "step-000004" / "model.safetensors"
    checkpoint.verify()
    assert not theirs.samefile(checkpoint.folder / "model.safetensors")


def test_the_best_weights_so_far_come_along(run: Path, tmp_path: Path) -> None:
    best = checkpoint_of_step(run, checkpoint_of_step(run, 4).best_step or 0)
    assert best.weights_only, "of a step between two that training can go on from"
    chosen = choose_checkpoint(fork(run, 4, tmp_path / "new"), "best")
    assert chosen.folder.name == best.folder.name
    assert (chosen.folder / "model.safetensors").read_bytes() == (best.folder / "model.safetensors").read_bytes()


def test_what_was_never_trained_here_names_another_way(run: Path, tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    imported.mkdir()
    save_recipe(load_recipe(run), imported / "recipe.yaml")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        fork(imported, None, tmp_path / "new")
    tensors = load_file(checkpoints(run)[0].folder / "model.safetensors")
    save_checkpoint(imported, 0, tensors, {}, asdict(Progress()))
    with pytest.raises(UserError, match=r"was imported and .* start a run from it with initialize_from="):
        fork(imported, None, tmp_path / "new")
    packed = {name: tensor.half() for name, tensor in tensors.items()}
    save_checkpoint(imported, 0, packed, {}, json.loads((checkpoints(run)[0].folder / "state.json").read_text()))
    with pytest.raises(UserError, match=r"is quantized: .* Take the run that it was made from"):
        fork(imported, None, tmp_path / "new")


def test_the_command_says_what_was_made_and_what_is_next(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    result = CliRunner().invoke(app, ["fork", f"{run}@4", str(new), "train.learning_rate=0.0005"])
    assert result.exit_code == 0, result.output
    assert "forked from the run run at step 4" in result.output
    assert "from step 4: train.learning_rate 0.003 → 0.0005" in result.output
    assert f"Next: gptworks train {new} --resume" in result.output
    result = CliRunner().invoke(app, ["fork", str(run), str(tmp_path / "done")])
    assert f"Next: gptworks train {tmp_path / 'done'} --resume --change train.max_steps=MORE" in result.output
    best = choose_checkpoint(run, "best").step
    assert origin_of(f"{run}@best") == (run, best) and origin_of(f"{run}@last") == origin_of(str(run)) == (run, None)
