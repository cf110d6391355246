"""Code that objectives on pairs of answers share: batches, evaluation, and log-probabilities of answers.

Shapes: P pairs, T tokens of their longest conversation.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.data.permutation import evenly_spaced
from gptworks.data.samples import AnswerPairs, Batch
from gptworks.device import Precision
from gptworks.evaluation.loss import LossReport, Workers
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.loss import target_logprobs
from gptworks.training.objectives.base import Objective


def answer_logprobs(model: GPT, inputs: Tensor, targets: Tensor, router_logits: list[Tensor] | None = None) -> Tensor:
    """Return log π(answer | prompt) of each row, [B]: the sum of its targets' log-probabilities."""
    features = model.features(inputs, router_logits=router_logits)
    return target_logprobs(features, model.head_weight, targets, model.config.logit_softcap).sum(-1)


def answer_lengths(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored in each row, [B], at least 1."""
    return (targets != IGNORED).sum(-1).clamp(min=1)


class PairsObjective(Objective):
    """Base class of objectives on pairs of answers; `batch_size` is a number of pairs."""

    figures: tuple[str, ...]
    """Names of the figures reported in addition to the loss, each a mean over pairs."""

    @property
    def pairs(self) -> AnswerPairs:
        assert isinstance(self.samples, AnswerPairs)
        return self.samples

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        return self.batch_of("train", self.pairs.chosen(position, micro_step, size))

    def batch_of(self, split: str, pairs: list[int]) -> Batch:
        """Return the batch of the pairs with these numbers: rows of the chosen answers, then of the rejected ones."""
        return self.pairs.of(split, pairs)

    def _chunks(self, pairs: list[int]) -> Iterator[list[int]]:
        """Split pairs into micro-batches."""
        size = self.train.micro_batch_size
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def count(self, batch: Batch) -> int:
        return batch[0].size(0) // 2

    @torch.no_grad()
    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """Return the mean loss on the evaluated validation pairs, and the mean of each of `figures`."""
        chosen = evenly_spaced(self.n_validation, self.n_evaluated)
        sums = dict.fromkeys(("loss", *self.figures), 0.0)
        with eval_mode(model):
            batches = (self.batch_of("validation", pairs) for pairs in self._chunks(chosen))
            for batch in workers.split_batches(batches):
                with precision.autocast():
                    losses = self.loss(model, tuple(x.to(model.device) for x in batch))
                if counts(batch[1]):
                    for name, value in {"loss": losses.loss, **losses.figures}.items():
                        sums[name] += value.item()
        total, *figures = workers.all_reduce_numbers(list(sums.values()))
        means = {name: value / len(chosen) for name, value in zip(self.figures, figures, strict=True)}
        return LossReport(total, len(chosen), unit=self.settings.loss_unit), means


def counts(targets: Tensor) -> bool:
    """Return whether an evaluation batch has targets. To keep ranks in step, `Workers.split_batches` gives a batch
    without targets to a rank that has no batch left."""
    return bool((targets != IGNORED).any())
