"""Change logits before a token is chosen: add biases, subtract penalties, and exclude tokens that may not come next.

Shapes: B texts, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from gptworks.infer.sampling import Sampler, SamplingSettings

LONGEST_REPEAT = 64
"""Maximum number of repeated tokens that are counted, so that a long prompt is searched in little time."""
_LARGEST = 1e30
"""Maximum DRY penalty. It keeps every logit finite, so that even a text whose tokens are all penalized continues."""


class Repeats:
    """Finds tokens that would continue a repetition of earlier text, prompt included.

    This is the DRY penalty, "Don't Repeat Yourself" (p-e-w, 2024: text-generation-webui, pull request 5677; llama.cpp's
    --dry-multiplier), without sequence breakers. `push` takes time in proportion to the text's length.
    """

    def __init__(self, text: Sequence[int]) -> None:
        """text: the tokens of the prompt."""
        self._tokens = np.array(text, np.int64)
        self._lengths = np.zeros(len(text), np.int64)
        """For each token: length of the longest sequence that ends with this token and equals the end of the text, at
        most LONGEST_REPEAT."""
        self._n = max(0, len(text) - LONGEST_REPEAT)
        for token in text[self._n :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Add the text's next token."""
        n = self._n
        if n == len(self._tokens):
            more = np.zeros(n + 64, np.int64)
            self._tokens, self._lengths = (np.concatenate((one, more)) for one in (self._tokens, self._lengths))
        longer = np.minimum(self._lengths[: n - 1] + 1, LONGEST_REPEAT) if n else self._lengths[:0]
        self._lengths[1:n] = longer * (self._tokens[1:n] == token)
        self._lengths[: min(n, 1)] = self._tokens[: min(n, 1)] == token
        self._tokens[n], self._n = token, n + 1

    def penalties(self, settings: "SamplingSettings", ends: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids that would continue a repetition, and the number to subtract from the logit of each.

        Tokens in `ends`, which end the text, are never penalized, because a penalty would prolong the text.
        """
        lengths = self._lengths[: max(0, self._n - 1)]
        places = np.flatnonzero(lengths >= settings.dry_allowed_length)
        ids, which = np.unique(self._tokens[places + 1], return_inverse=True)
        longest = np.zeros(len(ids))
        np.maximum.at(longest, which, lengths[places])
        penalties = settings.dry_multiplier * settings.dry_base ** (longest - settings.dry_allowed_length)
        goes_on = ~np.isin(ids, ends)
        return ids[goes_on], np.minimum(penalties[goes_on], _LARGEST)


def adjust(logits: Tensor, samplers: Sequence["Sampler"], allowed: Sequence[Tensor | None] | None = None) -> Tensor:
    """Return a copy of the logits [B, V] with each text's bias and penalties, and −inf for tokens not allowed next."""
    logits = logits.clone()
    device = logits.device

    def places(parts: Callable[["Sampler"], Any]) -> Iterator[list[Tensor]]:
        """Yield the row numbers, token ids and amounts of all texts as three tensors, or nothing if no text has any."""
        found = [(row, *part) for row, sampler in enumerate(samplers) if (part := parts(sampler)) and len(part[0])]
        if found:
            rows = np.repeat([row for row, _, _ in found], [len(ids) for _, ids, _ in found])
            ids, numbers = (np.concatenate([part[i] for part in found]) for i in (1, 2))
            arrays = rows, ids.astype(np.int64), numbers.astype(np.float32)
            yield [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]

    for rows, ids, numbers in places(lambda s: tuple(zip(*s.settings.logit_bias.items(), strict=True))):
        logits[rows, ids] += numbers
    for rows, ids, numbers in places(_repetition):
        scores = logits[rows, ids]
        logits[rows, ids] = torch.where(scores < 0, scores * numbers, scores / numbers)
    for subtracted in _frequency_and_presence, _repeats:
        for rows, ids, numbers in places(subtracted):
            logits[rows, ids] -= numbers
    for row, sampler in enumerate(samplers):
        mask = allowed[row] if allowed is not None else None
        if mask is not None:
            logits[row].masked_fill_(~mask.to(device, non_blocking=True), -math.inf)
        for token in sampler.banned:
            logits[row, token] = -math.inf
    return logits


def _repetition(sampler: "Sampler") -> tuple[np.ndarray, np.ndarray]:
    seen: Mapping[int, int] = sampler.seen or {}
    return np.fromiter(seen, np.int64, len(seen)), np.full(len(seen), sampler.settings.repetition_penalty)


def _frequency_and_presence(sampler: "Sampler") -> tuple[np.ndarray, np.ndarray]:
    generated: Mapping[int, int] = sampler.generated or {}
    ids, counts = (np.fromiter(part, np.int64, len(generated)) for part in (generated, generated.values()))
    return ids, counts * sampler.settings.frequency_penalty + sampler.settings.presence_penalty


def _repeats(sampler: "Sampler") -> tuple[np.ndarray, np.ndarray] | None:
    return None if sampler.repeats is None else sampler.repeats.penalties(sampler.settings, sampler.ends)
