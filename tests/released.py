"""`config.json` of released models, exactly as published, with its meaning in gptworks.

Facts of public model cards and repositories: name → the file, and fields of the model that is read; or words of the
reason why it is not.
"""

from typing import Any

Facts = dict[str, Any]


def _file(kind: str, architecture: str, version: str, facts: Facts, *, dtype: str = "bfloat16") -> Facts:
    return {"architectures": [architecture], "model_type": kind, "torch_dtype": dtype, "transformers_version": version,
            "use_cache": True, **facts}  # fmt: skip


def _sizes(vocab: int, width: int, layers: int, heads: int, inner: int, context: int, kv: int | None = None) -> Facts:
    sizes = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
             "intermediate_size": inner, "max_position_embeddings": context, "hidden_act": "silu",
             "initializer_range": 0.02}  # fmt: skip
    return sizes | ({} if kv is None else {"num_key_value_heads": kv})


def _llama(version: str, facts: Facts, **more: Any) -> Facts:
    return _file("llama", "LlamaForCausalLM", version, {"pretraining_tp": 1} | facts, **more)


_LLAMA3 = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "mlp_bias": False,
           "rms_norm_eps": 1e-05, "rope_theta": 500000.0}  # fmt: skip
_SCALED = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
           "rope_type": "llama3"}  # fmt: skip
_QWEN2 = {"attention_dropout": 0.0, "bos_token_id": 151643, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
          "use_sliding_window": False}  # fmt: skip
_QWEN3 = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
          "head_dim": 128, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
          "use_sliding_window": False}  # fmt: skip
_MISTRAL = {"bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
_GEMMA = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
          "rms_norm_eps": 1e-06, "rope_theta": 10000.0}  # fmt: skip
_PHI3 = {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
         "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
         "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip
_NEOX = {"bos_token_id": 0, "classifier_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
         "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
         "use_parallel_residual": True}  # fmt: skip
_OLMO2 = {"attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "pad_token_id": 100277,
          "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False}  # fmt: skip
_SMOLLM = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "rms_norm_eps": 1e-05,
           "rope_scaling": None, "tie_word_embeddings": True}  # fmt: skip


def _phi_auto(code: str = "modeling_phi3.Phi3ForCausalLM") -> Facts:
    return {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": code}}


RELEASED: dict[str, tuple[Facts, Facts | str]] = {
    "meta-llama/Llama-2-7b-hf": (
        _llama("4.31.0.dev0", _sizes(32000, 4096, 32, 32, 11008, 4096, 32) | {
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "tie_word_embeddings": False}, dtype="float16"),
        {"d_ff": 11008, "n_kv_heads": 32, "rope_theta": 1e4, "tie_embeddings": False},
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        _llama("4.40.0.dev0", _sizes(128256, 4096, 32, 32, 14336, 8192, 8) | _LLAMA3 | {
            "eos_token_id": 128009, "rope_scaling": None, "tie_word_embeddings": False}),
        {"n_kv_heads": 8, "rope_theta": 5e5, "rope_scaling": None, "norm_eps": 1e-5},
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        _llama("4.42.3", _sizes(128256, 4096, 32, 32, 14336, 131072, 8) | _LLAMA3 | {
            "eos_token_id": [128001, 128008, 128009], "rope_scaling": _SCALED, "tie_word_embeddings": False}),
        {"context_length": 131072, "original_context_length": 8192},
    ),
    "meta-llama/Llama-3.2-1B": (
        _llama("4.45.0.dev0", _sizes(128256, 2048, 16, 32, 8192, 131072, 8) | _LLAMA3 | {
            "eos_token_id": 128001, "head_dim": 64, "rope_scaling": _SCALED | {"factor": 32.0},
            "tie_word_embeddings": True}),
        {"d_head": 64, "tie_embeddings": True},
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": (
        _llama("4.35.0", _sizes(32000, 2048, 22, 32, 5632, 2048, 4) | {
            "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 10000.0, "tie_word_embeddings": False}),
        {"n_kv_heads": 4, "d_head": 64},
    ),
    "HuggingFaceTB/SmolLM-135M": (
        _llama("4.42.3", _sizes(49152, 576, 30, 9, 1536, 2048, 3) | _SMOLLM | {
            "bos_token_id": 0, "eos_token_id": 0, "rope_theta": 10000.0}),
        {"n_heads": 9, "n_kv_heads": 3, "tie_embeddings": True},
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (
        _llama("4.42.3", _sizes(49152, 2048, 24, 32, 8192, 8192, 32) | _SMOLLM | {
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rope_theta": 130000,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}),
        {"rope_theta": 130000, "context_length": 8192},
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        _file("smollm3", "SmolLM3ForCausalLM", "4.54.0.dev0", _sizes(128256, 2048, 36, 16, 11008, 65536, 4) | {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012,
            "layer_types": ["full_attention"] * 36, "max_window_layers": 28, "mlp_bias": False,
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pad_token_id": 128004,
            "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
            "sliding_window": None, "use_sliding_window": False}),
        {"rope_pattern": ("rope", "rope", "rope", "none"), "window": None, "tie_embeddings": True, "rope_theta": 5e6},
    ),
    "Qwen/Qwen2-0.5B": (
        _file("qwen2", "Qwen2ForCausalLM", "4.40.1", _sizes(151936, 896, 24, 14, 4864, 131072, 2) | _QWEN2 | {
            "eos_token_id": 151643, "max_window_layers": 24, "sliding_window": 131072, "tie_word_embeddings": True}),
        {"attention_bias": "qkv", "window": None, "tie_embeddings": True},
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        _file("qwen2", "Qwen2ForCausalLM", "4.43.1", _sizes(152064, 3584, 28, 28, 18944, 32768, 4) | _QWEN2 | {
            "eos_token_id": 151645, "max_window_layers": 28, "sliding_window": 131072, "tie_word_embeddings": False}),
        {"attention_bias": "qkv", "window": None, "n_kv_heads": 4},
    ),
    "Qwen/Qwen3-8B": (
        _file("qwen3", "Qwen3ForCausalLM", "4.51.0", _sizes(151936, 4096, 36, 32, 12288, 40960, 8) | _QWEN3 | {
            "max_window_layers": 36, "tie_word_embeddings": False}),
        {"qk_norm": True, "d_head": 128, "window": None},
    ),
    "Qwen/Qwen3-30B-A3B": (
        _file("qwen3_moe", "Qwen3MoeForCausalLM", "4.51.0", _sizes(151936, 2048, 48, 32, 6144, 40960, 4) | _QWEN3 | {
            "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False}),
        {"n_experts": 128, "n_experts_per_token": 8, "d_ff": 768},
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        _file("qwen2_moe", "Qwen2MoeForCausalLM", "4.39.0.dev0", _sizes(151936, 2048, 24, 16, 5632, 8192, 16) | {
            "num_experts": 60, "shared_expert_intermediate_size": 5632}),
        "model_type `qwen2_moe`",
    ),
    "allenai/OLMo-1B-hf": (
        _file("olmo", "OlmoForCausalLM", "4.40.0.dev0", _sizes(50304, 2048, 16, 16, 8192, 2048, 16) | {
            "clip_qkv": None, "eos_token_id": 50279, "pad_token_id": 1}, dtype="float32"),
        "model_type `olmo`",
    ),
    "allenai/OLMo-2-1124-7B": (
        _file("olmo2", "Olmo2ForCausalLM", "4.47.0.dev0", _sizes(100352, 4096, 32, 32, 11008, 4096, 32) | _OLMO2,
              dtype="float32"),
        {"norm_placement": "after", "qk_norm": "whole", "rope_theta": 5e5},
    ),
    "mistralai/Mistral-7B-v0.1": (
        _file("mistral", "MistralForCausalLM", "4.34.0.dev0", _sizes(32000, 4096, 32, 32, 14336, 32768, 8) | _MISTRAL
              | {
            "rope_theta": 10000.0, "sliding_window": 4096}),
        {"window": 4096, "context_length": 32768},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        _file("mistral", "MistralForCausalLM", "4.36.0", _sizes(32000, 4096, 32, 32, 14336, 32768, 8) | _MISTRAL
              | {
            "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None}),
        {"window": None, "rope_theta": 1e6},
    ),
    "mistralai/Mistral-7B-v0.3": (
        _file("mistral", "MistralForCausalLM", "4.42.0.dev0", _sizes(32768, 4096, 32, 32, 14336, 32768, 8) | _MISTRAL
              | {
            "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None}),
        {"vocab_size": 32768, "window": None},
    ),
    "mistralai/Ministral-8B-Instruct-2410": (
        _file("mistral", "MistralForCausalLM", "4.46.0.dev0", _sizes(131072, 4096, 36, 32, 12288, 32768, 8) | _MISTRAL
              | {
            "attention_dropout": 0.0, "head_dim": 128, "rope_theta": 100000000.0, "sliding_window": 32768}),
        {"rope_theta": 1e8, "window": None},
    ),
    "google/gemma-2b": (
        _file("gemma", "GemmaForCausalLM", "4.38.0.dev0", _sizes(256000, 2048, 18, 8, 16384, 8192, 1) | _GEMMA | {
            "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": None}),
        {"mlp": "geglu_tanh", "n_kv_heads": 1, "embedding_scale": 2048**0.5, "tie_embeddings": True},
    ),
    "google/gemma-2-9b-it": (
        _file("gemma2", "Gemma2ForCausalLM", "4.42.0.dev0", _sizes(256000, 3584, 42, 16, 14336, 8192, 8) | _GEMMA | {
            "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
            "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096}),
        {"attention_softcap": 50.0, "logit_softcap": 30.0, "window_pattern": ("window", "full"), "window": 4096},
    ),
    "google/gemma-3-270m": (
        _file("gemma3_text", "Gemma3ForCausalLM", "4.55.0.dev0", _sizes(262144, 640, 18, 4, 2048, 32768, 1) | _GEMMA | {
            "_sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "head_dim": 256, "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "layer_types":
            (["sliding_attention"] * 5 + ["full_attention"]) * 3, "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
            "use_bidirectional_attention": False}),
        {"window": 512, "window_rope_theta": 1e4, "window_pattern": ("window",) * 5 + ("full",)},
    ),
    "google/gemma-3-4b-it": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {},
         "vision_config": {}, "eos_token_id": [1, 106], "image_token_index": 262144, "mm_tokens_per_image": 256},
        "a folder of only its language model can be read",
    ),
    "ibm-granite/granite-3.1-2b-instruct": (
        _file("granite", "GraniteForCausalLM", "4.47.0.dev0", _sizes(49155, 2048, 40, 32, 8192, 131072, 8) | {
            "attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625, "bos_token_id": 0,
            "embedding_multiplier": 12.0, "eos_token_id": 0, "logits_scaling": 8.0, "mlp_bias": False,
            "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 5000000.0, "tie_word_embeddings": True}),
        {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": 8.0, "attention_scale": 0.015625},
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        _file("phi3", "Phi3ForCausalLM", "4.40.2", _sizes(32064, 3072, 32, 32, 8192, 4096, 32) | _PHI3
              | _phi_auto() | {
            "_name_or_path": "Phi-3-mini-4k-instruct", "rope_scaling": None, "sliding_window": 2047}),
        {"window": 2047, "rope_fraction": 1.0},
    ),
    "microsoft/Phi-3.5-mini-instruct": (
        _file("phi3", "Phi3ForCausalLM", "4.43.3", _sizes(32064, 3072, 32, 32, 8192, 131072, 32) | _PHI3
              | _phi_auto() | {
            "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "sliding_window": 262144}),
        {"original_context_length": 4096, "context_length": 131072, "window": None},
    ),
    "microsoft/phi-2": (
        _file("phi", "PhiForCausalLM", "4.37.0", _sizes(51200, 2560, 32, 32, 10240, 2048, 32) | {
            "partial_rotary_factor": 0.4, "qk_layernorm": False}, dtype="float16"),
        "model_type `phi`",
    ),
    "EleutherAI/pythia-160m": (
        _file("gpt_neox", "GPTNeoXForCausalLM", "4.24.0", _sizes(50304, 768, 12, 12, 3072, 2048) | _NEOX,
              dtype="float16"),
        {"parallel_residual": True, "d_rotary": 16, "mlp": "gelu"},
    ),
    "EleutherAI/gpt-neox-20b": (
        _file("gpt_neox", "GPTNeoXForCausalLM", "4.19.0.dev0", _sizes(50432, 6144, 44, 64, 24576, 2048) | _NEOX | {
            "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0}, dtype="float16"),
        {"mlp": "gelu_tanh", "d_rotary": 24},
    ),
    "distilbert/distilgpt2": (
        {"_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
         "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"},
         "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
         "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1,
         "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type":
         "cls_index", "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True,
         "max_length": 50}}, "vocab_size": 50257},
        {"n_layers": 6, "position": "learned", "mlp": "gelu_tanh"},
    ),
    "bigcode/starcoder2-3b": (
        _file("starcoder2", "Starcoder2ForCausalLM", "4.37.0.dev0", _sizes(49152, 3072, 30, 24, 12288, 16384, 2) | {
            "activation_function": "gelu", "attention_dropout": 0.1, "attention_softmax_in_fp32": True,
            "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.018042, "layer_norm_epsilon": 1e-05, "mlp_type": "default", "norm_epsilon": 1e-05,
            "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
            "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096,
            "use_bias": True}),
        {"window": 4096, "attention_bias": True, "norm": "layernorm"},
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        _file("seed_oss", "SeedOssForCausalLM", "4.55.0", _sizes(155136, 5120, 64, 80, 27648, 524288, 8) | {
            "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False, "bos_token_id": 0,
            "eos_token_id": 2, "head_dim": 128, "mlp_bias": False, "pad_token_id": 1, "residual_dropout": 0.1,
            "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
            "tie_word_embeddings": False}),
        {"attention_bias": "qkv", "d_head": 128, "rope_theta": 1e7},
    ),
    "facebook/cwm": (
        _file("cwm", "CwmForCausalLM", "4.56.0", _sizes(128256, 6144, 64, 48, 21504, 131072, 8) | {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "layer_types":
            (["full_attention"] + ["sliding_attention"] * 3) * 16, "mlp_bias": False, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": _SCALED | {"factor": 16.0}, "rope_theta": 1000000.0,
            "sliding_window": 8192, "tie_word_embeddings": False}),
        {"window": 8192, "window_pattern": ("full", "window", "window", "window")},
    ),
    "baidu/ERNIE-4.5-0.3B-PT": (
        _file("ernie4_5", "Ernie4_5_ForCausalLM", "4.54.0.dev0", _sizes(103424, 1024, 18, 16, 3072, 131072, 2) | {
            "auto_map": {"AutoConfig": "configuration_ernie4_5.Ernie4_5_Config", "AutoModel":
                         "modeling_ernie4_5.Ernie4_5_Model", "AutoModelForCausalLM":
                         "modeling_ernie4_5.Ernie4_5_ForCausalLM"},
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "pad_token_id": 0, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False}),
        {"d_head": 128, "rope_theta": 5e5, "attention_bias": False},
    ),
    "kyutai/helium-1-preview-2b": (
        _file("helium", "HeliumForCausalLM", "4.45.0.dev0", _sizes(48000, 2560, 24, 20, 7040, 4096, 20) | {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-08, "rope_theta": 100000.0,
            "tie_word_embeddings": False}),
        {"norm_eps": 1e-8, "rope_theta": 1e5},
    ),
    "state-spaces/mamba-130m-hf": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "state_size": 16},
        "a recurrent state, not attention",
    ),
    "facebook/opt-125m": (
        {"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "do_layer_norm_before": True},
        r"model_type `opt`\. gptworks reads",
    ),
    "bigscience/bloom-560m": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_embed": 1024, "n_layer": 24}, "ALiBi",
    ),
}  # fmt: skip
