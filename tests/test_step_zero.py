"""With keep_every, a run keeps its initial weights, which are used if step 0 is requested."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from gptworks.checkpoint import checkpoints, choose_checkpoint, newest_verified
from gptworks.errors import UserError
from gptworks.interpret.checkpoints import chosen_steps
from gptworks.model.gpt import GPT
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.serve.errors import APIError
from gptworks.studio.library import Library
from gptworks.training.checkpoint_files import remove_old, save_checkpoint
from gptworks.training.fork import fork
from gptworks.training.loop import Run, train
from halves import assert_same_end

SETTINGS: dict[str, Any] = {"checkpoint_every": 2, "keep_every": 4, "evaluate_every": 3, "max_steps": 6}
START = "weights-000000"


def run(folder: Path, **changes: Any) -> Path:
    train(parse_recipe(tiny.recipe_tree(folder, **SETTINGS | changes)))
    return folder / "run"


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run. Tests must not change it."""
    return run(tmp_path_factory.mktemp("whole"), ema_decay=0.5)


def test_they_are_the_initialization_and_stay_to_the_end(whole: Path) -> None:
    recipe = load_recipe(whole)
    torch.manual_seed(recipe.seed)
    begun = dict(GPT(recipe.model).named_parameters())
    saved = load_file(whole / "checkpoints" / START / "model.safetensors")
    assert saved.keys() == begun.keys()
    assert all(torch.equal(saved[name], begun[name]) for name in begun)
    assert choose_checkpoint(whole, "0").folder.name == START
    assert chosen_steps(whole)[0] == 0, "the slider of Through time begins there"


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_run_resumes_bit_for_bit_and_saves_them_once(
    stop_at: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before step 2, it starts at step 0 again, and saves the same weights."""
    step = Run.training_step

    def killed(run: Run) -> None:
        if run.progress.step == stop_at:
            run.state.writer.wait()
            raise KeyboardInterrupt
        step(run)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "training_step", killed)
        run(tmp_path, ema_decay=0.5)
    folder = tmp_path / "run"
    assert (folder / "checkpoints" / START).is_dir()
    went_on = newest_verified(folder)
    assert (went_on and went_on.step) == (4 if stop_at == 4 else None)
    if went_on is not None:  # what is not there is not made up for: the weights are no longer those of step 0
        shutil.rmtree(folder / "checkpoints" / START)
    train(load_recipe(folder), resume=True)
    assert_same_end(whole, folder)
    assert names(folder) == [name for name in names(whole) if name != START or went_on is None]
    if went_on is None:
        one, other = (path / "checkpoints" / START / "model.safetensors" for path in (whole, folder))
        assert one.read_bytes() == other.read_bytes()


def test_without_keep_every_none_are_saved(tmp_path: Path) -> None:
    assert START not in names(run(tmp_path, keep_every=0, max_steps=3, keep_checkpoints=9))


def test_a_fork_takes_them_along_or_does_without(whole: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(whole, tmp_path / "source"))
    assert START in names(fork(source, 4, tmp_path / "with"))
    shutil.rmtree(source / "checkpoints" / START)
    assert START not in names(fork(source, 4, tmp_path / "without"))


def write(run_dir: Path, step: int, best: int = 0, weights_only: bool = False) -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "recipe.yaml").touch()
    tensors = {"w": torch.full((8,), float(step))}
    save_checkpoint(run_dir, step, tensors, None if weights_only else {"w/m": tensors["w"]}, {"best_step": best})


def test_they_are_neither_the_best_nor_the_last(tmp_path: Path) -> None:
    """A best step of 0 means that the run has no evaluation yet."""
    write(tmp_path, 0, weights_only=True)
    for which in ("best", "last", "7"):
        with pytest.raises(UserError, match="has no checkpoint yet"):
            choose_checkpoint(tmp_path, which)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        fork(tmp_path, None, tmp_path / "forked")
    assert choose_checkpoint(tmp_path, "0").folder.name == START
    write(tmp_path, 2)
    assert [choose_checkpoint(tmp_path, which).step for which in ("best", "last", "0")] == [2, 2, 0]
    (tmp_path / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"every checkpoint of .* is damaged"):
        choose_checkpoint(tmp_path)


def test_they_go_where_no_multiples_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, weights_only=True)
    for step in (2, 4, 6):
        write(tmp_path, step)
        remove_old(tmp_path, keep=1, keep_every=4)
    assert names(tmp_path) == ["step-000004", "step-000006", START]
    remove_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000006"]


def test_the_studio_lists_and_chooses_them(whole: Path, tmp_path: Path) -> None:
    library = Library([whole.parent])
    found = library.get("run")
    listed = library.describe(found)["checkpoints"]
    assert listed[0] == {"step": 0, "best": False, "last": False, "loss": None, "resumable": False}
    assert found.choose(0).folder.name == START
    assert found.choose("last") == checkpoints(whole)[0]
    begun = Path(shutil.copytree(whole, tmp_path / "begun"))
    for one in checkpoints(begun):
        shutil.rmtree(one.folder)
    for one in (begun / "checkpoints").glob("weights-00000[1-9]"):
        shutil.rmtree(one)
    library = Library([tmp_path])
    described = library.describe(library.get("begun"))
    assert [one["step"] for one in described["checkpoints"]] == [0] and "no checkpoint yet" in described["problem"]
    for which in (None, "last"):
        with pytest.raises(APIError, match="no checkpoint yet"):
            library.get("begun").choose(which)
