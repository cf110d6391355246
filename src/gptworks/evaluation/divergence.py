"""The divergence of two models' predictions on the same text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.errors import UserError
from gptworks.evaluation.loss import LOGITS_AT_ONCE, NO_TOKEN, LossReport, batches_of
from gptworks.model.gpt import GPT, eval_mode


@dataclass(frozen=True)
class Divergence:
    """The losses of a model and of its reference on the same targets, and the divergence of their predictions."""

    model: LossReport
    reference: LossReport
    kl_nats: float
    """Mean over the tokens of KL(reference ‖ model) = Σ p·ln(p/q), in nats; 0 if the predictions are equal."""
    agreement: float
    """Share of targets at which both models have the same most probable token."""


def measure_divergence(
    model: GPT,
    reference: GPT,
    windows: Iterable[tuple[Tensor, Tensor]],
    progress: Callable[[int], None] = lambda tokens: None,
) -> Divergence:
    """Return the losses of two models with the same vocabulary, and the divergence of their predictions. Both models
    compute in their own dtypes, without dropout. `windows` are as for `evaluate_loss`; raise a UserError if they have
    no target to count. `progress` is called after each batch with the number of tokens compared so far."""
    sums = torch.zeros(4, dtype=torch.float64)  # the four sums of `_compare`
    n_tokens = 0
    with eval_mode(model), eval_mode(reference), torch.inference_mode():
        for inputs, targets in batches_of(windows):
            n_tokens += int((targets != IGNORED).sum())
            sums += _compare(model, reference, inputs.to(model.device), targets.to(model.device)).cpu()
            progress(n_tokens)
    if not n_tokens:
        raise UserError(NO_TOKEN)
    nats, reference_nats, divergence, agreements = sums.tolist()
    return Divergence(
        LossReport(nats, n_tokens), LossReport(reference_nats, n_tokens), divergence / n_tokens, agreements / n_tokens
    )


def _compare(model: GPT, reference: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return sums over a batch, float64 [4]: nats of the model, nats of the reference, divergence, agreements."""
    n_rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    rows = zip(
        torch.split(model.features(inputs).flatten(0, 1), n_rows),
        torch.split(reference.features(inputs).flatten(0, 1), n_rows),
        torch.split(targets.flatten(), n_rows),
        strict=True,
    )
    sums = torch.zeros(4, dtype=torch.float64, device=inputs.device)
    for features, reference_features, target in rows:
        counted = target != IGNORED
        q = model.logits(features[counted]).float().log_softmax(-1)  # [tokens, vocabulary]
        p = reference.logits(reference_features[counted]).float().log_softmax(-1)  # [tokens, vocabulary]
        wanted = target[counted]
        sums += torch.stack((
            F.nll_loss(q, wanted, reduction="sum"),
            F.nll_loss(p, wanted, reduction="sum"),
            F.kl_div(q, p, reduction="sum", log_target=True),
            (q.argmax(-1) == p.argmax(-1)).sum().float(),
        ))  # fmt: skip
    return sums
