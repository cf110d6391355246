"""Hugging Face folders: folders written by stock transformers are read, ours load in it, and nothing is guessed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file

import hf
from gptworks.checkpoint import load_run
from gptworks.config import ModelConfig
from gptworks.errors import RunError, UserError
from gptworks.infer.engine import load
from gptworks.infer.speculate import PromptLookup
from gptworks.interop.huggingface import export_huggingface, import_huggingface
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.interop.huggingface.exporting import write_tensors
from gptworks.interop.huggingface.fitting import adapt_weights, choose_family
from gptworks.interop.huggingface.importing import read_config
from gptworks.interop.huggingface.keys import CONFIG_HARMLESS
from gptworks.interop.huggingface.settings import Settings, fixed
from gptworks.interop.huggingface.verify import quiet
from gptworks.interop.tensors import each_tensor
from gptworks.presets import PRESETS, preset
from gptworks.tokenizer import load_tokenizer
from tiny import plain_model

EXACT = 1e-5
"""How far logits of about 5 may be apart in fp32."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with quiet():
        yield


# ------------------------------------------------------------------------------------ what transformers writes

SMALL: dict[str, Any] = {
    "vocab_size": hf.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 96, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
THREE_LAYERS = GROUPED | {"num_hidden_layers": 3}
CWM = THREE_LAYERS | {"bos_token_id": 1, "eos_token_id": 2}
GEMMA = THREE_LAYERS | {"pad_token_id": None, "head_dim": 8}
GPT2: dict[str, Any] = {
    "vocab_size": hf.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
NEO: dict[str, Any] = {
    "vocab_size": hf.VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 96,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MOE = GROUPED | {"num_experts": 4, "moe_intermediate_size": 20, "norm_topk_prob": True}
QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6}
MULTIPLIED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.6,
              "attention_multiplier": 0.3}  # fmt: skip
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind: str = "default", theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=24)
YARN_SET = rope("yarn", factor=4.0, original_max_position_embeddings=24, beta_fast=8.0, beta_slow=2.0,
                attention_factor=1.3)  # fmt: skip
LLAMA3 = rope("llama3", factor=4.0, original_max_position_embeddings=24, low_freq_factor=1.0, high_freq_factor=4.0)


def by_layer(full: dict[str, Any], windowed: dict[str, Any]) -> dict[str, Any]:
    pair = zip(("full_attention", "sliding_attention"), (full, windowed), strict=True)
    return {"rope_parameters": {kind: parameters["rope_parameters"] for kind, parameters in pair}}


THEIRS: dict[str, tuple[t.PreTrainedConfig, ...]] = {
    "gpt2": (
        t.GPT2Config(**GPT2),
        t.GPT2Config(**GPT2, n_inner=40, activation_function="gelu", tie_word_embeddings=False,
                     layer_norm_epsilon=1e-3),
        t.GPT2Config(**GPT2, scale_attn_weights=False, reorder_and_upcast_attn=True, activation_function="relu2"),
    ),
    "gpt_neo": (
        t.GPTNeoConfig(**NEO, attention_types=[[["global", "local"], 1]], window_size=5),
        t.GPTNeoConfig(**NEO | {"num_layers": 3}, attention_types=[[["local"], 2], [["global"], 1]], window_size=7,
                       intermediate_size=50, tie_word_embeddings=False, activation_function="gelu"),
        t.GPTNeoConfig(**NEO, attention_types=[[["global"], 2]]),
    ),
    "starcoder2": (
        t.Starcoder2Config(**GROUPED, **rope()),
        t.Starcoder2Config(**SMALL, num_key_value_heads=4, use_bias=False, hidden_act="gelu", sliding_window=9,
                           tie_word_embeddings=False),
        t.Starcoder2Config(**GROUPED, **rope("linear", factor=2.0), hidden_act="relu2", norm_epsilon=1e-3),
    ),
    "stablelm": (
        t.StableLmConfig(**GROUPED),
        t.StableLmConfig(**GROUPED, use_qkv_bias=True, hidden_act="gelu", **rope(partial_rotary_factor=0.5)),
        t.StableLmConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True,
                         rope_parameters=YARN["rope_parameters"] | {"partial_rotary_factor": 1.0}),
    ),
    "gpt_neox": (
        t.GPTNeoXConfig(**SMALL),
        t.GPTNeoXConfig(**SMALL, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
                        hidden_act="gelu_new", **rope(partial_rotary_factor=1.0)),
        t.GPTNeoXConfig(**SMALL, **rope("linear", factor=3.0, partial_rotary_factor=0.5)),
    ),
    "llama": (
        t.LlamaConfig(**GROUPED, **rope()),
        t.LlamaConfig(**SMALL, head_dim=12, attention_bias=True, mlp_bias=True, hidden_act="gelu",
                      tie_word_embeddings=True, rms_norm_eps=1e-4),
        t.LlamaConfig(**GROUPED, **LLAMA3),
    ),
    "qwen2": (
        t.Qwen2Config(**GROUPED, **rope()),
        t.Qwen2Config(**THREE_LAYERS, **QWEN_WINDOW, max_window_layers=1),
        t.Qwen2Config(**THREE_LAYERS, **QWEN_WINDOW, layer_types=MIXED, tie_word_embeddings=True),
    ),
    "qwen3": (
        t.Qwen3Config(**GROUPED, head_dim=10),
        t.Qwen3Config(**GROUPED, head_dim=8, attention_bias=True, tie_word_embeddings=True, **YARN),
        t.Qwen3Config(**THREE_LAYERS, head_dim=8, **QWEN_WINDOW, layer_types=MIXED),
    ),
    "mistral": (
        t.MistralConfig(**GROUPED, sliding_window=7),
        t.MistralConfig(**GROUPED, head_dim=12, sliding_window=None, **rope("linear", factor=4.0)),
        t.MistralConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=True, hidden_act="gelu"),
    ),
    "ministral": (
        t.MinistralConfig(**THREE_LAYERS, head_dim=8, sliding_window=7, layer_types=MIXED),
        t.MinistralConfig(**THREE_LAYERS, head_dim=12, sliding_window=5, tie_word_embeddings=True),
        t.MinistralConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED[:2], hidden_act="gelu", **YARN),
    ),
    "arcee": (
        t.ArceeConfig(**GROUPED),
        t.ArceeConfig(**SMALL, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        t.ArceeConfig(**GROUPED, hidden_act="gelu", **YARN_SET),
    ),
    "olmo2": (
        t.Olmo2Config(**GROUPED, pad_token_id=None, hidden_act="gelu", rms_norm_eps=1e-4, **YARN),
        t.Olmo2Config(**SMALL, pad_token_id=None, attention_bias=True, tie_word_embeddings=True, **rope()),
    ),
    "olmo3": (
        t.Olmo3Config(**THREE_LAYERS, pad_token_id=None, layer_types=MIXED, sliding_window=7, rms_norm_eps=1e-4,
                      **by_layer(YARN_SET, rope())),
        t.Olmo3Config(**THREE_LAYERS, pad_token_id=None, layer_types=MIXED, sliding_window=6, attention_bias=True,
                      hidden_act="gelu", tie_word_embeddings=True, **by_layer(rope(), rope(theta=90.0))),
    ),
    "gemma2": (
        t.Gemma2Config(**GEMMA, query_pre_attn_scalar=24, sliding_window=7, attn_logit_softcapping=2.0,
                       final_logit_softcapping=5.0),
        t.Gemma2Config(**GEMMA | {"head_dim": 12}, layer_types=MIXED, sliding_window=6, attention_bias=True,
                       attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="gelu",
                       tie_word_embeddings=False, rms_norm_eps=1e-4, **YARN),
    ),
    "gemma3_text": (
        t.Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=24, sliding_window=7, final_logit_softcapping=5.0,
                           layer_types=MIXED, **by_layer(rope("linear", 3000.0, factor=8.0), rope(theta=90.0))),
        t.Gemma3TextConfig(**GEMMA | {"head_dim": 12}, sliding_window=5, attention_bias=True, layer_types=MIXED,
                           tie_word_embeddings=False, hidden_activation="silu", **by_layer(YARN_SET, YARN_SET)),
        t.Gemma3TextConfig(**GEMMA | {"num_hidden_layers": 2}, sliding_window=200,
                           **by_layer(rope(), rope(theta=90.0))),
    ),
    "granite": (
        t.GraniteConfig(**GROUPED, **MULTIPLIED),
        t.GraniteConfig(**SMALL, logits_scaling=1.5, attention_bias=True, mlp_bias=True, head_dim=12,
                        hidden_act="gelu", tie_word_embeddings=True, **LLAMA3),
    ),
    "smollm3": (
        t.SmolLM3Config(**THREE_LAYERS, pad_token_id=None, no_rope_layer_interval=2, attention_bias=True),
        t.SmolLM3Config(**THREE_LAYERS, **QWEN_WINDOW, pad_token_id=None, no_rope_layers=[1, 1, 0], layer_types=MIXED,
                        mlp_bias=True, tie_word_embeddings=False),
    ),
    "phi3": (
        t.Phi3Config(**SMALL, pad_token_id=None, sliding_window=7, hidden_act="gelu", tie_word_embeddings=True,
                     **rope(partial_rotary_factor=0.75)),
        t.Phi3Config(**GROUPED, pad_token_id=None, original_max_position_embeddings=24,
                     **rope("longrope", short_factor=[1.1, 1.2, 1.3, 1.4], long_factor=[1.5, 2.0, 3.0, 4.0])),
        t.Phi3Config(**GROUPED, pad_token_id=None, original_max_position_embeddings=24, resid_pdrop=0.1,
                     **rope("longrope", short_factor=[1.1], long_factor=[1.5], factor=2.0, attention_factor=1.3,
                            partial_rotary_factor=0.25)),
    ),
    "mixtral": (
        t.MixtralConfig(**GROUPED, num_local_experts=4),
        t.MixtralConfig(**GROUPED, num_local_experts=3, num_experts_per_tok=1, sliding_window=6, hidden_act="gelu",
                        head_dim=12),
        t.MixtralConfig(**SMALL, num_key_value_heads=4, num_local_experts=5, num_experts_per_tok=3,
                        tie_word_embeddings=True),
    ),
    "qwen3_moe": (
        t.Qwen3MoeConfig(**MOE, num_experts_per_tok=2),
        t.Qwen3MoeConfig(**MOE, num_experts_per_tok=3, head_dim=10, **QWEN_WINDOW),
        t.Qwen3MoeConfig(**MOE, num_experts_per_tok=1, tie_word_embeddings=True, attention_bias=True),
    ),
    "granitemoeshared": (
        t.GraniteMoeSharedConfig(**GROUPED, num_local_experts=4, shared_intermediate_size=24, **MULTIPLIED),
        t.GraniteMoeSharedConfig(**GROUPED, num_local_experts=4, attention_multiplier=0.2, attention_bias=True,
                                 tie_word_embeddings=True),
        t.GraniteMoeSharedConfig(**SMALL, num_local_experts=3, num_experts_per_tok=1, shared_intermediate_size=16,
                                 hidden_act="gelu", attention_multiplier=8**-0.5),
    ),
    "gemma": (
        t.GemmaConfig(**GEMMA, attention_bias=True),
        t.GemmaConfig(**GEMMA | {"head_dim": 12}, tie_word_embeddings=False, rms_norm_eps=1e-4, **YARN),
        t.GemmaConfig(**GEMMA, hidden_act="gelu"),  # what the first releases say, and which means the tanh form
    ),
    "seed_oss": (
        t.SeedOssConfig(**GROUPED, pad_token_id=None, head_dim=8),
        t.SeedOssConfig(**SMALL, num_key_value_heads=4, pad_token_id=None, head_dim=12, attention_bias=False,
                        mlp_bias=True, tie_word_embeddings=True, residual_dropout=0.0),
        t.SeedOssConfig(**GROUPED, pad_token_id=None, head_dim=8, attention_out_bias=True, hidden_act="gelu", **YARN),
    ),
    "cwm": (
        t.CwmConfig(**CWM, head_dim=8, sliding_window=7, layer_types=MIXED, **rope()),
        t.CwmConfig(**CWM | {"num_hidden_layers": 5}, head_dim=8, sliding_window=6, tie_word_embeddings=True,
                    hidden_act="gelu", **LLAMA3),
    ),
    "ernie4_5": (
        t.Ernie4_5Config(**GROUPED, pad_token_id=None, head_dim=8),
        t.Ernie4_5Config(**SMALL, num_key_value_heads=4, pad_token_id=None, head_dim=12, use_bias=True,
                         tie_word_embeddings=False),
        t.Ernie4_5Config(**GROUPED, pad_token_id=None, head_dim=8, hidden_act="gelu", **YARN),
    ),
    "helium": (
        t.HeliumConfig(**GROUPED, pad_token_id=None, head_dim=8),
        t.HeliumConfig(**SMALL, num_key_value_heads=4, pad_token_id=None, head_dim=8, attention_bias=True,
                       tie_word_embeddings=True, rms_norm_eps=1e-4),
    ),
}  # fmt: skip
CASES = [(name, i) for name in FAMILIES for i in range(len(THEIRS[name]))]


@pytest.mark.parametrize(("name", "i"), CASES, ids=[f"{name}-{i}" for name, i in CASES])
@torch.no_grad()
def test_a_folder_of_transformers_is_read_exactly_and_comes_back_bit_for_bit(name: str, i: int, tmp_path: Path) -> None:
    theirs = hf.save_theirs(tmp_path / "theirs", THEIRS[name][i], seed=i)
    assert theirs.config.model_type == name
    imported = import_huggingface(tmp_path / "theirs", tmp_path / "run")
    ours = load_run(tmp_path / "run").model
    tokens = hf.tokens(length=90)  # past every window
    expected = theirs(tokens).logits
    assert expected.std() > 0.4, "logits large enough for the tolerance to mean something"
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=EXACT)
    assert sum(p.numel() for p in theirs.parameters()) == imported.parameters

    export_huggingface(tmp_path / "run", tmp_path / "back")
    if not FAMILIES[name].exported:  # it goes out as a more common architecture, which the export's check compares
        import_huggingface(tmp_path / "back", tmp_path / "again")
        torch.testing.assert_close(load_run(tmp_path / "again").model(tokens), expected, rtol=0, atol=EXACT)
        return
    written, before = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "theirs"))
    assert written.keys() == before.keys()
    for key in before:  # 1 + w of Gemma's norms in fp32, which transformers forms too, leaves w's last bits out
        one = float(name.startswith("gemma") and "norm" in key)
        assert torch.equal(one + written[key], one + before[key]), key
    import_huggingface(tmp_path / "back", tmp_path / "again", verify=False)  # what it computes is compared below
    again = load_run(tmp_path / "again").model
    assert again.config.model_copy(update={"init": ours.config.init}) == ours.config
    assert torch.equal(again(tokens), ours(tokens))


@torch.no_grad()
def test_dynamic_scaling_is_read_with_the_context_that_it_reaches(tmp_path: Path) -> None:
    config = t.LlamaConfig(**GROUPED | {"max_position_embeddings": 24}, **rope("dynamic", factor=3.0))
    theirs = hf.save_theirs(tmp_path / "theirs", config)
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    ours = load_run(tmp_path / "run").model
    assert ours.config.context_length == 72
    for length in (20, 24, 25, 72):
        tokens = hf.tokens(length=length)
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=EXACT)
    found = export_huggingface(tmp_path / "run", tmp_path / "back").verification
    assert found is not None and found.greedy_tokens == 24 - 8  # theirs turns cached keys otherwise beyond
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 24


@pytest.mark.parametrize("draft", [False, True])
@torch.no_grad()
def test_greedy_texts_that_outgrow_the_original_context_are_those_of_transformers(draft: bool, tmp_path: Path) -> None:
    """When a text outgrows the original context, transformers computes it again with the long factors."""
    theirs = hf.save_theirs(tmp_path / "theirs", THEIRS["phi3"][1])  # of 24 tokens
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "qkv_proj" in name:
                parameter.mul_(4)
    theirs.save_pretrained(tmp_path / "theirs")
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    engine = load(tmp_path / "run", drafter=PromptLookup(4, 2) if draft else None)
    prompts = [hf.tokens(1, length, seed=seed) % 256 for seed, length in enumerate([4, 9, 16, 20, 23, 24, 25, 30] * 2)]
    requests = [engine.submit(ids[0].tolist(), temperature=0, max_tokens=24) for ids in prompts]
    while not all(request.done for request in requests):
        engine.step()
    ours = [[piece.token_id for piece in request.take() if piece.token_id is not None] for request in requests]
    for ids, generated in zip(prompts, ours, strict=True):
        expected = theirs.generate(ids, do_sample=False, max_new_tokens=24, suppress_tokens=[256, 257, 258, 259])
        assert generated == expected[0, ids.size(1) :].tolist(), f"after {ids.size(1)} tokens"
    assert len({tuple(text) for text in ours}) > 8


def test_an_architecture_is_one_entry_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an entry for VaultGemma (Gemma 2 without norms after attention and MLP), import and export both work."""
    gemma = FAMILIES["gemma2"]
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    vault = replace(
        gemma, model_type="vaultgemma", architecture="VaultGemmaForCausalLM",
        clauses=(*gemma.clauses, fixed(norm_placement="before")),
        places=tuple(place for place in gemma.places if place.theirs.rpartition(".")[2] not in after),
    )  # fmt: skip
    hf.save_theirs(tmp_path / "theirs", t.VaultGemmaConfig(**GEMMA, sliding_window=6, query_pre_attn_scalar=64))
    with pytest.raises(UserError, match="model_type `vaultgemma`"):
        import_huggingface(tmp_path / "theirs", tmp_path / "run")
    monkeypatch.setitem(FAMILIES, "vaultgemma", vault)
    difference = import_huggingface(tmp_path / "theirs", tmp_path / "run").logit_difference
    assert difference is not None and difference < EXACT
    assert export_huggingface(tmp_path / "run", tmp_path / "back").architecture == "VaultGemmaForCausalLM"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_setting_of_the_class_is_known_and_a_missing_one_means_what_it_means_there(name: str) -> None:
    whole = THEIRS[name][0].to_dict()
    classes = type(THEIRS[name][0])()
    required = {key: whole[key] for key in whole if whole[key] != getattr(classes, key, None)}
    required |= {"model_type": name} | ({"norm_topk_prob": True} if "norm_topk_prob" in whole else {})
    for key in ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "num_heads", "n_head"):
        required |= {key: whole[key]} if key in whole else {}
    family, model = read_config(whole)
    theirs = Settings(whole)
    family.read(theirs)
    theirs.take("model_type")
    unknown = [key for key in theirs.left() if key not in CONFIG_HARMLESS | family.harmless]
    assert not unknown, "each setting of the class is read, or is known to change nothing"
    assert read_config(required)[1] == model, "a setting that is left out means the class's default"
    assert len(required) < len(whole) / 2


@pytest.mark.parametrize("config", [t.Olmo3Config, t.Gemma2Config, t.Gemma3TextConfig, t.CwmConfig])
def test_layers_of_which_nothing_is_said_are_windowed_as_the_class_has_them(config: type[t.PreTrainedConfig]) -> None:
    whole = config(num_hidden_layers=13, sliding_window=8).to_dict()
    model = read_config({name: value for name, value in whole.items() if name != "layer_types"})[1]
    windowed = [kind == "sliding_attention" for kind in whole["layer_types"]]
    assert [window is not None for window in model.layer_windows] == windowed


def test_the_older_names_of_rotary_settings_mean_the_same() -> None:
    new = t.LlamaConfig(**GROUPED, **YARN).to_dict()
    parameters = new.pop("rope_parameters")
    old = new | {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": {"type": parameters.pop("rope_type")}}
    old["rope_scaling"] |= parameters
    assert read_config(old)[1] == read_config(t.LlamaConfig(**GROUPED, **YARN).to_dict())[1]
    gemma = t.Gemma3TextConfig(**GEMMA, **by_layer(rope("linear", 3000.0, factor=8.0), rope(theta=90.0))).to_dict()
    parameters = gemma.pop("rope_parameters")["full_attention"]
    old = gemma | {"rope_theta": parameters.pop("rope_theta"), "rope_local_base_freq": 90, "rope_scaling": parameters}
    old |= {"layer_types": None, "sliding_window_pattern": 3}
    new = gemma | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    new |= by_layer(rope("linear", 3000.0, factor=8.0), rope(theta=90.0))
    assert read_config(old)[1] == read_config(new)[1]
    pythia = t.GPTNeoXConfig(**SMALL, **rope(partial_rotary_factor=0.5)).to_dict()
    older = {**pythia, "rotary_pct": 0.5, "rotary_emb_base": 500}
    del older["rope_parameters"]
    assert read_config(older)[1] == read_config(pythia)[1]


@torch.no_grad()
def test_files_of_the_bare_model_and_buffers_of_old_versions_are_read(tmp_path: Path) -> None:
    theirs = hf.save_theirs(tmp_path / "theirs", t.GPT2Config(**GPT2))
    file = tmp_path / "theirs" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    old["h.0.attn.bias"], old["h.0.attn.masked_bias"] = torch.ones(1, 1, 96, 96), torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()  # tied, and stored nevertheless
    save_file(old, file)
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    torch.testing.assert_close(
        load_run(tmp_path / "run").model(hf.tokens()), theirs(hf.tokens()).logits, rtol=0, atol=EXACT
    )


@torch.no_grad()
def test_the_head_of_gpt_neox_is_read_by_either_name(tmp_path: Path) -> None:
    theirs = hf.save_theirs(tmp_path / "theirs", THEIRS["gpt_neox"][0])
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, file)
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    torch.testing.assert_close(
        load_run(tmp_path / "run").model(hf.tokens()), theirs(hf.tokens()).logits, rtol=0, atol=EXACT
    )


@torch.no_grad()
def test_several_files_are_read_and_written(tmp_path: Path) -> None:
    theirs = hf.save_theirs(tmp_path / "theirs", THEIRS["mixtral"][0], max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    model = load_run(tmp_path / "run").model
    torch.testing.assert_close(model(hf.tokens()), theirs(hf.tokens()).logits, rtol=0, atol=EXACT)

    out = export_huggingface(tmp_path / "run", tmp_path / "out").folder
    family, adapted = choose_family(model.config, load_tokenizer(out))
    (out / "model.safetensors").unlink()
    write_tensors(out, dict(each_tensor(family.places, adapted, model.state_dict())), shard_bytes=40_000)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 45_000 for path in files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    again = t.AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))


def test_rounded_weights_of_another_function_are_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(family: Any, config: Any, adapted: Any, tensors: Any) -> Any:
        weights, changes = adapt_weights(family, config, adapted, tensors)
        return {name: 2 * x if name.endswith("query_norm.weight") else x for name, x in weights.items()}, changes

    config = ModelConfig(vocab_size=hf.VOCABULARY, context_length=64, n_layers=2, d_model=32, n_heads=4)
    run = hf.make_run(tmp_path / "run", hf.random_model(config))
    export_huggingface(run, tmp_path / "right", precision="bf16")
    monkeypatch.setattr("gptworks.interop.huggingface.exporting.adapt_weights", wrong)
    with pytest.raises(RunError, match="another function"):
        export_huggingface(run, tmp_path / "out", precision="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.bfloat16), ("llama", torch.float16), ("gemma3_text", torch.bfloat16)]
)
def test_16_bit_weights_are_read_without_loss(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = hf.save_theirs(tmp_path / "theirs", THEIRS[name][0])
    theirs.to(dtype).save_pretrained(tmp_path / "theirs")
    import_huggingface(tmp_path / "theirs", tmp_path / "run")
    back = export_huggingface(tmp_path / "run", tmp_path / "back", precision="bf16" if dtype.itemsize == 2 and
                              dtype == torch.bfloat16 else "fp16")  # fmt: skip
    written, before = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "theirs"))
    settings = json.loads((back.folder / "config.json").read_text())
    assert settings["dtype"] == settings["torch_dtype"] == str(dtype).removeprefix("torch."), "granite-switch#126"
    assert all(torch.equal(written[key], before[key]) and written[key].dtype == dtype for key in before)
    assert back.verification is not None and back.verification.logit_difference < EXACT


# ------------------------------------------------------------------------------------- what transformers reads


def shrunk(config: ModelConfig) -> ModelConfig:
    """Return a preset with its settings but with small sizes."""
    kept = {name: getattr(config, name) for name in config.model_fields_set}
    small = {"vocab_size": hf.VOCABULARY, "context_length": 96, "n_layers": 2, "d_model": 32, "n_heads": 4}
    small |= {"n_kv_heads": 4 if config.n_kv_heads == config.n_heads else 2}
    small |= {"d_head": 12} if "d_head" in kept else {}
    small |= {"d_ff": 40} if "d_ff" in kept else {}
    small |= {"window": 8} if config.window else {}
    return plain_model(**kept | small)


SHRUNK: dict[ModelConfig, list[str]] = {}
for preset_name in PRESETS:
    SHRUNK.setdefault(shrunk(preset(preset_name)), []).append(preset_name)


@pytest.mark.parametrize("config", SHRUNK, ids=[" ".join(names) for names in SHRUNK.values()])
@torch.no_grad()
def test_every_preset_loads_in_stock_transformers(config: ModelConfig, tmp_path: Path) -> None:
    model = hf.random_model(config)
    if config.window is not None and config.qkv_bias:  # a banded GPT-3, whose query biases no class has: as it begins
        for block in model.blocks:
            block.attention.query.bias.zero_()
    run = hf.make_run(tmp_path / "run", model)
    found = export_huggingface(run, tmp_path / "out").verification
    assert found is not None and found.logit_difference < EXACT and found.greedy_tokens == 64 and found.ties == 0

    theirs = t.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = hf.tokens(length=96)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=EXACT)
    prompt = hf.tokens(1, 9, seed=3) % 256
    generated = theirs.generate(prompt, do_sample=False, max_new_tokens=64)[0, 9:].tolist()
    ids = prompt
    for _ in range(64):  # ours without a cache; with one in the engine
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), dim=1)
    assert generated == ids[0, 9:].tolist()
    assert len(set(generated)) > 8, "greedy text that does not merely repeat itself"

    imported = import_huggingface(tmp_path / "out", tmp_path / "again")
    family, adapted = choose_family(config, hf.byte_tokenizer())
    assert imported.architecture == family.architecture
    again, before = load_run(tmp_path / "again").model, load_run(run).model
    assert family.adapted(again.config) == again.config
    if adapted.model_copy(update={"init": "normal"}) == config.model_copy(update={"init": "normal"}):
        ours, theirs_again = before.state_dict(), again.state_dict()
        assert all(torch.equal(ours[name], theirs_again[name]) for name in ours)
    out = export_huggingface(tmp_path / "again", tmp_path / "twice").folder
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()
