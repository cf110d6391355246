"""`Request`, which the engine's caller holds, and `OpenRequests`, the set of all requests that have not ended."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from torch import Tensor

from gptworks.errors import RunError
from gptworks.infer.logprobs import PromptScores, TokenLogprob
from gptworks.infer.room import Room
from gptworks.infer.scheduler import Job, Work
from gptworks.infer.text import FinishReason, Piece, Sample

Prompt = str | Sequence[int]
"""A prompt as text or as token ids."""

_LOG = logging.getLogger("gptworks.engine")

Overflow = Literal["error", "slide"]


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    text: str
    """The generated text, cut before a stop string."""
    token_ids: list[int]
    """All generated tokens, including the tokens of a stop string. A final end-of-text or stop token is left out."""
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token, if the setting `logprobs` is given."""
    processed_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of each token in the distribution it was drawn from, if `processed_logprobs` is given."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], n_prompt_tokens: int) -> Self:
        """Join all pieces of one sample into a completion."""
        reason = pieces[-1].finish_reason
        assert reason is not None, "a sample's last piece says why it ended"
        return cls(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token_id for piece in pieces if piece.token_id is not None],
            finish_reason=reason,
            prompt_tokens=n_prompt_tokens,
            logprobs=[piece.logprob for piece in pieces if piece.logprob is not None] or None,
            processed_logprobs=[piece.processed for piece in pieces if piece.processed is not None] or None,
        )


@dataclass
class Statistics:
    """An engine's counts since its creation or warm-up, and the current `running`, `waiting`, `slots`, `slots_used`."""

    running: int = 0
    """Number of texts that have a slot."""
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
    reused_tokens: int = 0
    """Number of prompt tokens reused from slots instead of computed."""
    draft_tokens: int = 0
    """Number of draft tokens that the model has checked."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted, because the model drew the same token."""

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens, from 0 to 1; None without draft tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


Listener = Callable[[Piece | Exception], None]
"""A function that `Engine.step` calls with each piece of a request, or with the error that ends the request."""


class Request:
    """A request to continue a prompt, or only to score it. `take` returns new pieces, unless a listener gets them.

    Each sample is a continuation of the prompt. A request without samples scores the prompt and then gets one piece.
    Its prompt may be one token longer than the context, since the prompt's last token is not computed.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        samples: list[Sample],
        overflow: Overflow,
        scores: PromptScores,
        listener: Listener | None,
    ) -> None:
        self.prompt_ids, self.samples, self.overflow = prompt_ids, samples, overflow
        self.done = False
        """Whether the request has ended: finished, cancelled or failed."""
        self.error: Exception | None = None
        """The error that ended the request, if any."""
        self.prompt_logprobs = scores.logprobs
        """Log-probability of each prompt token; None for tokens before `score_from`. The list is complete when the
        first piece comes. The attribute is None if the request does not ask for log-probabilities."""
        self.n_reused_tokens = 0
        """Number of prompt tokens reused from a slot instead of computed (prefix reuse)."""
        self.admitted_at: float | None = None
        """The time, by `time.monotonic`, at which the request first got a slot; None before that."""
        self._pieces: deque[Piece] = deque()
        self._listener, self.scores = listener, scores
        self.jobs: list[Job] = []
        """For the engine: the request's unfinished jobs."""
        self.first_logits: Tensor | None = None
        """For the engine: logits [1, V] after the prompt, from which the samples after the first begin."""

    @property
    def n_samples(self) -> int:
        """Number of texts to compute: the number of samples, or 1 if the request only scores the prompt."""
        return len(self.samples) or 1

    @property
    def reads_logits(self) -> bool:
        """Whether the host reads the request's logits, to compute log-probabilities."""
        settings = [sample.settings for sample in self.samples]
        wanted = [one for s in settings for one in (s.logprobs, s.processed_logprobs)]
        return self.prompt_logprobs is not None or any(one is not None for one in wanted)

    def take(self) -> list[Piece]:
        """Return the pieces that came since the last call."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    def completions(self, pieces: Iterable[Piece] | None = None) -> list[Completion]:
        """Return a completion for each sample. pieces: all pieces of the request; default: the result of `take`."""
        made: list[list[Piece]] = [[] for _ in self.samples]
        for piece in self.take() if pieces is None else pieces:
            made[piece.sample].append(piece)
        return [Completion.of(of_one, len(self.prompt_ids)) for of_one in made]

    def deliver(self, piece: Piece) -> None:
        """For the engine: hand a piece to the listener, or keep it for `take`."""
        (self._pieces.append if self._listener is None else self._listener)(piece)

    def fail(self, error: Exception) -> None:
        """For the engine: end the request with an error, and pass the error to the listener. Log an error that the
        listener raises."""
        self.error = error
        if self._listener is not None:
            try:
                self._listener(error)
            except BaseException as raised:
                _LOG.error("the reader of a request that failed raised an error itself", exc_info=raised)
        self.close()

    def close(self) -> None:
        """For the engine: mark the request as ended, and release its logits and constraints."""
        self.done, self.first_logits = True, None
        for sample in self.samples:
            sample.constraint = None

    @property
    def n_to_come(self) -> int:
        """Number of jobs that start only when the first job has computed the prompt."""
        return max(0, sum(one.finish_reason is None for one in self.samples) - len(self.jobs))


@dataclass
class Draw:
    """The logits from which a sample draws its next token and, if there are draft tokens, the tokens after it."""

    job: Job
    logits: Tensor  # [1 + number of draft tokens, V]
    draft: list[int] = field(default_factory=list)
    work: Work | None = None
    n_drawn: int = 0

    def __post_init__(self) -> None:
        self.request: Request = self.job.request
        self.sample: Sample = self.job.sample

    @property
    def row(self) -> Tensor:
        """The logits [1, V] for the next token."""
        return self.logits[self.n_drawn : self.n_drawn + 1] if self.draft else self.logits


class WorkClock:
    """Measures the total time spent in the context `running`, in which the engine takes its steps."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._before = now, 0.0
        self._since: float | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time spent in this context."""
        self._since = self._now()
        try:
            yield
        finally:
            self._before, self._since = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds measured so far."""
        return self._before if self._since is None else self._before + self._now() - self._since


class OpenRequests:
    """The requests that have not ended, and their jobs. Not thread-safe, except for `n_to_come`."""

    def __init__(self, room: Room) -> None:
        self.room, self.statistics = room, Statistics()
        self.clock = WorkClock()
        self._open: list[Request] = []
        self._has_new_jobs = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def n_to_come(self) -> int:
        """Number of texts that have no job yet because their prompt is not computed. Thread-safe."""
        return sum(request.n_to_come for request in tuple(self._open))

    def most_tokens(self, job: Job) -> int:
        """Return the maximum length, in tokens, of a job's text in its slot."""
        sample: Sample | None = job.sample
        n_left = 0 if sample is None else sample.settings.max_tokens - sample.sampler.n_generated
        return min(self.room.context, len(job.tokens) + n_left)

    def rotary_length(self, job: Job) -> int:
        """Return the text length, in tokens, that rotary scaling uses for a job.

        With LongRoPE, this is the original context if the text fits into it, otherwise the full context. With dynamic
        scaling, this is the text's maximum length, so that all its cached keys are rotated with the same frequencies.
        """
        turns_at = self.room.turns_at
        if turns_at is None:
            return self.most_tokens(job)
        return turns_at if len(job.tokens) <= turns_at else self.room.model.config.context_length

    def make_room(self) -> None:
        """Allocate slots for all jobs, up to the room's maximum. Do nothing if no jobs were added since the last call,
        because a running job never needs more room."""
        if not self._has_new_jobs:
            return
        jobs = [*self.room.scheduler.running, *self.room.scheduler.waiting]
        self.room.fit(len(jobs) + self.n_to_come, max(map(self.most_tokens, jobs)))
        self._has_new_jobs = False

    def admit(self) -> list[Draw]:
        """Assign free slots to waiting jobs, and copy the prefixes that these jobs reuse. Return a `Draw` for each of
        these jobs whose logits are already known."""
        admitted, copies = self.room.scheduler.admit()
        for copy in copies:
            assert self.room.backend is not None
            self.room.backend.copy(copy.source, copy.target, copy.n_tokens)
        for job in admitted:
            request = job.request
            request.admitted_at = request.admitted_at or time.monotonic()
            if job.n_reused and not job.knows_logits:
                request.n_reused_tokens += job.n_reused
                self.statistics.reused_tokens += job.n_reused
        return [Draw(job, job.request.first_logits) for job in admitted if job.n_computed == len(job.tokens)]

    # -------------------------------------------------------------------------------------------- open and end requests

    def open(self, request: Request) -> None:
        """Add a submitted request and queue its first job, which computes the prompt."""
        is_first = not self._open
        self._open.append(request)  # first, so that an error below ends this request too
        self.statistics.requests += 1
        if is_first:
            self.room.release_stale()
        self.statistics.prompt_tokens += len(request.prompt_ids)
        samples, ids = request.samples, request.prompt_ids
        read = ids if samples else ids[:-1] or ids
        first = Job(self.room.window(read), score_from=request.scores.score_from, request=request)
        first.sample = samples[0] if samples else None
        self.add(first)

    def add(self, *jobs: Job, first: bool = False) -> None:
        """Queue jobs of open requests. first: ahead of the waiting jobs."""
        for job in jobs:
            job.request.jobs.append(job)
        self._has_new_jobs = True
        self.room.scheduler.add(*jobs, first=first)

    def drop(self, job: Job) -> None:
        """End a job and free its slot."""
        self.room.scheduler.finish(job)
        job.request.jobs.remove(job)

    def deliver(self, request: Request, piece: Piece) -> None:
        """Pass a piece to a request. If the request's listener raises an error, the request ends with a RunError."""
        try:
            request.deliver(piece)
        except Exception as error:
            failure = RunError(f"the reader of a request failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(request, failure)

    def finish(self, request: Request) -> None:
        """End a request whose pieces are all delivered."""
        self.statistics.finished += 1
        self._close(request)

    def cancel(self, request: Request) -> None:
        """End a request early; do nothing if it has ended."""
        if request in self._open:
            self.statistics.cancelled += 1
            self._close(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error."""
        self.statistics.failed += 1
        request.fail(error)
        self._close(request)

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error."""
        for request in list(self._open):
            self.fail(request, error)

    def abandon_all(self, error: Exception) -> None:
        """End all requests with an error, and leave their slots, whose state is unknown, as they are."""
        for request in list(self._open):
            self.statistics.failed += 1
            request.fail(error)
        self._open.clear()

    def _close(self, request: Request) -> None:
        for job in list(request.jobs):
            self.drop(job)
        request.close()
        self._open.remove(request)
