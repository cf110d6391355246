"""From logits to a token, as a pure function of the logits, the tokens so far, the settings and a source of chance.

Shapes: B sequences, V vocabulary.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gptworks.errors import RunError, UserError, nearest

_GREEDY_BELOW = 1e-5
"""Temperatures below it would overflow float32, and their limit is the greedy choice."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen and when a text ends.

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.8
    """Divides the logits. 0 (or below 1e-5): greedy, always the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens, and those that tie with the last of them. 0: all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach top_p (Holtzman et al., 2020). 1: all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest (Nguyen et al., 2024). 0: all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred, in the prompt too, become less likely (Keskar et al., 2019). 1: off."""
    seed: int | None = None
    """The same seed gives the same text. None: a new one each time."""
    max_tokens: int = 200
    """Tokens generated at most."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these strings to be completed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for name, holds, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "0 (off) or more, and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("stop", all(self.stop), "strings that are not empty; leave it out for none"),
        ):
            if not holds:
                raise UserError(f"{name}={getattr(self, name)}: it must be {rule}.")

    @classmethod
    def of(cls, settings: Self | None = None, **changes: Any) -> Self:
        """`settings` (default: the defaults) with the changes given as keywords.

        Raises:
            UserError: an unknown keyword, or a value outside its range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in changes:
            if name not in known:
                near = nearest(name, known)
                hint = f"did you mean `{near}`?" if near else f"known: {', '.join(known)}."
                raise UserError(f"unknown sampling setting `{name}`; {hint}")
        return dataclasses.replace(settings or cls(), **changes)

    def chance(self, index: int) -> random.Random:
        """The source of chance of sample `index` of a request: its own, whatever the number of samples."""
        return random.Random() if self.seed is None else random.Random(f"{self.seed}/{index}")


def sample(
    logits: Tensor, history: Sequence[Sequence[int]], settings: SamplingSettings, chance: Sequence[random.Random]
) -> Tensor:
    """Choose the next token of each sequence.

    The order is Hugging Face's: repetition penalty, temperature, top-k, top-p, min-p. One number of `chance` decides
    each sequence's draw, on the CPU, so that a seed means the same on every device.

    Args:
        logits: [B, V], any float dtype; computed with in float32.
        history: for each sequence, the token ids so far, the prompt's included.
        chance: for each sequence, where its random number comes from.

    Returns:
        [B], int64, on the CPU.

    Raises:
        RunError: a logit is NaN.
    """
    logits = logits.float()
    if logits.isnan().any():
        raise RunError("the model's scores are not numbers (NaN): its training diverged, or its checkpoint is damaged.")
    logits = penalize_repetition(logits, history, settings.repetition_penalty)
    if settings.temperature < _GREEDY_BELOW:
        return logits.argmax(-1).cpu()
    logits = logits / settings.temperature
    logits = keep_top_k(logits, settings.top_k)
    logits = keep_top_p(logits, settings.top_p)
    logits = keep_min_p(logits, settings.min_p)
    cumulative = logits.softmax(-1).cpu().double().cumsum(-1)  # B V
    # 1 − random() lies in (0, 1]: the first token to reach that share of the total has a probability above 0.
    share = torch.tensor([[1 - source.random()] for source in chance], dtype=torch.float64)
    return torch.searchsorted(cumulative, share * cumulative[:, -1:])[:, 0]


def penalize_repetition(logits: Tensor, history: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Make each distinct token of the history less likely, once: positive logits are divided, negative multiplied.

    logits [B, V] → [B, V].
    """
    if penalty == 1:
        return logits
    logits = logits.clone()
    for row, tokens in zip(logits, history, strict=True):
        seen = torch.tensor(sorted(set(tokens)), dtype=torch.int64, device=logits.device)
        scores = row[seen]
        row[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    return logits


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """−inf for what scores less than the k-th best; logits [B, V] → [B, V]. 0, or k ≥ V, keeps all."""
    if not 0 < k < logits.size(-1):
        return logits
    kth_best = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < kth_best, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """−inf for what follows the fewest likeliest tokens whose probabilities reach p; logits [B, V] → [B, V]."""
    if p == 1:
        return logits
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    dropped = mass_before >= p
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -math.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """−inf for what is less than p times as likely as the likeliest; logits [B, V] → [B, V]."""
    if p == 0:
        return logits
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)
