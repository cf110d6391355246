"""PEFT's file format: our adapter loads in peft with equal logits, and peft's loads here."""

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gptworks.checkpoint import load_run
from gptworks.config import LoRAConfig
from gptworks.errors import RunError, UserError
from gptworks.interop.huggingface import export_huggingface
from gptworks.interop.peft import export_adapter, import_adapter
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora, is_adapter
from gptworks.quantize.convert import pack_for
from gptworks.recipe import load_recipe, save_recipe
from gptworks.training.checkpoint_files import save_checkpoint
from gptworks.training.optim.trainable import trainable_model
from hf import VOCABULARY, make_run, random_model, tokens
from tiny import plain_model

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'gptworks[interop]'")

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "context_length": 64, "n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"position": "learned", "attention_bias": True, "mlp_bias": True},
    "gpt_neox": {"parallel_residual": True, "rope_fraction": 0.5, "attention_bias": True, "mlp_bias": True},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 2},
    "mixtral": {"norm": "rmsnorm", "mlp": "swiglu", "n_experts": 4},
    "qwen3": {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "tie_embeddings": False},
}


def adapted_run(folder: Path, settings: dict[str, Any], adapter: dict[str, Any], seed: int = 0) -> Path:
    """Write a run folder with random weights and a random adapter, as training leaves one."""
    model = random_model(plain_model(**SMALL, **settings), seed)
    make_run(folder, model)
    lora = LoRAConfig.model_validate(adapter)
    add_lora(model, lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    save_recipe(load_recipe(folder).model_copy(update={"adapter": lora}), folder / "recipe.yaml")
    shutil.rmtree(folder / "checkpoints")
    save_checkpoint(folder, 7, model.state_dict(), {}, {"best_step": 7})
    return folder


def test_an_adapter_over_a_packed_base_is_exported_beside_the_base_unpacked(tmp_path: Path) -> None:
    """With the original weights it would compute something else, so another base is refused."""
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 3, "base": "int4"})
    [checkpoint] = (run / "checkpoints").iterdir()
    lora = load_recipe(run).adapter
    assert lora is not None
    packed = trainable_model(load_recipe(run).model, lora, None)
    tensors = pack_for(packed, load_file(checkpoint / "model.safetensors"))
    shutil.rmtree(checkpoint)
    save_checkpoint(run, 7, tensors, {}, {"best_step": 7})
    made = export_adapter(run, tmp_path / "peft")
    assert made.logit_difference is not None and made.logit_difference < 1e-3
    with pytest.raises(UserError, match=r"was trained on weights rounded to int4.*leave --base out"):
        export_adapter(run, tmp_path / "other", base=tmp_path / "peft" / "base")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with the `run` of a random model of a family, and its `base` for transformers. Tests must not change
    it."""

    @cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        make_run(folder / "run", random_model(plain_model(**SMALL, **FAMILIES[family])))
        export_huggingface(folder / "run", folder / "base", verify=False)
        return folder

    return made


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported adapter. Tests must not change it."""
    folder = tmp_path_factory.mktemp("exported")
    run = adapted_run(folder / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, folder / "out", verify=False)
    return folder / "out"


def in_peft(base: Path, adapter: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits: torch.Tensor = peft.PeftModel.from_pretrained(model, adapter).eval()(tokens()).logits
    return logits


def ours(run: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_run(run).model(tokens())
    return logits


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        ("gpt2", {"rank": 3, "alpha": 5}),
        ("gpt2", {"rank": 2, "targets": ["query", "value", "down"]}),
        ("gpt_neox", {"rank": 4}),
        ("gpt_neox", {"rank": 4, "targets": ["key"]}),
        ("llama", {"rank": 8}),
        ("mixtral", {"rank": 2}),
        ("qwen3", {"rank": 3, "alpha": 7, "targets": ["attention"], "dropout": 0.1}),
    ],
)
def test_an_adapter_of_ours_is_equal_in_peft(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES[family], adapter)
    made = export_adapter(run, tmp_path / "out")
    assert json.loads((tmp_path / "out/base/config.json").read_text())["model_type"] == family
    theirs, merged = in_peft(tmp_path / "out/base", tmp_path / "out"), ours(run)
    assert (theirs - merged).abs().max() <= 1e-5 * max(1.0, merged.abs().max().item())
    with torch.no_grad():
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/base")(tokens()).logits
    assert (plain - merged).abs().max() > 0.01, "the adapter does nothing"
    assert made.logit_difference is not None and made.logit_difference <= 1e-4

    again = import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")
    assert (ours(again.run_dir) - merged).abs().max() <= 1e-5 * max(1.0, merged.abs().max().item())


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("kind", ["plain", "patterns"])
def test_an_adapter_of_pefts_loads_here(family: str, kind: str, tmp_path: Path, bases: Callable[[str], Path]) -> None:
    run, base = bases(family) / "run", bases(family) / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    if kind == "patterns":
        first = {"gpt2": "h.0.mlp.c_fc", "gpt_neox": "layers.0.mlp.dense_h_to_4h", "llama": "layers.0.mlp.up_proj"}
        settings |= {"rank_pattern": {first[family]: 2}, "alpha_pattern": {first[family]: 9}, "use_rslora": True}
    torch.manual_seed(3)
    theirs = peft.get_peft_model(model, peft.LoraConfig(**settings, init_lora_weights=False)).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    imported = import_adapter(tmp_path / "adapter", tmp_path / "run", base)
    with torch.no_grad():
        expected = theirs(tokens()).logits
    got = ours(tmp_path / "run")
    assert (got - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    beside_run = import_adapter(tmp_path / "adapter", tmp_path / "again", run)
    assert (ours(beside_run.run_dir) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert imported.adapter.rank == 4


INITS = [True, False, "gaussian", "orthogonal", "eva", "pissa", "olora", "OLoRA"]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize("init", INITS)
def test_every_start_of_an_adapter_gives_pefts_logits(
    family: str, init: bool | str, tmp_path: Path, bases: Callable[[str], Path]
) -> None:
    """An untrained PiSSA or OLoRA adapter changes no logits: it holds the part that was taken from the base."""
    run, base = bases(family) / "run", bases(family) / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = model(tokens()).logits
    square = {"gpt2": ["attn.c_proj"], "gpt_neox": ["dense"], "llama": ["q_proj", "o_proj"]}  # as OLoRA needs of Conv1D
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "init_lora_weights": init}
    settings["target_modules"] = square[family] if str(init).lower() == "olora" else "all-linear"
    settings |= {"alpha_pattern": {"o_proj": 3}, "use_rslora": init == "pissa"}
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of EVA, that its start needs data
        theirs = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    for name in ("untrained", "trained"):
        if name == "trained":
            with torch.no_grad():
                for part, parameter in theirs.named_parameters():
                    if "lora_" in part:
                        parameter.add_(torch.randn(parameter.shape), alpha=0.05)
        theirs.save_pretrained(tmp_path / name)
        with torch.no_grad():
            expected = theirs(tokens()).logits
        moves = init in (False, "orthogonal") or (
            family == "gpt2" and "olora" in str(init).lower()
        )  # GPT-2's: PEFT's bug
        if name == "untrained" and not moves:
            assert (expected - plain).abs().max() <= 1e-5
        imported = import_adapter(tmp_path / name, tmp_path / f"{name}-run", base if name == "untrained" else run)
        assert (ours(imported.run_dir) - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
        assert imported.logit_difference is not None and imported.logit_difference <= 1e-4


def test_layers_that_peft_leaves_out_stay_plain(tmp_path: Path) -> None:
    run = make_run(tmp_path / "base-run", random_model(plain_model(**SMALL, **FAMILIES["llama"])))
    base = tmp_path / "base"
    export_huggingface(run, base, verify=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    some = {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.up_proj"}
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **some)
    theirs = peft.get_peft_model(model, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    import_adapter(tmp_path / "adapter", tmp_path / "run", base)
    with torch.no_grad():
        expected = theirs(tokens()).logits
    assert (ours(tmp_path / "run") - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_a_missing_half_of_a_pair_is_named(half: str, tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "out", verify=False)
    path = tmp_path / "out/adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if half in name)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(UserError, match=f"has no `{name.removeprefix('base_model.model.')}`"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_of_numbers_that_are_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "out", verify=False)
    path = tmp_path / "out/adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"finite|NaN|no number"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base", verify=False)


def test_an_import_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with PEFT catches errors in the tables of settings."""
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "out", verify=False)
    monkeypatch.setattr("gptworks.interop.peft_settings.LoraSettings.scale_of", lambda settings, module: 0.5)
    with pytest.raises(RunError, match="the import does not compute what the original does"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")
    assert not (tmp_path / "back").exists()
    assert (
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base", verify=False).logit_difference
        is None
    )


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "out", verify=False)
    (tmp_path / "file").touch()
    refused = r"file/new could not be written: (Not a directory|File exists) \(.*file.*\)\."
    with pytest.raises(RunError, match=refused):
        export_adapter(run, tmp_path / "file/new", verify=False)
    with pytest.raises(RunError, match=refused):
        import_adapter(tmp_path / "out", tmp_path / "file/new", tmp_path / "out/base", verify=False)


def test_a_base_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "first")
    (tmp_path / "first/base").rename(tmp_path / "base")
    export_adapter(run, tmp_path / "second", base=tmp_path / "base")
    assert not (tmp_path / "second/base").exists()
    settings = json.loads((tmp_path / "second/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")

    other = adapted_run(tmp_path / "other", FAMILIES["llama"], {"rank": 2}, seed=1)
    with pytest.raises(RunError, match="does not compute what the model does"):
        export_adapter(other, tmp_path / "third", base=tmp_path / "base")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("settings", "adapter", "words"),
    [
        (FAMILIES["llama"], {"embeddings": True}, "export it merged"),
        (FAMILIES["mixtral"] | {"d_ff_shared": 16}, {}, "stores all experts in one tensor"),
    ],
)
def test_what_pefts_format_does_not_hold_is_refused(
    settings: dict[str, Any], adapter: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run = adapted_run(tmp_path / "run", settings, adapter)
    with pytest.raises(UserError, match=words):
        export_adapter(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_without_an_adapter_has_none_to_write(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", GPT(plain_model(**SMALL)))
    with pytest.raises(UserError, match="has no adapter"):
        export_adapter(run, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type `IA3`"),
        ({"bias": "all"}, "bias `all`"),
        ({"use_dora": True}, r"`use_dora`=True: DoRA .*matrix\. Merge it in PEFT"),
        ({"modules_to_save": ["lm_head"]}, r"`modules_to_save`.*base\. Merge it in PEFT"),
        ({"lora_bias": True}, r"`lora_bias`=True.*own\. Merge it in PEFT"),
        ({"trainable_token_indices": [1]}, r"`trainable_token_indices`.*embedding\. Merge it in PEFT"),
        ({"arrow_config": {"top_k": 1}}, "cannot be merged"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "`layer_replication`.*repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*random search"),
        ({"init_lora_weights": "corda"}, "corda.*activations"),
        ({"init_lora_weights": "loftq"}, "loftq.*quantized"),
        ({"init_lora_weights": "lora_ga"}, "lora_ga.*gradients"),
        ({"init_lora_weights": "of-next-year"}, "of-next-year.*does not know"),
        ({"init_lora_weights": ["pissa"]}, "does not know this initialization"),
        ({"loftq_config": {"loftq_bits": 4}}, "`loftq_config`"),
        ({"of_next_year": {"mode": "fast"}}, "`of_next_year`.*does not know this setting"),
        ({"r": 3}, r"rank in adapter_config.json require \(3, 32\)"),
        ({"r": 0}, "`r`=0"),
        ({"r": True}, "`r`=True"),
        ({"lora_alpha": float("nan")}, "`lora_alpha`=nan"),
        ({"lora_alpha": 10**400}, "`lora_alpha`=1000"),
        ({"rank_pattern": [1]}, "`rank_pattern`"),
        ({"alpha_pattern": {"q_proj": "a"}}, r"`alpha_pattern`=\{'q_proj': 'a'\}: .*number"),
        ({"alpha_pattern": {"(": 2}}, r"pattern '\('"),
        ({"target_modules": r"((\w|\.)+)+!"}, "very long"),
        ({"target_modules": ["q_proj"]}, "PEFT would ignore it"),
        ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]}, "PEFT would ignore it"),
        ({"exclude_modules": ["up_proj"]}, "PEFT would ignore it"),
    ],
)
def test_what_is_more_than_lora_is_refused(change: dict[str, Any], words: str, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    path = tmp_path / "out/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("head", [False, True])
def test_an_adapter_of_the_embedding_or_the_head_is_named(head: bool, exported: Path, tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "out")
    settings, tensors = tmp_path / "out/adapter_config.json", tmp_path / "out/adapter_model.safetensors"
    tree = json.loads(settings.read_text())
    module = "lm_head" if head else "embed_tokens"
    settings.write_text(json.dumps(tree | {"target_modules": [*tree["target_modules"], module]}))
    kind, place = ("lora_", "base_model.model.") if head else ("lora_embedding_", "base_model.model.model.")
    halves = {f"{place}{module}.{kind}{half}{'.weight' if head else ''}": torch.zeros(2, 2) for half in "AB"}
    save_file(load_file(tensors) | halves, tensors)
    with pytest.raises(UserError, match=rf"`.*{module}.*`, for which gptworks has no adapter.* Merge it in PEFT"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    run = adapted_run(tmp_path / "run", FAMILIES["llama"], {"rank": 2})
    export_adapter(run, tmp_path / "out", verify=False)
    path = tmp_path / "out/adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name.replace("layers.", "layers.9"): tensors[name].clone()}, path)
    with pytest.raises(UserError, match=r"layers\.9"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")
    (tmp_path / "out/adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="reads only safetensors"):
        import_adapter(tmp_path / "out", tmp_path / "back", tmp_path / "out/base")
