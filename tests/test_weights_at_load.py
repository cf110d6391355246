"""Weights rounded when a run is loaded equal, bit for bit, those that `gptworks quantize` writes; and refused
inputs."""

import contextlib
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hf
import tiny
from gptworks.api import evaluate
from gptworks.checkpoint import load_run
from gptworks.choices import LoadedWeights, Weights
from gptworks.cli import app
from gptworks.cli.generate import drafter_of
from gptworks.config import LoRAConfig
from gptworks.errors import UserError
from gptworks.evaluation.results import read_evaluations
from gptworks.infer.backends.native import refusal
from gptworks.infer.engine import load
from gptworks.infer.speculate import DraftModel
from gptworks.kernels.build import Unavailable
from gptworks.kernels.library import library
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora, is_adapter
from gptworks.planning.inference import PRECISIONS, inference_memory
from gptworks.quantize.convert import pack_for
from gptworks.quantize.linear import QuantizedGPT
from gptworks.recipe import load_recipe, save_recipe
from gptworks.runs import quantized as quantize_module
from gptworks.runs.quantized import quantize_run
from gptworks.tensors import TensorFile
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.optim.trainable import trainable_model

SMALL: dict[str, Any] = {
    "vocab_size": hf.VOCABULARY, "context_length": 16, "n_layers": 2, "d_model": 64, "n_heads": 2,
}  # fmt: skip
GPT2 = {"position": "learned", "attention_bias": True, "mlp_bias": True}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 1, "d_ff": 48, "tie_embeddings": False}
EXPERTS = {"mlp": "swiglu", "d_ff": 32, "n_experts": 3, "d_ff_shared": 32}

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "tied head": (GPT2, None),
    "untied head": (LLAMA, None),
    "experts": (EXPERTS, None),
    "adapter": (LLAMA, {"rank": 3, "alpha": 5, "embeddings": True}),
    "adapter over int4": (GPT2, {"rank": 3, "base": "int4", "targets": ["query", "mlp"]}),
    "adapter of experts over int8": (EXPERTS, {"rank": 2, "base": "int8"}),
}
"""The settings of a model, and of its adapter."""


def make_run(folder: Path, name: str = "tied head") -> Path:
    """Write a run folder with random weights, and a random adapter if the run has one."""
    settings, adapter = RUNS[name]
    model = hf.random_model(tiny.plain_model(**SMALL | settings))
    hf.make_run(folder, model)
    if adapter is None:
        return folder
    lora = LoRAConfig.model_validate(adapter)
    adapted = add_lora(model, lora) if lora.base == "full" else _over_packed(model, lora)
    with torch.no_grad():
        for parameter_name, parameter in adapted.named_parameters():
            if is_adapter(parameter_name):
                parameter.normal_(std=0.1)
    save_recipe(load_recipe(folder).model_copy(update={"adapter": lora}), folder / "recipe.yaml")
    shutil.rmtree(folder / "checkpoints")
    save_checkpoint(folder, 7, adapted.state_dict(), {}, {"best_step": 7})
    return folder


def _over_packed(model: GPT, lora: LoRAConfig) -> GPT:
    packed = trainable_model(model.config, lora, None)
    packed.load_state_dict(pack_for(packed, model.state_dict()), strict=False)
    return packed


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(tiny.TEXT[:4000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in fp32. Tests must not change it."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def written(run: Path, weights: Weights, text: Path) -> Path:
    """Return the run that `gptworks quantize` makes of it, with nearest rounding."""
    out = run.parent / f"{run.name}-{weights}"
    if not out.exists():
        quantize_run(run, out, weights, rounding="nearest", texts=[text])
    return out


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ------------------------------------------------------------------------------------------ what the engine computes


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_and_outputs_are_those_of_the_run_that_quantize_writes(
    name: str, weights: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_module, "REPORT_TOKENS", 64)
    run = make_run(tmp_path / "run", name)
    engines = [load(run, weights=weights), load(written(run, weights, text))]
    models = [engine.model for engine in engines]
    assert_equal(models[0].state_dict(), models[1].state_dict())
    assert [engine.weights for engine in engines] == ["int4, int8" if weights == "int4" else "int8"] * 2
    assert {p.requires_grad for model in models for p in model.parameters()} == {True}
    backends: list[Any] = ["torch"]
    with contextlib.suppress(Unavailable):
        backends += [] if refusal(models[0]) else [library() and "native"]
    for backend in backends:
        scores = [load(one, weights=kept, backend=backend).score("line 12")
                  for one, kept in ((run, weights), (written(run, weights, text), "auto"))]  # fmt: skip
        assert scores[0] == scores[1], backend


@pytest.mark.parametrize("name", ["tied head", "untied head", "experts"])
@pytest.mark.parametrize("weights", PRECISIONS)
def test_they_take_the_memory_that_plan_counts(name: str, weights: Any, tmp_path: Path) -> None:
    model = load_run(make_run(tmp_path / "run", name), weights=weights).model
    [planned] = [row for row in inference_memory(model.config) if row.weights == weights]
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) == planned.weights_bytes


@pytest.mark.parametrize("name", RUNS)
def test_one_matrix_at_a_time_is_in_memory_in_fp32(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", name)
    read, there = TensorFile.read, weakref.WeakValueDictionary[str, Tensor]()
    modules_there = []

    def watched(file: TensorFile, *names: str) -> dict[str, Tensor]:
        assert names, "all at once"
        found = read(file, *names)
        there.update(found)
        modules_there.append({one.rpartition(".")[0] for one in there})
        return found

    monkeypatch.setattr(TensorFile, "read", watched)
    load_run(run, weights="int8")
    assert len(modules_there) > 10
    assert max(map(len, modules_there)) == 1, "a matrix, its scales and its adapter, and nothing of another module"


def test_auto_and_fp32_are_the_weights_of_the_run(run: Path) -> None:
    expected = load_run(run).model
    for weights in ("auto", "fp32"):
        found = load_run(run, weights=weights).model
        assert type(found) is GPT
        assert_equal(found.state_dict(), expected.state_dict())
    assert load(run).weights == "fp32"


# ---------------------------------------------------------------------------------------------------- what is refused


def test_a_quantized_run_has_only_its_own_weights(run: Path, text: Path) -> None:
    quantized = written(run, "int4", text)
    assert_equal(load_run(quantized, weights="int4").model.state_dict(), load_run(quantized).model.state_dict())
    others: tuple[LoadedWeights, ...] = ("fp32", "bf16", "int8")
    for weights in others:
        with pytest.raises(
            UserError, match=rf"weights={weights}: .*run-int4 is quantized already, to int4, int8\. Leave"
        ):
            load_run(quantized, weights=weights)
    for arguments in (["generate", "line"], ["chat"], ["evaluate"], ["serve"]):
        command, *rest = arguments
        done = CliRunner().invoke(app, [command, str(quantized), *rest, "--weights", "int8"])
        assert isinstance(done.exception, UserError), done.output
        assert "take the run that it was made from" in str(done.exception)


def test_a_run_whose_head_is_in_int4_too_has_weights_in_int4(run: Path, text: Path, tmp_path: Path) -> None:
    quantize_run(run, tmp_path / "int4", "int4", rounding="nearest", head="int4", texts=[text])
    found = load_run(tmp_path / "int4", weights="int4").model
    assert isinstance(found, QuantizedGPT) and found.weights == "int4"
    assert_equal(found.state_dict(), load_run(tmp_path / "int4").model.state_dict())
    with pytest.raises(UserError, match=r"weights=int8: .*int4 is quantized already, to int4\. Leave"):
        load_run(tmp_path / "int4", weights="int8")


def test_weights_that_are_not_known_or_cannot_hold_a_number_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for weights, said in (("int5", "weights=int5: .*did you mean `int"), ("q", "one of auto, fp32, bf16, int8, int4")):
        with pytest.raises(UserError, match=said):
            load(run, weights=weights)  # type: ignore[arg-type]
    model = load_run(run).model
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[3, 4] = 1e6  # type: ignore[union-attr, index]
    shutil.rmtree(run / "checkpoints")
    save_checkpoint(run, 7, model.state_dict(), {}, {"best_step": 7})
    load(run, weights="int8")
    with pytest.raises(UserError, match=r"`blocks\.1\.mlp\.up` holds a weight of magnitude 1e\+06, which int4"):
        load(run, weights="int4")


# ------------------------------------------------------------------------------------------------------- the commands


def test_the_commands_compute_with_them(run: Path, text: Path) -> None:
    arguments = ["line", "--max-tokens", "12", "--temperature", "0", "--backend", "torch"]
    texts = [
        CliRunner().invoke(app, ["generate", str(folder), *arguments, "--weights", weights]).stdout
        for folder, weights in ((run, "int4"), (written(run, "int4", text), "auto"), (run, "auto"))
    ]
    assert texts[0] == texts[1] != texts[2]
    chat = CliRunner().invoke(
        app, ["chat", str(run), "--weights", "int4", "--backend", "torch", "--temperature", "0", "--max-tokens", "5"],
        input="line",
    )  # fmt: skip
    assert chat.exit_code == 0 and texts[0].removeprefix("line")[:5].strip("\n")[:1] in chat.stdout


def test_a_draft_model_follows_unless_it_is_quantized(run: Path, text: Path) -> None:
    kinds = []
    for folder, weights in ((run, "int8"), (run, "auto"), (written(run, "int4", text), "int8")):
        drafter = drafter_of(folder, 2, folder, {"device": "cpu", "backend": "torch", "weights": weights})
        assert isinstance(drafter, DraftModel)
        kinds.append(drafter.model.weights if isinstance(drafter.model, QuantizedGPT) else "fp32")
    assert kinds == ["int8", "fp32", "int4, int8"]


def test_an_evaluation_says_which_weights_it_measured(text: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    quantized = written(run, "int4", text)
    own = evaluate(run, text=text, report=str)
    rounded = evaluate(run, text=text, weights="int4", report=str)
    assert read_evaluations(run).keys() == {"text-words", "text-words-int4"}, "each under a name of its own"
    [tree] = rounded.to_json()
    assert (tree["name"], tree["settings"]["weights"]) == ("text-words-int4", "int4")
    assert rounded.notes == ["text-words-int4: weights rounded to int4 as they were loaded; the run's own are in fp32."]
    assert rounded.notes[0].rstrip(".") in (run / "model-card.md").read_text()
    expected = evaluate(quantized, text=text, report=str)
    figures = [one.evaluations[0].metrics["loss"].value for one in (rounded, expected, own)]
    assert figures[0] == figures[1] != figures[2]
    assert expected.evaluations[0].name == "text-words", "the run's own weights are these"


def test_a_validation_loss_says_which_weights_it_measured(trained_run: Path) -> None:
    own, rounded = (evaluate(trained_run, weights=weights, report=str) for weights in ("auto", "int8"))  # type: ignore[arg-type]
    assert [json.loads(json.dumps(one.to_json()))["weights"] for one in (own, rounded)] == ["fp32", "int8"]
    assert own.to_json()["loss"] != rounded.to_json()["loss"]
    assert not any("rounded" in line for line in own.lines)
    assert sum("rounded to int8 as they were loaded; the run's own are in fp32" in line for line in rounded.lines) == 1
