"""Direct logit attribution (Elhage et al., 2021): the contribution of each part of a model to a token's logit.

The residual stream is the sum of the embedding and the outputs of all attention heads and MLPs. The language-model head
reads the stream through the final norm, which is linear if its divisor is fixed. With the divisor of this position, the
logit is the sum of the parts' contributions. Norms after attention and the MLP are treated the same way. A skip
connection adds the output of an earlier block again, times a learned scalar. Activations and the heads' updates have
the model's dtype; norms, sums and products with the head's matrix are computed in float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gptworks.errors import UserError
from gptworks.interpret.record import Recording, blocks_of
from gptworks.model.gpt import GPT
from gptworks.model.lab.embeddings import previous_tokens
from gptworks.model.layers import Norm

Kind = Literal["embedding", "bigram", "position", "head", "attention bias", "mlp", "norm bias"]


@dataclass(frozen=True)
class Part:
    """One part of the model and its contribution to a logit."""

    kind: Kind
    """`mlp` includes experts; `attention bias` is the bias of the output projection and of the norm after it;
    `norm bias` is the final norm's bias."""
    layer: int | None
    head: int | None
    value: float


@dataclass(frozen=True)
class Attribution:
    """A token's logit, or the difference of two tokens' logits, as a sum over the model's parts."""

    parts: tuple[Part, ...]
    """All parts; their values add up to `logit`."""
    logit: float
    """The logit before the model's soft cap, if it has one."""
    capped_logit: float
    """The model's output, which differs from `logit` only if the model caps its logits (a cap is not linear)."""


def attribute(model: GPT, recording: Recording, row: int, token: int, against: int | None = None) -> Attribution:
    """Split a token's logit at a recorded position into the contributions of the model's parts.

    Args:
        row: index of the position in `recording.rows`.
        token: the token whose logit is attributed.
        against: another token, whose logit is subtracted; the parts then explain the difference.

    Raises:
        UserError: a token is not in the vocabulary.
    """
    config, chosen = model.config, [token] if against is None else [token, against]
    for one in chosen:
        if not 0 <= one < config.vocab_size:
            raise UserError(f"token {one} is not in the vocabulary: ids go from 0 to {config.vocab_size - 1}.")

    def difference(values: Tensor) -> Tensor:
        return values[0] if against is None else values[0] - values[1]

    with torch.inference_mode():
        reads = difference(_wide(model.head_weight[chosen]))  # [C]
        logit = float(_wide(recording.features[row]) @ reads)
        capped_logit = float(difference(_wide(model.logits(recording.features[row])[chosen])))
        reads = model.feature_scale(reads)
        norm = _linear(model.norm, recording.residual[-1, row])
        parts = [Part(kind, *place, float(norm(x) @ reads)) for kind, place, x in _parts(model, recording, row)]
        if (shift := _shift(model.norm)) is not None:
            parts.append(Part("norm bias", None, None, float(shift @ reads)))
    return Attribution(tuple(parts), logit, capped_logit)


Place = tuple[int | None, int | None]


def _parts(model: GPT, recording: Recording, row: int) -> Iterator[tuple[Kind, Place, Tensor]]:
    """Yield the terms whose sum is the residual stream at a position: kind, (layer, head) and value, float64 [C]."""
    position, config = recording.rows[row], model.config
    two = recording.ids[: position + 1][-2:]  # the token, and the one before it
    ids = torch.as_tensor(two, device=model.device)[None]
    whole, shares = _shares(model)
    yield "embedding", (None, None), _wide(model.embed(ids, previous_tokens(ids))[0, -1]) * whole
    if model.bigram_embedding is not None:
        pairs = model.bigram_embedding(ids, previous_tokens(ids))
        yield "bigram", (None, None), _wide(pairs[0, -1]) * whole
    if model.position_embedding is not None:
        yield "position", (None, None), _wide(model.position_embedding.weight[position]) * whole
    for i, block in enumerate(blocks_of(model)):
        scale = config.residual_scale * shares[i]
        norms = [None, None] if config.norms_behind is None else [getattr(block, name) for name in config.norms_behind]
        attention, mlp = (
            (lambda x: x, None) if norm is None else (_linear(norm, given[i, row]), _shift(norm))
            for norm, given in zip(norms, (recording.attention, recording.mlp), strict=True)
        )
        heads, bias = _heads(block.attention.out, recording.mixed[i, row], config.n_heads)
        for head, x in enumerate(heads):
            yield "head", (i, head), attention[0](x) * scale
        if bias.any() or attention[1] is not None:
            yield "attention bias", (i, None), _plus(attention[0](bias), attention[1]) * scale
        yield "mlp", (i, None), _plus(mlp[0](_wide(recording.mlp[i, row])), mlp[1]) * scale


def _shares(model: GPT) -> tuple[float, list[float]]:
    """Return the factors of the embedding, and of each block's update, in the sum that is the last block's output."""
    blocks = blocks_of(model)
    share, shares, skipped = 1.0, [0.0] * len(blocks), [0.0] * len(blocks)
    for i in reversed(range(len(blocks))):
        shares[i] = share = share + skipped[i]
        skip = blocks[i].skip
        if skip is not None:
            skipped[len(blocks) - 1 - i] = share * skip.weight.item()
    return share, shares


def _heads(out: nn.Module, mixed: Tensor, n_heads: int) -> tuple[Tensor, Tensor]:
    """Return each head's update of the stream [H, C] and the projection's bias [C]. `mixed`: heads' outputs [H·D]."""
    chosen = torch.eye(n_heads + 1, n_heads, dtype=mixed.dtype, device=mixed.device)
    alone = chosen[:, :, None] * mixed.view(n_heads, -1)
    given = _wide(out(alone.flatten(1)))  # the last row is only the bias
    return given[:-1] - given[-1], given[-1]


def _linear(norm: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the norm as a linear map, without bias; its fixed divisor is the one that the norm computes for x [C]."""
    assert isinstance(norm, Norm)
    weight, eps, centred = _wide(norm.weight), norm.eps, norm.centers
    wide = _wide(x)
    wide = wide - wide.mean() if centred else wide
    divisor = (wide.square().mean() + eps).sqrt()
    return lambda part: (part - part.mean() if centred else part) / divisor * weight


def _shift(norm: nn.Module) -> Tensor | None:
    return _wide(norm.bias) if isinstance(norm, Norm) and norm.bias is not None else None


def _plus(x: Tensor, shift: Tensor | None) -> Tensor:
    return x if shift is None else x + shift


def _wide(x: Tensor) -> Tensor:
    """Convert to float64 on the CPU, because not every accelerator has float64."""
    return x.cpu().double()
