"""The architectures of llama.cpp that compute what a `GPT` computes, and a model's settings and tensors there.

What stands in the table was read from llama.cpp's sources; test_gguf.py compares each with llama.cpp itself.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gptworks.config import LABORATORY, ModelConfig
from gptworks.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

Bias = Literal["qkv", "out", "mlp"]
ALL_BIASES: tuple[Bias, ...] = ("qkv", "out", "mlp")
GELU = ("gelu_tanh", "gelu")
"""llama.cpp has the tanh form alone."""

APPROXIMATE_GELU = (
    "llama.cpp computes model.mlp=gelu by its tanh form, which is off by at most 0.0005; on a CPU it rounds GELU to 16 "
    "bits besides"
)


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: the models it computes, and how their tensors lie."""

    name: str
    norm: Literal["layernorm", "rmsnorm"]
    mlp: tuple[str, ...]
    position: tuple[str, ...] = ("rope",)
    qk_norm: bool = False
    biases: tuple[Bias, ...] = ()
    """Those of linear layers that it can have."""
    always_biased: bool = False
    """It has all of them in every file. Where the model has none they are zeros."""
    joined: bool = False
    """Query, key and value are one tensor."""
    interleaved: bool = False
    """It rotates elements 2i and 2i + 1 of a head where we rotate i and i + D/2."""
    free_head_width: bool = False
    """A head may be wider or narrower than d_model / n_heads."""
    partial_rotation: bool = False
    parallel: bool = False
    """Attention and MLP may stand side by side, each behind its norm."""
    tied: bool = True
    """The head may be left out of the file. Where not, a tied one is stored twice."""
    experts: Literal["none", "routed", "shared"] = "none"
    attention_scale: bool = False

    def obstacles(self, config: ModelConfig) -> list[str]:
        """The settings that it does not compute, as `name=value`."""
        used = {"qkv": config.qkv_bias, "out": config.out_bias, "mlp": config.mlp_bias}
        held = {bias: bias in self.biases and not (bias == "mlp" and config.n_experts) for bias in ALL_BIASES}
        wide = config.n_heads * config.d_head != config.d_model
        scaling = config.rope_scaling
        fits = {
            "position": config.position in self.position,
            "norm": config.norm == self.norm,
            "norm_placement": config.norm_placement == "before",
            "mlp": config.mlp in self.mlp,
            "qk_norm": config.qk_norm == self.qk_norm,
            "attention_bias": all(held[bias] or not used[bias] for bias in ("qkv", "out")),
            "mlp_bias": held["mlp"] or not used["mlp"],
            "d_head": self.free_head_width or not wide,
            "rope_fraction": self.partial_rotation or config.position != "rope" or config.d_rotary == config.d_head,
            "rope_pattern": "none" not in config.rope_pattern,
            "parallel_residual": self.parallel or not config.parallel_residual,
            "n_experts": self.experts != "none" or not config.n_experts,
            "d_ff_shared": self.experts == "shared" or not config.d_ff_shared,
            "attention_scale": self.attention_scale or math.isclose(config.score_scale, config.d_head**-0.5),
            "window": config.window is None,
            **{name: getattr(config, name) == 1 for name in ("embedding_scale", "residual_scale", "logit_divisor")},
            **{name: getattr(config, name) is None for name in ("attention_softcap", "logit_softcap")},
            **{name: name not in config.laboratory for name in LABORATORY},
            "rope_scaling.type": scaling is None or scaling.type in ("linear", "yarn"),
            "rope_scaling.beta_fast": scaling is None or scaling.type != "yarn" or scaling.beta_fast == 32,
            "rope_scaling.beta_slow": scaling is None or scaling.beta_slow == 1,
        }
        return [f"{name}={_value(config, name)}" for name, fit in fits.items() if not fit]


ARCHITECTURES = (
    Architecture("gpt2", "layernorm", GELU, ("learned",), biases=ALL_BIASES, always_biased=True, joined=True),
    Architecture("starcoder2", "layernorm", GELU, biases=ALL_BIASES, always_biased=True),
    Architecture(
        "gptneox", "layernorm", GELU, biases=ALL_BIASES, always_biased=True, joined=True, partial_rotation=True,
        parallel=True, tied=False,
    ),
    Architecture("stablelm", "layernorm", ("swiglu",), biases=("qkv",), partial_rotation=True, tied=False),
    Architecture("nemotron", "layernorm", ("relu2",), biases=ALL_BIASES, partial_rotation=True, tied=False),
    Architecture(
        "llama", "rmsnorm", ("swiglu",), biases=ALL_BIASES, interleaved=True, free_head_width=True, experts="routed"
    ),
    Architecture(
        "granite", "rmsnorm", ("swiglu",), ("rope", "none"), biases=ALL_BIASES, interleaved=True, free_head_width=True,
        attention_scale=True,
    ),
    Architecture(
        "granitemoe", "rmsnorm", ("swiglu",), biases=("qkv", "out"), interleaved=True, free_head_width=True,
        experts="shared", attention_scale=True,
    ),
    Architecture("arcee", "rmsnorm", ("relu2",), biases=("qkv",), interleaved=True, free_head_width=True),
    Architecture("qwen3", "rmsnorm", ("swiglu",), qk_norm=True, biases=("qkv",), free_head_width=True),
    Architecture(
        "qwen3moe", "rmsnorm", ("swiglu",), qk_norm=True, biases=("qkv",), free_head_width=True, experts="routed"
    ),
)  # fmt: skip
"""Qwen2 and Mixtral are `llama` here: with biases, and with experts. The first that computes a model is taken."""


def choose_architecture(config: ModelConfig) -> Architecture:
    """The architecture of llama.cpp that computes a model.

    Raises:
        UserError: there is none; those that lack the fewest settings are named with what they lack.
    """
    lacking = [(architecture, architecture.obstacles(config)) for architecture in ARCHITECTURES]
    fewest = min(len(obstacles) for _, obstacles in lacking)
    nearest = [(architecture, obstacles) for architecture, obstacles in lacking if len(obstacles) == fewest]
    if not fewest:
        return nearest[0][0]
    names = {", ".join(f"model.{setting}" for setting in obstacles): a.name for a, obstacles in reversed(nearest)}
    raise UserError(
        f"no architecture of llama.cpp computes this model: "
        f"{'; '.join(f'`{name}` lacks {settings}' for settings, name in reversed(names.items()))}. "
        f"Train another, or try --format hf."
    )


def _value(config: ModelConfig, name: str) -> str:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---------------------------------------------------------------------------------------------- settings


def add_settings(writer: "GGUFWriter", architecture: Architecture, config: ModelConfig) -> None:
    """Write the numbers that llama.cpp builds the model from."""
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_block_count(config.n_layers)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.d_head)
    writer.add_value_length(config.d_head)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.position == "rope":
        _add_rotation(writer, config)
    if architecture.parallel:
        writer.add_parallel_residual(config.parallel_residual)
    if config.n_experts:
        writer.add_expert_count(config.n_experts)
        writer.add_expert_used_count(config.n_experts_per_token)
        writer.add_expert_feed_forward_length(config.d_ff)
        writer.add_expert_shared_feed_forward_length(config.d_ff_shared)
    if architecture.attention_scale:
        writer.add_attention_scale(config.score_scale)
        writer.add_logit_scale(1.0)
    if "none" in architecture.position:
        writer.add_rope_scaling_finetuned(config.position == "rope")  # what llama.cpp switches rotation by


def _add_rotation(writer: "GGUFWriter", config: ModelConfig) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(config.d_rotary)
    writer.add_rope_freq_base(config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.type))
    writer.add_rope_scaling_factor(scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(config.original_context_length)
    if scaling.attention_factor is not None:  # llama.cpp multiplies its own by this
        writer.add_rope_scaling_attn_factors(scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1))


# ----------------------------------------------------------------------------------------------- tensors

Module = dict[str, Tensor]
"""A module's tensors: `weight`, and `bias` where it has one."""


def their_tensors(
    architecture: Architecture, config: ModelConfig, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file with its name there, block by block. Given meta tensors, gives meta tensors."""
    embedding = weights["token_embedding.weight"]
    yield "token_embd.weight", embedding
    if config.position == "learned":
        yield "position_embd.weight", weights["position_embedding.weight"]
    for layer in range(config.n_layers):
        prefix = f"blocks.{layer}."
        ours = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        for name, module in _block(architecture, config, ours).items():
            for kind, tensor in module.items():
                yield f"blk.{layer}.{name}.{kind}", tensor
    for kind, tensor in _module(weights, "norm", config.norm == "layernorm").items():
        yield f"output_norm.{kind}", tensor
    if not config.tie_embeddings or not architecture.tied:
        yield "output.weight", weights.get("untied_head.weight", embedding)


def _block(architecture: Architecture, config: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Module]:
    """The modules of one block by their names in the file, from the block's tensors by ours."""
    shifted, biased = config.norm == "layernorm", architecture.always_biased
    query, key, value = (_module(ours, f"attention.{name}", biased) for name in ("query", "key", "value"))
    if architecture.interleaved and config.position == "rope":
        query = {kind: interleaved(x, config.n_heads) for kind, x in query.items()}
        key = {kind: interleaved(x, config.n_kv_heads) for kind, x in key.items()}
    block = {"attn_norm": _module(ours, "norm1", shifted), "ffn_norm": _module(ours, "norm2", shifted)}
    if architecture.joined:
        block["attn_qkv"] = {kind: torch.cat([query[kind], key[kind], value[kind]]) for kind in query}
    else:
        block |= {"attn_q": query, "attn_k": key, "attn_v": value}
    if config.qk_norm:
        block["attn_q_norm"] = _module(ours, "attention.query_norm")
        block["attn_k_norm"] = _module(ours, "attention.key_norm")
    block["attn_output"] = _module(ours, "attention.out", biased)
    matrices = ("gate", "up", "down") if config.gated else ("up", "down")
    if not config.n_experts:
        return block | {f"ffn_{name}": _module(ours, f"mlp.{name}", biased) for name in matrices}
    block["ffn_gate_inp"] = _module(ours, "mlp.router")
    for name in matrices:
        experts = [ours[f"mlp.experts.{expert}.{name}.weight"] for expert in range(config.n_experts)]
        block[f"ffn_{name}_exps"] = {"weight": torch.stack(experts)}  # E F C
        if config.d_ff_shared:
            block[f"ffn_{name}_shexp"] = _module(ours, f"mlp.shared.{name}")
    return block


def _module(weights: Mapping[str, Tensor], name: str, biased: bool = False) -> Module:
    """A module's tensors. `biased`: with zeros for a bias that it does not have."""
    module = {kind: weights[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in weights}
    if biased and "bias" not in module:
        module["bias"] = module["weight"].new_zeros(len(module["weight"]))
    return module


def interleaved(x: Tensor, n_heads: int) -> Tensor:
    """Rows of queries or keys, [H·D, ...], in the order that brings elements i and i + D/2 of each head together."""
    return x.view(n_heads, 2, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 2)
