"""Loss, perplexity and bits per byte of held-out text, and the bits per byte of general compressors."""

import gzip
import itertools
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gptworks.config import IGNORED
from gptworks.errors import UserError
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.loss import linear_cross_entropy, token_nats

BATCH_TOKENS = 4096
"""Maximum number of tokens of a batch of windows; a longer window is a batch of its own."""

LOGITS_AT_ONCE = 2**22
"""Limit on the elements of a logits matrix in measurements that need logits; a few such matrices exist at a time."""

NO_TOKEN = "there is no token to evaluate: the split is empty or shorter than two tokens."


@dataclass(frozen=True)
class LossReport:
    """The loss over a set of targets, and the figures that follow from it."""

    total_nats: float
    """Sum of −ln p(target) over the targets. If `unit` is not nats per token, this is the sum of the losses of
    `n_tokens` pairs or prompts."""
    n_tokens: int
    """Number of targets, 1 or more. If `unit` is not nats per token, number of pairs or prompts."""
    text_bytes: int | None = None
    """UTF-8 bytes of the text that the targets cover; None if they are unknown."""
    unit: str = "nats per token"
    """The unit of `loss`; perplexity has a meaning only in nats per token."""

    @property
    def loss(self) -> float:
        """Mean loss, in `unit`."""
        return self.total_nats / self.n_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), comparable only between models with the same tokenizer; infinite if it overflows a float."""
        return math.exp(self.loss) if not self.loss > 709 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, comparable between tokenizers and with compressors; None if `text_bytes` is None or
        0."""
        return None if not self.text_bytes else self.total_nats / math.log(2) / self.text_bytes


class Workers(Protocol):
    """Processes that divide an evaluation. Each process gets sums over all processes."""

    def split_batches(self, batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield this process's part of the batches. A process without a batch of its own gets one with only IGNORED
        targets, so that all processes run the same number of forward passes."""

    def all_reduce_numbers(self, numbers: list[float]) -> list[float]:
        """Return the sum of each number over the processes."""

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum a tensor on the model's device over the processes, in place, and return it."""


def evaluate_loss(
    model: GPT,
    windows: Iterable[tuple[Tensor, ...]],
    *,
    text_bytes: int | None = None,
    workers: Workers | None = None,
) -> LossReport:
    """Compute the cross-entropy of the targets of all windows, without dropout; afterwards restore the model's mode.

    Args:
        windows: pairs (inputs, targets), each int64 [T] or [B, T] with T ≤ context_length, as `evaluation_windows`
            makes them; targets of −100 are not counted. Rows that hold several texts have more tensors, as
            `gptworks.data.conversations.packing.evaluation_rows` makes them.
        text_bytes: bytes of the original text. Give this only if each token of the text is a target once; with a sample
            of the windows, bits per byte would be too low.
        workers: the processes that divide the work. Default: this process does all the work.

    Raises:
        UserError: the text has no target to count.
    """
    nats, n_tokens = [torch.zeros((), device=model.device)], 0  # read at the end, so that the host does not wait
    batches, on_cuda = batches_of(windows), model.device.type == "cuda"
    with eval_mode(model), torch.inference_mode():
        for batch in batches if workers is None else workers.split_batches(batches):
            inputs, targets, *texts = (x.to(model.device, non_blocking=on_cuda) for x in batch)
            features = model.features(inputs, None, None, *texts)
            nats.append(linear_cross_entropy(features, model.head_weight, targets, model.config.logit_softcap))
            n_tokens += int((batch[1] != IGNORED).sum())
        total_nats = sum(torch.stack(nats).tolist())
    if workers is not None:
        total_nats, n_targets = workers.all_reduce_numbers([total_nats, n_tokens])
        n_tokens = round(n_targets)
    if not n_tokens:
        raise UserError(NO_TOKEN)
    return LossReport(total_nats, n_tokens, text_bytes)


def each_nats(model: GPT, windows: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each batch of windows, its targets' losses in nats, float64 [B, T], and the targets, int64 [B, T]."""
    for inputs, targets in batches_of(windows):
        with eval_mode(model), torch.inference_mode():
            features = model.features(inputs.to(model.device))
            nats = token_nats(features, model.head_weight, targets.to(model.device), model.config.logit_softcap)
        yield nats.cpu().double(), targets  # convert on the CPU, since not every device has float64


@dataclass(frozen=True)
class PositionLoss:
    """The loss of targets that have `first` to `last` earlier tokens in their window."""

    first: int
    last: int
    report: LossReport


def evaluate_by_position(
    model: GPT,
    windows: Iterable[tuple[Tensor, Tensor]],
    n_parts: int = 8,
    *,
    token_bytes: Sequence[int] | None = None,
) -> list[PositionLoss]:
    """Compute the loss in each of `n_parts` equal parts of the context, to see whether a model uses a long context.
    Parts without a target are left out, for example if the context is shorter than `n_parts`.

    Args:
        windows: as for `evaluate_loss`; windows shorter than the context are left out, so that all parts cover the same
            windows.
        token_bytes: bytes of text of each token id, [V]; None leaves out bits per byte.

    Raises:
        UserError: no window is as long as the context.
    """
    context = model.config.context_length
    whole = (window for window in windows if window[0].size(-1) == context)
    bytes_of = None if token_bytes is None else torch.tensor(token_bytes)
    nats, counts, sizes = (torch.zeros(context, dtype=torch.float64) for _ in range(3))
    for cost, targets in each_nats(model, whole):
        counted = targets != IGNORED
        nats += cost.sum(0)
        counts += counted.sum(0)
        if bytes_of is not None:
            sizes += bytes_of[targets.where(counted, 0)].where(counted, 0).sum(0)
    if not counts.any():
        raise UserError(f"the split holds no whole window of context_length={context}: use more text or less context.")
    edges = [part * context // n_parts for part in range(n_parts + 1)]
    found = []
    for a, b in itertools.pairwise(edges):
        if not counts[a:b].any():
            continue
        n_bytes = None if bytes_of is None else int(sizes[a:b].sum())
        found.append(PositionLoss(a + 1, b, LossReport(nats[a:b].sum().item(), int(counts[a:b].sum()), n_bytes)))
    return found


def watched(
    windows: Iterable[tuple[Tensor, ...]], n_tokens: int, stride: int | None, progress: Callable[[int, int], None]
) -> Iterator[Any]:
    """Yield the windows of `n_tokens` tokens. After each window, call `progress(targets done, all targets)`. The last
    call reports all targets as done, even if the windows cover fewer. `stride` is the number of tokens between the
    starts of windows; None if windows do not overlap."""
    done, n_targets = 0, n_tokens - 1
    for window in windows:
        yield window
        done = min(n_targets, done + (window[0].numel() if stride is None or not done else stride))
        progress(done, n_targets)
    if done < n_targets:
        progress(n_targets, n_targets)


def batches_of(windows: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of consecutive windows of equal length, of up to BATCH_TOKENS tokens."""
    held: list[tuple[Tensor, ...]] = []
    for window in windows:
        inputs = window[0]
        n_held = sum(rows.numel() for rows, *_ in held)
        if held and (held[0][0].size(-1) != inputs.size(-1) or n_held + inputs.numel() > BATCH_TOKENS):
            yield _stack(held)
            held = []
        held.append(window)
    if held:
        yield _stack(held)


def _stack(windows: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(part).view(-1, part[0].size(-1)) for part in zip(*windows, strict=True))


def compressor_bits_per_byte(text: bytes) -> dict[str, float]:
    """Compute the bits per byte of `gzip -9` and `xz -9e`, including their containers, as a baseline. Raise a UserError
    if the text is empty."""
    if not text:
        raise UserError("there is no text to compress.")
    compressed = {
        "gzip_9": gzip.compress(text, 9, mtime=0),
        "xz_9e": lzma.compress(text, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(data) / len(text) for name, data in compressed.items()}
