"""Record a model's intermediate results on a text, at chosen positions.

Hooks on the model's modules record inputs and outputs and change nothing. Attention weights are computed again from
the model's queries and keys.

Shapes: L layers, R recorded positions, S positions read, H heads, D head width, C width.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptworks.data.permutation import Int64s
from gptworks.errors import UserError
from gptworks.interpret.hooks import Check, after, before, never, stoppable
from gptworks.interpret.text import check_ids
from gptworks.model.attention import Attention
from gptworks.model.block import Block
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.scores import attention_weights, causal_mask

MOST_NUMBERS = 2**25


@dataclass(frozen=True)
class Recording:
    """Activations of one text, on the model's device and in its dtype."""

    ids: Int64s
    rows: tuple[int, ...]
    """The recorded positions of the text."""
    residual: Tensor
    """The residual stream before the first block and after each block, [L + 1, R, C]."""
    weights: Tensor
    """Attention weights of each recorded position over the text, [L, H, R, S], in float32 at least."""
    mixed: Tensor
    """Outputs of the heads before the output projection, [L, R, H·D]."""
    attention: Tensor
    """Attention's output before any post-norm, [L, R, C]."""
    mlp: Tensor
    """Output of the MLP or the experts before any post-norm, [L, R, C]."""
    features: Tensor
    """Input of the language-model head, [R, C]."""


def blocks_of(model: GPT) -> list[Block]:
    """Return the model's blocks, typed as `Block`."""
    return [block for block in model.blocks if isinstance(block, Block)]


def record(model: GPT, ids: Int64s, rows: Sequence[int], check: Check = never) -> Recording:
    """Run a model on a text [S] without dropout, and record the activations at the positions `rows`.

    Raises:
        UserError: the text has ids outside the vocabulary, the model runs blocks several times, or the recording would
            exceed MOST_NUMBERS.
        ValueError: the text is longer than the context.
    """
    config, length = model.config, len(ids)
    check_ids(model, ids)
    if config.repeats_layers:
        raise UserError("model.layer_repeats runs blocks several times; only blocks that run once can be recorded.")
    n_layer = config.n_heads * (length + config.d_head) + 3 * config.d_model
    needed = len(rows) * config.n_layers * n_layer
    if needed > MOST_NUMBERS:
        raise UserError(
            f"{len(rows)} positions of {length} tokens would take {needed:,} numbers and at most {MOST_NUMBERS:,} are "
            f"recorded at once: choose {MOST_NUMBERS * len(rows) // needed} positions, or a shorter text."
        )
    at = torch.tensor(list(rows), device=model.device)
    kept: dict[str, list[Tensor]] = {name: [] for name in ("residual", "weights", "mixed", "attention", "mlp")}

    def keep(name: str, value: Any) -> None:
        kept[name].append((value[0] if isinstance(value, tuple) else value)[0, at])

    def weigh(attention: Attention, inputs: tuple[Any, ...]) -> None:
        x, read, *_ = inputs
        q, k, _ = attention.heads(x, read.rotary)
        mask = causal_mask(length, length, attention.scores.window, x.device)[at]
        kept["weights"].append(attention_weights(q[:, :, at], k, mask, attention.scores)[0])

    with ExitStack() as hooks, eval_mode(model), torch.inference_mode():
        hooks.enter_context(stoppable(model, check))
        hooks.enter_context(before(blocks_of(model)[0], lambda _, inputs: keep("residual", inputs[0])))
        for block in blocks_of(model):
            hooks.enter_context(before(block.attention, weigh))
            hooks.enter_context(before(block.attention.out, lambda _, inputs: keep("mixed", inputs[0])))
            for name, module in (("attention", block.attention), ("mlp", block.mlp), ("residual", block)):
                hooks.enter_context(after(module, partial(keep, name)))
        tokens = torch.from_numpy(ids).to(model.device)
        features = model.features(tokens[None])[0, at]
    stacked = {name: torch.stack(values) for name, values in kept.items()}
    return Recording(ids, tuple(rows), features=features, **stacked)
