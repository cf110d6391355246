"""Log-probabilities, in nats, of generated tokens and of a prompt's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.infer.scheduler import Work


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, in nats; `top` has the most likely tokens as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """The token's rank by probability; 1: no token is more likely. None: not computed."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of each row's token and of its `n_top` most likely tokens, from logits [T, V]."""
    logits = logits.float()
    normalizer = logits.logsumexp(-1, keepdim=True)
    of_chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])  # T 1
    chosen, ranks = (of_chosen - normalizer)[:, 0].tolist(), ((logits > of_chosen).sum(-1) + 1).tolist()
    best = logits.topk(min(n_top, logits.size(-1)))
    tops = ((best.values - normalizer).tolist(), best.indices.tolist())
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, rank, values, ids in zip(tokens, chosen, ranks, *tops, strict=True)
    ]


class PromptScores:
    """Collects the log-probabilities of a prompt's tokens while its logits are computed."""

    def __init__(self, prompt_ids: list[int], first: int, n_top: int | None) -> None:
        """
        Args:
            first: index of the first token to score, ≥ 1.
            n_top: number of most likely tokens to report at each position; None: score nothing.
        """
        self._prompt_ids, self._n_top = prompt_ids, n_top or 0
        self.score_from = None if n_top is None else first - 1
        self.logprobs: list[TokenLogprob | None] | None = None
        if n_top is not None:
            self.logprobs = [None] * min(first, len(prompt_ids))

    def read(self, work: Work, logits: Tensor) -> None:
        """Score the prompt tokens that the logits [n_logits, V] of `work` predict."""
        if self.logprobs is None or work.job.score_from is None:
            return
        first = work.start + len(work.tokens) - len(logits) + 1  # index of the token that the first row predicts
        tokens = self._prompt_ids[first : first + len(logits)]
        if tokens:
            self.logprobs[first:] = token_logprobs(logits[: len(tokens)], tokens, self._n_top)
        if work.is_last:
            work.job.score_from = None
