"""Beam search: several likely beginnings of a text are kept and extended side by side (num_beams of them).

The rules are Hugging Face's (early_stopping=False): of the 2 · num_beams best extensions, those that end are kept, with
their log-probability divided by length ** length_penalty, the end-of-text token counted; the search ends when no
running beam, at its present length, is better than the worst of num_beams kept ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Found:
    """A finished text: its tokens (without the end-of-text token), how it ended, and its score."""

    tokens: list[int]
    ended: bool
    """Whether the end-of-text token ended it, and not the limit."""
    score: float


class BeamSearch:
    """The search alone: log-probabilities in, tokens and their parents out. Knows nothing of a model or its cache."""

    def __init__(self, num_beams: int, length_penalty: float, max_tokens: int, end_of_text: int | None) -> None:
        self.num_beams, self.length_penalty, self.max_tokens = num_beams, length_penalty, max_tokens
        self.end_of_text = end_of_text
        self.beams: list[list[int]] = [[]]
        """Tokens of the running beams, best first. Before the first step there is one, the prompt."""
        self.scores = [0.0]
        self.found: list[Found] = []
        """The best finished texts so far, best first."""
        self.done = False

    def advance(self, logits: Tensor) -> list[tuple[int, int]]:
        """Extend the running beams by one token, given their logits [n, V].

        Returns:
            For each new beam, the index of the beam it extends, and the token. Empty: the search is done.
        """
        n_tokens = len(self.beams[0]) + 1
        totals = logits.float().log_softmax(-1) + torch.tensor(self.scores, device=logits.device)[:, None]  # n V
        best = totals.flatten().topk(min(2 * self.num_beams, totals.numel()))
        running: list[tuple[float, int, int]] = []
        for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            parent, token = divmod(place, logits.size(-1))
            if token != self.end_of_text and n_tokens < self.max_tokens:
                running.append((total, parent, token))
            elif rank < self.num_beams:
                self._keep(parent, token, total / n_tokens**self.length_penalty)
        running = running[: self.num_beams]
        full = len(self.found) == self.num_beams
        self.done = not running or (full and running[0][0] / n_tokens**self.length_penalty <= self.found[-1].score)
        if self.done:
            return []
        self.beams = [[*self.beams[parent], token] for _, parent, token in running]
        self.scores = [total for total, _, _ in running]
        return [(parent, token) for _, parent, token in running]

    def _keep(self, parent: int, token: int, score: float) -> None:
        ended = token == self.end_of_text
        tokens = self.beams[parent] if ended else [*self.beams[parent], token]
        self.found.append(Found(tokens, ended, score))
        self.found.sort(key=lambda found: -found.score)
        del self.found[self.num_beams :]
