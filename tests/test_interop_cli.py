"""`gptworks export` and `gptworks import`: from a trained run to a Hugging Face folder, and back to a run that is
trained further."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

import tiny
from gptworks.checkpoint import load_run
from gptworks.cli import app
from gptworks.config import FileTokenizer
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe, parse_recipe
from gptworks.tokenizer import load_tokenizer, prompt_ids
from gptworks.training.loop import train


def gptworks(*arguments: str | Path) -> str:
    """Run a command in this process and return its output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def recipe_tree(folder: Path, **model: Any) -> dict[str, Any]:
    tree = tiny.recipe_tree(folder, max_steps=8, precision="fp32")
    return tree | {"model": tree["model"] | {"mlp": "swiglu"} | model}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run, its export and the import of it."""
    folder = tmp_path_factory.mktemp("interop")
    train(parse_recipe(recipe_tree(folder)))
    exported = tiny.gptworks("export", folder / "run", folder / "hf", new=True)
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith(f"wrote {folder / 'hf'}: Qwen3ForCausalLM, 34,368 parameters, fp32\nequal in ")
    assert exported.stderr.splitlines() == [
        "writing a Qwen3ForCausalLM of 34,368 parameters",
        "comparing it with the run in transformers",
    ], "nothing of transformers on the terminal"
    made, equal = gptworks("import", folder / "hf", folder / "back").splitlines()
    assert made == f"made {folder / 'back'} of a Qwen3ForCausalLM: 34,368 parameters"
    assert equal.startswith("equal in transformers: logits within ")
    return folder


def test_what_is_not_there_and_what_is_no_adapter_are_told_apart(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing: no such folder"):
        gptworks("import", tmp_path / "missing", tmp_path / "made", "--base", folder / "run")
    with pytest.raises(UserError, match="hf is not an adapter: drop --base"):
        gptworks("import", folder / "hf", tmp_path / "made", "--base", folder / "run")
    assert not (tmp_path / "made").exists()


def test_the_folder_has_what_its_readers_look_for(folder: Path) -> None:
    assert {path.name for path in (folder / "hf").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "README.md",
    }  # fmt: skip
    card = (folder / "hf" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "greedy tokens from a cache are equal" in card
    assert "dropout_residual=0.1, which only training uses, is left out" in card
    assert "## Training" in card
    assert str(folder) not in card


def test_a_pipeline_of_transformers_continues_as_the_engine_does(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    assert ids[0].tolist() == prompt_ids(load_tokenizer(folder / "run" / "tokenizer"), "the quick")
    theirs = tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0])
    ours = gptworks("generate", folder / "run", "the quick", "--max-tokens", "20", "--temperature", "0")
    assert ours == theirs + "\n"
    assert ours == gptworks("generate", folder / "back", "the quick", "--max-tokens", "20", "--temperature", "0")


def test_the_imported_run_has_the_same_weights_and_is_described(folder: Path) -> None:
    before, after = (load_run(folder / name).model for name in ("run", "back"))
    theirs = after.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in before.state_dict().items())
    assert "34,368" in gptworks("describe", folder / "back")
    exported = json.loads(gptworks("export", folder / "back", folder / "hf2", "--json"))
    assert exported["architecture"] == "Qwen3ForCausalLM"
    file = json.loads(gptworks("export", folder / "back", folder / "run.gguf", "--format", "gguf", "--json"))
    made = json.loads(gptworks("import", folder / "hf2", folder / "back2", "--no-verify", "--json"))
    assert not tiny.odd_keys([exported, file, made])
    assert exported["verification"]["logit_difference"] < 1e-5
    first, second = (load_file(folder / name / "model.safetensors") for name in ("hf", "hf2"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_imported_run_is_evaluated_on_its_recipes_text_and_trained_further(folder: Path) -> None:
    recipe = folder / "back" / "recipe.yaml"
    tree = yaml.safe_load(recipe.read_text())
    assert tree["data"]["sources"] == [{"type": "python-stdlib"}]
    with pytest.raises(UserError, match=r"was imported and has no held-out text.*Give --text FILE"):
        gptworks("evaluate", folder / "back", "--json")
    data = recipe_tree(folder)["data"]
    recipe.write_text(yaml.safe_dump(tree | {"data": tree["data"] | data}))
    before, after = (
        json.loads(gptworks("evaluate", folder / name, "--json", "--precision", "fp32", "--device", "cpu"))["loss"]
        for name in ("run", "back")
    )
    assert after == pytest.approx(before, abs=1e-6)

    with pytest.raises(UserError, match="was imported and has no training to resume"):
        gptworks("train", folder / "back", "--resume", "train.device=cpu")
    gptworks("train", folder / "back", f"initialize_from={folder / 'back'}", f"run_dir={folder / 'further'}",
             "train.max_steps=3", "train.warmup_steps=0", "train.device=cpu", "train.precision=fp32")  # fmt: skip
    metrics = [json.loads(line) for line in (folder / "further" / "metrics.jsonl").read_text().splitlines()]
    assert next(record["loss"] for record in metrics if record["kind"] == "validation") < before + 0.05
    gptworks("export", folder / "further", folder / "hf3")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of a file as Linux does")
@pytest.mark.parametrize(
    "command",
    [
        ("export", "run"),
        ("export", "run", "--format", "gguf"),
        ("quantize", "run", "--weights", "int8"),
        ("import", "hf"),
    ],
    ids=["hf", "gguf", "quantize", "import"],
)
def test_a_disk_that_is_full_or_refuses_is_named_and_nothing_is_left(
    folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    name, source, *options = command
    arguments = [*options, *(["--no-verify"] if name != "quantize" and "gguf" not in options else [])]
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/new could not be written: (Not a directory|File exists) \(.*file.*\)\."):
        gptworks(name, folder / source, tmp_path / "file" / "new", *arguments)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the weights are larger
    try:
        with pytest.raises(RunError, match=r"could not be written.*(File too large|\d+ requested).* free on the disk"):
            gptworks(name, folder / source, tmp_path / "new", *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_no_class_computes_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    tree = recipe_tree(tmp_path, mlp="relu2")
    tree["train"] |= {"max_steps": 1, "warmup_steps": 0}
    train(parse_recipe(tree))
    refused = tiny.gptworks("export", tmp_path / "run", tmp_path / "hf")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no architecture of transformers computes this model: `qwen3` lacks")
    assert "model.qk_norm=true" in refused.stderr
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "onnx"], "'onnx' is not one of 'hf', 'gguf'"),
        (["--dtype", "fp8"], "'fp8' is not one of 'fp32', 'bf16', 'fp16'"),
        (["--format", "gguf", "--type", "q5"], "'q5' is not one of 'f32', 'f16', 'bf16', 'q8_0', 'q4_0'"),
        (["--checkpoint", "99"], "checkpoint `99` is not in"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str, folder: Path) -> None:
    refused = CliRunner().invoke(app, ["export", str(folder / "run"), str(folder / "other"), *options])
    assert message in refused.stderr + str(refused.exception)
    assert not (folder / "other").exists()


def test_an_imported_recipe_is_whole(folder: Path) -> None:
    recipe = load_recipe(folder / "back")
    assert recipe.name == "back"
    assert recipe.initialize_from is None
    assert recipe.tokenizer == FileTokenizer(type="file", path=folder / "back" / "tokenizer")
    card = (folder / "back" / "model-card.md").read_text()
    assert "imported, not trained" in card and "initialize_from=" in card
