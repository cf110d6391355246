"""Measure how well a model predicts a given text. Only bits per byte can be compared between tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from gptworks.config import IGNORED
from gptworks.data.batches import Tokens, evaluation_windows
from gptworks.data.permutation import Int64s
from gptworks.errors import UserError
from gptworks.evaluation.loss import LossReport, PositionLoss, each_nats, evaluate_by_position, watched
from gptworks.evaluation.metrics import Floats
from gptworks.evaluation.results import Measured
from gptworks.evaluation.scoring import Progress
from gptworks.model.gpt import GPT
from gptworks.tokenizer import document_frame, encodings, token_bytes

PASSAGE_CHARACTERS = 1000
"""Length of the passages into which a text is cut; the bootstrap intervals resample passages."""


class TextTokens:
    """The tokens of a text, preceded by the token that begins a document if the tokenizer has such a token."""

    split = "given"

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        """Tokenize the text; raise a UserError if it is empty or the tokenizer cannot read it."""
        encoding = encodings(tokenizer, [text], offsets=True)[0]
        if not encoding.ids:
            raise UserError("the text is empty: give one with words in it.")
        begin = document_frame(tokenizer)[0]
        self.tokens: Int64s = np.array([*begin, *encoding.ids], dtype=np.int64)
        self.starts: Int64s = np.array([0] * len(begin) + [start for start, _ in encoding.offsets], dtype=np.int64)
        """Index of the character in the text at which each token begins."""
        self.n_tokens = len(self.tokens)
        self.round_trips = tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        sizes = token_bytes(tokenizer)
        self.unseen_bytes = 0 if begin or sizes is None else sizes[encoding.ids[0]]
        """Number of bytes of the first token if it is not predicted and its bytes are known, else 0."""

    def read(self, start: int, length: int) -> Int64s:
        return self.tokens[start : start + length]


@dataclass(frozen=True)
class TextEvaluation:
    """The loss of a text and of its parts."""

    report: LossReport
    """The loss over all predicted tokens. `text_bytes` is None if decoding does not restore the text."""
    passages: Floats
    """[P, 3]: nats, tokens and UTF-8 bytes of each passage."""
    positions: list[PositionLoss]
    """The loss by position in the context; empty if the text is not longer than the context."""

    def measured(self) -> dict[str, Measured]:
        """Return the figures with their intervals over passages."""
        found = {
            "loss": Measured.of("mean", self.passages[:, [0, 1]]),
            "perplexity": Measured.of("perplexity", self.passages[:, [0, 1]]),
        }
        if self.report.text_bytes is not None:
            found["bits per byte"] = Measured.of("bits", self.passages[:, [0, 2]])
        return found


def evaluate_text(
    model: GPT,
    tokenizer: Tokenizer,
    text: str,
    *,
    stride: int | None = None,
    progress: Progress = lambda done, total: None,
) -> TextEvaluation:
    """Compute loss, perplexity and bits per byte of a text; each of its tokens is predicted once.

    The first token is predicted from the token that begins a document. If the tokenizer has no such token, the first
    token is not predicted, and its bytes are not counted.

    Args:
        stride: tokens from one window to the next; each token sees at least context − stride earlier tokens, if the
            text has as many. Default: half the context.
        progress: called with the number of tokens done and the number of all tokens.

    Raises:
        UserError: the text is empty, the tokenizer cannot read it, or the stride is not between 1 and the context
            length; or the text is a single token, and the tokenizer has no token that begins a document.
    """
    tokens, context = TextTokens(tokenizer, text), model.config.context_length
    nats = text_nats(model, tokens, stride=stride, progress=progress)
    n_bytes = len(text.encode("utf-8")) - tokens.unseen_bytes
    report = LossReport(float(nats.sum()), len(nats), n_bytes if tokens.round_trips else None)
    positions = []
    if tokens.n_tokens > context:
        sizes = token_bytes(tokenizer) if tokens.round_trips else None
        whole = evaluation_windows(tokens, context)
        positions = evaluate_by_position(model, whole, token_bytes=sizes)
    return TextEvaluation(report, _passages(text, tokens, nats), positions)


def text_nats(
    model: GPT,
    tokens: Tokens,
    *,
    stride: int | None = None,
    progress: Progress = lambda done, total: None,
) -> npt.NDArray[np.float64]:
    """Return the loss of each token but the first, in nats, [T − 1]. `stride`, `progress`: as for `evaluate_text`.
    Raise a UserError if there are fewer than two tokens, or the stride is not between 1 and the context length."""
    context = model.config.context_length
    stride = default_stride(context) if stride is None else stride
    windows = watched(evaluation_windows(tokens, context, stride=stride), tokens.n_tokens, stride, progress)
    parts = [nats[targets != IGNORED] for nats, targets in each_nats(model, windows)]
    return torch.cat(parts).numpy()


def default_stride(context: int) -> int:
    """Return the default number of tokens from one window to the next: half the context."""
    return max(1, context // 2)


def _passages(text: str, tokens: TextTokens, nats: npt.NDArray[np.float64]) -> Floats:
    """Return nats, tokens and bytes of each passage, [P, 3]; a token belongs to the passage in which it begins."""
    cuts = range(0, len(text), PASSAGE_CHARACTERS)
    of_token = tokens.starts[1:] // PASSAGE_CHARACTERS
    n_bytes = np.array([len(text[cut : cut + PASSAGE_CHARACTERS].encode("utf-8")) for cut in cuts], dtype=np.float64)
    n_bytes[0] -= tokens.unseen_bytes
    sums = [np.bincount(of_token, weights, len(n_bytes)) for weights in (nats, np.ones(len(nats)))]
    return np.stack([*sums, n_bytes], axis=1)


def positions_table(positions: Sequence[PositionLoss]) -> list[dict[str, float | int | None]]:
    """Return the loss by position, as JSON."""
    return [
        {"first": one.first, "last": one.last, "loss": one.report.loss, "bits_per_byte": one.report.bits_per_byte}
        for one in positions
    ]
