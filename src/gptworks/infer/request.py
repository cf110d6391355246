"""A request to the engine: what its caller holds, what the engine notes of it, and what comes of it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gptworks.infer.sampling import TokenLogprob
from gptworks.infer.scheduler import Job
from gptworks.infer.text import FinishReason, Piece, Sample

Overflow = Literal["error", "slide"]


@dataclass(frozen=True)
class Completion:
    """One finished sample."""

    text: str
    """What follows the prompt, up to and without the stop string."""
    token_ids: list[int]
    """Every token generated, those of a stop string too, the end-of-text token not."""
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    """What the model gave each token, where the setting `logprobs` asks for it."""


@dataclass
class Statistics:
    """What an engine does and has done. Counts since it was made; running, waiting and slots are as of now."""

    running: int = 0
    """Texts in a slot."""
    waiting: int = 0
    slots: int = 0
    slots_used: int = 0
    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    prefix_hits: int = 0
    """Prompts that began with what a slot held."""
    reused_tokens: int = 0
    """Prompt tokens that were not computed for that reason."""
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    """Of the tokens guessed (speculation), those that were right."""

    @property
    def acceptance_rate(self) -> float | None:
        """Share of guessed tokens that were right; None: none were guessed."""
        return self.accepted_tokens / self.guessed_tokens if self.guessed_tokens else None


Listener = Callable[[Piece | Exception], None]
"""Told of each piece, in the thread that steps; of an error, after which there are no more."""


class Request:
    """A request that was submitted: `take` gives its pieces as they come, unless it has a listener."""

    def __init__(
        self, number: int, prompt: list[int], samples: list[Sample], overflow: Overflow, listener: Listener | None
    ) -> None:
        self.id = number
        self.prompt_ids = prompt
        self.done = False
        """No more pieces will come."""
        self.error: Exception | None = None
        """Why it failed, where it did."""
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        """What the model gave the prompt's tokens (None before `score_from`), with the first piece; if asked for."""
        self.n_reused_tokens = 0
        """Tokens of the prompt that needed no computing (prefix reuse)."""
        self.admitted_at: float | None = None
        """When it first got a slot, by `time.monotonic`."""
        self._pieces: deque[Piece] = deque()
        self._listener = listener
        # for the engine
        self.samples, self.overflow = samples, overflow
        self.jobs: dict[Job, Sample] = {}
        self.first_logits: Tensor | None = None  # [1, V] after the prompt, for the samples still to come
        self.score_top: int | None = None
        self.score_from = 1
        self.generates = True

    def take(self) -> list[Piece]:
        """The pieces that came since the last call."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    @property
    def n_samples_to_come(self) -> int:
        """For the engine: samples that wait for the first one to read the prompt."""
        return sum(one.finish_reason is None for one in self.samples) - len(self.jobs)

    def deliver(self, piece: Piece) -> None:
        """For the engine: hand a piece on."""
        if self._listener is not None:
            self._listener(piece)
        else:
            self._pieces.append(piece)

    def fail(self, error: Exception) -> None:
        """For the engine: no more pieces will come."""
        self.error = error
        if self._listener is not None:
            self._listener(error)
