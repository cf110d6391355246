"""Log-probabilities, in nats, that a model gives tokens: the tokens it generates, and those of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.infer.scheduler import Work


@dataclass(frozen=True)
class TokenLogprob:
    """What the model gave a token, in nats, and what it gave the likeliest ones (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: Tensor, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
    """The log-probability of one token for each row of logits [T, V], and those of the `n_top` likeliest."""
    logits = logits.float()
    normalizer = logits.logsumexp(-1, keepdim=True)
    chosen = (logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]) - normalizer)[:, 0].tolist()
    best = logits.topk(min(n_top, logits.size(-1)))
    tops = ((best.values - normalizer).tolist(), best.indices.tolist())
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, values, ids in zip(tokens, chosen, *tops, strict=True)
    ]


class PromptScores:
    """Reads the log-probabilities of a prompt's tokens from the logits, as they are computed."""

    def __init__(self, prompt_ids: list[int], first: int, n_top: int) -> None:
        """
        Args:
            first: index of the first token to score, from 1; what stands before may be reused from other texts.
            n_top: how many of the likeliest tokens to report beside each.
        """
        self.prompt_ids, self.first, self.n_top = prompt_ids, first, n_top
        self.logprobs: list[TokenLogprob | None] = [None] * min(first, len(prompt_ids))

    def read(self, work: Work, logits: Tensor) -> None:
        """Score the tokens that the logits [n_logits, V] of a work predict."""
        if work.job.score_from is None:
            return
        first = work.start + len(work.tokens) - len(logits) + 1  # the token that the first row predicts
        tokens = self.prompt_ids[first : first + len(logits)]
        if tokens:
            self.logprobs[first:] = token_logprobs(logits[: len(tokens)], tokens, self.n_top)
        if work.is_last:
            work.job.score_from = None
