"""A best checkpoint between two saves has only weights: it can be used, but training never resumes from it."""

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from gptworks import load
from gptworks.checkpoint import (
    all_checkpoints,
    checkpoint_of_step,
    checkpoints,
    choose_checkpoint,
    newest_verified,
)
from gptworks.errors import UserError
from gptworks.evaluation.evaluated_run import EvaluatedRun
from gptworks.evaluation.loss import LossReport
from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.planning.run import plan
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.runs.history import read_history
from gptworks.training import checkpoint_files
from gptworks.training.checkpoint_files import remove_newer, remove_old, save_checkpoint
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.loop import Run, train
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.distillation import TEACHER
from gptworks.training.progress import Length

SETTINGS: dict[str, Any] = {"optimizer": "adamw", "checkpoint_every": 4, "evaluate_every": 3, "max_steps": 14}
LOSSES = {3: 9.0, 6: 8.0, 9: 7.0, 12: 7.5, 14: 7.2}
"""The best are 3, 6 and 9, between the saves of 4, 8, 12 and 14."""


class BrokenOff(Exception):
    """Raised to end a run in the middle of a step."""


@contextmanager
def told(losses: dict[int, float], end_before: int | None = None) -> Iterator[None]:
    """A context in which evaluations give the loss set for each step; step `end_before` raises BrokenOff."""
    evaluate, take, step = Objective.evaluate, Run.training_step, 0

    def training_step(run: Run) -> None:
        nonlocal step
        if run.progress.step + 1 == end_before:
            run.state.writer.wait()
            raise BrokenOff
        take(run)
        step = run.progress.step

    def evaluated(task: Objective, *arguments: Any) -> Any:
        report, figures = evaluate(task, *arguments)
        return LossReport(report.n_tokens * losses[step], report.n_tokens), figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "evaluate", evaluated)
        patch.setattr(Run, "training_step", training_step)
        yield


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def contents(run_dir: Path) -> dict[str, Any]:
    """Return the bytes of all tensors, and the states without clock times."""
    found: dict[str, Any] = {}
    for path in sorted((run_dir / "checkpoints").glob("*/*")):
        if path.suffix == ".safetensors":
            found[str(path.relative_to(run_dir))] = path.read_bytes()
        elif path.name == "state.json":
            found[str(path.relative_to(run_dir))] = json.loads(path.read_bytes()) | {"seconds": None}
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed after step 10: its best checkpoint is of step 9, and it resumes from step 8."""
    folder = tmp_path_factory.mktemp("live")
    tree = tiny.recipe_tree(folder, **SETTINGS)
    tree["model"] |= {"mlp": "swiglu", "qk_norm": False}  # what other formats know
    with told(LOSSES, end_before=11), pytest.raises(BrokenOff):
        train(parse_recipe(tree))
    return folder / "run"


def test_a_best_between_saves_is_the_weights_and_state_of_its_step_without_the_optimizer(tmp_path: Path) -> None:
    """Compared with a run that saves everything at each step, with averaged weights, which are the published ones."""
    for name, changes in (("every", {"checkpoint_every": 1, "keep_checkpoints": 20}), ("light", {})):
        with told(LOSSES):
            tree = tiny.recipe_tree(tmp_path, **SETTINGS | {"ema_decay": 0.9} | changes)
            train(parse_recipe(tree | {"run_dir": str(tmp_path / name)}))
    assert names(tmp_path / "light") == ["step-000012", "step-000014", "weights-000009"]
    every, light = contents(tmp_path / "every"), contents(tmp_path / "light")
    for name, written in light.items():
        assert written == every[name.replace("weights-", "step-")], name
    assert {path.name for path in (tmp_path / "light" / "checkpoints" / "weights-000009").iterdir()} == {
        "model.safetensors", "state.json", "manifest.json",
    }  # fmt: skip


def test_what_uses_weights_takes_the_best_and_the_newest_of_either_kind(live: Path, tmp_path: Path) -> None:
    assert names(live) == ["step-000004", "step-000008", "weights-000003", "weights-000006", "weights-000009"]
    chosen = {which: choose_checkpoint(live, which).folder.name for which in ("best", "last", "6", "8")}
    assert chosen == {"best": "weights-000009", "last": "weights-000009", "6": "weights-000006", "8": "step-000008"}
    with pytest.raises(UserError, match=r"`5` is not in .*one of \[3, 4, 6, 8, 9\]"):
        choose_checkpoint(live, "5")
    best = load_file(live / "checkpoints" / "weights-000009" / "model.safetensors")
    assert all(torch.equal(best[name], p) for name, p in load(live).model.named_parameters())
    assert EvaluatedRun(live, device="cpu").validation()["step"] == 9
    assert read_history(live).data_fingerprint == checkpoints(live)[0].state()["data_fingerprint"]
    export_huggingface(live, tmp_path / "exported", verify=False)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], best["token_embedding.weight"])


def test_a_run_starts_and_learns_from_a_best_with_weights_only(
    live: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=1, warmup_steps=0, optimizer="adamw")
    tree |= {"model": load_recipe(live).model.model_dump(mode="json"), "initialize_from": str(live)}
    tree |= {"tokenizer": {"type": "file", "path": str(live / "tokenizer")}}
    tree["objective"] = {"type": "distillation", "teacher": str(live)}
    train(parse_recipe(tree))
    assert f"starting from {live}, step 9" in capfd.readouterr().err
    tree["train"]["max_steps"] = 2
    train(parse_recipe(tree), resume=True)
    assert f"the teacher is {live}, step 9" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / TEACHER).read_text())["step"] == 9


def test_a_damaged_best_with_weights_only_falls_back_to_the_one_before(live: Path, tmp_path: Path) -> None:
    shutil.copytree(live, tmp_path / "run")
    weights = tmp_path / "run" / "checkpoints" / "weights-000009" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    said: list[str] = []
    assert choose_checkpoint(tmp_path / "run", "best", said.append).folder.name == "weights-000006"
    assert choose_checkpoint(tmp_path / "run", "last").folder.name == "step-000008"
    assert "weights-000009" in said[0]
    with pytest.raises(UserError, match="is damaged"):
        choose_checkpoint(tmp_path / "run", "9")


@pytest.mark.parametrize("end_before", [4, 11])
def test_a_run_resumes_from_the_optimizer_state_before_its_best_and_makes_the_same_again(
    end_before: int, tmp_path: Path
) -> None:
    """If it has only weights, it starts from step 0 and says so."""
    tree = tiny.recipe_tree(tmp_path, **SETTINGS)
    recipes = {name: parse_recipe(tree | {"run_dir": str(tmp_path / name)}) for name in ("whole", "parts")}
    left: list[list[str]] = []
    with told(LOSSES):
        train(recipes["whole"])
    with told(LOSSES, end_before=end_before), pytest.raises(BrokenOff):
        train(recipes["parts"])
    went_on = newest_verified(tmp_path / "parts")
    assert choose_checkpoint(tmp_path / "parts").step > (went_on.step if went_on else 0)
    with told(LOSSES), pytest.MonkeyPatch.context() as patch:
        begin = Run.begin
        patch.setattr(Run, "begin", lambda run, *a: (begin(run, *a), left.append(names(tmp_path / "parts"))))
        train(recipes["parts"], resume=True)
    kept = ["step-000004", "step-000008", "weights-000003", "weights-000006"]
    assert left == [[] if went_on is None else kept], "nothing newer than where it goes on is there"
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_run_stopped_at_its_best_saves_what_it_goes_on_from_in_place_of_the_weights(tmp_path: Path) -> None:
    recipe = parse_recipe(tiny.recipe_tree(tmp_path, **SETTINGS))
    end_reason = Length.end_reason
    with told(LOSSES), pytest.MonkeyPatch.context() as patch:
        stop = lambda length, at, asked: "stopped" if at.step == 9 else end_reason(length, at, asked)  # noqa: E731
        patch.setattr(Length, "end_reason", stop)
        train(recipe)
    assert names(tmp_path / "run") == ["step-000008", "step-000009", "weights-000006"]
    with told(LOSSES):
        assert train(recipe, resume=True).step == 14


def test_weights_alone_are_refused_where_training_would_go_on(live: Path) -> None:
    newest = all_checkpoints(live)[0]
    assert newest.weights_only
    with pytest.raises(UserError, match=r"weights-000009 has weights only: .*--resume.*initialize_from="):
        newest.optimizer_tensors()
    for name in ("weights-000009", "step-000008"):
        with pytest.raises(UserError, match=rf"{name} is a checkpoint, not a run folder: .*give {live} and --resume"):
            load_recipe(live / "checkpoints" / name)


def write(run_dir: Path, step: int, best: int, weights_only: bool = False) -> None:
    (run_dir / "recipe.yaml").parent.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").touch()
    tensors = {"w": torch.full((8,), float(step))}
    save_checkpoint(run_dir, step, tensors, None if weights_only else {"w/m": tensors["w"]}, {"best_step": best})


def test_a_step_folder_without_the_optimizer_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 3, best=3, weights_only=True)
    (tmp_path / "checkpoints" / "weights-000003").rename(tmp_path / "checkpoints" / "step-000003")
    assert newest_verified(tmp_path) is None


def test_weights_only_do_not_count_and_go_once_no_kept_checkpoint_names_them(tmp_path: Path) -> None:
    best, seen = 0, []
    for step, kind in ((3, "w"), (4, "s"), (6, "w"), (7, "w"), (8, "s"), (12, "s"), (13, "w"), (13, "s")):
        best = step if kind == "w" else best
        write(tmp_path, step, best, weights_only=kind == "w")
        remove_old(tmp_path, keep=2, keep_every=6)
        seen.append(" ".join(f"{'w' if c.weights_only else 's'}{c.step}" for c in reversed(all_checkpoints(tmp_path))))
    assert seen == [
        "w3", "w3 s4", "w3 s4 w6", "w3 s4 w7", "w3 s4 w7 s8", "w7 s8 s12", "w7 s8 s12 w13",
        "w7 s12 s13",  # one that training goes on from has the best weights too
    ]  # fmt: skip


def test_weights_only_go_where_the_only_checkpoint_to_go_on_from_is_better(tmp_path: Path) -> None:
    write(tmp_path, 3, best=3, weights_only=True)
    write(tmp_path, 4, best=4)
    remove_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000004"]


def test_a_rollback_takes_weights_only_back_too_and_a_resumption_those_alone(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        write(tmp_path, step - 1, best=step - 1, weights_only=True)
        write(tmp_path, step, best=step - 1)
    remove_newer(tmp_path, 8, weights_only=True)
    assert names(tmp_path) == ["step-000004", "step-000008", "step-000012", "weights-000003", "weights-000007"]
    remove_newer(tmp_path, 4)
    assert names(tmp_path) == ["step-000004", "weights-000003"]


def test_both_kinds_of_one_step_stand_for_it_until_one_is_removed(tmp_path: Path) -> None:
    """As left by a run that was stopped at its best and killed before the cleanup."""
    write(tmp_path, 5, best=5, weights_only=True)
    write(tmp_path, 5, best=5)
    assert choose_checkpoint(tmp_path).folder.name == checkpoint_of_step(tmp_path, 5).folder.name == "step-000005"
    (tmp_path / "checkpoints" / "step-000005" / "model.safetensors").write_bytes(b"")
    assert choose_checkpoint(tmp_path).folder.name == "weights-000005"
    remove_old(tmp_path, keep=1)
    assert choose_checkpoint(tmp_path).folder.name == "weights-000005", "the other is damaged"


def test_a_folder_whose_best_has_its_optimizer_between_saves_is_read_and_goes_on(tmp_path: Path) -> None:
    """As in earlier versions, which saved everything at every improvement."""
    tree = tiny.recipe_tree(tmp_path, **SETTINGS)
    for name, changes in (("whole", {}), ("parts", {"checkpoint_every": 3})):
        recipe = parse_recipe(tree | {"run_dir": str(tmp_path / name), "train": tree["train"] | changes})
        with told(LOSSES, end_before=None if name == "whole" else 11):
            if name == "whole":
                train(recipe)
            else:
                with pytest.raises(BrokenOff):
                    train(recipe)
    assert choose_checkpoint(tmp_path / "parts").folder.name == "step-000009"
    with told(LOSSES):
        train(parse_recipe(tree | {"run_dir": str(tmp_path / "parts")}), resume=True)
    one, other = (contents(tmp_path / name) for name in ("whole", "parts"))
    assert {name.replace("weights-", "step-"): each for name, each in one.items()} == {
        name: each for name, each in other.items() if name != "checkpoints/step-000009/optimizer.safetensors"
    }


@pytest.mark.parametrize("evaluate_every", [3, 4])
def test_the_plan_has_the_most_bytes_that_a_run_s_checkpoints_take(evaluate_every: int, tmp_path: Path) -> None:
    """With losses for which most is kept: a best at a save, then one between each two saves."""
    losses = dict.fromkeys(range(1, 25), 9.0) | {12: 5.0, 18: 4.0, 20: 4.5, 24: 4.4}
    most = 0
    remove = checkpoint_files.remove_old

    def watch(run_dir: Path, *arguments: Any) -> None:
        nonlocal most
        files = (run_dir / "checkpoints").glob("*/*.safetensors")
        held = [tensor for file in files for tensor in load_file(file).values()]
        most = max(most, sum(tensor.nbytes for tensor in held if tensor.ndim))  # counts of AdamW's steps are scalars
        remove(run_dir, *arguments)

    settings = SETTINGS | {"max_steps": 24, "keep_checkpoints": 1, "evaluate_every": evaluate_every}
    with told(losses), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "remove_old", watch)
        train(parse_recipe(tiny.recipe_tree(tmp_path, **settings)))
    planned = plan(load_recipe(tmp_path / "run"))
    assert most == planned.checkpoints_bytes
    assert planned.weights_only_at_peak == (1 if evaluate_every == 3 else 0)


def counts_on_disk(run_dir: Path, settings: dict[str, Any], chance: random.Random) -> list[tuple[int, int]]:
    """Save like a run whose evaluations find a new best at random; return the numbers of full and of weights-only
    checkpoints after each save, before old ones are removed."""
    keep, keep_every, n_steps = (settings[name] for name in ("keep_checkpoints", "keep_every", "max_steps"))
    found, best, likely = [], 0, chance.random()

    def save(step: int, weights_only: bool) -> None:
        write(run_dir, step, best, weights_only)
        kinds = [one.weights_only for one in all_checkpoints(run_dir)]
        found.append((kinds.count(False), kinds.count(True)))
        remove_old(run_dir, keep, keep_every)

    if keep_every:
        save(0, weights_only=True)
    for step in range(1, n_steps + 1):
        evaluated = step % settings["evaluate_every"] == 0 or step == n_steps
        best = step if evaluated and chance.random() < likely else best
        if step % settings["checkpoint_every"] == 0 or step == n_steps:
            save(step, weights_only=False)
        elif best == step:
            save(step, weights_only=True)
    return found


def test_more_weights_only_than_at_the_peak_are_there_while_there_are_fewer_full_ones(tmp_path: Path) -> None:
    write(tmp_path, 180, best=180, weights_only=True)
    write(tmp_path, 200, best=180)
    write(tmp_path, 210, best=210, weights_only=True)
    remove_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000200", "weights-000180", "weights-000210"]
    write(tmp_path, 220, best=220, weights_only=True)
    assert len(names(tmp_path)) == 1 + 3
    remove_old(tmp_path, keep=1)
    assert names(tmp_path) == ["step-000200", "weights-000180", "weights-000220"]


@pytest.mark.parametrize(
    ("keep", "every", "evaluate_every", "keep_every"), [(1, 4, 3, 0), (1, 4, 1, 0), (2, 3, 2, 6), (1, 4, 8, 6)]
)
def test_no_order_of_bests_takes_more_bytes_than_planned(
    keep: int, every: int, evaluate_every: int, keep_every: int, tmp_path: Path
) -> None:
    settings = {
        "checkpoint_every": every, "evaluate_every": evaluate_every, "keep_checkpoints": keep, "max_steps": 21,
        "keep_every": keep_every,
    }  # fmt: skip
    tree = tiny.recipe_tree(tmp_path, **SETTINGS | settings)
    planned = plan(parse_recipe(tree | {"model": tree["model"] | {"vocab_size": 256}}))
    chance, most_bytes, most_light = random.Random(1), 0, 0
    for number in range(10):
        for n_full, n_light in counts_on_disk(tmp_path / str(number), settings, chance):
            assert planned.most_checkpoints is not None and n_full <= planned.most_checkpoints
            most_bytes = max(most_bytes, n_full * planned.checkpoint_bytes + n_light * planned.weights_bytes)
            most_light = max(most_light, n_light)
    assert planned.checkpoints_bytes is not None and most_bytes <= planned.checkpoints_bytes
    assert most_light <= planned.weights_only_at_peak + 2


def test_optimizer_state_is_copied_for_the_saves_that_write_it_only(tmp_path: Path) -> None:
    saved: list[str] = []
    parts = Parallel.parts

    def noted(parallel: Parallel, tensors: dict[str, torch.Tensor], *holders: Mapping[str, int]) -> Any:
        saved.append("moments" if any("/" in name for name in tensors) else "weights")
        return parts(parallel, tensors, *holders)

    with told(LOSSES), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parallel, "parts", noted)
        train(parse_recipe(tiny.recipe_tree(tmp_path, **SETTINGS)))
    light, whole_one = ["weights"], ["weights", "moments"]
    assert saved == light + whole_one + light + whole_one + light + whole_one * 2  # of 3, 4, 6, 8, 9, 12 and 14
