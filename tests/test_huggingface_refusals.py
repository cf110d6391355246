"""Exports and imports that are impossible are refused by name, and leave no files."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf
from gptworks.checkpoint import load_run
from gptworks.errors import RunError, UserError
from gptworks.interop.huggingface import export_huggingface, exporting, import_huggingface, verify
from gptworks.interop.huggingface.architectures import FAMILIES
from gptworks.interop.huggingface.fitting import adapt_weights, choose_family
from gptworks.interop.huggingface.keys import REASONS, about
from gptworks.tokenizer import load_tokenizer, prompt_ids
from tiny import plain_model

LLAMA: dict[str, Any] = {
    "vocab_size": hf.VOCABULARY, "context_length": 64, "n_layers": 2, "d_model": 32, "n_heads": 4, "norm": "rmsnorm",
    "mlp": "swiglu",
}  # fmt: skip
GPT2: dict[str, Any] = LLAMA | {
    "norm": "layernorm", "mlp": "gelu_tanh", "position": "learned", "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
BANDED = GPT2 | {"window": 8, "window_pattern": ("full", "window")}
MOE = LLAMA | {"n_experts": 4}
OLMO3: dict[str, Any] = {"max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}
GEMMA2 = LLAMA | {
    "norm_placement": "both", "mlp": "geglu_tanh", "embedding_scale": 32**0.5, "logit_softcap": 30.0,
    "attention_softcap": 50.0, "window": 8, "window_pattern": ("window", "full"), "qk_norm": False,
}  # fmt: skip
PHI3: dict[str, Any] = {"max_position_embeddings": 8192}
LONGROPE = {"type": "longrope", "long_factor": [4.0] * 48, "short_factor": [1.0] * 48}
ODD_HEADS = LLAMA | {"d_model": 36, "n_heads": 8, "d_head": 4}


def family_of(**settings: Any) -> str:
    return choose_family(plain_model(**settings), hf.byte_tokenizer())[0].model_type


# -------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        (GPT2, "gpt2"), (GPT2 | {"tie_embeddings": False}, "gpt2"), (BANDED, "gpt_neo"),
        (GPT2 | {"attention_bias": "out"}, "gpt_neo"), (GPT2 | {"attention_bias": False, "mlp_bias": False}, "gpt_neo"),
        (GPT2 | {"position": "rope"}, "starcoder2"), (GPT2 | {"position": "rope", "window": 8}, "starcoder2"),
        (GPT2 | {"position": "rope", "rope_fraction": 0.5}, "gpt_neox"),
        (GPT2 | {"position": "rope", "parallel_residual": True}, "gpt_neox"),
        (LLAMA | {"norm": "layernorm"}, "stablelm"), (LLAMA, "llama"), (LLAMA | {"attention_bias": True}, "llama"),
        (LLAMA | {"attention_bias": "qkv"}, "qwen2"), (LLAMA | {"qk_norm": True}, "qwen3"),
        (LLAMA | {"window": 8}, "mistral"), (ODD_HEADS, "mistral"),
        (LLAMA | {"window": 8, "window_pattern": ("full", "window")}, "ministral"), (LLAMA | {"mlp": "relu2"}, "arcee"),
        (MOE, "mixtral"), (MOE | {"qk_norm": True}, "qwen3_moe"), (MOE | {"d_ff_shared": 16}, "granitemoeshared"),
        (MOE | {"attention_bias": True}, "granitemoeshared"), (LLAMA | {"rope_fraction": 0.5}, "phi3"),
        (LLAMA | {"rope_pattern": ("rope", "none")}, "smollm3"), (LLAMA | {"logit_divisor": 8.0}, "granite"),
        (LLAMA | {"norm_placement": "after", "qk_norm": "whole"}, "olmo2"),
        (LLAMA | {"norm_placement": "after", "qk_norm": "whole", "window": 8}, "olmo3"),
        (LLAMA | {"attention_bias": "qkv", "window": 8, "window_pattern": ("full", "window")}, "qwen2"),
        (GEMMA2 | {"attention_softcap": None, "qk_norm": True, "window_rope_theta": 50.0}, "gemma3_text"),
        (GEMMA2, "gemma2"), (GEMMA2 | {"logit_softcap": None, "attention_softcap": 20.0}, "gemma2"),
        (LLAMA | {"mlp": "geglu_tanh"}, "llama"), (LLAMA | {"window": 64}, "llama"),  # a window as long as the context
    ],
)  # fmt: skip
def test_each_model_finds_its_architecture(settings: dict[str, Any], family: str) -> None:
    assert family_of(**settings) == family


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (LLAMA | {"position": "none"}, ["position=none"]),
        (LLAMA | {"position": "learned", "norm": "layernorm"}, ["mlp=swiglu"]),
        (LLAMA | {"mlp": "relu2", "qk_norm": True}, ["qk_norm=true", "mlp=relu2"]),
        (LLAMA | {"rope_fraction": 0.5, "qk_norm": True}, ["rope_fraction=0.5", "qk_norm=true"]),
        (LLAMA | {"rope_pattern": ("rope", "none"), "qk_norm": True}, ["rope_pattern=('rope', 'none')"]),
        (LLAMA | {"norm_placement": "after"}, ["norm_placement=after", "qk_norm=false"]),
        (GEMMA2 | {"embedding_scale": 1.0}, ["embedding_scale=1.0"]),
        (LLAMA | {"logit_softcap": 30.0}, ["logit_softcap=30.0"]),
        (LLAMA | {"attention_softcap": 30.0}, ["attention_softcap=30.0"]),
        (LLAMA | {"layer_repeats": 2}, ["layer_repeats=2"]),
        (LLAMA | {"bigram_vocab_size": 99}, ["bigram_vocab_size=99"]),
        (LLAMA | {"window": 8, "window_rope_theta": 50.0}, ["window_rope_theta=50.0"]),
        (LLAMA | {"residual_scale": 0.5, "window": 8}, ["residual_scale=0.5", "window=8"]),
        (LLAMA | {"parallel_residual": True}, ["parallel_residual=true"]),
        (GPT2 | {"n_kv_heads": 2}, ["n_kv_heads=2"]),
        (GPT2 | {"d_head": 12}, ["d_head=12"]),
        (GPT2 | {"qk_norm": True}, ["qk_norm=true"]),
        (MOE | {"mlp_bias": True}, ["mlp_bias=true"]),
        (MOE | {"d_ff_shared": 16, "qk_norm": True}, ["d_ff_shared=16"]),
        (ODD_HEADS | {"attention_bias": "qkv", "window": 8}, ["attention_bias=qkv"]),
        (LLAMA | {"norm": "layernorm", "mlp_bias": True}, ["mlp_bias=true"]),
        (GPT2 | {"position": "none", "n_experts": 2}, ["position=none", "n_experts=2"]),
    ],
)  # fmt: skip
def test_a_model_that_no_architecture_computes_is_refused_by_its_settings(
    settings: dict[str, Any], named: list[str]
) -> None:
    config = plain_model(**settings)
    if config.attention_bias == "qkv":  # qwen2, which has them all, reads text by Qwen's tokenizer alone
        with pytest.raises(UserError, match="no architecture of transformers") as refused:
            choose_family(config, Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}'))
    else:
        with pytest.raises(UserError, match="no architecture of transformers") as refused:
            choose_family(config, hf.byte_tokenizer())
    for setting in named:
        assert f"model.{setting}" in str(refused.value)


# ---------------------------------------------------------------------------------- another form of the weights


@pytest.mark.parametrize(
    "settings",
    [
        GPT2 | {"attention_bias": False, "mlp_bias": False, "norm_bias": False},
        GPT2 | {"attention_bias": "qkv"},
        LLAMA | {"norm": "layernorm", "norm_bias": False},
        LLAMA | {"attention_scale": 0.5, "qk_norm": True},
        GEMMA2 | {"attention_scale": 0.3},
        LLAMA | {"attention_scale": 0.1, "attention_bias": True},
        BANDED | {"attention_bias": "out", "attention_scale": 0.3},
        MOE | {"attention_scale": 0.3, "d_ff_shared": 16},
        GPT2 | {"position": "rope", "attention_bias": "out"},
    ],
)
def test_biases_of_zero_and_a_scaled_query_compute_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(plain_model(**settings)))
    found = export_huggingface(run, tmp_path / "out").verification
    assert found is not None and found.logit_difference < 1e-5


@pytest.mark.parametrize("out_bias", [True, False])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
@torch.no_grad()
def test_a_value_bias_is_the_outputs_and_a_key_bias_is_none(out_bias: bool, n_kv_heads: int) -> None:
    config = plain_model(**BANDED | {"attention_bias": True if out_bias else "qkv", "n_kv_heads": n_kv_heads})
    model = hf.random_model(config)
    for block in model.blocks:
        block.attention.query.bias.zero_()
    family, adapted = choose_family(plain_model(**BANDED), hf.byte_tokenizer())
    adapted = adapted.model_copy(update={"n_kv_heads": n_kv_heads})
    weights, changes = adapt_weights(family, config, adapted, model.state_dict())
    tokens = hf.tokens()
    torch.testing.assert_close(exporting.model_of(adapted, weights)(tokens), model(tokens), rtol=0, atol=1e-5)
    assert len(changes) == 2


def test_trained_query_biases_of_a_banded_model_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(plain_model(**BANDED)))
    with pytest.raises(UserError, match=r"model\.attention_bias=true.*model\.attention_bias=out"):
        export_huggingface(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_banded_export_asks_for_the_implementation_that_keeps_to_the_window(tmp_path: Path) -> None:
    run = hf.make_run(tmp_path / "run", hf.random_model(plain_model(**BANDED | {"attention_bias": "out"})))
    export_huggingface(run, tmp_path / "out")
    assert t.AutoConfig.from_pretrained(tmp_path / "out")._attn_implementation == "eager"
    assert 'attn_implementation="eager"' in (tmp_path / "out" / "README.md").read_text()


# ---------------------------------------------------------------------------------------------- the comparison


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return hf.make_run(tmp_path / "run", hf.random_model(plain_model(**LLAMA)))


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"run", "theirs", "data"}


@pytest.mark.parametrize("name", ["blocks.1.attention.query.weight", "norm.weight", "token_embedding.weight"])
def test_one_wrong_tensor_is_found_and_nothing_is_kept(
    name: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> Any:
        weights, changes = adapt_weights(*arguments)
        return weights | {name: weights[name] * 1.01}, changes

    monkeypatch.setattr(exporting, "adapt_weights", wrong)
    with pytest.raises(RunError, match="does not compute what the model does"):
        export_huggingface(llama, tmp_path / "out")
    assert not leftovers(tmp_path)


def test_a_wrong_setting_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = exporting._write_json
    monkeypatch.setattr(exporting, "_write_json", lambda path, value: written(path, value | {"rms_norm_eps": 0.01}))
    with pytest.raises(RunError, match="does not compute what the model does"):
        export_huggingface(llama, tmp_path / "out")


def test_a_tensor_that_transformers_misses_is_found(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_norm(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, path, metadata)

    monkeypatch.setattr(exporting, "save_file", without_norm)
    with pytest.raises(RunError, match=r"missing keys in the export: model\.norm\.weight"):
        export_huggingface(llama, tmp_path / "out")


def test_a_tokenizer_that_reads_otherwise_is_found(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "prompt_ids", lambda tokenizer, text: [1, *prompt_ids(tokenizer, text)])
    with pytest.raises(RunError, match="the exported tokenizer encodes 'The quick brown"):
        export_huggingface(llama, tmp_path / "out")
    assert not leftovers(tmp_path)


def test_a_cache_that_goes_wrong_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits without a cache are equal; only the greedy tokens reveal it."""
    forward = t.LlamaForCausalLM.forward

    def forgets(self: Any, ids: torch.Tensor, past_key_values: Any = None, **options: Any) -> Any:
        return forward(self, ids, past_key_values=None, **options)

    monkeypatch.setattr(t.LlamaForCausalLM, "forward", forgets)
    with pytest.raises(RunError, match="greedy token 2 after a prompt"):
        export_huggingface(llama, tmp_path / "out")


def test_without_transformers_an_export_says_what_to_install_and_an_import_works(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"gptworks\[interop\]"):
        export_huggingface(llama, tmp_path / "out")
    export = export_huggingface(llama, tmp_path / "out", verify=False)
    assert export.verification is None
    assert "None: the folder was written with `--no-verify`." in (tmp_path / "out" / "README.md").read_text()
    import_huggingface(tmp_path / "out", tmp_path / "again")


def test_rounded_weights_are_compared_with_rounded_weights(llama: Path, tmp_path: Path) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        found = export_huggingface(llama, tmp_path / precision, precision=precision).verification
        assert found is not None and found.logit_difference < 1e-5
        written = load_file(tmp_path / precision / "model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {dtype}
        assert json.loads((tmp_path / precision / "config.json").read_text())["dtype"] == str(dtype)[6:]
        theirs = t.AutoModelForCausalLM.from_pretrained(tmp_path / precision)
        assert theirs.dtype == dtype


def test_values_beyond_fp16_are_refused_by_the_tensors_name(tmp_path: Path) -> None:
    model = hf.random_model(plain_model(**LLAMA))
    model.blocks[1].mlp.up.weight.data[0, 0] = 70_000.0
    run = hf.make_run(tmp_path / "run", model)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight.*--dtype bf16"):
        export_huggingface(run, tmp_path / "out", precision="fp16")


def test_a_place_that_holds_something_is_refused_and_an_empty_one_is_taken(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for work in (lambda: export_huggingface(llama, out), lambda: import_huggingface(llama, out)):
        with pytest.raises(UserError, match="not an empty folder"):
            work()
    (out / "mine.txt").unlink()
    export_huggingface(llama, out, verify=False)
    assert (out / "config.json").exists()


def test_the_token_that_begins_a_text_and_the_chat_template_go_along(tmp_path: Path) -> None:
    tokenizer = hf.byte_tokenizer("<bos>", "<eos>", "<pad>")
    run = hf.make_run(tmp_path / "run", hf.random_model(plain_model(**LLAMA)), tokenizer)
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (run / "tokenizer" / "chat_template.jinja").write_text(template)
    export_huggingface(run, tmp_path / "out")
    theirs = t.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("ab")["input_ids"] == prompt_ids(tokenizer, "ab") == [0, *tokenizer.encode("ab").ids]
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert theirs.model_max_length == 64
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<eos>"
    config = t.AutoConfig.from_pretrained(tmp_path / "out")
    generation = t.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)
    assert (generation.bos_token_id, generation.eos_token_id) == (0, 1)

    imported = import_huggingface(tmp_path / "out", tmp_path / "again")
    assert not imported.notes
    assert (tmp_path / "again" / "tokenizer" / "chat_template.jinja").read_text() == template
    assert prompt_ids(load_tokenizer(tmp_path / "again" / "tokenizer"), "ab") == prompt_ids(tokenizer, "ab")


# ------------------------------------------------------------------------------------------------- the import


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = t.LlamaConfig(vocab_size=hf.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                           intermediate_size=48, max_position_embeddings=64, eos_token_id=None,
                           bos_token_id=None)  # fmt: skip
    hf.save_theirs(tmp_path / "theirs", config)
    return tmp_path / "theirs"


def change(folder: Path, **values: Any) -> None:
    """Set or (None) remove settings of config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gemma4"}, "model_type `gemma4`"),
        ({"model_type": "lama"}, "nearest: `llama`"),
        ({"hidden_size": None}, "no `hidden_size`"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"hidden_act": "quick_gelu"}, "`hidden_act`='quick_gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "no `high_freq_factor`"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "`rope_type`='longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no `factor`"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, r"rope_parameters\.truncate"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, r"rope_parameters\.mscale"),
        ({"rope_parameters": {"rope_type": "default", "sections": [1]}}, r"rope_parameters\.sections"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "greater than or equal to 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"`partial_rotary_factor`=0\.5"),
        ({"attn_logit_softcapping": 30.0}, r"`attn_logit_softcapping`=30\.0"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping`"),
        # mlx-lm#1865, mlx-examples#1232: quantized weights were read as if they were of another format.
        ({"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`: the weights are quantized.* Import"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "`auto_map`"),
        ({"layer_types": ["full_attention"] * 2}, "`layer_types`"),
        ({"is_encoder_decoder": True}, "`is_encoder_decoder`=True"),
        ({"attention_bias": "yes"}, "true or false"),
        ({"num_attention_heads": 5}, "n_heads=5"),
        ({"num_key_value_heads": 3}, "n_kv_heads=3"),
        ({"mlp_bias": True}, r"`model\.layers\.0\.mlp\.gate_proj\.bias` is missing"),
        ({"num_hidden_layers": 1}, r"has no place in a `llama`"),
        ({"tie_word_embeddings": True}, r"`lm_head\.weight` differs"),
        ({"intermediate_size": 47}, r"mlp\.gate_proj\.weight` has shape \(48, 32\)"),
        ({"max_position_embeddings": 10**9}, "context_length.*less than or equal to 4194304"),
        ({"vocab_size": 100}, "256 tokens and config.json `vocab_size`=100"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_ours_is_refused_by_its_name(
    values: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    change(folder, **values)
    with pytest.raises(UserError, match=message):
        import_huggingface(folder, tmp_path / "out")
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx`=True"),
        ("GPT2Config", {"add_cross_attention": True}, "`add_cross_attention`=True"),
        ("StableLmConfig", {"qk_layernorm": True}, "`qk_layernorm`=True"),
        ("StableLmConfig", {"use_parallel_residual": True}, "`use_parallel_residual`=True"),
        ("Qwen3MoeConfig", {"norm_topk_prob": False}, "`norm_topk_prob`=False"),
        ("Qwen3MoeConfig", {"norm_topk_prob": True, "mlp_only_layers": [0]}, r"`mlp_only_layers`=\[0\]"),
        ("Qwen3MoeConfig", {"norm_topk_prob": True, "decoder_sparse_step": 2}, "`decoder_sparse_step`=2"),
        ("Qwen3Config", {"layer_types": ["full_attention"]}, "`layer_types` for 1 layers"),
        ("Qwen3Config", {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        ("GPTNeoConfig", {"attention_types": [[["global", "strided"], 12]]}, "'strided'"),
        ("GPTNeoConfig", {"attention_types": [[["global"], 3]]}, "`attention_types` for 3 layers"),
        ("SmolLM3Config", {"no_rope_layers": [0, 0]}, r"`no_rope_layers`=\[0, 0\]"),
        ("SmolLM3Config", {"layer_types": ["full_attention"]}, "`layer_types` for 1 layers"),
        ("Qwen3Config", {"num_hidden_layers": 10**15}, "`num_hidden_layers`=1000000000000000"),
        ("Olmo3Config", OLMO3 | {"rope_parameters": {"rope_type": "default"}}, r"rope_type: only full_attention"),
        ("Olmo3Config", OLMO3 | {"rope_theta": 100.0, "rope_parameters": None}, "`rope_theta`=100.0: windowed layers"),
        ("Olmo3Config", OLMO3 | {"rope_parameters": {"sliding_attention": LINEAR}}, r"\.rope_type`='linear'"),
        ("Gemma2Config", {"use_bidirectional_attention": True}, "`use_bidirectional_attention`=True"),
        ("Gemma2Config", {"query_pre_attn_scalar": 0}, "wrong type"),
        ("Gemma2Config", {"final_logit_softcapping": -1.0}, "logit_softcap"),
        ("Gemma3TextConfig", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`=50.0"),
        ("Gemma3TextConfig", {"layer_types": None, "sliding_window_pattern": 0}, "wrong type"),
        ("Phi3Config", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn': gptworks supports default, longr"),
        ("Phi3Config", {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Mine"}}, "`auto_map`='modeling_phi3.Mine'"),
        ("Phi3Config", {"full_attn_mod": 2}, "`full_attn_mod`=2"),
        ("Phi3Config", PHI3 | {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "no `short_factor`"),
        ("Phi3Config", PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factors has 1 numbers"),
        ("Phi3Config", PHI3 | {"rope_scaling": LONGROPE | {"long_factor": [-1.0] * 48}}, "greater than 0"),
        ("Phi3Config", PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 0}, "wrong type"),
    ],
)  # fmt: skip
def test_what_a_class_can_do_and_we_cannot_is_refused_by_its_name(
    config: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tree = getattr(t, config)(num_hidden_layers=2).to_dict() if "Neo" not in config else t.GPTNeoConfig().to_dict()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(tree | values, default=str))
    with pytest.raises(UserError, match=message):
        import_huggingface(tmp_path / "theirs", tmp_path / "out")


def test_a_model_type_that_is_not_read_is_named_by_its_kind_and_never_by_its_spelling() -> None:
    known = CONFIG_MAPPING_NAMES.keys()
    said = {kind: about(kind, FAMILIES) for kind in known - FAMILIES.keys()}
    assert not [kind for kind, words in said.items() if "nearest" in words], "a model of transformers is not a typo"
    assert "a recurrent state, not attention" in said["mamba"] and "reads images" in said["llava"]
    assert said["opt"] == said["cohere"] == said["olmo"] == "", "nothing rather than another family"
    assert set(REASONS) <= known - FAMILIES.keys(), "each is the name of a model that gptworks does not read"
    assert about("lama", FAMILIES) == " (nearest: `llama`)"


def test_files_that_are_missing_damaged_or_can_run_code_are_refused(folder: Path, tmp_path: Path) -> None:
    def refused(message: str, source: Path) -> None:
        with pytest.raises(UserError, match=message):
            import_huggingface(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def copy(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copies" / name))

    refused("no such file", tmp_path / "nowhere")
    broken = copy("json")
    (broken / "config.json").write_text("{")
    refused("not readable JSON", broken)
    (broken / "config.json").write_text("[]")
    refused("holds list, not a mapping", broken)
    pickled = copy("code")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(r"pytorch_model\.bin is of a kind that can run code", pickled)
    (pickled / "pytorch_model.bin").unlink()
    refused("holds no model.safetensors", pickled)
    shards = copy("shards")
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    refused(r"It has model-00001-of-00002\.safetensors: get the index of these files", shards)
    damaged = copy("damaged")
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    refused("is damaged", damaged)
    without = copy("tokenizer")
    (without / "tokenizer.json").unlink()
    refused("tokenizer.json: no such file", without)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no `weight_map`"),
        ({"weight_map": {"model.norm.weight": "../theirs/model.safetensors"}}, "not in"),
        ({"weight_map": {"model.norm.weight": "other.safetensors"}}, r"names other\.safetensors"),
        ({"weight_map": {"model.nor.weight": "a.safetensors"}}, r"`model\.nor\.weight` is in a\.safetensors"),
        ({"weight_map": {"model.norm.weight": "a.safetensors"}}, r"`model\.embed_tokens\.weight` is missing"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(
    index: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        import_huggingface(folder, tmp_path / "out")


def test_a_folder_without_a_head_is_refused_with_the_way_out(folder: Path, tmp_path: Path) -> None:
    """Qwen3-VL-Embedding#89: the files lack the head, and config.json says that it is not the embedding."""
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"`lm_head\.weight` is missing.* set `tie_word_embeddings` to true"):
        import_huggingface(folder, tmp_path / "out", verify=False)
    change(folder, tie_word_embeddings=True)
    import_huggingface(folder, tmp_path / "out", verify=False)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4), r"`model\.layers\.0\.self_attn\.sinks` has no place in a `llama`"),
        (torch.zeros(0), r"`model\.layers\.0\.self_attn\.sinks` has no place"),
    ],
)
def test_a_tensor_that_is_left_over_is_refused_by_its_name(
    tensor: torch.Tensor, message: str, folder: Path, tmp_path: Path
) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.sinks": tensor}, file)
    with pytest.raises(UserError, match=message):
        import_huggingface(folder, tmp_path / "out")


def test_tensors_of_other_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].double()}, file)
    with pytest.raises(UserError, match=r"`model\.norm\.weight` is torch\.float64"):
        import_huggingface(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "_orig_mod.", r"names like `_orig_mod\..*`, in which torch\.compile adds `_orig_mod\.`"),
        ("", "module.", r"in which DistributedDataParallel adds `module\.`"),
        ("q_proj.", "q_proj.base_layer.", r"in which PEFT adds `base_layer\.`: .* the merged model"),
    ],
)
def test_a_wrapper_that_renames_tensors_is_named(
    before: str, after: str, message: str, folder: Path, tmp_path: Path
) -> None:
    file = folder / "model.safetensors"
    save_file({name.replace(before, after, 1): tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match=message):
        import_huggingface(folder, tmp_path / "out")


def test_weights_that_are_there_twice_are_named(folder: Path, tmp_path: Path) -> None:
    """transformers reads model.safetensors, even if an index names other files."""
    whole = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(whole, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(whole, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    said = "model.safetensors, which is read, and model.safetensors.index.json of model-00001-of-00001.safetensors"
    assert any(said in note for note in import_huggingface(folder, tmp_path / "run").notes)
    part = {name: tensor for name, tensor in whole.items() if "layers.0" in name}
    save_file(part, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"`model\.embed_tokens\.weight` is missing.*index\.json of model-00001"):
        import_huggingface(folder, tmp_path / "out")


def test_a_file_without_tensors_is_a_mistake_that_is_named(folder: Path, tmp_path: Path) -> None:
    save_file({}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"`model\.embed_tokens\.weight` is missing"):
        import_huggingface(folder, tmp_path / "out")


def test_a_note_says_where_nothing_ends_a_text(folder: Path, tmp_path: Path) -> None:
    imported = import_huggingface(folder, tmp_path / "out")
    assert imported.notes == ("the folder states no token that ends a text: generation stops only at its length",)
    assert imported.notes[0] in (tmp_path / "out" / "model-card.md").read_text()
    assert load_run(tmp_path / "out").checkpoint.step == 0


def test_two_names_of_one_weight_are_refused(tmp_path: Path) -> None:
    """transformers uses one of them; which one is not documented."""
    hf.save_theirs(tmp_path / "theirs", t.GPT2Config(vocab_size=hf.VOCABULARY, n_embd=32, n_layer=2, n_head=4))
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"wpe.weight": tensors["transformer.wpe.weight"] + 1}, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"wpe\.weight.*two names of one weight"):
        import_huggingface(tmp_path / "theirs", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_layers": ["local", "global"]}, "contradict each other"),
        ({"attention_types": [[["global", "local"], 10**15]]}, "for 2000000000000000 layers and num_hidden_layers=2"),
    ],
)
def test_gpt_neo_settings_that_contradict_one_another_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    small = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    hf.save_theirs(tmp_path / "theirs", t.GPTNeoConfig(vocab_size=hf.VOCABULARY, **small))
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=words):
        import_huggingface(tmp_path / "theirs", tmp_path / "run")


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    hf.save_theirs(tmp_path / "theirs", t.GPT2Config(vocab_size=hf.VOCABULARY, n_embd=32, n_layer=2, n_head=4))
    path = tmp_path / "theirs/model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 4] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"h\.1\.mlp\.c_fc\.weight` has values that are not finite"):
        import_huggingface(tmp_path / "theirs", tmp_path / "run", verify=False)


def test_a_windowed_qwen2_with_another_tokenizer_goes_out_as_another_architecture(tmp_path: Path) -> None:
    tokenizer = hf.byte_tokenizer()
    tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = hf.random_model(plain_model(**LLAMA | {"attention_bias": "qkv", "window": 8}))
    exported = export_huggingface(hf.make_run(tmp_path / "run", model, tokenizer), tmp_path / "out")
    assert exported.architecture == "SmolLM3ForCausalLM"


def test_a_model_whose_tokenizer_stands_in_the_way_is_told_so() -> None:
    settings = ODD_HEADS | {"attention_bias": "qkv", "window": 8}
    with pytest.raises(UserError, match=r"`qwen2` does, but AutoTokenizer.*not this run's tokenizer's"):
        choose_family(
            plain_model(**settings), Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
        )
