"""The architectures of llama.cpp that gptworks exports to: which models each supports, and how a file stores them.

`ARCHITECTURES` follows llama.cpp's sources; test_gguf.py compares each entry with llama.cpp itself.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gguf import GGUFWriter, RopeScalingType
from torch import Tensor

from gptworks.config import LABORATORY, ModelConfig
from gptworks.errors import UserError
from gptworks.interop.steps import nearest_architectures
from gptworks.interop.tensors import (
    KEY_IN_PAIRS,
    PLAIN,
    QUERY_IN_PAIRS,
    QUERY_KEY_VALUE,
    STACKED,
    Place,
    each_tensor,
    expected_tensors,
    places,
)

Bias = Literal["qkv", "out", "mlp"]
ALL_BIASES: tuple[Bias, ...] = ("qkv", "out", "mlp")
GELU = ("gelu_tanh", "gelu")
"""Names of GELU's two forms. llama.cpp computes the tanh form for both."""

APPROXIMATE_GELU = (
    "llama.cpp computes model.mlp=gelu in its tanh form, which differs by at most 0.0005; on a CPU it also rounds GELU "
    "to 16 bits"
)


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp: the model settings that it supports, and the layout of its tensors."""

    name: str
    norm: Literal["layernorm", "rmsnorm"]
    mlp: tuple[str, ...]
    position: tuple[str, ...] = ("rope",)
    qk_norm: bool = False
    biases: tuple[Bias, ...] = ()
    """Linear layers that may have biases."""
    always_biased: bool = False
    """Whether a file must have all biases; an export writes zeros for biases that the model lacks."""
    joined: bool = False
    """Whether the file stores query, key and value as one tensor."""
    interleaved: bool = False
    """Whether rotary pairs are elements 2i and 2i + 1 of a head (of width D); in gptworks they are i and i + D/2."""
    free_head_width: bool = False
    """Whether the width of a head may differ from d_model / n_heads."""
    partial_rotation: bool = False
    parallel: bool = False
    """Whether attention and MLP may be parallel, each with its own norm."""
    tied: bool = True
    """Whether a file may leave out a tied head; if False, the head is stored as a copy of the embedding."""
    experts: Literal["none", "routed", "shared"] = "none"
    attention_scale: bool = False

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Return the names of a model's settings that this architecture does not support."""
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
        return [name for name, fit in fits.items() if not fit]


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
"""An export uses the first architecture that fits. `llama` covers Qwen2 (with biases) and Mixtral (with experts)."""


def choose_architecture(config: ModelConfig) -> Architecture:
    """Return the first architecture of llama.cpp that supports a model. Raises a UserError if no architecture fits; the
    message names the nearest architectures and the settings that they lack."""
    obstacles = {architecture.name: architecture.obstacles(config) for architecture in ARCHITECTURES}
    fitting = next((architecture for architecture in ARCHITECTURES if not obstacles[architecture.name]), None)
    if fitting is None:
        raise UserError(
            f"no architecture of llama.cpp computes this model: {nearest_architectures(config, obstacles)}. "
            f"Train a model without them, or use --format hf."
        )
    return fitting


# ---------------------------------------------------------------------------------------------- settings


def add_settings(writer: GGUFWriter, architecture: Architecture, config: ModelConfig) -> None:
    """Write the settings that llama.cpp builds the model from."""
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
        writer.add_rope_scaling_finetuned(config.position == "rope")  # llama.cpp rotates if this is true


def _add_rotation(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_rope_dimension_count(config.d_rotary)
    writer.add_rope_freq_base(config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.type))
    writer.add_rope_scaling_factor(scaling.factor)
    writer.add_rope_scaling_orig_ctx_len(config.original_context_length)
    if scaling.attention_factor is not None:  # undo llama.cpp's multiplication by 0.1 ln(factor) + 1
        writer.add_rope_scaling_attn_factors(scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1))


# ----------------------------------------------------------------------------------------------- tensors

_QUERY, _KEY, _VALUE = (f"blocks.{{layer}}.attention.{name}" for name in ("query", "key", "value"))
_BLOCK = {
    "blk.{layer}.attn_q_norm": "blocks.{layer}.attention.query_norm",
    "blk.{layer}.attn_k_norm": "blocks.{layer}.attention.key_norm",
    "blk.{layer}.attn_output": "blocks.{layer}.attention.out",
    "blk.{layer}.ffn_gate": "blocks.{layer}.mlp.gate",
    "blk.{layer}.ffn_up": "blocks.{layer}.mlp.up",
    "blk.{layer}.ffn_down": "blocks.{layer}.mlp.down",
    "blk.{layer}.ffn_gate_inp": "blocks.{layer}.mlp.router",
}
_EXPERTS = tuple(
    place
    for name in ("gate", "up", "down")
    for place in (
        Place(f"blk.{{layer}}.ffn_{name}_exps", (f"blocks.{{layer}}.mlp.experts.{{expert}}.{name}",), STACKED),
        Place(f"blk.{{layer}}.ffn_{name}_shexp", (f"blocks.{{layer}}.mlp.shared.{name}",)),
    )
)


def _places(architecture: Architecture, config: ModelConfig) -> tuple[Place, ...]:
    """Return a file's modules in order, each with the gptworks modules that it stores."""
    interleaves = architecture.interleaved and config.position == "rope"
    apart = (
        Place("blk.{layer}.attn_q", (_QUERY,), QUERY_IN_PAIRS if interleaves else PLAIN),
        Place("blk.{layer}.attn_k", (_KEY,), KEY_IN_PAIRS if interleaves else PLAIN),
        Place("blk.{layer}.attn_v", (_VALUE,)),
    )
    joined = (Place("blk.{layer}.attn_qkv", (_QUERY, _KEY, _VALUE), QUERY_KEY_VALUE),)
    return (
        *places({"token_embd": "token_embedding", "position_embd": "position_embedding"}),
        *places({"blk.{layer}.attn_norm": "blocks.{layer}.norm1", "blk.{layer}.ffn_norm": "blocks.{layer}.norm2"}),
        *(joined if architecture.joined else apart),
        *places(_BLOCK),
        *_EXPERTS,
        *places({"output_norm": "norm", "output": "untied_head"}),
    )


def file_tensors(
    architecture: Architecture, config: ModelConfig, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and data of each tensor of the file, block by block. `weights` may be on the meta device."""
    always = {"attention_bias": True, "mlp_bias": True} if architecture.always_biased else {}
    tied = config.tie_embeddings and architecture.tied
    held = config.model_copy(update=always | {"norm_bias": config.norm == "layernorm", "tie_embeddings": tied})
    embedding = weights["token_embedding.weight"]
    absent = {name: x for name, x in expected_tensors(held).items() if name not in weights}
    filled = {name: embedding.new_zeros(x.shape) for name, x in absent.items()}  # missing biases are zeros
    if "untied_head.weight" in absent:
        filled["untied_head.weight"] = embedding
    return each_tensor(_places(architecture, held), held, {**filled, **weights})
