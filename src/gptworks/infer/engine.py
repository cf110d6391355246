"""The inference engine: prompts go in, text comes out as it is made, for many requests at once.

    submit ─► waiting ─► slot: prefill ─► sample a token ─┬─► hold back stop strings ─► pieces
              (scheduler)             ▲                   │
                                      └── compute it ◄────┘  (backend; all running texts together)

For one text at a time there are `generate`, `stream`, `complete`, `pieces` and `score`. Underneath, and for a server:

    request = engine.submit(prompt, settings, n_samples=1)    # from any thread; checked at once
    while engine.step():                                      # one step of all requests; False: nothing is left to do
        for piece in request.take(): ...                      # or submit(..., listener=function of a Piece or an error)
    engine.cancel(request)                                    # from any thread; its slots are free at once

Calls of `step` from several threads take turns, so that `generate` works beside them. `EngineLoop` (loop.py) runs the
steps in a thread and gives `async for piece in loop.stream(prompt, settings)`.

The prompt and its continuation together may fill the context. When it is full, a request ends (`overflow="error"`), or
its window restarts (`overflow="slide"`): the last half of the context is computed anew, from position 0. Learned
positions so stay those the model was trained with, and each token is computed about twice.

A request's tokens do not depend on the requests beside it, as far as the backend's numbers do not (see `Backend`).
"""

import dataclasses
import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.checkpoint import Report, load_run
from gptworks.device import choose_device, memory_bytes
from gptworks.errors import RunError, UserError
from gptworks.infer.choice import BackendName, choose_backend
from gptworks.infer.constrain import Constraints, Grammar
from gptworks.infer.request import Completion, Listener, Overflow, Request, Statistics
from gptworks.infer.sampling import SamplingSettings, TokenLogprob, sample, token_logprobs
from gptworks.infer.scheduler import PREFILL_TOKENS, Copy, Job, QueueFull, Reuse, Scheduler, Work
from gptworks.infer.speculate import Draftable, Drafter
from gptworks.infer.text import Piece, Sample
from gptworks.model import GPT
from gptworks.model.backend import Backend, Chunk
from gptworks.tokenizer import encodings, load_tokenizer, prompt_ids, special_tokens, vocabulary_size
from gptworks.units import readable

MOST_SLOTS = 32
"""Texts generated at once by an engine that makes room by itself."""

_LEAST_CAPACITY = 256
_LEAST_CAPACITY_CPU = 2048
"""Tokens of such an engine's slots. Room is made in powers of two, so that it is seldom made anew; on a CPU generously,
since what no text reaches takes no memory there."""


@dataclass
class _Draw:
    """Rows of logits from which a sample draws its next token and, where guesses were checked, those after it."""

    request: Request
    sample: Sample
    job: Job
    logits: Tensor  # [1 + n_guessed, V]
    guessed: list[int]
    work: Work | None = None
    n_drawn: int = 0


class Engine:
    """Generates text with one model and its tokenizer. Computes on the model's device, in the model's dtype."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        n_slots: int | None = None,
        slot_tokens: int | None = None,
        max_waiting: int | None = None,
        reuse: Reuse = "exact",
        prefill_tokens: int = PREFILL_TOKENS,
        drafter: Drafter | None = None,
        backend: BackendName = "auto",
        cache_dtype: torch.dtype | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """
        Args:
            n_slots: texts generated at once. None: as many as are asked for, up to 32; room is made as it is needed.
            slot_tokens: tokens of a text, prompt and continuation; None: as needed, up to the model's context.
            max_waiting: requests that may wait for a slot; None: any number.
            reuse: whether a prompt that begins like an earlier text starts from what was computed for that; see
                `scheduler.Reuse`. Not done for a model in training.
            prefill_tokens: prompt tokens computed at once; exact reuse shares whole such parts.
            drafter: guesses tokens ahead (speculate.py); texts stay the same.
            backend, cache_dtype: see `choose_backend`.
            chat_template: how conversations become text; None: a model without turns.

        Raises:
            UserError: the tokenizer makes ids that the model does not have, or a number is below 1.
        """
        n_ids, n_rows = vocabulary_size(tokenizer), model.config.vocab_size
        if n_ids > n_rows:
            raise UserError(
                f"the tokenizer has {n_ids} tokens and the model's vocabulary {n_rows}: they do not belong together. "
                f"Give the tokenizer that the model was trained with."
            )
        for name, number in (("n_slots", n_slots), ("slot_tokens", slot_tokens), ("prefill_tokens", prefill_tokens)):
            if number is not None and number < 1:
                raise UserError(f"{name}={number}: it must be 1 or more.")
        self.model, self.tokenizer, self.chat_template = model, tokenizer, chat_template
        self.n_ids = n_ids  # a padded vocabulary's last rows stand for no token
        self.end_of_text = special_tokens(tokenizer).eos
        self.context = min(slot_tokens or model.config.context_length, model.config.context_length)
        """Tokens that a text may come to before it is full."""
        self.drafter, self.max_waiting = drafter, max_waiting
        if drafter is not None:
            drafter.check(n_ids)
        self._n_slots, self._slot_tokens = n_slots, slot_tokens
        self._backend_name: BackendName = backend
        self._cache_dtype = cache_dtype
        scaling = model.config.rope_scaling
        if scaling is not None and scaling.type == "dynamic":
            reuse = "off"  # what a token's keys are depends on how long its text may become
        self._reuse: Reuse = reuse
        self._prefill_tokens = prefill_tokens
        self._backend: Backend | None = None
        self._scheduler = self._new_scheduler(0, invariant=False)
        self._weights: object = None
        self._constraints: Constraints | None = None
        self._constraints_lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, Request] = {}
        self._request_of: dict[Job, Request] = {}
        self._inbox: deque[tuple[bool, Request]] = deque()  # (submitted, not cancelled)
        self._inbox_lock, self._stepping = threading.Lock(), threading.Lock()
        self._statistics = Statistics()

    # ------------------------------------------------------------------------------------------- one text at a time

    def generate(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> str:
        """The text that follows the prompt: `engine.generate("def ", max_tokens=50, temperature=0.8, seed=1)`.

        Arguments and errors are those of `pieces`.
        """
        return "".join(self.stream(prompt, settings, overflow=overflow, **changes))

    def stream(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[str]:
        """The text that follows the prompt, in parts, as they come. Arguments and errors are those of `pieces`."""
        pieces = self.pieces(prompt, settings, overflow=overflow, **changes)
        return (piece.text for piece in pieces if piece.text)

    def complete(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> list[Completion]:
        """Several finished continuations, with their tokens and why they ended. See `pieces`."""
        ids = self.encode_prompt(prompt)
        return completions(
            self.pieces(ids, settings, n_samples=n_samples, overflow=overflow, **changes), n_samples, len(ids)
        )

    def pieces(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[Piece]:
        """Generate step by step; `generate`, `stream` and `complete` are views of it.

        A request is checked when it is made, before the first piece is asked for.

        Args:
            prompt: text, or token ids. Empty text starts a new document, where the tokenizer has a token for that.
            settings: how to sample; default: SamplingSettings().
            n_samples: continuations of the one prompt, which is computed once. With a seed, sample i draws the same
                random numbers whatever n_samples is.
            overflow: when the context is full. error: a longer prompt is refused, and a sample ends with the reason
                "context". slide: the window restarts from the last context_length / 2 tokens, recomputed; of a prompt
                longer than the context, the last context_length / 2 tokens are read.
            changes: settings by name, such as temperature=0.8.

        Raises:
            UserError: an unknown or impossible setting, a prompt with no tokens, or one longer than the context.
            RunError: the model's scores are not numbers.
        """
        return self._run(self._request(prompt, SamplingSettings.of(settings, **changes), n_samples, overflow))

    def score(self, prompt: str | Sequence[int], *, top: int = 0) -> list[TokenLogprob | None]:
        """What the model gives each token of a text, in nats, and the `top` likeliest ones; the first token has none.

        Raises:
            UserError: as `pieces`.
        """
        request = self._request(prompt, SamplingSettings(), prompt_logprobs=top, generates=False)
        for _ in self._run(request):
            pass
        assert request.prompt_logprobs is not None
        return request.prompt_logprobs

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, after the token that begins a document where the tokenizer has one for it.

        Warns (UserWarning) of characters or words that the tokenizer does not know.

        Raises:
            UserError: no tokens come of it, or ids outside the vocabulary.
        """
        if not isinstance(prompt, str):
            ids = list(prompt)
            if wrong := [token for token in ids if not 0 <= token < self.n_ids]:
                raise UserError(f"token id {wrong[0]} is not in the vocabulary: ids go from 0 to {self.n_ids - 1}.")
            if not ids:
                raise UserError("the prompt has no tokens: give at least one.")
            return ids
        ids = prompt_ids(self.tokenizer, prompt)
        if prompt and ids == prompt_ids(self.tokenizer, ""):
            raise UserError(f"the prompt {prompt!r} has no token this tokenizer knows: give other text.")
        if not ids:
            raise UserError("the prompt is empty and this tokenizer has no token to begin a document: give some text.")
        self._warn_of_unknown(prompt, ids)
        return ids

    @property
    def most_texts(self) -> int:
        """Texts that are generated at once, at most."""
        return self._n_slots or MOST_SLOTS

    @property
    def restart_tokens(self) -> int:
        """Tokens that a window restarts from when the context is full: the last half of the context."""
        return max(1, self.context // 2)

    # ------------------------------------------------------------------------------------------- many at once

    def submit(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        prompt_logprobs: int | None = None,
        score_from: int = 1,
        generates: bool = True,
        listener: Listener | None = None,
        **changes: Any,
    ) -> Request:
        """Let a request wait for its turn; `step` makes its pieces. From any thread.

        Args:
            prompt, settings, n_samples, overflow, changes: as in `pieces`.
            prompt_logprobs: tell in `Request.prompt_logprobs` what the model gave the prompt's tokens, and so many of
                the likeliest instead.
            score_from: the first token of the prompt that is told of; what stands before may be reused from others.
            generates: False: the prompt alone is computed, for its log-probabilities; one piece says when it is done.
                Its last token is not read, so that the prompt may be one token longer than the context.
            listener: called with each piece in the thread that steps, or with an error that ends the request.

        Raises:
            UserError: as `pieces`.
            QueueFull: as many requests wait as may.
        """
        settings = SamplingSettings.of(settings, **changes)
        request = self._request(prompt, settings, n_samples, overflow, prompt_logprobs, score_from, generates, listener)
        self._post(request)
        return request

    def cancel(self, request: Request) -> None:
        """Let a request end where it is, without more pieces. From any thread; its slots are free by the next step."""
        with self._inbox_lock:
            self._inbox.append((False, request))
        if self._stepping.acquire(blocking=False):
            try:
                self._receive()
                self._rest()
            finally:
                self._stepping.release()

    def step(self, on_failure: Callable[[Exception], None] = lambda _: None) -> bool:
        """Take one step with all requests; whether any is left.

        on_failure: called with what the backend raised, before any request learns of it.

        Raises:
            Exception: what the backend raised. Every request has then ended with it.
        """
        with self._stepping:
            self._receive()
            if self._open:
                try:
                    self._step()
                except Exception as error:
                    on_failure(error)
                    for request in list(self._open.values()):
                        self._fail(request, error)
                    self._scheduler.forget()
                    if self._backend is None:  # it could not be made, or not grow
                        self._release()
                    raise
            self._rest()
            return bool(self._open or self._inbox)

    def statistics(self) -> Statistics:
        """What the engine does and has done, as of now."""
        scheduler = self._scheduler
        return dataclasses.replace(
            self._statistics,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + sum(submitted for submitted, _ in tuple(self._inbox)),
            slots=scheduler.n_slots,
            slots_used=scheduler.n_slots_used,
        )

    @property
    def backend_description(self) -> str | None:
        """What computes, with what, and where it was chosen why; None before anything was computed."""
        return None if self._backend is None else self._backend.description

    def warm_up(self, *, promised_bytes: int = 0) -> int:
        """Allocate all slots, each as long as a text may become, and compute a token.

        After it no request makes the engine allocate more, or waits for that.

        Args:
            promised_bytes: of the memory there is, what others have allocated and not yet touched.

        Returns:
            Bytes of the slots' keys and values, when all of them are full.

        Raises:
            UserError: the slots do not fit in memory.
        """
        n_slots = self.most_texts
        with self._stepping:
            self._have_room(1, 1)
            assert self._backend is not None
            needed_bytes = self._backend.cache_bytes(n_slots, self.context)
            there_bytes = max(0, memory_bytes(self.model.device) - promised_bytes)
            refusal = (
                f"the keys and values of {n_slots} slots of {self.context:,} tokens take "
                f"{readable(needed_bytes, 'B')}, and {readable(there_bytes, 'B')} are available, enough for "
                f"{n_slots * there_bytes // needed_bytes} slots: give --slots or --context (n_slots, slot_tokens in "
                f"Python) a smaller number."
            )
            if needed_bytes > there_bytes:
                raise UserError(refusal)
            try:
                self._have_room(n_slots, self.context)
            except RuntimeError as error:  # torch could not allocate them
                self._release()
                raise UserError(refusal) from error
        for _ in self.pieces([0], max_tokens=1):
            pass
        self._statistics = Statistics()
        return needed_bytes

    # --------------------------------------------------------------------------------------- requests come and go

    def _request(
        self,
        prompt: str | Sequence[int],
        settings: SamplingSettings,
        n_samples: int = 1,
        overflow: Overflow = "error",
        prompt_logprobs: int | None = None,
        score_from: int = 1,
        generates: bool = True,
        listener: Listener | None = None,
    ) -> Request:
        """A request that has been checked."""
        ids = self.encode_prompt(prompt)
        n_read = len(ids) if generates else len(ids) - 1
        if n_samples < 1:
            raise UserError(f"n_samples={n_samples}: it must be 1 or more.")
        if overflow not in ("error", "slide"):
            raise UserError(f'overflow="{overflow}": it must be "error" or "slide".')
        if n_read > self.context and overflow == "error":
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model's context {self.context}: "
                f'shorten it, or use --slide (overflow="slide" in Python), which reads its last {self.restart_tokens}.'
            )
        if prompt_logprobs is not None and (prompt_logprobs < 0 or n_read > self.context):
            raise UserError(
                f"prompt_logprobs={prompt_logprobs} for {len(ids)} tokens: it must be 0 or more, for a prompt of at "
                f"most {self.context} tokens."
            )
        if not 1 <= score_from <= max(1, len(ids) - 1):
            raise UserError(f"score_from={score_from}: it must be a token from 1 to {len(ids) - 1} of the prompt.")
        for name in ("logit_bias", "stop_token_ids"):
            if wrong := [token for token in getattr(settings, name) if not 0 <= token < self.n_ids]:
                raise UserError(
                    f"{name} has token id {wrong[0]}, which is not in the vocabulary: "
                    f"ids go from 0 to {self.n_ids - 1}."
                )
        grammar = self._grammar(settings)
        samples = [
            Sample(i, ids, settings, self.tokenizer, self.end_of_text, None if grammar is None else grammar.begin())
            for i in range(n_samples)
        ]
        request = Request(next(self._numbers), ids, samples, overflow, listener)
        request.score_top, request.score_from, request.generates = prompt_logprobs, score_from, generates
        return request

    def _grammar(self, settings: SamplingSettings) -> Grammar | None:
        if settings.json_schema is None and settings.regex is None:
            return None
        return self.constraints().grammar(settings)

    def constraints(self) -> Constraints:
        """Makes the grammars of constrained texts, for this engine's tokenizer.

        Raises:
            UserError: llguidance is not installed, or the tokens do not spell text by themselves.
        """
        with self._constraints_lock:
            if self._constraints is None:
                self._constraints = Constraints(self.tokenizer)
            return self._constraints

    def _post(self, request: Request) -> None:
        with self._inbox_lock:
            n_waiting = len(self._scheduler.waiting) + sum(submitted for submitted, _ in self._inbox)
            if self.max_waiting is not None and n_waiting >= self.max_waiting:
                raise QueueFull(f"{n_waiting} requests are waiting already: try again later.")
            self._inbox.append((True, request))

    def _run(self, request: Request) -> Iterator[Piece]:
        """Submit a request and step until it is done; a reader who goes away cancels it."""
        self._post(request)
        try:
            while not request.done:
                self.step()
                yield from request.take()
            yield from request.take()
        finally:
            if not request.done:
                self.cancel(request)
        if request.error is not None:
            raise request.error

    def _receive(self) -> None:
        """Take in what was submitted and cancelled."""
        with self._inbox_lock:
            received = list(self._inbox)
            self._inbox.clear()
        for submitted, request in received:
            if not submitted:
                self._cancel(request)
                continue
            if not self._open:
                self._check_weights()
            self._open[request.id] = request
            self._statistics.requests += 1
            self._statistics.prompt_tokens += len(request.prompt_ids)
            self._start(request)

    def _start(self, request: Request) -> None:
        ids = request.prompt_ids
        read = ids if request.generates or len(ids) == 1 else ids[:-1]
        job = Job(list(read if len(read) <= self.context else read[-self.restart_tokens :]))
        if request.score_top is not None:
            job.score_from, request.prompt_logprobs = request.score_from - 1, [None] * min(request.score_from, len(ids))
        self._take_on(job, request, request.samples[0])
        self._scheduler.add(job)

    def _take_on(self, job: Job, request: Request, of: Sample) -> None:
        request.jobs[job] = of
        self._request_of[job] = request

    def _cancel(self, request: Request) -> None:
        if request.id in self._open:
            self._statistics.cancelled += 1
            self._close(request)

    def _fail(self, request: Request, error: Exception) -> None:
        self._statistics.failed += 1
        request.fail(error)
        self._close(request)

    def _finish(self, request: Request) -> None:
        self._statistics.finished += 1
        self._close(request)

    def _close(self, request: Request) -> None:
        for job in list(request.jobs):
            self._drop(job)
        request.first_logits = None
        request.done = True
        del self._open[request.id]

    def _drop(self, job: Job) -> None:
        self._scheduler.finish(job)
        del self._request_of.pop(job).jobs[job]

    # ------------------------------------------------------------------------------------------------ room

    def _new_scheduler(self, n_slots: int, *, invariant: bool) -> Scheduler:
        return Scheduler(n_slots, prefill_tokens=self._prefill_tokens, reuse=self._reuse, invariant=invariant)

    def _make_room(self) -> None:
        """Have a backend with slots for what is to be done."""
        scheduler = self._scheduler
        least = _LEAST_CAPACITY_CPU if self.model.device.type == "cpu" else _LEAST_CAPACITY
        longest = max(self._room(job) for job in (*scheduler.running, *scheduler.waiting))
        capacity = min(self._slot_tokens or _power_of_two(max(least, longest)), self.context)
        n_slots = self._n_slots
        if n_slots is None:
            n_more = sum(r.n_samples_to_come for r in self._open.values())
            n_needed = scheduler.n_slots_used + len(scheduler.waiting) + n_more
            n_slots = _power_of_two(min(n_needed, MOST_SLOTS))
        self._have_room(n_slots, capacity)

    def _have_room(self, n_slots: int, capacity: int) -> None:
        """Have a backend with so many slots of so many tokens at least. What a smaller one holds stays."""
        backend, scheduler = self._backend, self._scheduler
        if backend is None:
            backend = choose_backend(self.model, n_slots, capacity, dtype=self._cache_dtype, name=self._backend_name)
            self._weights = None if self.model.training else _versions(self.model)  # a backend may have moved them
            scheduler.invariant = backend.invariant
            if self.drafter is not None:
                self.drafter.reset(n_slots, capacity)
        elif n_slots > backend.n_slots or capacity > backend.capacity:
            n_slots, capacity = max(n_slots, backend.n_slots), max(capacity, backend.capacity)
            self._backend = None  # if it fails, it is of no use
            backend.grow(n_slots, capacity, scheduler.held)
            if self.drafter is not None:
                self.drafter.grow(n_slots, capacity)
        self._backend = backend
        scheduler.grow(n_slots)

    def _room(self, job: Job) -> int:
        """Tokens that a job's text may come to in its slot."""
        request = self._request_of[job]
        one = request.jobs[job]
        n_more = one.settings.max_tokens - one.n_generated if request.generates else 0
        return min(self.context, len(job.tokens) + n_more)

    def _check_weights(self) -> None:
        """Forget what was computed with other weights."""
        if self._backend is not None and (self.model.training or self._weights != _versions(self.model)):
            self._release()

    def _rest(self) -> None:
        """With nothing to do, a model in training gets its memory back, and its weights will change."""
        if not self._open and self.model.training:
            self._release()

    def _release(self) -> None:
        self._backend = None
        self._scheduler = self._new_scheduler(0, invariant=False)

    # ------------------------------------------------------------------------------------------------ a step

    def _step(self) -> None:
        self._make_room()
        self._guess()
        self._admit()
        plan = self._scheduler.plan()
        backend = self._backend
        assert backend is not None
        chunks = [Chunk(w.slot, w.start, w.tokens, w.n_logits, self._room(w.job)) for w in plan.work]
        computed = backend.compute(chunks) if chunks else []
        self._statistics.steps += 1
        draws: list[_Draw] = []
        for work, logits in zip(plan.work, computed, strict=True):
            draws += self._read(work, logits[:, : self.n_ids])
        draws += [draw for job in plan.ready for draw in self._ready(job)]
        self._draw(draws)

    def _admit(self) -> list[Job]:
        """Jobs that have got a slot; what they share with others is copied there."""
        admitted, copies = self._scheduler.admit()
        self._copy(copies)
        for job in admitted:
            request = self._request_of[job]
            request.admitted_at = request.admitted_at or time.monotonic()
            if job.n_reused and not job.knows_logits:
                request.n_reused_tokens += job.n_reused
                self._statistics.prefix_hits += 1
                self._statistics.reused_tokens += job.n_reused
        return admitted

    def _copy(self, copies: Iterable[Copy]) -> None:
        assert self._backend is not None
        for copy in copies:
            self._backend.copy(copy.source, copy.target, copy.n_tokens)

    def _guess(self) -> None:
        """Let the drafter say what may follow the texts that are being generated."""
        if self.drafter is None or self._backend is None:
            return
        texts = []
        for job in self._scheduler.running:
            request = self._request_of[job]
            one = request.jobs[job]
            n_wanted = min(one.settings.max_tokens - one.n_generated - 1, self._backend.capacity - len(job.tokens))
            if one.n_generated and n_wanted > 0 and len(job.tokens) == job.n_computed + 1:
                assert job.slot is not None
                texts.append((job, Draftable(one, job.slot, job.tokens, n_wanted)))
        if not texts:
            return
        for (job, text), guess in zip(texts, self.drafter.guess([text for _, text in texts]), strict=True):
            constraint = text.sample.constraint
            job.guess = guess[: constraint.accepts(guess)] if constraint is not None else guess

    def _read(self, work: Work, logits: Tensor) -> list[_Draw]:
        """What follows from a work's logits [n_logits, V]; the draws for which it has all tokens."""
        job, request = work.job, self._request_of[work.job]
        if job.score_from is not None:
            self._read_scores(request, work, logits)
        if not work.n_guessed:
            self._scheduler.commit(work)
        if work.start + len(work.tokens) - work.n_guessed < len(job.tokens):
            return []
        job.score_from = None
        if not request.generates:
            request.deliver(Piece(0, "", None, "length"))
            self._finish(request)
            return []
        one = request.jobs[job]
        guessed = work.tokens[len(work.tokens) - work.n_guessed :]
        draws = [_Draw(request, one, job, logits[-1 - work.n_guessed :], guessed, work)]
        if request.first_logits is None and len(request.samples) > 1:
            request.first_logits = logits[-1:].clone()
            draws += self._branch(request, job)
        return draws

    def _branch(self, request: Request, first: Job) -> list[_Draw]:
        """Let the other samples of a request go on from the prompt that the first has read."""
        twins = [Job(list(first.tokens), knows_logits=True) for _ in request.samples[1:]]
        for one, twin in zip(request.samples[1:], twins, strict=True):
            self._take_on(twin, request, one)
        for twin in reversed(twins):
            self._scheduler.add(twin, first=True)
        return [draw for job in self._admit() if job.n_computed == len(job.tokens) for draw in self._ready(job)]

    def _ready(self, job: Job) -> list[_Draw]:
        """The draw of a job that has nothing to compute: its request knows the logits."""
        request = self._request_of[job]
        assert request.first_logits is not None
        return [_Draw(request, request.jobs[job], job, request.first_logits, [])]

    def _read_scores(self, request: Request, work: Work, logits: Tensor) -> None:
        assert request.prompt_logprobs is not None and request.score_top is not None
        first = work.start + len(work.tokens) - len(logits) + 1  # the token that the first row foretells
        tokens = request.prompt_ids[first : first + len(logits)]
        if tokens:
            request.prompt_logprobs[first:] = token_logprobs(logits[: len(tokens)], tokens, request.score_top)

    def _draw(self, draws: list[_Draw]) -> None:
        """Draw the next token of each sample, and go on with those whose next token had been guessed."""
        live = draws
        while live:
            tokens = self._sample(live)
            live = [draw for draw in live if not draw.request.done]  # some may have failed
            for draw, token in zip(live, tokens, strict=True):
                self._push(draw, token)
            live = [
                draw
                for draw, token in zip(live, tokens, strict=True)
                if not draw.request.done
                and draw.n_drawn <= len(draw.guessed)
                and draw.guessed[draw.n_drawn - 1] == token
                and draw.sample.finish_reason is None
            ]
        for draw in draws:
            self._settle(draw)

    def _sample(self, draws: list[_Draw]) -> list[int]:
        """A token for each draw, but for those of requests that fail because a score is not a number."""
        allowed = None
        if any(draw.sample.constraint is not None for draw in draws):
            masks = [self._allowed(draw) for draw in draws]
            allowed = [mask for mask, draw in zip(masks, draws, strict=True) if not draw.request.done]
            draws = [draw for draw in draws if not draw.request.done]
            if not draws:
                return []
        rows = [draw.logits[draw.n_drawn : draw.n_drawn + 1] for draw in draws]
        logits = rows[0] if len(rows) == 1 else torch.cat(rows)
        try:
            return sample(logits, [draw.sample.sampler for draw in draws], allowed)
        except RunError as error:
            for draw, bad in zip(draws, logits.isnan().any(-1).tolist(), strict=True):
                if bad and not draw.request.done:
                    self._fail(draw.request, error)
            left = [draw for draw in draws if not draw.request.done]
            return self._sample(left) if left else []

    def _allowed(self, draw: _Draw) -> Tensor | None:
        """The tokens that a draw's constraint allows; its request fails where that cannot be told."""
        if draw.sample.constraint is None or draw.request.done:
            return None
        try:
            return draw.sample.constraint.allowed()
        except UserError as error:
            self._fail(draw.request, error)
            return None

    def _push(self, draw: _Draw, token: int) -> None:
        one, logprob = draw.sample, None
        if draw.request.done:  # another of its samples has failed
            return
        if one.settings.logprobs is not None:
            row = draw.logits[draw.n_drawn : draw.n_drawn + 1]
            (logprob,) = token_logprobs(row, [token], one.settings.logprobs)
        draw.n_drawn += 1
        try:
            piece = one.push(token, logprob)
        except UserError as error:  # its constraint cannot go on
            self._fail(draw.request, error)
            return
        if piece.token_id is not None:
            draw.job.tokens.append(token)
            self._statistics.generated_tokens += 1
        draw.request.deliver(piece)

    def _settle(self, draw: _Draw) -> None:
        """After a sample's draws of this step: note what was computed rightly, and end what has ended."""
        request, job, one = draw.request, draw.job, draw.sample
        if request.done:
            return
        if draw.work is not None and draw.guessed:
            n_right = draw.n_drawn - 1
            self._statistics.guessed_tokens += len(draw.guessed)
            self._statistics.accepted_tokens += n_right
            self._scheduler.commit(draw.work, len(draw.work.tokens) - len(draw.guessed) + n_right)
        if one.finish_reason is None and len(job.tokens) > self.context:
            if request.overflow == "slide":
                self._scheduler.restart(job, one.ids[-self.restart_tokens :])
            else:
                request.deliver(one.finish("context"))
        if one.finish_reason is not None:
            self._drop(job)
            if all(other.finish_reason is not None for other in request.samples):
                self._finish(request)

    def _warn_of_unknown(self, prompt: str, ids: list[int]) -> None:
        unknown = special_tokens(self.tokenizer).unk
        if unknown is None or unknown not in ids:
            return
        encoding = encodings(self.tokenizer, [prompt], offsets=True)[0]
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token == unknown]
        known_by_name = ", ".join(dict.fromkeys(repr(prompt[start:end]) for start, end in spans))
        warnings.warn(f"the tokenizer does not know {known_by_name}: the model reads <unk> there.", stacklevel=5)


def completions(pieces: Iterable[Piece], n_samples: int, n_prompt_tokens: int) -> list[Completion]:
    """The finished samples that a request's pieces make."""
    made: list[list[Piece]] = [[] for _ in range(n_samples)]
    for piece in pieces:
        made[piece.sample].append(piece)
    return [_completion(of_one, n_prompt_tokens) for of_one in made]


def _completion(pieces: list[Piece], n_prompt_tokens: int) -> Completion:
    reason = pieces[-1].finish_reason
    assert reason is not None, "a sample's last piece says why it ended"
    logprobs = [piece.logprob for piece in pieces if piece.logprob is not None and piece.token_id is not None]
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token_id for piece in pieces if piece.token_id is not None],
        finish_reason=reason,
        prompt_tokens=n_prompt_tokens,
        logprobs=logprobs or None,
    )


def _versions(model: GPT) -> tuple[tuple[int, int], ...]:
    """Where the weights are and how often each was written to: equal while nobody changes them."""
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())


def _power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def load(
    run_dir: str | Path,
    checkpoint: str | int = "best",
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    report: Report = lambda _: None,
    **options: Any,
) -> Engine:
    """The engine of a run folder: its tokenizer, and the model as it was at a checkpoint.

    Args:
        checkpoint: best, last, or a step.
        overrides: settings that win over the run's, such as `model.context_length=1024` for a longer context.
        device: auto, cpu, cuda or mps.
        report: told of what was fallen back from, such as a damaged checkpoint.
        options: of `Engine`, such as n_slots=8.

    Raises:
        UserError: no such run, checkpoint or device, or damaged files.
    """
    run = load_run(run_dir, str(checkpoint), overrides=overrides, device=choose_device(device), report=report)
    tokenizer = load_tokenizer(run.tokenizer_folder)
    options.setdefault("chat_template", load_chat_template(run.tokenizer_folder, tokenizer))
    return Engine(run.model, tokenizer, **options)
