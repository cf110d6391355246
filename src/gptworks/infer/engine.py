"""The inference engine: prompts in, text out as it is generated, for many requests at once.

    submit ─► waiting ─► slot: prefill ─► sample a token ─┬─► hold back stop strings ─► pieces
              (scheduler)             ▲                   │
                                      └── compute it ◄────┘  (backend; all running texts together)

For one text at a time: `generate`, `stream`, `complete`, `chat`, `pieces` and `score`. For many:

    request = engine.submit(prompt, settings, n_samples=1)    # from any thread; checks the request (admission.py)
    while engine.step():                                      # one step of all requests; False: all have ended
        for piece in request.take(): ...                      # or give `submit` a listener, which gets each piece
    engine.cancel(request)                                    # from any thread; frees the request's slots

`EngineLoop` (loop.py) runs the steps in a thread, for readers in asyncio. drawing.py draws tokens from the logits.

When a prompt and its continuation fill the context, the text ends (`overflow="error"`), or its window restarts
(`overflow="slide"`): the last half of the context is computed again, from position 0. Positions therefore stay within
the model's context, and each token is computed about twice.

A request's tokens do not depend on other requests, except for rounding in some backends (`Backend.invariant`).
"""

import contextlib
import dataclasses
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from typing import Any

from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate, Message, load_chat_template
from gptworks.checkpoint import Report, load_run
from gptworks.choices import LoadedWeights
from gptworks.device import choose_device
from gptworks.errors import RunError, UserError
from gptworks.infer.admission import Admission
from gptworks.infer.backends.backend import Backend, Chunk
from gptworks.infer.drawing import draft_tokens, draw_tokens, use_logits
from gptworks.infer.fitting import fit_conversation
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.request import Completion, OpenRequests, Overflow, Prompt, Request, Statistics
from gptworks.infer.room import Room
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.scheduler import QueueFull
from gptworks.infer.text import Piece
from gptworks.model.gpt import GPT
from gptworks.quantize.linear import weights_of
from gptworks.tokenizer import load_tokenizer
from gptworks.units import counted


class EngineFailed(RunError):
    """The engine has failed: all its requests have ended with this error, and it accepts no new requests."""

    def __init__(self, error: BaseException) -> None:
        """`error` is the error that ended the engine."""
        what = type(error).__name__ + (f": {error}" if str(error) else "")
        super().__init__(f"the engine failed and takes no more requests ({what}). Start the program again.")
        self.error = self.__cause__ = error


class Engine:
    """Generates text with one model and its tokenizer. A backend (`choose_backend`) computes on the model's device."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_waiting: int | None = None,
        chat_template: ChatTemplate | None = None,
        **slots: Any,
    ) -> None:
        """
        Args:
            max_waiting: requests are refused while this many texts or more wait for a slot. None: no limit.
            chat_template: renders conversations; None: the model is a base model.
            slots: arguments of `Room`, such as n_slots=8.

        Raises:
            UserError: the tokenizer or the drafter does not fit the model, or a number in `slots` is below 1.
        """
        self.model, self.tokenizer, self.chat_template, self.max_waiting = model, tokenizer, chat_template, max_waiting
        self._room = Room(model, **slots)
        self.admission = Admission(tokenizer, self._room)
        self.defaults = self.admission.defaults
        self.context, self.restart_tokens = self._room.context, self._room.restart_tokens
        self.most_texts = self._room.most_texts
        self._requests = OpenRequests(self._room)
        self._inbox: deque[tuple[bool, Request]] = deque()  # (True: submit, False: cancel; the request)
        self._inbox_lock, self._stepping = threading.Lock(), threading.Lock()
        self.failure: EngineFailed | None = None
        """The error that ended the engine; None while it runs. See `fail`."""

    def require_chat_template(self, advice: str) -> ChatTemplate:
        """Return the run's chat template. Raises a UserError, which ends with `advice`, if the run has none."""
        if self.chat_template is None:
            raise UserError(f"this run has no chat template: it is a base model, which has no turns. {advice}")
        return self.chat_template

    # --------------------------------------------------------------------------------------------- one text at a time

    def generate(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> str:
        """Return the text that continues the prompt: `engine.generate("def ", max_tokens=50, temperature=0.8, seed=1)`.

        Arguments and errors are those of `pieces`.
        """
        return "".join(self.stream(prompt, settings, **arguments))

    def stream(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> Iterator[str]:
        """Yield the continuation of the prompt in parts, as it is generated. Arguments and errors: see `pieces`."""
        return (piece.text for piece in self.pieces(prompt, settings, **arguments) if piece.text)

    def complete(
        self, prompt: Prompt, settings: SamplingSettings | None = None, *, n_samples: int = 1, **arguments: Any
    ) -> list[Completion]:
        """Return `n_samples` finished continuations of the prompt. Arguments and errors: see `pieces`."""
        request = self.admission.request(prompt, settings, n_samples=n_samples, **arguments)
        return request.completions(self._run(request))

    def chat(
        self, messages: str | Sequence[Message], settings: SamplingSettings | None = None, **arguments: Any
    ) -> str:
        """Return the assistant's answer to a conversation: `engine.chat([{"role": "user", "content": "Hello"}])`.

        A plain text is one user message. Arguments and errors are those of `pieces`. A conversation that is too long is
        read without its oldest turns (see `fit_conversation`), and a UserWarning says so.

        Raises:
            UserError: the run has no chat template, the template refuses the messages, or the system messages and the
                newest question together exceed the context.
        """
        return "".join(self.stream_chat(messages, settings, **arguments))

    def stream_chat(
        self, messages: str | Sequence[Message], settings: SamplingSettings | None = None, **arguments: Any
    ) -> Iterator[str]:
        """Yield the answer of `chat` in parts, as it is generated."""
        template = self.require_chat_template("Let it continue a text, with generate, stream or complete.")
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        options = {name: arguments.pop(name) for name in ("n_samples", "overflow") if name in arguments}
        settings = SamplingSettings.of(settings or self.defaults, **arguments).ending_at(template.end_token_ids)
        prompt, n_dropped = fit_conversation(template, said, self.context, settings.max_tokens)
        if n_dropped:
            what = counted(n_dropped, "message")
            rule = f"its context has {self.context} tokens"
            warnings.warn(f"the model does not read the first {what}: {rule}.", stacklevel=3)
        return self.stream(prompt, settings, **options)

    def pieces(
        self,
        prompt: Prompt,
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[Piece]:
        """Yield the pieces of the generated texts, step by step. `generate` and `stream` use this.

        The call itself checks the request; reading the first piece queues it.

        Args:
            prompt: text, or token ids. Empty text starts a new document, if the tokenizer has a token for that.
            settings: sampling settings; default: `Engine.defaults`.
            n_samples: number of continuations of the prompt, which is computed once. With a seed, the random numbers of
                sample i do not depend on n_samples.
            overflow: error: a prompt longer than the context is refused, and a sample that fills the context ends with
                finish reason "context". slide: a sample that fills the context continues from its last
                `restart_tokens` tokens (half the context), which are computed again. A prompt longer than the context
                is cut to its last `restart_tokens` tokens.
            changes: settings by name, such as temperature=0.8, which replace values in `settings`.

        Raises:
            UserError: a setting is unknown or impossible, or the prompt has no tokens or exceeds the context.
            QueueFull: too many texts are waiting, or the grammars in use have reached their memory limit.
            EngineFailed: see `enqueue`.
            RunError: a logit of the model is NaN.
        """
        return self._run(self.admission.request(prompt, settings, n_samples=n_samples, overflow=overflow, **changes))

    def score(self, prompt: Prompt, *, top: int = 0) -> list[TokenLogprob | None]:
        """Return the log-probability, in nats, of each token of a prompt, and of the `top` most likely tokens at its
        position; None for the first token. Errors: see `pieces`."""
        request = self.admission.request(prompt, prompt_logprobs=top, generates=False)
        for _ in self._run(request):
            pass
        assert request.prompt_logprobs is not None
        return request.prompt_logprobs

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; see `Admission.encode_prompt`."""
        return self.admission.encode_prompt(prompt)

    def finish(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Take steps until these submitted requests are done; return each request's completions.

        Raises:
            Exception: the error that ended a request, such as a RunError because a logit is NaN.
        """
        while not all(request.done for request in requests):
            self.step()
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.completions() for request in requests]

    def _run(self, request: Request) -> Iterator[Piece]:
        """Enqueue a request, take steps until it is done, and yield its pieces; cancel it if the reader stops early."""
        self.enqueue(request)
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

    # ------------------------------------------------------------------------------------------------- many requests

    def submit(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> Request:
        """Check and queue a request, which `step` computes. Arguments: see `Admission.request`; errors: see `pieces`.
        Thread-safe."""
        request = self.admission.request(prompt, settings, **arguments)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request that `admission` has made. Thread-safe.

        Raises:
            QueueFull: `max_waiting` texts are waiting.
            EngineFailed: the engine has failed.
        """
        with self._inbox_lock:
            if self.failure is not None:
                raise EngineFailed(self.failure.error)
            n_waiting = self._n_waiting()
            if self.max_waiting is not None and n_waiting >= self.max_waiting:
                raise QueueFull(f"{n_waiting} texts are waiting already: try again later.")
            self._inbox.append((True, request))

    def cancel(self, request: Request) -> None:
        """Cancel a request now, or before the next step if a step is running. Frees its slots. Thread-safe."""
        with self._inbox_lock:
            if self.failure is not None:
                return
            self._inbox.append((False, request))
        if self._stepping.acquire(blocking=False):
            try:
                with self._failing(lambda _: None):
                    self._receive()
                    self._rest()
            finally:
                self._stepping.release()

    def step(self, on_failure: Callable[[BaseException], None] = lambda _: None) -> bool:
        """Take one step with all requests; return whether any request is unfinished.

        Args:
            on_failure: called with the error that ended the step, before any request receives it.

        Raises:
            EngineFailed: the step failed, and the engine cannot continue; see `fail`.
            Exception: another error of the step; every request has ended with it.
        """
        with self._stepping:
            if self.failure is not None:
                raise EngineFailed(self.failure.error)
            with self._failing(on_failure):
                self._receive()
                if self._requests:
                    with self._requests.clock.running():
                        self._step()
                self._rest()
            return bool(self._requests or self._inbox)

    def fail(self, error: BaseException) -> None:
        """End the engine: every request, running or waiting, ends with an EngineFailed. New requests are refused."""
        with self._inbox_lock:
            self.failure = self.failure or EngineFailed(error)
            waiting = [request for submitted, request in self._inbox if submitted]
            self._inbox.clear()
        self._requests.abandon_all(self.failure)
        for request in waiting:
            request.fail(self.failure)

    @contextlib.contextmanager
    def _failing(self, on_failure: Callable[[BaseException], None]) -> Iterator[None]:
        """If this context raises an error, end all requests with the error, so that each request gets an answer.

        After an `Exception`, cached keys and values are discarded, and later requests may succeed. A MemoryError, or an
        error that is not an `Exception`, such as a panic in a Rust library, also ends the engine. A KeyboardInterrupt
        ends only the requests, since an interactive session continues after it.
        """
        try:
            yield
        except BaseException as error:
            try:
                on_failure(error)
            finally:
                if isinstance(error, MemoryError) or not isinstance(error, Exception | KeyboardInterrupt):
                    self.fail(error)
                else:
                    interrupted = RunError("the engine was interrupted.")
                    self._requests.fail_all(error if isinstance(error, Exception) else interrupted)
                    self._room.forget()
            if self.failure is not None and not isinstance(error, SystemExit | GeneratorExit):
                raise EngineFailed(self.failure.error) from error
            raise

    def _step(self) -> None:
        """Compute one step: draft tokens, admit jobs, compute the planned work, and draw the next tokens."""
        room, requests = self._room, self._requests
        requests.make_room()
        draft_tokens(requests)
        ready = requests.admit()
        plan = room.scheduler.plan()
        assert room.backend is not None
        chunks = [Chunk(w.slot, w.start, w.tokens, w.n_logits, requests.rotary_length(w.job)) for w in plan]
        computed = room.backend.compute(chunks, not any(w.job.request.reads_logits for w in plan)) if chunks else []
        requests.statistics.steps += 1
        draws = []
        for work, logits in zip(plan, computed, strict=True):
            is_padded = logits.size(-1) > self.admission.n_ids  # the last ids of a padded vocabulary are not tokens
            known = logits[:, : self.admission.n_ids] if is_padded else logits
            draws += use_logits(work, known, requests)
        draw_tokens(draws + ready, requests)

    def _receive(self) -> None:
        """Empty the inbox: open the submitted requests, and end the cancelled requests."""
        while True:
            with self._inbox_lock:  # take one request at a time: if it fails, the rest stay in the inbox
                if not self._inbox:
                    return
                submitted, request = self._inbox.popleft()
            if submitted:
                self._requests.open(request)
            else:
                self._requests.cancel(request)

    def _rest(self) -> None:
        """Release the slots of a model in training if no requests are left, because its weights are about to change."""
        if not self._requests and self.model.training:
            self._room.release()

    def _n_waiting(self) -> int:
        """Return the number of texts without a slot: in the inbox, in the queue, or waiting for a shared prompt."""
        submitted = sum(request.n_samples for is_new, request in tuple(self._inbox) if is_new)
        return submitted + self._requests.n_to_come + len(self._room.scheduler.waiting)

    def statistics(self) -> Statistics:
        """Return current and total numbers of requests, texts, tokens, slots and steps; see `Statistics`."""
        scheduler = self._room.scheduler
        return dataclasses.replace(
            self._requests.statistics,
            running=len(scheduler.running),
            waiting=self._n_waiting(),
            slots=scheduler.n_slots,
            slots_used=scheduler.n_slots_used,
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights and of all slots' keys and values."""
        backend = self._room.backend
        weights = sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))
        return weights + (0 if backend is None else backend.cache.bytes_of(backend.n_slots, backend.capacity))

    @property
    def weights(self) -> str:
        """Storage formats of the weight matrices, such as `fp32`, or `int4, int8` if quantized."""
        return weights_of(self.model)

    def reader(self) -> Backend:
        """Return a separate backend of the model, for use in one thread; its `read` returns the features of a text."""
        return self._room.reader()

    @property
    def backend_description(self) -> str | None:
        """The backend's name, for people to read; None before the first computation."""
        return None if self._room.backend is None else self._room.backend.description

    def warm_up(self, *, promised_bytes: int = 0) -> int:
        """Allocate all slots at full length and compute a token, so that no later request waits for an allocation.

        Args:
            promised_bytes: bytes that other engines have allocated but not used; the system reports them as free.

        Returns:
            Bytes of all slots' keys and values.

        Raises:
            UserError: the slots do not fit in memory.
        """
        with self._stepping:
            needed_bytes = self._room.fill(promised_bytes=promised_bytes)
        self.begin()
        return needed_bytes

    def begin(self) -> None:
        """Make the backend and compute a token, so that the first request starts at once; then reset the statistics."""
        self.generate([0], max_tokens=1)
        self._requests.statistics = Statistics()


def load(
    run_dir: str | PathLike[str],
    checkpoint: str | int = "best",
    *,
    overrides: Sequence[str] = (),
    device: str = "auto",
    weights: LoadedWeights = "auto",
    report: Report = lambda _: None,
    **options: Any,
) -> Engine:
    """Load a run's tokenizer and the model of one of its checkpoints; return an engine with this model.

    Args:
        checkpoint: best, last, or a step number.
        overrides: settings that replace the run's, such as `model.context_length=1024` for a longer context.
        device: auto, cpu, cuda or mps.
        weights: storage of the matrices: auto (as in the run), fp32, bf16, int8 or int4. Weights of a run that is not
            quantized are rounded to the nearest value while they are loaded; no file is written.
        report: called with a message for each fallback, such as when a checkpoint is damaged.
        options: arguments of `Engine`, such as n_slots=8.

    Raises:
        UserError: the run, checkpoint or device does not exist, a file is damaged, or the run is already
            quantized in another format.
    """
    run = load_run(
        run_dir, str(checkpoint), overrides=overrides, device=choose_device(device), weights=weights, report=report
    )
    tokenizer = load_tokenizer(run.tokenizer_folder)
    options.setdefault("chat_template", load_chat_template(run.tokenizer_folder, tokenizer))
    return Engine(run.model, tokenizer, **options)
