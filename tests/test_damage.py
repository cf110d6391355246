"""Flipped bits and truncated files, at random, in checkpoints, prepared data and tokenizers: each is noticed."""

import random
import shutil
import sys
from pathlib import Path

import pytest

import tiny
from gptworks.checkpoint import checkpoints
from gptworks.cli import main
from gptworks.data.prepare import find_prepared
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.infer.engine import load
from gptworks.infer.sampling import SamplingSettings
from gptworks.recipe import parse_recipe
from gptworks.tokenizer import load_tokenizer
from gptworks.training.loop import train

TRIALS = 120


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=2, warmup_steps=0)))
    return folder / "run"


def damage(path: Path, chance: random.Random) -> str:
    """Flip one bit, or truncate the file at a random place; return a description."""
    data = bytearray(path.read_bytes())
    if chance.random() < 0.7:
        at = chance.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        kind = f"bit {at} of {path.name} turned"
    else:
        del data[chance.randrange(len(data)) :]
        kind = f"{path.name} cut to {len(data)} bytes"
    path.write_bytes(data)
    return kind


def test_every_damage_to_a_checkpoint_is_noticed(run_dir: Path, tmp_path: Path) -> None:
    chance, missed = random.Random(1), []
    [checkpoint] = checkpoints(run_dir)
    for trial in range(TRIALS):
        copy = tmp_path / "run" / "checkpoints" / checkpoint.folder.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(checkpoint.folder, copy)
        name = chance.choice(["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
        kind = damage(copy / name, chance)
        if checkpoints(tmp_path / "run")[0].is_whole:
            missed.append((trial, kind))
    assert not missed


def test_every_damage_to_prepared_data_is_noticed(run_dir: Path, tmp_path: Path) -> None:
    from gptworks.recipe import load_recipe

    prepared = find_prepared(load_recipe(run_dir))
    assert prepared is not None
    chance, missed = random.Random(2), []
    shards = sorted(path.name for path in prepared.folder.iterdir() if path.is_file() and path.suffix != ".lock")
    for trial in range(TRIALS):
        copy = tmp_path / "data"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(prepared.folder, copy)
        name = chance.choice(shards)
        kind = damage(copy / name, chance)
        try:
            for split in ("train", "validation"):
                TokenShards(copy, split, verify=True)
        except UserError as error:
            assert name in str(error)
        else:
            missed.append((trial, kind))
    assert not missed


def test_every_damage_to_a_run_s_tokenizer_is_noticed(run_dir: Path, tmp_path: Path) -> None:
    chance, missed, folder = random.Random(3), [], tmp_path / "tokenizer"
    names = sorted(path.name for path in (run_dir / "tokenizer").iterdir())
    assert {"tokenizer.json", "tokenizer_config.json", "sums.json"} <= set(names)
    for trial in range(TRIALS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run_dir / "tokenizer", folder)
        name = chance.choice(names)
        kind = damage(folder / name, chance)
        try:
            load_tokenizer(folder)
        except UserError as error:
            assert name in str(error)
        else:
            missed.append((trial, kind))
    assert not missed


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "RUN", "line", "--max-tokens", "1"], ["evaluate", "RUN"], ["export", "RUN", "OUT"],
        ["chat", "RUN"], ["quantize", "RUN", "OUT", "--weights", "int8"],
        ["train", "RUN", "--resume", "--change", "train.max_steps=3"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_no_command_uses_a_tokenizer_that_has_changed(
    command: list[str], name: str, run_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    file = copy / "tokenizer" / name
    text = file.read_bytes()
    file.write_bytes(text.replace(b"unk", b"unj", 1))
    assert file.read_bytes() != text
    arguments = [str(copy) if word == "RUN" else word.replace("OUT", str(tmp_path / "out")) for word in command]
    monkeypatch.setattr(sys, "argv", ["gptworks", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2, error
    assert f"{file} is not the file that was written" in error
    assert f"changed it on purpose, delete {file.with_name('sums.json')}" in error
    assert not [path for path in tmp_path.iterdir() if path != copy], "nothing is written"


def test_a_tokenizer_changed_on_purpose_is_accepted_without_its_sums(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "tokenizer"
    shutil.copytree(run_dir, folder.parent)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{", '{"model_max_length": 32,', 1))
    with pytest.raises(UserError, match="changed it on purpose"):
        load(folder.parent)
    (folder / "sums.json").unlink()
    assert load(folder.parent).complete("line", SamplingSettings(max_tokens=1))
