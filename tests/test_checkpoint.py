"""Checkpoints: complete or absent, verified, and damage is reported."""

import json
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks import checkpoint as checkpoint_module
from gptworks.checkpoint import (
    checkpoints,
    choose_checkpoint,
    load_model,
    load_run,
    newest_verified,
)
from gptworks.errors import RunError, UserError
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe
from gptworks.training import checkpoint_files, state
from gptworks.training.checkpoint_files import CheckpointWriter, TensorPart, remove_old, save_checkpoint
from gptworks.training.loop import train
from tiny import plain_model, recipe_tree

CONFIG = plain_model(vocab_size=30, context_length=16, n_layers=2, d_model=16, n_heads=2, tie_embeddings=True)


def write(run_dir: Path, step: int, best: int = 0) -> None:
    torch.manual_seed(step)
    (run_dir / "recipe.yaml").parent.mkdir(parents=True, exist_ok=True)
    (run_dir / "recipe.yaml").touch()
    save_checkpoint(run_dir, step, GPT(CONFIG).state_dict(), {"a/b": torch.ones(3)}, {"step": step, "best_step": best})


def test_weights_come_back_bit_for_bit_and_are_plain_safetensors(tmp_path: Path) -> None:
    write(tmp_path, 7)
    [checkpoint] = checkpoints(tmp_path)
    checkpoint.verify()
    torch.manual_seed(7)
    expected = GPT(CONFIG)
    loaded = load_model(checkpoint, CONFIG)
    for (name, a), b in zip(expected.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), name
    tokens = torch.randint(30, (1, 16))
    assert torch.equal(expected.eval()(tokens), loaded(tokens))
    assert {path.name for path in checkpoint.folder.iterdir()} == {
        "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json",
    }  # fmt: skip


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_any_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path, file: str, damage: str) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = tmp_path / "checkpoints" / "step-000002" / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    said: list[str] = []
    found = newest_verified(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert file in said[0]


def test_an_unreadable_manifest_is_damage(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-000001" / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"every checkpoint .* is damaged"):
        choose_checkpoint(tmp_path)


def test_an_interrupted_write_is_never_read_and_is_cleaned_up(tmp_path: Path) -> None:
    write(tmp_path, 1)
    leftover = tmp_path / "checkpoints" / ".writing-step-000002"
    shutil.copytree(tmp_path / "checkpoints" / "step-000001", leftover)
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [1]
    remove_old(tmp_path, keep=2)
    assert not leftover.exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step, best=min(step, 2))
        remove_old(tmp_path, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [6, 5, 2]
    assert choose_checkpoint(tmp_path, "best").step == 2
    assert choose_checkpoint(tmp_path, "last").step == 6
    assert choose_checkpoint(tmp_path, "5").step == 5
    for name in ("4", "²", "9" * 5000):
        with pytest.raises(UserError, match="use best, last or one of"):
            choose_checkpoint(tmp_path, name)


def test_each_kept_checkpoint_keeps_the_best_that_it_knows_of(tmp_path: Path) -> None:
    """So the best exists even if the newest checkpoint is damaged or rolled back."""
    write(tmp_path, 1, best=1)
    write(tmp_path, 2, best=1)
    write(tmp_path, 3, best=1)
    write(tmp_path, 4, best=4)
    remove_old(tmp_path, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [4, 3, 1]
    (checkpoints(tmp_path)[0].folder / "model.safetensors").write_bytes(b"")
    assert choose_checkpoint(tmp_path, "best").step == 1


def test_files_are_summed_once_and_again_where_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[str] = []
    sum_file = checkpoint_module.sha256_file

    def counted(path: Path, *, inside: Path | None = None) -> str:
        summed.append(path.name)
        return sum_file(path, inside=inside)

    for module in (checkpoint_module, checkpoint_files):
        monkeypatch.setattr(module, "sha256_file", counted)
    writer = CheckpointWriter(tmp_path, keep=2)

    def save(step: int) -> int:
        """Save this step, and return the number of files read for it."""
        summed.clear()
        weights = {"a": TensorPart.whole(torch.full((4,), float(step)))}
        writer.save(step, {"model": weights.items(), "optimizer": {}.items()}, {"best_step": 0})
        writer.wait()
        return len(summed)

    n_files = 3
    assert [save(step) for step in (1, 2, 3)] == [n_files] * 3
    path = checkpoints(tmp_path)[0].folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert save(4) > n_files, "it looks changed, and is read again"
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [4, 3, 2]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path: Path) -> None:
    write(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"x/y": torch.ones(200_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            RunError,
            match=r"step 2 could not be written.*needs 8\d\d,\d\d\d bytes, and [\d,]+ are free on the disk mounted at /"
            r".*Earlier ones kept: step-000001",
        ):
            save_checkpoint(tmp_path, 2, GPT(CONFIG).state_dict(), big, {"best_step": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    checkpoints(tmp_path)[0].verify()


def test_a_save_that_waits_for_the_one_before_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_awaited = threading.Event()

    def save(run_dir: Path, step: int, *arguments: Any) -> Any:
        if step == 2:
            is_awaited.wait(60)
            time.sleep(0.1)
        return save_checkpoint(run_dir, step, *arguments)

    class Writer(checkpoint_files.CheckpointWriter):
        def wait(self) -> None:
            if self._in_flight is not None:
                is_awaited.set()
            super().wait()

    monkeypatch.setattr(checkpoint_files, "save_checkpoint", save)
    monkeypatch.setattr(state, "CheckpointWriter", Writer)
    monkeypatch.setattr(state, "_REPORTED_WAIT_SECONDS", 0.1)
    train(parse_recipe(recipe_tree(tmp_path, max_steps=6, checkpoint_every=2, evaluate_every=6)))
    waits = [line for line in "".join(capsys.readouterr()).splitlines() if "waited" in line]
    assert waits == ["step 4: waited 0 s until the previous checkpoint was written (train.checkpoint_every=2)"]


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, 1)
    other = CONFIG.model_copy(update={"d_ff": 99})
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.down\.weight.*\[16, 64\].*\[16, 99\]"):
        load_model(checkpoints(tmp_path)[0], other)


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder"):
        load_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"has no recipe\.yaml"):
        load_run(tmp_path)
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(tmp_path)


def test_manifest_lists_every_file_with_its_sum(tmp_path: Path) -> None:
    write(tmp_path, 3)
    manifest = json.loads((tmp_path / "checkpoints" / "step-000003" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["step"] == 3
    assert set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
