"""Bad input: one clear message with value, rule and fix; exit code 2 or 1; no partial files."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml

import commands
import tiny
from gptworks.checkpoint import checkpoints
from gptworks.data.prepare import prepare
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.training.loop import train
from gptworks.training.record.display import Display
from in_process import Command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trained")
    train(parse_recipe(tiny.recipe_tree(folder, max_steps=4, evaluate_every=4)), display=Display())
    return folder


def copy_of(trained: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", f"{trained}/.", folder], check=True)
    text = (folder / "run" / "recipe.yaml").read_text(encoding="utf-8").replace(str(trained), str(folder))
    (folder / "run" / "recipe.yaml").write_text(text, encoding="utf-8")
    return folder / "run"


def prepare_for(run_dir: Path) -> Path:
    """Prepare the data of a copied run again, since its text is at another path now."""
    return prepare(load_recipe(run_dir)).folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def assert_clear(code: int, error: str, *expected: str, exit_code: int = 2) -> None:
    assert code == exit_code, error
    assert "Traceback" not in error
    assert [line.startswith("error: ") for line in error.splitlines()].count(True) == 1, error
    for text in expected:
        assert text in error


# ------------------------------------------------------------------------------------------------- recipes

RECIPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"train.max_step": 3}, ("`train.max_step`", "did you mean `max_steps`")),
    "wrong type": ({"model.n_layers": "six"}, ("`model.n_layers`", "six", "a whole number")),
    "heads that do not divide": ({"model.n_heads": 3}, ("d_model=32", "n_heads=3", "choose n_heads that divides")),
    "odd head width with RoPE": ({"model.d_head": 15}, ("d_head=15", "rope")),
    "window beyond the context": ({"model.window": 99}, ("window=99", "context_length=32")),
    "unknown preset": ({"model": {"preset": "gpt2-tinny"}}, ("gpt2-tinny", "did you mean `gpt2-tiny`")),
    "batch that does not divide": ({"train.micro_batch_size": 3}, ("batch_size=8", "micro_batch_size=3")),
    "a run without an end": ({"train.max_steps": None}, ("no end", "max_steps", "epochs")),
    "vocabulary of another tokenizer": ({"model.vocab_size": 512}, ("model.vocab_size=512", "must be equal")),
    "a source of unknown type": ({"data.sources.0.type": "txt"}, ("`txt`", "did you mean `text`")),
    "a missing file": ({"data.sources.0.path": "absent.txt"}, ("absent.txt",)),
    "fp16 on a CPU": ({"train.precision": "fp16"}, ("fp16", "CUDA")),
    "a device that is not here": ({"train.device": "mps"}, ("mps", "not available")),
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_bad_recipe_is_refused_before_any_work(case: str, tmp_path: Path, command: Command) -> None:
    changes, expected = RECIPES[case]
    recipe = tiny.write_recipe(tmp_path)
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    code, error = command("train", recipe, *overrides)
    assert_clear(code, error, *expected)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "data").glob("[!.]*")), "it was refused after preparing the data"


def test_a_recipe_that_is_not_there_or_not_yaml(tmp_path: Path, command: Command) -> None:
    assert_clear(*command("train", tmp_path / "absent.yaml"), "absent.yaml", "no such recipe")
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: [1, 2", encoding="utf-8")
    assert_clear(*command("plan", broken), "not readable YAML")
    assert_clear(*command("train", tiny.write_recipe(tmp_path), "max_steps"), "max_steps", "key.path=value")


# ---------------------------------------------------------------------------------------------------- data


def write_text(folder: Path, data: bytes) -> Path:
    recipe = tiny.write_recipe(folder)
    (folder / "text.txt").write_bytes(data)
    return recipe


TEXTS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("text",)),
    "binary": (b"GIF89a\x00\x01" * 100, ("text.txt", "binary")),
    "not UTF-8": (b"caf\xe9 " * 400, ("text.txt", "UTF-8")),
    "shorter than the context": (b"only a few words here, no more", ("context_length=32", "the corpus is too small")),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_cannot_be_trained_on(case: str, tmp_path: Path, command: Command) -> None:
    data, expected = TEXTS[case]
    code, error = command("train", write_text(tmp_path, data))
    assert_clear(code, error, *expected)
    assert not (tmp_path / "run").exists()
    assert not [name for name in files(tmp_path) if ".partial" in name]


def test_too_little_text_for_the_vocabulary(tmp_path: Path, command: Command) -> None:
    recipe = tiny.write_recipe(tmp_path)
    code, error = command("data", "build", recipe, "tokenizer={type: bpe, vocab_size: 30000}")
    assert_clear(code, error, "tokenizer.vocab_size=30000", "yields")
    assert not list((tmp_path / "data").glob("tiny-*"))


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_corrupt_shard_is_named(damage: str, trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    shard = prepare_for(run_dir) / "train-00000.tokens"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data if damage == "flip" else data[:-2])
    code, error = command("train", run_dir, "--resume", "--change", "train.max_steps=8")
    assert_clear(code, error, shard.name, "data build` again")


def test_a_missing_tokenizer_file(tmp_path: Path, command: Command) -> None:
    recipe = tiny.write_recipe(tmp_path)
    code, error = command("train", recipe, "tokenizer={type: file, path: absent.json}")
    assert_clear(code, error, "absent.json")


def test_a_garbled_tokenizer_file(tmp_path: Path, command: Command) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    code, error = command("data", "build", tiny.write_recipe(tmp_path), f"tokenizer={{type: file, path: {tmp_path}}}")
    assert_clear(code, error, "tokenizer.json")


# ---------------------------------------------------------------------------------------------- run folders


def test_a_run_is_never_overwritten(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    before = files(run_dir)
    code, error = command("train", tiny.write_recipe(tmp_path))
    assert_clear(code, error, "already holds a run", "--resume", "run_dir=")
    assert files(run_dir) == before


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, command: Command) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    assert_clear(*command("train", tiny.write_recipe(tmp_path)), "holds other files", "run_dir=")
    assert files(tmp_path / "run") == {"thesis.tex"}


def test_a_run_folder_in_use(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    with filelock.FileLock(run_dir / ".lock"):
        result = tiny.gptworks("train", run_dir, "--resume", "--change", "train.max_steps=8")
    assert_clear(result.returncode, result.stderr, "in use by another process")


def test_resuming_with_another_model(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    code, error = command("train", run_dir, "--resume", "model.n_layers=3")
    assert_clear(code, error, "was started with model.n_layers=2, and it is now 3", "Resume with model.n_layers=2")


def test_resuming_on_text_that_has_changed(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    (tmp_path / "text.txt").write_text(tiny.TEXT.replace("fox", "xof"), encoding="utf-8")
    code, error = command("train", run_dir, "--resume", "--change", "train.max_steps=8")
    assert_clear(code, error, "data has changed")


def test_every_checkpoint_truncated(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    for checkpoint in checkpoints(run_dir):
        weights = checkpoint.folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    code, error = command("generate", run_dir, "line")
    assert code == 2
    assert "model.safetensors is damaged" in error
    assert "every checkpoint of" in error
    assert "Traceback" not in error


def test_a_tokenizer_of_another_vocabulary_in_the_run(trained: Path, tmp_path: Path, command: Command) -> None:
    run_dir = copy_of(trained, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "text.txt").write_text("abc " * 2000 + "".join(map(chr, range(0x400, 0x480))), encoding="utf-8")
    tree = tiny.recipe_tree(other)
    tree["data"]["validation"] = {"fraction": 0.5, "by": "tail"}
    (other / "r.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (other / "text.txt").write_text("".join(map(chr, range(0x400, 0x480))) * 50, encoding="utf-8")
    assert tiny.gptworks("data", "build", other / "r.yaml").returncode == 0
    [tokenizer] = (other / "data").glob("*/tokenizer")
    subprocess.run(["cp", "-r", f"{tokenizer}/.", run_dir / "tokenizer"], check=True)
    (run_dir / "tokenizer" / "sums.json").unlink()
    code, error = command("generate", run_dir, "line")
    assert_clear(code, error, "vocabulary", "do not belong together")


def test_what_is_not_a_run(tmp_path: Path, command: Command) -> None:
    assert_clear(*command("generate", tmp_path / "absent", "x"), "no such run folder")
    assert_clear(*command("evaluate", tmp_path), "not a run folder")


def test_a_checkpoint_that_is_not_there(trained: Path, command: Command) -> None:
    assert_clear(*command("generate", trained / "run", "x", "--checkpoint", "3"), "`3`", "best, last or one of")


# ------------------------------------------------------------------------------------------------ generating


def test_a_prompt_longer_than_the_context(trained: Path, command: Command) -> None:
    code, error = command("generate", trained / "run", "line " * 20)
    assert_clear(code, error, "100 tokens", "context 32", "slide")


SAMPLING: dict[str, tuple[list[str], str]] = {
    "negative temperature": (["--temperature", "-1"], "temperature"),
    "top-p of two": (["--top-p", "2"], "top_p"),
    "no tokens": (["--max-tokens", "0"], "max_tokens"),
    "zero penalty": (["--repetition-penalty", "0"], "repetition_penalty"),
}


@pytest.mark.parametrize("case", SAMPLING)
def test_impossible_sampling(case: str, trained: Path, command: Command) -> None:
    options, name = SAMPLING[case]
    assert_clear(*command("generate", trained / "run", "line", *options), name)


def test_options_that_do_not_exist(trained: Path, command: Command) -> None:
    code, error = command("generate", trained / "run", "x", "--temprature", "1")
    assert code == 2
    assert "--temperature" in error
    assert "Traceback" not in error


# ------------------------------------------------------------------------------------------------ full disks


def limited(n_bytes: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command with a limit on the size of files."""
    limit = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, ({n_bytes}, {n_bytes}))"
    return commands.run("-c", f"{limit}; runpy.run_module('gptworks', run_name='__main__')", *arguments)


def test_a_full_disk_while_preparing(tmp_path: Path) -> None:
    recipe = tiny.write_recipe(tmp_path)
    result = limited(20_000, "data", "build", recipe)
    assert_clear(result.returncode, result.stderr, "data", exit_code=1)
    assert not list((tmp_path / "data").glob("tiny-*/manifest.json"))
    assert not [name for name in files(tmp_path) if ".partial" in name]
    assert tiny.gptworks("data", "build", recipe).returncode == 0


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(trained: Path, tmp_path: Path) -> None:
    run_dir = copy_of(trained, tmp_path)
    prepare_for(run_dir)
    before = checkpoints(run_dir)[0]
    result = limited(60_000, "train", run_dir, "--resume", "--change", "train.max_steps=8")
    expected = ("could not be written", f"Earlier ones kept: {before.folder.name}")
    assert_clear(result.returncode, result.stderr, *expected, exit_code=1)
    assert checkpoints(run_dir) == [before]
    before.verify()


def test_a_run_folder_that_cannot_be_made(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").touch()
    recipe = tiny.write_recipe(tmp_path)
    code, error = command("train", recipe, f"run_dir={tmp_path / 'file'}")
    assert_clear(code, error, "is a file", "run_dir=")
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        assert_clear(*command("train", recipe), "cannot be written", exit_code=1)


# ------------------------------------------------------------------------------------------ diverging training


def test_non_finite_steps_are_skipped_counted_and_end_the_run(tmp_path: Path, command: Command) -> None:
    recipe = tiny.write_recipe(tmp_path)
    arguments = ("train.learning_rate=1e15", "train.muon_learning_rate=1e15", "train.max_skipped_steps=3")
    code, error = command("train", recipe, *arguments, "train.checkpoint_every=1", "train.warmup_steps=0")
    assert code == 1
    assert "skipped: its" in error
    assert "3 steps in a row were skipped, the last at step" in error
    assert "last good checkpoint is" in error
    assert "Traceback" not in error
