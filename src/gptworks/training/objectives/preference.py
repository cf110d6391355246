"""Preference tuning without a reward model: DPO (Rafailov et al., 2023), cDPO and IPO.

The loss compares the model's log-probability of an answer with a reference: the starting model's log-probability,
computed once before the first step and stored in the run folder.

Shapes: P pairs, T tokens of their longest conversation.
"""

import hashlib
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gptworks.config.objective import PreferenceObjective
from gptworks.data.samples import Batch
from gptworks.device import Precision
from gptworks.errors import UserError
from gptworks.evaluation.loss import Workers
from gptworks.files import read_regular, sealed_json, unsealed_json, write_whole
from gptworks.model.gpt import GPT, eval_mode
from gptworks.quantize.linear import weight_tensors
from gptworks.training.distributed.shards import local
from gptworks.training.objectives.base import RunContext
from gptworks.training.objectives.next_token import Losses, LossFunction, with_routing
from gptworks.training.objectives.pairs import PairsObjective, answer_lengths, answer_logprobs, counts

REFERENCE = "reference.safetensors"


def preference_loss(
    objective: PreferenceObjective, logratios: Tensor, n_tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the pairs' losses, and the figures to report, as sums over the pairs.

    Args:
        logratios: log π(answer) − log π_ref(answer), [2P]: chosen answers, then rejected ones.
        n_tokens: number of targets of each answer, [2P].
    """
    chosen, rejected = logratios.chunk(2)
    if objective.loss == "ipo":  # Azar et al., 2023, eq. 17, with means over tokens, as in their experiments
        chosen_tokens, rejected_tokens = n_tokens.chunk(2)
        gap = chosen / chosen_tokens - rejected / rejected_tokens
        losses = (gap - 1 / (2 * objective.beta)).square()
    else:  # DPO: Rafailov et al., 2023, eq. 7; cDPO, with label smoothing: Mitchell, 2023, eq. 3
        margin, smoothing = objective.beta * (chosen - rejected), objective.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    figures = {
        "reward_margin": objective.beta * (chosen - rejected).sum(),
        "reward_chosen": objective.beta * chosen.sum(),
        "accuracy": (chosen > rejected).float().sum(),
    }
    return losses.sum(), figures


_MOST_NOTE_BYTES = 1 << 16
_LOGPROB_BYTES = 8
"""Bytes of a pair's reference log-probabilities: one float32 for each of its two answers."""


class Preference(PairsObjective):
    """The objective of DPO, cDPO and IPO: pairs of answers, compared with the starting model."""

    settings: PreferenceObjective
    kept_files = (REFERENCE, "reference.json")
    figures = ("reward_margin", "reward_chosen", "accuracy")
    _reference: dict[str, Tensor]
    """Log-probabilities of the chosen and the rejected answer under the starting model, [n pairs, 2], by split."""

    def loss_without_data(self, model: GPT) -> LossFunction:
        return lambda model, batch: self.loss(model, (*batch, torch.zeros(len(batch[0]), device=model.device)))

    # ----------------------------------------------------------------------------------------------- reference

    def begin(self, run: RunContext) -> None:
        path = self.recipe.run_dir / REFERENCE
        if not run.is_new:
            self._reference = self._read_reference(path)
            return
        pairs = self.pairs.pairs
        n_pairs = sum(map(len, pairs.values()))
        run.report(f"computing the reference log-probabilities of {n_pairs:,} pairs of answers")
        self._reference = {split: self._logprobs(run.model, run.precision, split, run.workers) for split in pairs}
        if run.ranks.is_rank_zero:
            data = save(self._reference)
            described = {
                "data": self.pairs.train_shards.manifest.fingerprint,
                "weights": weights_fingerprint(run.model),
                "tensors": hashlib.sha256(data).hexdigest(),
            }
            write_whole(path, data)
            write_whole(path.with_suffix(".json"), sealed_json(described))

    def _read_reference(self, path: Path) -> dict[str, Tensor]:
        """Read the starting model's log-probabilities from the run folder; UserError if the file is missing or damaged,
        or belongs to other data."""
        n_pairs = sum(map(len, self.pairs.pairs.values()))
        try:
            described, data = (
                unsealed_json(read_regular(path.with_suffix(".json"), _MOST_NOTE_BYTES, inside=path.parent)),
                read_regular(path, _LOGPROB_BYTES * n_pairs + _MOST_NOTE_BYTES, inside=path.parent),
            )
            whole = hashlib.sha256(data).hexdigest() == described["tensors"]
            reference = load(data) if whole else {}
        except (OSError, ValueError, KeyError, SafetensorError, json.JSONDecodeError):
            reference = {}
        if not reference:
            raise UserError(
                f"{path} is missing or damaged: it holds the answers' log-probabilities before the run began, which "
                f"cannot be computed now. Restore it from a copy, or start a new run with another run_dir=."
            )
        if described.get("data") != self.pairs.train_shards.manifest.fingerprint:
            raise UserError(f"{path} is of other pairs than these: restore the data, or give another run_dir=.")
        return reference

    def _logprobs(self, model: GPT, precision: Precision, split: str, workers: Workers) -> Tensor:
        """Return log π of both answers of every pair, float32 [n, 2] on the CPU. Ranks divide the pairs.

        Gradients stay enabled, though unused, so that the same kernels run as in training and round alike.
        """
        given = torch.zeros(len(self.pairs.pairs[split]), 2, device=model.device)
        chunks = self._chunks(list(range(len(given))))
        batches = ((*self.pairs.of(split, pairs), torch.tensor(pairs)) for pairs in chunks)
        with eval_mode(model):
            for inputs, targets, chosen in workers.split_batches(batches):
                with precision.autocast():
                    logprobs = answer_logprobs(model, inputs.to(model.device), targets.to(model.device))
                if counts(targets):
                    given[chosen.to(model.device)] = logprobs.detach().view(2, -1).T.float()
        return workers.all_reduce(given).cpu()  # each pair was computed on one rank and is zero on the others

    def batch_of(self, split: str, pairs: list[int]) -> Batch:
        """Return the batch of the pairs with these numbers: inputs and targets [2P, T], reference logprobs [2P]."""
        return (*self.pairs.of(split, pairs), self._reference[split][pairs].T.flatten())

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Return the `preference_loss` of a batch from `batch_of`."""
        inputs, targets, reference = batch
        router_logits: list[Tensor] = []
        logprobs = answer_logprobs(model, inputs, targets, router_logits)
        loss, figures = preference_loss(self.settings, logprobs - reference, answer_lengths(targets))
        return with_routing(loss, loss, router_logits, model, len(inputs) // 2, self._routing, figures)


def weights_fingerprint(model: GPT) -> str:
    """Return the sha256 of a model's weights, in the order of their names. If the model is sharded, only this
    rank's shards count."""
    digest = hashlib.sha256()
    for name, parameter in sorted(weight_tensors(model).items()):
        digest.update(name.encode("utf-8"))
        copied = local(parameter).detach().float().cpu().clone()  # FSDP cannot free a storage that numpy uses
        digest.update(copied.numpy().tobytes())
    return digest.hexdigest()
