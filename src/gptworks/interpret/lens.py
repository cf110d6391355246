"""The logit lens (nostalgebraist, 2020): the model's prediction if a block were the last one.

The residual stream after each block goes through the model's own final norm and head. After the last block, this is
the model's own prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptworks.evaluation.loss import LOGITS_AT_ONCE
from gptworks.interpret.record import Recording
from gptworks.model.gpt import GPT


@dataclass(frozen=True)
class Guess:
    """One layer's prediction at one position."""

    top: tuple[tuple[int, float], ...]
    """The most probable tokens with their probabilities, highest first."""
    probability: float
    """Probability of the token given to `logit_lens`."""
    rank: int
    """Rank of the same token by probability; 1 is the highest."""


def logit_lens(model: GPT, recording: Recording, tokens: Sequence[int], n_top: int = 5) -> list[list[Guess]]:
    """Return the guesses after the embedding and after each of the L blocks, at the R recorded positions: [L + 1][R].

    Args:
        tokens: for each recorded position, the token whose probability and rank to return, such as the next token.
    """
    n_layers, n_rows, width = recording.residual.shape
    stream = recording.residual.reshape(-1, width)
    wanted = torch.tensor(list(tokens), device=stream.device).repeat(n_layers)
    found = []
    n_top = min(n_top, model.config.vocab_size)
    with torch.inference_mode():
        size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
        for x, of in zip(torch.split(stream, size), torch.split(wanted, size), strict=True):
            scores = model.logits(model.feature_scale(model.norm(x))).float().softmax(-1)
            of_wanted = scores.gather(1, of[:, None])
            ranks = (scores > of_wanted).sum(1) + 1
            best = scores.topk(n_top)
            for row in zip(*(t.tolist() for t in (best.indices, best.values, of_wanted[:, 0], ranks)), strict=True):
                ids, values, probability, rank = row
                found.append(Guess(tuple(zip(ids, values, strict=True)), probability, rank))
    return [found[i : i + n_rows] for i in range(0, len(found), n_rows)]
