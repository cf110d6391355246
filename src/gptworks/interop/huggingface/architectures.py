"""The architectures of transformers that gptworks reads and writes.

To add an architecture, add an entry to `_ALL`; export and import then use it. The tables follow the classes of
transformers 5, and test_huggingface.py compares each entry with its class.
"""

from typing import Any

from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.positions import (
    ROTATED_LAYERS,
    WINDOW_BY_PATTERN,
    rope,
    window_by_layer,
    window_everywhere,
)
from gptworks.interop.huggingface.settings import (
    EMBEDDING_ROOT,
    QUERY_SCALAR,
    SCALE_FACTOR,
    SCALE_SWITCH,
    Clause,
    activation,
    bias_flags,
    experts,
    fixed,
    heads,
    needed,
    only,
    optional,
    own_code,
)
from gptworks.interop.tensors import (
    HALVES,
    HEAD_BY_HEAD,
    KEY_IN_PAIRS,
    LESS_ONE,
    PLAIN,
    QUERY_IN_PAIRS,
    QUERY_KEY_VALUE,
    STACKED,
    STACKED_HALVES,
    TRANSPOSED,
    TRANSPOSED_THIRDS,
    Layout,
    Place,
    places,
)

# ----------------------------------------------------------------------------------------------- shared settings

_SUMMARY = frozenset({"summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
                      "summary_first_dropout"})  # fmt: skip
_ALONE = tuple(only(name, False, absent=False) for name in (
    "is_encoder_decoder", "add_cross_attention", "use_mrope", "rope_interleaved",
))  # fmt: skip
_PHI3_ALONE = (
    *(only(f"{name}_bias", False, absent=False) for name in ("attention", "mlp", "lm_head")),
    *(only(name, 1, absent=1) for name in ("full_attn_mod", "interpolate_factor")),
    own_code("modeling_phi3.Phi3ForCausalLM"),
)  # fmt: skip
_UNGATED = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
_UNGATED_NEW = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}
"""The names in `_UNGATED`, but with GPT-2's name for the tanh form of GELU."""
_GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh"}
_SILU = activation("hidden_act", _GATES, "silu")
_LAYER_NORM = fixed(norm="layernorm", norm_bias=True)
_QK_NORM = fixed(qk_norm=True)
_LEARNED, _ROPE = fixed(position="learned"), fixed(position="rope")
_NO_BIASES = fixed(attention_bias=False, mlp_bias=False)
_ATTENTION_FLAG = bias_flags(attention_bias=(False, "qkv out"))
_BOTH_FLAGS = bias_flags(attention_bias=(False, "qkv out"), mlp_bias=(False, "mlp"))
_MULTIPLIERS = optional({
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
    "logits_scaling": ("logit_divisor", 1.0),
})  # fmt: skip
_FIXED_LENGTH = ("default", "linear", "yarn", "llama3")
"""Kinds of rotary scaling that do not depend on the length of a text."""
_SIZES = needed(vocab_size="vocab_size", hidden_size="d_model", num_hidden_layers="n_layers")
_FOUR_TIMES = ("d_ff", lambda ours: 4 * ours["d_model"])


def _more(norm_eps: str, eps: float, *, tied: bool, std: float = 0.02) -> Clause:
    ends = {"tie_word_embeddings": ("tie_embeddings", tied), "initializer_range": ("init_std", std)}
    return optional({norm_eps: ("norm_eps", eps), **ends})


def _dropouts(absent: float = 0.0, **names: str) -> Clause:
    return optional({name: (f"dropout_{ours}", absent) for name, ours in names.items()})


# ------------------------------------------------------------------------------------------------ shared tensors

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
_AFTER_BLOCK = {theirs: ours for theirs, ours in _LLAMA_BLOCK.items() if not ours.endswith(("norm1", "norm2"))} | {
    "model.layers.{layer}.post_attention_layernorm": "blocks.{layer}.norm1",
    "model.layers.{layer}.post_feedforward_layernorm": "blocks.{layer}.norm2",
}
_BETWEEN_NORMS = {theirs: ours for theirs, ours in _LLAMA_BLOCK.items() if not ours.endswith("norm2")} | {
    "model.layers.{layer}.post_attention_layernorm": "blocks.{layer}.norm1_after",
    "model.layers.{layer}.pre_feedforward_layernorm": "blocks.{layer}.norm2",
    "model.layers.{layer}.post_feedforward_layernorm": "blocks.{layer}.norm2_after",
}
_GATED_MLP = {"model.layers.{layer}.mlp.gate_proj": "blocks.{layer}.mlp.gate"} | _UP_DOWN
_QUERY_KEY_VALUE = tuple(f"blocks.{{layer}}.attention.{name}" for name in ("query", "key", "value"))

_NOT_ROTATED = {theirs: ours for theirs, ours in _LLAMA_BLOCK.items() if ours not in _QUERY_KEY_VALUE[:2]}
_ROTATED_IN_PAIRS = (
    Place("model.layers.{layer}.self_attn.q_proj", _QUERY_KEY_VALUE[:1], QUERY_IN_PAIRS),
    Place("model.layers.{layer}.self_attn.k_proj", _QUERY_KEY_VALUE[1:2], KEY_IN_PAIRS),
)


def like_llama(
    model_type: str,
    architecture: str,
    *clauses: Clause,
    heads: Clause,
    rope: Clause = rope(),  # noqa: B008
    mlp: Clause = _SILU,
    width: str = "intermediate_size",
    eps: float = 1e-6,
    modules: dict[str, str] = _GATED_MLP,
    joined: tuple[Place, ...] = (),
    block: dict[str, str] = _LLAMA_BLOCK,
    norms: Layout = PLAIN,
    tied: bool = False,
    dropout: float = 0.0,
    **more: Any,
) -> Family:
    """Return an architecture like Llama: rotary positions, RMSNorm, and Llama's names of settings and tensors.

    Args:
        clauses: clauses in addition to Llama's.
        width: name of the setting for the MLP's inner width.
        modules: modules in addition to those in `block`: name in transformers → our name.
        joined: modules of transformers that hold several of our modules.
    """
    return Family(
        model_type, architecture, "model.",
        (
            _SIZES, needed(**{width: "d_ff"}), heads, _ROPE, rope, fixed(norm="rmsnorm", norm_bias=False), mlp,
            *clauses, *_ALONE, _more("rms_norm_eps", eps, tied=tied),
            _dropouts(dropout, attention_dropout="attention"),
        ),
        (*places(block | modules, norms), *joined),
        **more,
    )  # fmt: skip


def _gemma(model_type: str, architecture: str, *clauses: Clause, rope: Clause, **more: Any) -> Family:
    """Return an architecture like Gemma 2: scaled embedding, GEGLU, norms by 1 + w before and after each sublayer."""
    return like_llama(
        model_type, architecture, fixed(norm_placement="both"), _ATTENTION_FLAG, QUERY_SCALAR, EMBEDDING_ROOT,
        *clauses, only("use_bidirectional_attention", False, absent=False),
        heads=heads(kv_absent=4, width_absent=256, whole=True), rope=rope, tied=True,
        mlp=activation("hidden_activation", dict(reversed(_GATES.items())), "gelu_pytorch_tanh"),
        block=_BETWEEN_NORMS, norms=LESS_ONE, **more,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- the architectures

_ALL = (
    Family(
        "gpt2", "GPT2LMHeadModel", "transformer.",
        (
            needed(vocab_size="vocab_size", n_embd="d_model", n_layer="n_layers", n_positions="context_length"),
            heads("n_head", None, None), _LEARNED, _LAYER_NORM, optional({"n_inner": _FOUR_TIMES}),
            activation("activation_function", _UNGATED_NEW, "gelu_new"), fixed(attention_bias=True, mlp_bias=True),
            SCALE_SWITCH, only("scale_attn_by_inverse_layer_idx", False, absent=False), *_ALONE,
            _more("layer_norm_epsilon", 1e-5, tied=True), fixed(init="gpt2"),
            _dropouts(0.1, embd_pdrop="embedding", attn_pdrop="attention", resid_pdrop="residual"),
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
        harmless=frozenset({"n_ctx", "reorder_and_upcast_attn", *_SUMMARY}),
    ),
    Family(
        "gpt_neo", "GPTNeoForCausalLM", "transformer.",
        (
            needed(vocab_size="vocab_size", hidden_size="d_model", num_layers="n_layers",
                   max_position_embeddings="context_length"),
            heads("num_heads", None, None), _LEARNED, _LAYER_NORM, optional({"intermediate_size": _FOUR_TIMES}),
            activation("activation_function", _UNGATED_NEW, "gelu_new"), fixed(attention_bias="out", mlp_bias=True),
            fixed(attention_scale=1.0), WINDOW_BY_PATTERN, *_ALONE, _more("layer_norm_epsilon", 1e-5, tied=True),
            _dropouts(embed_dropout="embedding", attention_dropout="attention", resid_dropout="residual"),
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
        harmless=_SUMMARY,
        moves_value_bias=True,
        written={"attn_implementation": "eager"},
        advice='Windowed layers need `attn_implementation="eager"`, which `config.json` sets: other implementations '
               "of this architecture ignore the window.",
    ),
    Family(
        "starcoder2", "Starcoder2ForCausalLM", "model.",
        (
            _SIZES, needed(intermediate_size="d_ff"), heads(kv_absent=2), _ROPE, rope(), _LAYER_NORM,
            activation("hidden_act", _UNGATED, "gelu_pytorch_tanh"), window_everywhere(), *_ALONE,
            bias_flags(use_bias=(True, "qkv out mlp")),
            _more("norm_epsilon", 1e-5, tied=True, std=0.018042),
            _dropouts(embedding_dropout="embedding", attention_dropout="attention", residual_dropout="residual"),
        ),
        places(_LLAMA_BLOCK | {
            "model.layers.{layer}.mlp.c_fc": "blocks.{layer}.mlp.up",
            "model.layers.{layer}.mlp.c_proj": "blocks.{layer}.mlp.down",
        }),
        harmless=frozenset({"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights",
                            "mlp_type", "norm_type", "activation_function", "layer_norm_epsilon"}),  # without effect
    ),
    Family(
        "stablelm", "StableLmForCausalLM", "model.",
        (
            _SIZES, needed(intermediate_size="d_ff"), heads(width=None, kv_absent=32), _ROPE, _LAYER_NORM,
            rope(fraction="partial_rotary_factor", fraction_absent=0.25), _SILU,
            bias_flags(use_qkv_bias=(False, "qkv")),
            only("qk_layernorm", False, absent=False), only("use_parallel_residual", False, absent=False), *_ALONE,
            _more("layer_norm_eps", 1e-5, tied=False), _dropouts(attention_dropout="attention"),
        ),
        places(_LLAMA_BLOCK | _GATED_MLP),
        harmless=frozenset({"hidden_dropout"}),  # dropout after the MLP, used only in training
    ),
    Family(
        "gpt_neox", "GPTNeoXForCausalLM", "gpt_neox.",
        (
            _SIZES, needed(intermediate_size="d_ff"), heads(kv_heads=None, width=None), _ROPE, _LAYER_NORM,
            rope("rotary_emb_base", fraction="rotary_pct", fraction_absent=0.25),
            optional({"use_parallel_residual": ("parallel_residual", True)}),
            activation("hidden_act", _UNGATED, "gelu"), *_ALONE,
            bias_flags("mlp", attention_bias=(True, "qkv out")),
            _more("layer_norm_eps", 1e-5, tied=False),
            _dropouts(attention_dropout="attention", hidden_dropout="residual"),
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
        harmless=frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob"}),  # dropout settings of old versions
    ),
    like_llama("llama", "LlamaForCausalLM", _BOTH_FLAGS, heads=heads(whole=True)),
    like_llama(
        "qwen2", "Qwen2ForCausalLM", fixed(attention_bias="qkv", mlp_bias=False), window_by_layer(),
        heads=heads(kv_absent=32),
        own_split=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    like_llama(
        "qwen3", "Qwen3ForCausalLM", _QK_NORM, _ATTENTION_FLAG, window_by_layer(),
        heads=heads(kv_absent=32, width_absent=128), modules=_QK_NORMS | _GATED_MLP,
    ),
    like_llama(
        "mistral", "MistralForCausalLM", _NO_BIASES, window_everywhere(absent=4096), heads=heads(kv_absent=8)
    ),
    like_llama(
        "ministral", "MinistralForCausalLM", _NO_BIASES, window_by_layer(switched=False), heads=heads(kv_absent=8)
    ),
    like_llama(
        "arcee", "ArceeForCausalLM", _BOTH_FLAGS, heads=heads(whole=True), eps=1e-5,
        mlp=activation("hidden_act", _UNGATED, "relu2"), modules=_UP_DOWN,
    ),
    like_llama(
        "olmo2", "Olmo2ForCausalLM", fixed(qk_norm="whole", norm_placement="after"), _ATTENTION_FLAG, heads=heads(),
        eps=1e-5, block=_AFTER_BLOCK, modules=_QK_NORMS | _GATED_MLP,
    ),
    like_llama(
        "olmo3", "Olmo3ForCausalLM", fixed(qk_norm="whole", norm_placement="after"), _ATTENTION_FLAG,
        window_by_layer(switched=False, full_every=4), heads=heads(), eps=1e-5, block=_AFTER_BLOCK,
        rope=rope(theta_absent=500_000.0, window_theta_absent=500_000.0, kinds=_FIXED_LENGTH),
        modules=_QK_NORMS | _GATED_MLP,
    ),
    like_llama(
        "gemma", "GemmaForCausalLM", _ATTENTION_FLAG, EMBEDDING_ROOT,
        only("hidden_activation", "gelu_pytorch_tanh", absent="gelu_pytorch_tanh"),
        only("use_bidirectional_attention", False, absent=False),
        heads=heads(kv_absent=16, width_absent=256), norms=LESS_ONE, tied=True,
        mlp=activation("hidden_act", {"geglu_tanh": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh",
                       other_names={"gelu": "gelu_pytorch_tanh"}),  # Gemma's first releases name the tanh form "gelu"
    ),
    _gemma(
        "gemma2", "Gemma2ForCausalLM",
        optional({"final_logit_softcapping": ("logit_softcap", 30.0),
                  "attn_logit_softcapping": ("attention_softcap", 50.0)}, nullable=True),
        window_by_layer(switched=False, full_every=2), rope=rope(), modules=_GATED_MLP,
        harmless=frozenset({"hidden_act", "cache_implementation", "sliding_window_size"}),  # no effect on logits
    ),
    _gemma(
        "gemma3_text", "Gemma3ForCausalLM", _QK_NORM,
        optional({"final_logit_softcapping": ("logit_softcap", None)}, nullable=True),
        only("attn_logit_softcapping", None, absent=None),
        window_by_layer(switched=False, full_every=6, pattern="sliding_window_pattern"),
        rope=rope(theta_absent=1_000_000.0, window_theta="rope_local_base_freq", window_theta_absent=10_000.0,
                  kinds=_FIXED_LENGTH),
        modules=_QK_NORMS | _GATED_MLP,
        # `cache_implementation` is for generation only; `_sliding_window_pattern` repeats `layer_types`
        harmless=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    ),
    like_llama("granite", "GraniteForCausalLM", _BOTH_FLAGS, SCALE_FACTOR, _MULTIPLIERS, heads=heads()),
    like_llama(
        "smollm3", "SmolLM3ForCausalLM", _BOTH_FLAGS, ROTATED_LAYERS,
        window_by_layer(by_rotation=True, window_absent=None),
        heads=heads(kv_absent=4, whole=True), tied=True, rope=rope(theta_absent=2_000_000.0),
    ),
    like_llama(
        "phi3", "Phi3ForCausalLM", _NO_BIASES, window_everywhere(), _dropouts(resid_pdrop="residual"), *_PHI3_ALONE,
        heads=heads(width=None), eps=1e-5,
        rope=rope(fraction="partial_rotary_factor", kinds=("default", "longrope"), original_absent=4096),
        block={theirs: ours for theirs, ours in _LLAMA_BLOCK.items() if ours not in _QUERY_KEY_VALUE},
        modules={"model.layers.{layer}.mlp.down_proj": "blocks.{layer}.mlp.down"},
        joined=(
            Place("model.layers.{layer}.self_attn.qkv_proj", _QUERY_KEY_VALUE, QUERY_KEY_VALUE),
            Place("model.layers.{layer}.mlp.gate_up_proj",
                  ("blocks.{layer}.mlp.gate", "blocks.{layer}.mlp.up"), HALVES),
        ),
        harmless=frozenset({"embd_pdrop"}),  # Phi-3's class does not use it
    ),
    like_llama(
        "mixtral", "MixtralForCausalLM", _NO_BIASES, window_everywhere(),
        experts("num_local_experts", count_absent=8, per_token_absent=2),
        heads=heads(kv_absent=8), rope=rope(theta_absent=1_000_000.0), eps=1e-5,
        modules={
            "model.layers.{layer}.block_sparse_moe.gate": "blocks.{layer}.mlp.router",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1": "blocks.{layer}.mlp.experts.{expert}.gate",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3": "blocks.{layer}.mlp.experts.{expert}.up",
            "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2": "blocks.{layer}.mlp.experts.{expert}.down",
        },
    ),
    like_llama(
        "qwen3_moe", "Qwen3MoeForCausalLM", _QK_NORM, _ATTENTION_FLAG,
        window_everywhere(absent=4096, switch="use_sliding_window"),
        experts("num_experts", "num_local_experts", count_absent=128, per_token_absent=8),
        only("norm_topk_prob", True, absent=False), only("decoder_sparse_step", 1, absent=1),
        only("mlp_only_layers", [], absent=[]),
        heads=heads(kv_absent=4), width="moe_intermediate_size",
        modules=_QK_NORMS | {
            "model.layers.{layer}.mlp.gate": "blocks.{layer}.mlp.router",
            "model.layers.{layer}.mlp.experts.{expert}.gate_proj": "blocks.{layer}.mlp.experts.{expert}.gate",
            "model.layers.{layer}.mlp.experts.{expert}.up_proj": "blocks.{layer}.mlp.experts.{expert}.up",
            "model.layers.{layer}.mlp.experts.{expert}.down_proj": "blocks.{layer}.mlp.experts.{expert}.down",
        },
        harmless=frozenset({"intermediate_size", "max_window_layers"}),  # for dense layers, which these models lack
    ),
    like_llama(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", _ATTENTION_FLAG, SCALE_FACTOR,
        experts("num_local_experts", count_absent=8, per_token_absent=2, shared="shared_intermediate_size"),
        _MULTIPLIERS, heads=heads(),
        modules={
            "model.layers.{layer}.block_sparse_moe.router.layer": "blocks.{layer}.mlp.router",
            "model.layers.{layer}.shared_mlp.output_linear": "blocks.{layer}.mlp.shared.down",
        },
        joined=(
            Place("model.layers.{layer}.block_sparse_moe.input_linear",
                  ("blocks.{layer}.mlp.experts.{expert}.gate", "blocks.{layer}.mlp.experts.{expert}.up"),
                  STACKED_HALVES),
            Place("model.layers.{layer}.block_sparse_moe.output_linear",
                  ("blocks.{layer}.mlp.experts.{expert}.down",), STACKED),
            Place("model.layers.{layer}.shared_mlp.input_linear",
                  ("blocks.{layer}.mlp.shared.gate", "blocks.{layer}.mlp.shared.up"), HALVES),
        ),
    ),
    like_llama(
        "seed_oss", "SeedOssForCausalLM", _dropouts(0.1, residual_dropout="residual"),
        bias_flags(attention_bias=(True, "qkv"), attention_out_bias=(False, "out"), mlp_bias=(False, "mlp")),
        heads=heads(kv_absent=8, width_absent=128), dropout=0.1, exported=False,
    ),
    like_llama(
        "cwm", "CwmForCausalLM", only("attention_bias", False, absent=False),
        bias_flags(mlp_bias=(False, "mlp")),
        window_by_layer(switched=False, full_every=4, full_is=0, window_absent=8192),
        heads=heads(kv_absent=8, width_absent=128, whole=True), eps=1e-5, exported=False,
        rope=rope(theta_absent=1_000_000.0, absent={
            "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }),
    ),
    like_llama(
        "ernie4_5", "Ernie4_5ForCausalLM",
        bias_flags(use_bias=(False, "qkv out mlp")), only("compression_ratio", 1.0, absent=1.0),
        own_code("modeling_ernie4_5.Ernie4_5_ForCausalLM"),
        heads=heads(kv_absent=2, width_absent=128), eps=1e-5, tied=True, rope=rope(theta_absent=500_000.0),
        block=_NOT_ROTATED, joined=_ROTATED_IN_PAIRS, exported=False,
        harmless=frozenset({"use_flash_attention", "fuse_rms_norm", "max_sequence_length"}),  # no effect on logits
    ),
    like_llama(
        "helium", "HeliumForCausalLM", bias_flags(attention_bias=(False, "qkv"), mlp_bias=(False, "mlp")),
        heads=heads(kv_absent=20, width_absent=128), eps=1e-8, rope=rope(theta_absent=100_000.0),
        block=_NOT_ROTATED, joined=_ROTATED_IN_PAIRS, exported=False,
    ),
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Every architecture by its `model_type`. If several fit a model equally well, an export uses the first."""
