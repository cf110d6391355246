"""The engine's methods for one text at a time: `generate`, `stream`, `complete`, `chat`, `pieces` and `score`.

Each enqueues a request and takes steps until it is done. Calls from several threads take turns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gptworks.chat_template import ChatTemplate, Message
from gptworks.errors import UserError
from gptworks.infer.admission import Admission
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.request import Completion, Overflow, Prompt, Request
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece

J = TypeVar("J", bound=Hashable)


class Client(ABC):
    """The engine's base class: generates and scores texts by requests and steps."""

    admission: Admission
    chat_template: ChatTemplate | None

    @abstractmethod
    def enqueue(self, request: Request) -> None: ...

    @abstractmethod
    def step(self) -> bool: ...

    @abstractmethod
    def cancel(self, request: Request) -> None: ...

    def generate(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> str:
        """The text that follows the prompt: `engine.generate("def ", max_tokens=50, temperature=0.8, seed=1)`.

        Arguments and errors are those of `pieces`.
        """
        return "".join(self.stream(prompt, settings, **arguments))

    def stream(self, prompt: Prompt, settings: SamplingSettings | None = None, **arguments: Any) -> Iterator[str]:
        """The text that follows the prompt, in parts, as they arrive. Arguments and errors are those of `pieces`."""
        return (piece.text for piece in self.pieces(prompt, settings, **arguments) if piece.text)

    def complete(
        self, prompt: Prompt, settings: SamplingSettings | None = None, *, n_samples: int = 1, **arguments: Any
    ) -> list[Completion]:
        """`n_samples` finished continuations, with their tokens and finish reasons. See `pieces`."""
        ids = self.encode_prompt(prompt)
        return completions(self.pieces(ids, settings, n_samples=n_samples, **arguments), n_samples, len(ids))

    def chat(
        self, messages: str | Sequence[Message], settings: SamplingSettings | None = None, **arguments: Any
    ) -> str:
        """The assistant's answer to a conversation: `engine.chat([{"role": "user", "content": "Hello"}])`.

        A plain text is one user message. Arguments and errors are those of `pieces`.

        Raises:
            UserError: the run has no chat template, or the template refuses the messages.
        """
        return "".join(self.stream_chat(messages, settings, **arguments))

    def stream_chat(
        self, messages: str | Sequence[Message], settings: SamplingSettings | None = None, **arguments: Any
    ) -> Iterator[str]:
        """The answer of `chat` in parts, as they arrive."""
        if self.chat_template is None:
            raise UserError(
                "this run has no chat template: it is a base model, which has no turns. Let it continue a text, with "
                "generate, stream or complete."
            )
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        prompt = self.chat_template.encode(said, add_generation_prompt=True)
        settings = answer_settings(SamplingSettings.of(settings), self.chat_template)
        return self.stream(prompt, settings, **arguments)

    def pieces(
        self,
        prompt: Prompt,
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        **changes: Any,
    ) -> Iterator[Piece]:
        """The pieces of the generated texts, step by step; `generate`, `stream` and `complete` use it.

        The request is checked at once, before the first piece is read.

        Args:
            prompt: text, or token ids. Empty text starts a new document, if the tokenizer has a token for that.
            settings: settings of sampling; default: SamplingSettings().
            n_samples: continuations of the prompt, which is computed once. With a seed, the random numbers of sample i
                do not depend on n_samples.
            overflow: what happens when the context is full. error: a longer prompt is refused, and a sample ends with
                the reason "context". slide: the window restarts from the last context_length / 2 tokens, recomputed;
                a prompt longer than the context is cut to its last context_length / 2 tokens.
            changes: settings by name, such as temperature=0.8.

        Raises:
            UserError: a setting is unknown or impossible, or the prompt has no tokens or exceeds the context.
            RunError: a logit of the model is NaN.
        """
        return self._run(self.admission.request(prompt, settings, n_samples=n_samples, overflow=overflow, **changes))

    def score(self, prompt: Prompt, *, top: int = 0) -> list[TokenLogprob | None]:
        """Log-probabilities, in nats, of each token of a text and of the `top` likeliest; None for the first token.

        Raises:
            UserError: for the reasons of `pieces`.
        """
        request = self.admission.request(prompt, prompt_logprobs=top, generates=False)
        for _ in self._run(request):
            pass
        assert request.prompt_logprobs is not None
        return request.prompt_logprobs

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; see `Admission.encode_prompt`."""
        return self.admission.encode_prompt(prompt)

    def _run(self, request: Request) -> Iterator[Piece]:
        """Enqueue a request and take steps until it is done; cancel it if the reader stops early."""
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


def answer_settings(settings: SamplingSettings, template: ChatTemplate) -> SamplingSettings:
    """The settings with the tokens that end an assistant's answer, unless `ignore_eos` is set."""
    ends = () if settings.ignore_eos else template.end_token_ids
    return replace(settings, stop_token_ids=tuple(dict.fromkeys((*settings.stop_token_ids, *ends))))


def run_many(
    engine: Client, next_jobs: Callable[[int], Iterable[J]], submit: Callable[[J], Request], most: int
) -> Generator[tuple[J, Request | Exception]]:
    """Each job with its finished request, or with its error, as they end.

    Args:
        next_jobs: called with a number before each step; returns at most this many jobs to submit.
        submit: makes a job's request; it may raise a UserError, which ends only this job.
        most: maximum number of requests in the engine at a time; enough that it is never idle.
    """
    running: dict[J, Request] = {}
    try:
        while (new := list(next_jobs(most - len(running)))) or running:
            for job in new:
                try:
                    running[job] = submit(job)
                except UserError as error:
                    yield job, error
            engine.step()
            for job, request in [(job, request) for job, request in running.items() if request.done]:
                del running[job]
                yield job, request.error or request
    finally:
        for request in running.values():
            engine.cancel(request)


def completions(pieces: Iterable[Piece], n_samples: int, n_prompt_tokens: int) -> list[Completion]:
    """The finished samples of a request's pieces."""
    made: list[list[Piece]] = [[] for _ in range(n_samples)]
    for piece in pieces:
        made[piece.sample].append(piece)
    return [_completion(of_one, n_prompt_tokens) for of_one in made]


def _completion(pieces: list[Piece], n_prompt_tokens: int) -> Completion:
    reason = pieces[-1].finish_reason
    assert reason is not None, "a sample's last piece says why it ended"
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=[piece.token_id for piece in pieces if piece.token_id is not None],
        finish_reason=reason,
        prompt_tokens=n_prompt_tokens,
        logprobs=[piece.logprob for piece in pieces if piece.logprob is not None] or None,
        processed_logprobs=[piece.processed for piece in pieces if piece.processed is not None] or None,
    )
