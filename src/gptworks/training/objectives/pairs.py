"""What objectives on pairs of answers have in common: batches of both answers, and their evaluation.

Shapes: P pairs, T tokens of the longest conversation among them.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.data.conversations.preferences import Pairs
from gptworks.data.permutation import shuffled
from gptworks.data.rows import Piece, Row
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers
from gptworks.model import GPT
from gptworks.model.gpt import eval_mode
from gptworks.model.loss import target_logprobs
from gptworks.training.objectives.base import Objective
from gptworks.training.objectives.next_token import Batch, padded, padded_width


def answer_logprobs(model: GPT, inputs: Tensor, targets: Tensor, router_logits: list[Tensor] | None = None) -> Tensor:
    """log π(answer | prompt) of each row, [B]: the sum over its targets."""
    features = model.features(inputs, router_logits=router_logits)
    return target_logprobs(features, model.head_weight, targets, model.config.logit_softcap).sum(-1)


def answer_lengths(targets: Tensor) -> Tensor:
    """Learned tokens of each row, [B], at least 1: what its sum of log-probabilities is divided by."""
    return (targets != IGNORED).sum(-1).clamp(min=1)


class PairsObjective(Objective):
    """Pairs of answers; a step's batch_size counts pairs."""

    figures: tuple[str, ...]
    """Names of the other figures that the loss reports, means over pairs."""

    def _open(self) -> None:
        self._pairs = {"train": Pairs(self.train_shards, self.context_length),
                       "validation": Pairs(self.validation_shards, self.context_length)}  # fmt: skip

    @property
    def samples_per_epoch(self) -> int:
        return len(self._pairs["train"])

    @property
    def n_validation(self) -> int:
        return len(self._pairs["validation"])

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        first = position + micro_step * size
        samples = np.arange(first, first + size)
        return self._batch_of("train", shuffled(samples, len(self._pairs["train"]), self.recipe.seed).tolist())

    def tokens_read(self, n_samples: int, micro_batch_size: int) -> int:
        """Tokens of the first samples of a run, padding counted, in micro-batches of this size."""
        lengths, order = self._pairs["train"].lengths, shuffled(np.arange(n_samples), self.n_items, self.recipe.seed)
        tokens = 0
        for first in range(0, n_samples, micro_batch_size):
            chosen = lengths[order[first : first + micro_batch_size]]
            tokens += chosen.size * padded_width(int(chosen.max()), self.context_length)
        return tokens

    def rows(self, number: int, epoch: int = 0) -> list[Row]:
        """A pair: the chosen conversation, then the rejected."""
        inputs, targets = self._rows("train", [number])
        lengths = [len(self._pairs["train"].answer(number, side)[0]) - 1 for side in (0, 1)]
        texts = [[(n, [Piece(2 * number + side, 0, 0)])] for side, n in enumerate(lengths)]
        return [
            Row.of(inputs[0], targets[0], None, texts[0], "chosen"),
            Row.of(inputs[1], targets[1], None, texts[1], "rejected"),
        ]

    def _batch_of(self, split: str, pairs: list[int]) -> Batch:
        """What the loss is computed from."""
        return self._rows(split, pairs)

    def _rows(self, split: str, pairs: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [2P, T]: the chosen conversations, then the rejected."""
        answers = [self._pairs[split].answer(pair, side) for side in (0, 1) for pair in pairs]
        return padded(answers, self.context_length)

    def _chunks(self, pairs: list[int]) -> Iterator[list[int]]:
        """A micro-batch of them at a time."""
        size = self.recipe.train.micro_batch_size
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def count(self, batch: Batch) -> int:
        return batch[0].size(0) // 2

    @torch.no_grad()
    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The held-out pairs' mean loss, and the means of its figures."""
        n_pairs = self.n_validation
        n_chosen = self.n_evaluated or n_pairs
        chosen = [place * n_pairs // n_chosen for place in range(n_chosen)]
        sums = dict.fromkeys(("loss", *self.figures), 0.0)
        with eval_mode(model):
            batches = (self._batch_of("validation", pairs) for pairs in self._chunks(chosen))
            for batch in workers.split_batches(batches):
                with precision.autocast():
                    losses = self.loss(model, tuple(x.to(model.device) for x in batch))
                if counts(batch[1]):
                    for name, value in {"loss": losses.loss, **losses.figures}.items():
                        sums[name] += value.item()
        total, *figures = workers.all_reduce_numbers(list(sums.values()))
        means = {name: value / n_chosen for name, value in zip(self.figures, figures, strict=True)}
        return LossReport(total, n_chosen, unit=self.recipe.objective.loss_unit), means


def counts(targets: Tensor) -> bool:
    """Whether a batch of an evaluation is this process's own, see `Workers.split_batches`."""
    return bool((targets != IGNORED).any())
