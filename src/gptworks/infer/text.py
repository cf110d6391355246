"""Turn a sample's tokens into pieces of final text, until a stop string, a token or a limit ends the sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from gptworks.infer.constrain import Constraint
from gptworks.infer.healing import Healing
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.sampling import Sampler, SamplingSettings
from gptworks.tokenizer import StreamDecoder

FinishReason = Literal["stop", "length", "context"]
"""Why a text ended. stop: by a token that ends texts, a stop string, or a completed constraint. length: at max_tokens.
context: the context is full."""

DECODER_CONTEXT_TOKENS = 16
"""Number of last prompt tokens given to the decoder: the text of a token may depend on the tokens before it."""


@dataclass(frozen=True)
class Piece:
    """A sample's next token with the text that is now final, or the sample's end. Only a sample's last piece has a
    `finish_reason`."""

    sample: int
    """Index of the sample within its request."""
    text: str
    """New text that is final; empty while the last tokens may be part of a character or of a stop string."""
    token_id: int | None
    """The generated token; None if the piece ends the sample without a token (end-of-text, a full context)."""
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None
    """The token's log-probability, if `logprobs` is set."""
    processed: TokenLogprob | None = None
    """The token's log-probability in the distribution that it was drawn from, if `processed_logprobs` is set."""
    worked: float = field(default=0.0, compare=False)
    """Seconds that the engine had spent in steps when the token was drawn."""


@dataclass
class Pace:
    """The decoding speed of one sample. Only the time of the engine's steps counts, not the reader's time between them.

    The first token does not count, because the prefill computes it.
    """

    n_tokens: int = 0
    _first: float = field(default=0.0, init=False)
    _last: float = field(default=0.0, init=False)

    def push(self, piece: Piece) -> None:
        """Add the sample's next piece."""
        if piece.token_id is not None:
            self._first = piece.worked if not self.n_tokens else self._first
            self._last, self.n_tokens = piece.worked, self.n_tokens + 1

    @property
    def decode_seconds(self) -> float:
        """Seconds spent in steps from the first token to the last."""
        return self._last - self._first

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token; None with fewer than two tokens, or if no time was measured."""
        return (self.n_tokens - 1) / self.decode_seconds if self.n_tokens > 1 and self.decode_seconds > 0 else None


class Sample:
    """One continuation of a prompt: its tokens, its sampler, and the text that is not yet final."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        settings: SamplingSettings,
        tokenizer: Tokenizer,
        ends: tuple[int, ...],
        constraint: Constraint | Healing | None = None,
    ) -> None:
        self.index, self.settings, self.constraint = index, settings, constraint
        self._n_known = constraint.n_characters if isinstance(constraint, Healing) else 0
        self.ids = list(prompt)
        """The prompt and the generated tokens."""
        self.sampler = Sampler(settings, prompt, index, ends)
        self.finish_reason: FinishReason | None = None
        self._stops = StopStrings(settings.stop)
        self._decoder = StreamDecoder(tokenizer)
        for token_id in prompt[-DECODER_CONTEXT_TOKENS:]:
            self._decoder.push(token_id)  # drop the returned text, which belongs to the prompt

    def push(self, token_id: int) -> Piece:
        """Add the next token; return the resulting piece."""
        if token_id in self.sampler.ends:
            return self.finish("stop")
        self.ids.append(token_id)
        self.sampler.push(token_id)
        text = self._stops.push(self._new(self._decoder.push(token_id)))
        if self._stops.found:
            return self.finish("stop", token_id, text)
        if self.constraint is not None and self.constraint.push(token_id):
            return self.finish("stop", token_id, text)
        if self.sampler.n_generated == self.settings.max_tokens:
            return self.finish("length", token_id, text)
        return Piece(self.index, text, token_id)

    def finish(self, reason: FinishReason, token_id: int | None = None, text: str = "") -> Piece:
        """End the sample; return its last piece, with the held-back text up to a stop string."""
        if not self._stops.found:
            text += self._stops.push(self._new(self._decoder.flush()))
        text += self._stops.flush()
        self.finish_reason = "stop" if self._stops.found else reason
        return Piece(self.index, text, token_id, self.finish_reason)

    def _new(self, text: str) -> str:
        """Return decoded text without the characters that the prompt has already."""
        n = min(self._n_known, len(text))
        self._n_known -= n
        return text[n:]


@dataclass
class StopStrings:
    """Cuts a streamed text before the first stop string; holds back text that may be the beginning of a stop string.

    The result does not depend on how the text is split into parts. If one character completes several stop strings, the
    text ends before the longest.
    """

    strings: tuple[str, ...]
    found: bool = field(default=False, init=False)
    held: str = field(default="", init=False)

    def push(self, text: str) -> str:
        """Add text; return the text that is now final."""
        if not self.strings:
            return text
        text, self.held = self.held + text, ""
        matches = [(start + len(stop), start) for stop in self.strings if (start := text.find(stop)) >= 0]
        if matches:
            self.found = True
            return text[: min(matches)[1]]
        n_held = max((self._n_begun(text, stop) for stop in self.strings), default=0)
        self.held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the text that is still held back; call this at the end of the sample."""
        text, self.held = self.held, ""
        return text

    @staticmethod
    def _n_begun(text: str, stop: str) -> int:
        """Return the length of the longest proper prefix of `stop` that `text` ends with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
