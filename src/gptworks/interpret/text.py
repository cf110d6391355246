"""A text as tokens, each with the characters that it adds and its loss."""

import itertools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from gptworks.data.permutation import Int64s
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.evaluation.text import TextTokens, default_stride, text_nats
from gptworks.interpret.hooks import Check, never, stoppable
from gptworks.model.gpt import GPT
from gptworks.tokenizer import StreamDecoder, document_frame

MOST_TOKENS = 8192

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TokenizedText:
    """Tokens of one text."""

    ids: Int64s
    pieces: tuple[str, ...]
    """Text of each token; empty for special tokens, and for tokens that end within a character. Joined, the pieces are
    the whole text."""
    framed: bool
    """Whether the first token marks the beginning of a document, so that it has no text."""
    predicted_bytes: int | None
    """Size of the text without its first token, in UTF-8 bytes; None if decoding does not restore the text."""
    split: str = "given"

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def read(self, start: int, length: int) -> Int64s:
        return self.ids[start : start + length]

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, text: str) -> Self:
        """Tokenize a text as `evaluate_text` does, after the token that begins a document, if the tokenizer has one.
        Raises a UserError if the text is empty or has too many tokens, or the tokenizer cannot read it."""
        tokens = TextTokens(tokenizer, text)
        _check_length(tokens.n_tokens)
        n_before = len(document_frame(tokenizer)[0])
        cuts = [*[0] * (n_before + 1), *tokens.starts[n_before + 1 :].tolist(), len(text)]
        pieces = tuple(text[a:b] for a, b in itertools.pairwise(cuts))
        n_bytes = len(text.encode("utf-8")) - tokens.unseen_bytes
        return cls(tokens.tokens, pieces, n_before > 0, n_bytes if tokens.round_trips else None)

    @classmethod
    def of_document(cls, tokenizer: Tokenizer, shards: TokenShards, number: int) -> Self:
        """Read document `number` of a split (0 is the first), cut to its first MOST_TOKENS tokens. Raises a UserError
        if the document does not exist."""
        start, end = shards.document(number)
        ids = shards.read(start, min(end - start, MOST_TOKENS))
        pieces, framed = _decoded(tokenizer, ids.tolist())
        n_bytes = len("".join(pieces[1:]).encode("utf-8"))
        return cls(ids, pieces, framed, n_bytes if shards.manifest.round_trips else None)

    @classmethod
    def of_tokens(cls, tokenizer: Tokenizer, ids: list[int]) -> Self:
        """Make a text from token ids that a model wrote or read. `predicted_bytes` is None unless the tokenizer splits
        the text into exactly these tokens. Raises a UserError if `ids` is empty or has too many tokens."""
        _check_length(len(ids))
        given = np.array(ids, dtype=np.int64)
        pieces, framed = _decoded(tokenizer, ids)
        if text := "".join(pieces):
            cut = cls.of_text(tokenizer, text)
            if np.array_equal(cut.ids, given):
                return cut
        return cls(given, pieces, framed, None)

    def token_nats(self, model: GPT, check: Check = never) -> Costs:
        """Return the loss of each token in nats, [T], as `evaluate --text` computes it; NaN for the first token. Raises
        a UserError if the text has fewer than two tokens, or ids outside the model's vocabulary."""
        check_ids(model, self.ids)
        with stoppable(model, check):
            return np.concatenate([[math.nan], text_nats(model, self)])

    def window(self, context: int, index: int) -> tuple[int, int]:
        """Return the range (first, end) of the tokens that the model read when `token_nats` predicted token `index`.
        Raises a UserError if there is no such token, or it is the first, which is not predicted."""
        if not 1 <= index < self.n_tokens:
            raise UserError(f"token {index} is not predicted: choose one from 1 to {self.n_tokens - 1}.")
        stride = default_stride(context)
        start = max(0, -(-(index - context) // stride)) * stride
        return start, min(start + context, self.n_tokens - 1)


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> tuple[tuple[str, ...], bool]:
    """Return the text that each token adds, and whether the first token marks the beginning of a document. Raises a
    UserError if `ids` is empty."""
    if not ids:
        raise UserError("there are no tokens to read: give at least one.")
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(token) for token in ids]
    pieces[-1] += stream.flush()
    return tuple(pieces), ids[:1] == document_frame(tokenizer)[0]


def check_ids(model: GPT, ids: Int64s) -> None:
    """Raise a UserError if one of the ids is not in the model's vocabulary."""
    if (largest := int(ids.max(initial=0))) >= model.config.vocab_size:
        raise UserError(f"token id {largest} is not among the model's {model.config.vocab_size}: not its tokenizer.")


def _check_length(n_tokens: int) -> None:
    if n_tokens > MOST_TOKENS:
        raise UserError(
            f"the text has {n_tokens} tokens and at most {MOST_TOKENS} are read at once: give a part of it."
        )


@dataclass(frozen=True)
class Segment:
    """A part of a text that two models read. It begins and ends where tokens of both models begin and end."""

    text: str
    tokens: tuple[int, int]
    """Range (first, end) of the first model's tokens."""
    other_tokens: tuple[int, int]
    nats: float | None
    """The first model's loss in nats, summed over `tokens`; None if a token that has text is not predicted."""
    other_nats: float | None


def segments(text: TokenizedText, nats: Costs, other: TokenizedText, other_nats: Costs) -> list[Segment]:
    """Divide a text that two models read into the smallest parts that are whole tokens for both. If the tokens of both
    models have the same texts, each token is a part. Otherwise, a part ends wherever tokens of both models end. Raises
    a UserError if the texts differ."""
    if "".join(text.pieces) != "".join(other.pieces):
        raise UserError("the two readings are of different texts: compare one text, or a document that both runs have.")
    if text.pieces == other.pieces:
        cuts = [(i, i) for i in range(text.n_tokens + 1)]
    else:
        ends, other_ends = _last_at(text), _last_at(other)
        shared = sorted(ends.keys() & other_ends.keys())
        cuts = [(0, 0), *((ends[at] + 1, other_ends[at] + 1) for at in shared)]
    return [
        Segment("".join(text.pieces[a:b]), (a, b), (c, d), _total(text, nats, a, b), _total(other, other_nats, c, d))
        for (a, c), (b, d) in itertools.pairwise(cuts)
    ]


def _last_at(text: TokenizedText) -> dict[int, int]:
    """Map the end of each token's text, in characters, to the token's index, and the end of all text to the last."""
    ends = itertools.accumulate(map(len, text.pieces))
    found = {end: i for i, (end, piece) in enumerate(zip(ends, text.pieces, strict=True)) if piece}
    return found | {max(found, default=0): text.n_tokens - 1}


def _total(text: TokenizedText, nats: Costs, first: int, end: int) -> float | None:
    total = float(nats[max(first, text.framed) : end].sum())
    return None if math.isnan(total) else total


@dataclass(frozen=True)
class Stretch:
    """The loss on a part of a text."""

    first_token: int
    end_token: int
    nats: float
    text_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.text_bytes


def along(text: TokenizedText, nats: Costs, n_parts: int = 32) -> list[Stretch]:
    """Return the loss on up to `n_parts` consecutive parts of a text, about equally long in bytes. A token belongs to
    the part in which it begins; the first token, which is not predicted, belongs to none."""
    sizes = [len(piece.encode("utf-8")) for piece in text.pieces]
    begins = [0, *itertools.accumulate(sizes)]
    found = []
    tokens = range(1, text.n_tokens)
    for _, group in itertools.groupby(tokens, lambda i: begins[i] * n_parts // max(1, begins[-1])):
        part = list(group)
        n_bytes = begins[part[-1] + 1] - begins[part[0]]
        if n_bytes:
            found.append(Stretch(part[0], part[-1] + 1, float(nats[part].sum()), n_bytes))
    return found
