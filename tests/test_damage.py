"""Single bits turned and files cut short, at random, in checkpoints and in prepared data: each is noticed."""

import random
import shutil
from pathlib import Path

import pytest

import tiny
from gptworks.checkpoint import checkpoints
from gptworks.data.prepare import find_prepared
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe
from gptworks.train.loop import train

TRIALS = 120


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=2, warmup_steps=0)))
    return folder / "run"


def damage(path: Path, chance: random.Random) -> str:
    """Turn one bit, or cut the file at a random place."""
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
