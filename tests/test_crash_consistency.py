"""After a crash at any moment, a folder holds its old contents or the complete new ones: checked by enumeration.

`make test` tries the saving of checkpoints and an export onto a full disk; `make test-crashes` prepared data and
exports too, a disk that is full or fails at each operation, and runs that go on from what was left.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import crash_worker
import tiny
from crashes import WORKER, Disk, Operation, Tree, available, every_state, read_tree, record, run, write_tree
from gptworks.checkpoint import all_checkpoints, checkpoints, newest_verified
from gptworks.errors import RunError
from gptworks.training.checkpoint_files import remove_old

pytestmark = [pytest.mark.skipif(not available(), reason="strace is not installed, or may not trace here")]


MOST_RESUMED = 24
"""Of the folders that a crash can leave of a run, this many, evenly spaced over its course, are resumed."""


def enumerate_states(
    operations: list[Operation], root: Path, folder: Path, check: Callable[[list[str], Path], None]
) -> None:
    """Check each state in a folder of its own, and print the number of states."""
    n_states = 0
    for marks, tree in every_state(operations, root):
        place = write_tree(tree, folder / "state")
        try:
            check(marks, place)
        except BaseException as error:
            raise AssertionError(f"after {marks}, state {n_states}: {sorted(_names(tree))}") from error
        shutil.rmtree(place)
        n_states += 1
    changes = [operation for operation in operations if operation.kind != "mark"]
    print(f"{len(changes)} operations, {len(changes) + 1} prefixes, {n_states} different states, all consistent")
    assert n_states > len(changes)


def _names(tree: Tree, path: str = "") -> list[str]:
    names = []
    for key, node in tree.items():
        whole = f"{path}{key}"
        names += [f"{whole} ({len(node)} bytes)"] if isinstance(node, bytes) else [whole, *_names(node, f"{whole}/")]
    return names


def whole_names(run_dir: Path) -> list[str]:
    """Return the names of the checkpoints, newest first; check that each has its own weights, and that its best
    exists."""
    found = all_checkpoints(run_dir)
    for checkpoint in found:
        checkpoint.verify()
        step = checkpoint.step
        assert load_file(checkpoint.folder / "model.safetensors")["w"].unique().tolist() == [step]
        if not checkpoint.weights_only:
            assert load_file(checkpoint.folder / "optimizer.safetensors")["w/own"].unique().tolist() == [step + 1]
    for newest in (found[:1], [checkpoint for checkpoint in found if not checkpoint.weights_only][:1]):
        assert {checkpoint.best_step for checkpoint in newest} <= {each.step for each in found}, "the best is lost"
    return [checkpoint.folder.name for checkpoint in found]


def newest_of_each_kind(names: list[str]) -> list[str]:
    """Return the newest checkpoint and the newest with optimizer state, given names from the newest on."""
    return [*names[:1], *[name for name in names if name.startswith("step-")][:1]]


def check_checkpoints(marks: list[str], disk: Path) -> None:
    newest, n_saved = newest_of_each_kind(whole_names(disk / "run")), sum(mark.startswith("saved") for mark in marks)
    saved = [f"{kind}-{step:06d}" for kind, step, _ in crash_worker.SAVES]
    n_left = {"rolling back": (n_saved - 1, n_saved), "rolled back": (n_saved - 1,)}
    allowed = n_left.get(marks[-1] if marks else "", (n_saved, n_saved + 1))
    assert newest in [newest_of_each_kind(saved[:n][::-1]) for n in allowed], f"{newest} after {marks}"
    remove_old(disk / "run", keep=1)
    assert newest_of_each_kind(whole_names(disk / "run")) == newest
    if newest:
        assert not list((disk / "run" / "checkpoints").glob(".*")), "a leftover stays"


def test_a_crash_while_checkpoints_are_saved_and_deleted_leaves_whole_ones(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    operations = record("checkpoints", root, tmp_path / "trace")
    disk_now = read_tree(root)
    enumerate_states(operations, root, tmp_path, check_checkpoints)
    disk = Disk(str(root))
    for operation in operations:
        disk.apply(operation)
    assert disk.now() == disk_now, "the trace is all that has happened"


@pytest.mark.crashes
def test_saves_that_forgot_to_sync_files_or_folders_are_found(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    operations = record("checkpoints", root, tmp_path / "trace")
    folders = {operation.path for operation in operations if operation.kind == "mkdir"} | {str(root)}
    for of_folders in (False, True):  # saves that forget to sync: the enumeration finds that
        fewer = [each for each in operations if each.kind != "sync" or (each.path in folders) != of_folders]
        with pytest.raises(AssertionError, match="state"):
            enumerate_states(fewer, root, tmp_path, check_checkpoints)
        shutil.rmtree(tmp_path / "state")


def whole_or_absent(
    operations: list[Operation], root: Path, tmp_path: Path, find: Callable[[Path], Path | None]
) -> None:
    """Check that each state holds the scenario's folder byte for byte or not at all, and holds it when all is done."""
    made = find(root)
    assert made is not None
    wanted = read_tree(made)

    def check(marks: list[str], disk: Path) -> None:
        found = find(disk)
        assert found is not None or "done" not in marks, "it was done, and is lost"
        assert found is None or read_tree(found) == wanted, "it is there in part"

    enumerate_states(operations, root, tmp_path, check)


@pytest.mark.crashes
def test_a_crash_while_data_is_prepared_leaves_all_of_it_or_none(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    operations = record("prepare", root, tmp_path / "trace")

    def find(disk: Path) -> Path | None:
        return next((path for path in disk.glob("data/*") if path.is_dir() and not path.name.startswith(".")), None)

    whole_or_absent(operations, root, tmp_path, find)


@pytest.mark.crashes
def test_a_crash_while_a_run_is_exported_leaves_all_of_it_or_none(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    tiny.trained(tmp_path / "source", steps=12)
    root = tmp_path / "disk"
    root.mkdir()
    operations = record("export", root, tmp_path / "trace")
    whole_or_absent(operations, root, tmp_path, lambda disk: disk / "out" if (disk / "out").exists() else None)


@pytest.mark.crashes
@pytest.mark.timeout(3000)
def test_a_full_or_failing_disk_at_any_operation_is_named_and_costs_no_checkpoint(tmp_path: Path) -> None:
    """strace makes each call fail in turn, with "no space left" and with an input/output error."""
    template = tmp_path / "template"
    template.mkdir()
    command = [sys.executable, str(WORKER), "checkpoints", str(template)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    root = tmp_path / "disk"
    shutil.copytree(template, root)
    operations = [each for each in record("one_more", root, tmp_path / "trace") if each.call]
    n_failures = n_saved = 0
    calls = sorted({(each.call, each.number) for each in operations})
    for (call, number), error in itertools.product(calls, ("ENOSPC", "EIO")):
        shutil.rmtree(root)
        shutil.copytree(template, root)
        inject = ("-e", f"inject={call}:error={error}:when={number}")
        result = run("one_more", root, tmp_path / "trace", *inject)
        names = whole_names(root / "run")
        assert set(names) & {"step-000004", "step-000006"}, f"{call} {number}: {names}"
        if result.returncode:
            n_failures += 1
            assert result.returncode == 1, f"{call} {number}: {result.stderr}"
            assert "Traceback" not in result.stderr, f"{call} {number}: {result.stderr}"
            said = result.stderr.lower()
            assert str(root) in said, result.stderr
            assert "no space left" in said if error == "ENOSPC" else "input/output error" in said, result.stderr
            if "could not be written" in said:
                assert re.search(r"needs [\d,]+ bytes, and [\d,]+ are free on the disk mounted at /", said), said
                assert not list((root / "run" / "checkpoints").glob(".writing-*")), f"{call} {number}: a part stays"
        else:
            n_saved += 1
            assert names == ["step-000006", "weights-000005"], f"{call} {number}: nothing is said, and nothing saved"
    print(f"{len(calls)} operations, each with no space left and with an error of the disk: {n_failures} named, "
          f"{n_saved} done all the same")  # fmt: skip
    assert n_failures > len(calls)


def fail_at_each_operation(
    scenario: str, again: Callable[[Path], None], template: Path, tmp_path: Path, says: str
) -> None:
    """Let strace fail each call in turn; check that the error is reported, old files stay, new ones are complete or
    absent, and a second try succeeds."""
    root = tmp_path / "disk"
    shutil.copytree(template, root)
    before = read_tree(root)
    operations = [each for each in record(scenario, root, tmp_path / "trace") if each.call]
    whole = visible(read_tree(root))
    calls = sorted({(each.call, each.number) for each in operations})
    n_failures = 0
    for (call, number), error in itertools.product(calls, ("ENOSPC", "EIO")):
        where = f"{call} {number} {error}"
        shutil.rmtree(root)
        shutil.copytree(template, root)
        result = run(scenario, root, tmp_path / "trace", "-e", f"inject={call}:error={error}:when={number}")
        left = visible(read_tree(root))
        assert left in (visible(before), whole), where
        assert result.returncode in (0, 1), f"{where}: {result.stderr}"
        if result.returncode:
            n_failures += 1
            assert "Traceback" not in result.stderr, f"{where}: {result.stderr}"
            said = result.stderr.lower()
            assert str(root) in said and says in said, f"{where}: {said}"
            assert "no space left" in said if error == "ENOSPC" else "input/output error" in said, f"{where}: {said}"
            assert re.search(r"[\d,]+( bytes)? are free on the disk mounted at /", said), f"{where}: {said}"
            again(root)
        assert visible(read_tree(root)) == whole, f"{where}: nothing is said, and it is not whole"
    print(f"{len(calls)} operations, each with no space left and with an error of the disk: {n_failures} named, "
          f"{2 * len(calls) - n_failures} done all the same")  # fmt: skip
    assert n_failures > len(calls)


def visible(tree: Tree) -> Tree:
    """Return the tree without hidden names, which are locks and leftovers that a later run removes."""
    return {name: node if isinstance(node, bytes) else visible(node) for name, node in tree.items() if name[0] != "."}


@pytest.mark.crashes
@pytest.mark.timeout(3000)
def test_a_full_or_failing_disk_while_data_is_prepared_is_named_and_it_can_be_done_again(tmp_path: Path) -> None:
    (tmp_path / "template").mkdir()
    crash_worker.prepare(tmp_path / "template", shard_tokens=10_000)  # of another recipe: it stays
    fail_at_each_operation("prepare", crash_worker.prepare, tmp_path / "template", tmp_path, "data.cache_dir")


@pytest.mark.crashes
@pytest.mark.timeout(3000)
def test_a_full_or_failing_disk_while_a_run_is_exported_is_named_and_it_can_be_done_again(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    tiny.trained(tmp_path / "source", steps=12)
    source = read_tree(tmp_path / "source")
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "beside").write_text("stays", encoding="utf-8")
    again = crash_worker.export_unverified
    fail_at_each_operation("export_unverified", again, tmp_path / "template", tmp_path, "needs")
    assert read_tree(tmp_path / "source") == source


def test_an_export_onto_a_full_disk_names_bytes_and_disk_and_leaves_nothing(tmp_path: Path, trained_run: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "source" / "run")
    (tmp_path / "disk").mkdir()
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the weights are larger
    try:
        with pytest.raises(RunError, match=r"File too large .*needs [\d,]+ bytes, and [\d,]+ are free on the disk"):
            crash_worker.export_unverified(tmp_path / "disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "disk").iterdir())
    crash_worker.export_unverified(tmp_path / "disk")
    assert (tmp_path / "disk" / "out" / "model.safetensors").exists()


@pytest.mark.crashes
@pytest.mark.timeout(3000)
def test_runs_go_on_bit_for_bit_from_what_a_crash_has_left(tmp_path: Path) -> None:
    """A run is killed during a save, and resumes from each state of its folder that differs in its checkpoints."""
    from gptworks.recipe import load_recipe
    from gptworks.training.loop import train

    settings: dict[str, Any] = {"max_steps": 6, "checkpoint_every": 2, "evaluate_every": 1, "optimizer": "adamw"}
    (tmp_path / "whole").mkdir()
    path = tiny.write_recipe(tmp_path / "whole", **settings)
    root = tmp_path / "disk"
    root.mkdir()
    train(load_recipe(path))
    wanted = [
        (checkpoints(tmp_path / "whole" / "run")[0].folder / file).read_bytes()
        for file in ("model.safetensors", "optimizer.safetensors")
    ]
    trace = tmp_path / "trace"
    (tmp_path / "recipe").write_text(str(path), encoding="utf-8")
    operations = record("train", root, trace)
    kinds = {
        str((marks, re.sub(r"\(\d+ bytes\)", "", str(_names(tree))))): tree
        for marks, tree in every_state(operations, root)
    }
    chosen = [list(kinds)[i * len(kinds) // MOST_RESUMED] for i in range(MOST_RESUMED)]
    n_begun = 0
    for kind in chosen:
        place = write_tree(kinds[kind], tmp_path / "state")
        n_begun += newest_verified(place / "run") is not None
        assert newest_verified(place / "run") is not None or not checkpoints(place / "run"), kind
        train(load_recipe(path).model_copy(update={"run_dir": place / "run"}), resume=True)
        newest = checkpoints(place / "run")[0]
        names = ("model.safetensors", "optimizer.safetensors")
        assert [(newest.folder / file).read_bytes() for file in names] == wanted, kind
        shutil.rmtree(place)
    assert n_begun > MOST_RESUMED // 2
    print(f"{len(chosen)} of {len(kinds)} kinds of folders, {n_begun} with a checkpoint, resumed to the same weights")
