"""The architectures of transformers that compute what a `GPT` computes.

What stands in the tables was read from the classes of transformers 5; test_huggingface.py compares each with its class.
"""

from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.settings import (
    Activation,
    Biases,
    Experts,
    Fixed,
    Heads,
    Only,
    Rope,
    Same,
    ScaleFactor,
    ScaleSwitch,
    WindowByLayer,
    WindowByPattern,
    WindowEverywhere,
)
from gptworks.interop.huggingface.tensors import (
    HALVES,
    HEAD_BY_HEAD,
    STACKED,
    STACKED_HALVES,
    TRANSPOSED,
    TRANSPOSED_THIRDS,
    Place,
    places,
)

# ------------------------------------------------------------------------------------------- settings in common

HARMLESS = frozenset({
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "name_or_path", "_name_or_path",
    "tokenizer_class", "prefix", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "decoder_start_token_id", "attn_implementation", "_attn_implementation_autoset", "output_hidden_states",
    "output_attentions", "return_dict", "use_return_dict", "torchscript", "id2label", "label2id", "num_labels",
    "problem_type", "task_specific_params", "finetuning_task", "chunk_size_feed_forward", "is_decoder",
    "classifier_dropout", "gradient_checkpointing", "pretraining_tp", "output_router_logits",
    "router_aux_loss_coef", "router_jitter_noise", "max_length", "min_length", "do_sample", "num_beams",
    "temperature", "top_k", "top_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "num_return_sequences", "is_llama_config", "transformers.js_config",
})  # fmt: skip
"""Settings of any `config.json` that change no logits: names, token ids, generation, what training alone uses. Others
that no clause takes are refused by name: they may belong to a newer class that computes something else."""

_ALONE = (
    Only("is_encoder_decoder", False, absent=False),
    Only("add_cross_attention", False, absent=False),
    Only("use_mrope", False, absent=False),
    Only("rope_interleaved", False, absent=False),
)
_UNGATED = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
_UNGATED_NEW = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}
"""The same; GPT-2's files have another name for the tanh form."""
_GATED = {"swiglu": "silu", "geglu": "gelu"}
_LAYER_NORM = Fixed({"norm": "layernorm", "norm_bias": True})
_RMS_NORM = Fixed({"norm": "rmsnorm", "norm_bias": False})
_LEARNED, _ROPE = Fixed({"position": "learned"}), Fixed({"position": "rope"})
_ATTENTION_FLAG = Biases({"attention_bias": False}, {(False,): (False, False), (True,): (True, False)})
_BOTH_FLAGS = Biases(
    {"attention_bias": False, "mlp_bias": False},
    {(attention, mlp): (attention, mlp) for attention in (False, True) for mlp in (False, True)},
)


def _no_biases() -> Biases:
    return Biases({}, {(): (False, False)})


def _sizes(width: str = "hidden_size", layers: str = "num_hidden_layers") -> Same:
    return Same({"vocab_size": "vocab_size", width: "d_model", layers: "n_layers"})


def _more(norm_eps: str, eps: float, *, tied: bool, std: float = 0.02, width: str | None = "intermediate_size") -> Same:
    names = {norm_eps: "norm_eps", "tie_word_embeddings": "tie_embeddings", "initializer_range": "init_std"}
    defaults = {norm_eps: eps, "tie_word_embeddings": tied, "initializer_range": std}
    return Same(names | ({width: "d_ff"} if width else {}), defaults)


def _dropouts(**names: str) -> Same:
    return Same(names, dict.fromkeys(names, 0.0))


# ------------------------------------------------------------------------------------------ tensors in common

_LLAMA_BLOCK = {
    "model.embed_tokens": "token_embedding",
    "model.layers.{layer}.input_layernorm": "blocks.{layer}.norm1",
    "model.layers.{layer}.self_attn.q_proj": "blocks.{layer}.attention.query",
    "model.layers.{layer}.self_attn.k_proj": "blocks.{layer}.attention.key",
    "model.layers.{layer}.self_attn.v_proj": "blocks.{layer}.attention.value",
    "model.layers.{layer}.self_attn.o_proj": "blocks.{layer}.attention.out",
    "model.layers.{layer}.post_attention_layernorm": "blocks.{layer}.norm2",
    "model.norm": "norm",
    "lm_head": "untied_head",
}
_QK_NORMS = {
    "model.layers.{layer}.self_attn.q_norm": "blocks.{layer}.attention.query_norm",
    "model.layers.{layer}.self_attn.k_norm": "blocks.{layer}.attention.key_norm",
}
_UP_DOWN = {
    "model.layers.{layer}.mlp.up_proj": "blocks.{layer}.mlp.up",
    "model.layers.{layer}.mlp.down_proj": "blocks.{layer}.mlp.down",
}
_GATED_MLP = {"model.layers.{layer}.mlp.gate_proj": "blocks.{layer}.mlp.gate"} | _UP_DOWN
_QUERY_KEY_VALUE = tuple(f"blocks.{{layer}}.attention.{name}" for name in ("query", "key", "value"))


# ------------------------------------------------------------------------------------------- the architectures

_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    (
        _sizes("n_embd", "n_layer"), Same({"n_positions": "context_length"}), Heads("n_head"), _LEARNED, _LAYER_NORM,
        Same({"n_inner": "d_ff"}, {"n_inner": lambda ours: 4 * ours["d_model"]}),
        Activation("activation_function", _UNGATED_NEW, "gelu_new"),
        Biases({}, {(): (True, True)}), ScaleSwitch(),
        Only("scale_attn_by_inverse_layer_idx", False, absent=False), *_ALONE,
        _more("layer_norm_epsilon", 1e-5, tied=True, width=None), Fixed({"init": "gpt2"}),
        Same({"embd_pdrop": "dropout_embedding", "attn_pdrop": "dropout_attention", "resid_pdrop": "dropout_residual"},
             {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}),
    ),
    (
        Place("transformer.wte", ("token_embedding",)),
        Place("transformer.wpe", ("position_embedding",)),
        Place("transformer.h.{layer}.ln_1", ("blocks.{layer}.norm1",)),
        Place("transformer.h.{layer}.attn.c_attn", _QUERY_KEY_VALUE, TRANSPOSED_THIRDS),
        Place("transformer.h.{layer}.attn.c_proj", ("blocks.{layer}.attention.out",), TRANSPOSED),
        Place("transformer.h.{layer}.ln_2", ("blocks.{layer}.norm2",)),
        Place("transformer.h.{layer}.mlp.c_fc", ("blocks.{layer}.mlp.up",), TRANSPOSED),
        Place("transformer.h.{layer}.mlp.c_proj", ("blocks.{layer}.mlp.down",), TRANSPOSED),
        Place("transformer.ln_f", ("norm",)),
        Place("lm_head", ("untied_head",)),
    ),
    harmless=frozenset({"n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                        "summary_proj_to_labels", "summary_first_dropout"}),
)  # fmt: skip

_GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    "transformer.",
    (
        _sizes(layers="num_layers"), Same({"max_position_embeddings": "context_length"}), Heads("num_heads"), _LEARNED,
        Same({"intermediate_size": "d_ff"}, {"intermediate_size": lambda ours: 4 * ours["d_model"]}), _LAYER_NORM,
        Activation("activation_function", _UNGATED_NEW, "gelu_new"),
        Biases({}, {(): ("out", True)}), Fixed({"attention_scale": 1.0}), WindowByPattern(), *_ALONE,
        _more("layer_norm_epsilon", 1e-5, tied=True, width=None),
        _dropouts(embed_dropout="dropout_embedding", attention_dropout="dropout_attention",
                  resid_dropout="dropout_residual"),
    ),
    places({
        "transformer.wte": "token_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.h.{layer}.ln_1": "blocks.{layer}.norm1",
        "transformer.h.{layer}.attn.attention.q_proj": "blocks.{layer}.attention.query",
        "transformer.h.{layer}.attn.attention.k_proj": "blocks.{layer}.attention.key",
        "transformer.h.{layer}.attn.attention.v_proj": "blocks.{layer}.attention.value",
        "transformer.h.{layer}.attn.attention.out_proj": "blocks.{layer}.attention.out",
        "transformer.h.{layer}.ln_2": "blocks.{layer}.norm2",
        "transformer.h.{layer}.mlp.c_fc": "blocks.{layer}.mlp.up",
        "transformer.h.{layer}.mlp.c_proj": "blocks.{layer}.mlp.down",
        "transformer.ln_f": "norm",
        "lm_head": "untied_head",
    }),
    harmless=frozenset({"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                        "summary_first_dropout"}),
    moves_value_bias=True,
    written={"attn_implementation": "eager"},
    advice='Windowed layers need `attn_implementation="eager"`, which `config.json` asks for: other implementations of '
           "this architecture do not keep to the window.",
)  # fmt: skip

_STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=2, width="head_dim"), _ROPE, Rope(), _LAYER_NORM,
        Activation("hidden_act", _UNGATED, "gelu_pytorch_tanh"), WindowEverywhere(), *_ALONE,
        Biases({"use_bias": True}, {(False,): (False, False), (True,): (True, True)}),
        _more("norm_epsilon", 1e-5, tied=True, std=0.018042),
        _dropouts(embedding_dropout="dropout_embedding", attention_dropout="dropout_attention",
                  residual_dropout="dropout_residual"),
    ),
    places(_LLAMA_BLOCK | {
        "model.layers.{layer}.mlp.c_fc": "blocks.{layer}.mlp.up",
        "model.layers.{layer}.mlp.c_proj": "blocks.{layer}.mlp.down",
    }),
    harmless=frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights",
                        "mlp_type", "norm_type", "activation_function", "layer_norm_epsilon"}),  # of its ancestors
)  # fmt: skip

_STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=32), _ROPE, _LAYER_NORM,
        Rope(fraction="partial_rotary_factor", fraction_absent=0.25), Activation("hidden_act", _GATED, "silu"),
        Biases({"use_qkv_bias": False}, {(False,): (False, False), (True,): ("qkv", False)}),
        Only("qk_layernorm", False, absent=False), Only("use_parallel_residual", False, absent=False), *_ALONE,
        _more("layer_norm_eps", 1e-5, tied=False), _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _GATED_MLP),
    harmless=frozenset({"hidden_dropout"}),  # in training alone, and after the MLP alone
)  # fmt: skip

_GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    (
        _sizes(), Heads(), _ROPE, Rope("rotary_emb_base", fraction="rotary_pct", fraction_absent=0.25), _LAYER_NORM,
        Same({"use_parallel_residual": "parallel_residual"}, {"use_parallel_residual": True}),
        Activation("hidden_act", _UNGATED, "gelu"),
        Biases({"attention_bias": True}, {(True,): (True, True), (False,): (False, True)}), *_ALONE,
        _more("layer_norm_eps", 1e-5, tied=False),
        _dropouts(attention_dropout="dropout_attention", hidden_dropout="dropout_residual"),
    ),
    (
        *places({
            "gpt_neox.embed_in": "token_embedding",
            "gpt_neox.layers.{layer}.input_layernorm": "blocks.{layer}.norm1",
            "gpt_neox.layers.{layer}.attention.dense": "blocks.{layer}.attention.out",
            "gpt_neox.layers.{layer}.post_attention_layernorm": "blocks.{layer}.norm2",
            "gpt_neox.layers.{layer}.mlp.dense_h_to_4h": "blocks.{layer}.mlp.up",
            "gpt_neox.layers.{layer}.mlp.dense_4h_to_h": "blocks.{layer}.mlp.down",
            "gpt_neox.final_layer_norm": "norm",
            "embed_out": "untied_head",
        }),
        Place("gpt_neox.layers.{layer}.attention.query_key_value", _QUERY_KEY_VALUE, HEAD_BY_HEAD),
    ),
    other_names={"lm_head": "embed_out"},
)  # fmt: skip

_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", width="head_dim", whole=True), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _GATED, "silu"), _BOTH_FLAGS, *_ALONE, _more("rms_norm_eps", 1e-6, tied=False),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _GATED_MLP),
)  # fmt: skip

_QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=32, width="head_dim"), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _GATED, "silu"), Biases({}, {(): ("qkv", False)}), WindowByLayer(), *_ALONE,
        _more("rms_norm_eps", 1e-6, tied=False), _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _GATED_MLP),
    own_split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip

_QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=32, width="head_dim", width_absent=128), _ROPE,
        Rope(), _RMS_NORM, Fixed({"qk_norm": True}), Activation("hidden_act", _GATED, "silu"), _ATTENTION_FLAG,
        WindowByLayer(), *_ALONE, _more("rms_norm_eps", 1e-6, tied=False),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _QK_NORMS | _GATED_MLP),
)  # fmt: skip

_MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=8, width="head_dim"), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _GATED, "silu"), _no_biases(), WindowEverywhere(absent=4096), *_ALONE,
        _more("rms_norm_eps", 1e-6, tied=False), _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _GATED_MLP),
)  # fmt: skip

_MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=8, width="head_dim"), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _GATED, "silu"), _no_biases(), WindowByLayer(switched=False), *_ALONE,
        _more("rms_norm_eps", 1e-6, tied=False), _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _GATED_MLP),
)  # fmt: skip

_ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", width="head_dim", whole=True), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _UNGATED, "relu2"), _BOTH_FLAGS, *_ALONE, _more("rms_norm_eps", 1e-5, tied=False),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _UP_DOWN),
)  # fmt: skip

_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=8, width="head_dim"), _ROPE,
        Rope(theta_absent=1_000_000.0), _RMS_NORM, Activation("hidden_act", _GATED, "silu"), _no_biases(),
        WindowEverywhere(), Experts(("num_local_experts",), 8, 2), *_ALONE, _more("rms_norm_eps", 1e-5, tied=False),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | {
        "model.layers.{layer}.block_sparse_moe.gate": "blocks.{layer}.mlp.router",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1": "blocks.{layer}.mlp.experts.{expert}.gate",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3": "blocks.{layer}.mlp.experts.{expert}.up",
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2": "blocks.{layer}.mlp.experts.{expert}.down",
    }),
)  # fmt: skip

_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", kv_absent=4, width="head_dim"), _ROPE, Rope(), _RMS_NORM,
        Fixed({"qk_norm": True}), Activation("hidden_act", _GATED, "silu"), _ATTENTION_FLAG,
        WindowEverywhere(absent=4096, switch="use_sliding_window"),
        Experts(("num_experts", "num_local_experts"), 128, 8), Only("norm_topk_prob", True, absent=False),
        Only("decoder_sparse_step", 1, absent=1), Only("mlp_only_layers", [], absent=[]), *_ALONE,
        _more("rms_norm_eps", 1e-6, tied=False, width="moe_intermediate_size"),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    places(_LLAMA_BLOCK | _QK_NORMS | {
        "model.layers.{layer}.mlp.gate": "blocks.{layer}.mlp.router",
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj": "blocks.{layer}.mlp.experts.{expert}.gate",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj": "blocks.{layer}.mlp.experts.{expert}.up",
        "model.layers.{layer}.mlp.experts.{expert}.down_proj": "blocks.{layer}.mlp.experts.{expert}.down",
    }),
    harmless=frozenset({"intermediate_size", "max_window_layers"}),  # of dense layers; of nothing
)  # fmt: skip

_GRANITE_MOE = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    "model.",
    (
        _sizes(), Heads(kv_heads="num_key_value_heads", width="head_dim"), _ROPE, Rope(), _RMS_NORM,
        Activation("hidden_act", _GATED, "silu"), _ATTENTION_FLAG, ScaleFactor(),
        Experts(("num_local_experts",), 8, 2, shared="shared_intermediate_size"),
        Only("embedding_multiplier", 1.0, absent=1.0), Only("logits_scaling", 1.0, absent=1.0),
        Only("residual_multiplier", 1.0, absent=1.0), *_ALONE, _more("rms_norm_eps", 1e-6, tied=False),
        _dropouts(attention_dropout="dropout_attention"),
    ),
    (
        *places(_LLAMA_BLOCK),
        Place("model.layers.{layer}.block_sparse_moe.router.layer", ("blocks.{layer}.mlp.router",)),
        Place("model.layers.{layer}.block_sparse_moe.input_linear",
              ("blocks.{layer}.mlp.experts.{expert}.gate", "blocks.{layer}.mlp.experts.{expert}.up"), STACKED_HALVES),
        Place("model.layers.{layer}.block_sparse_moe.output_linear",
              ("blocks.{layer}.mlp.experts.{expert}.down",), STACKED),
        Place("model.layers.{layer}.shared_mlp.input_linear",
              ("blocks.{layer}.mlp.shared.gate", "blocks.{layer}.mlp.shared.up"), HALVES),
        Place("model.layers.{layer}.shared_mlp.output_linear", ("blocks.{layer}.mlp.shared.down",)),
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (_GPT2, _GPT_NEO, _STARCODER2, _STABLELM, _GPT_NEOX, _LLAMA, _QWEN2, _QWEN3, _MISTRAL, _MINISTRAL,
                   _ARCEE, _MIXTRAL, _QWEN3_MOE, _GRANITE_MOE)
}  # fmt: skip
"""Every architecture by its `model_type`, in the order in which a model is tried on them."""
