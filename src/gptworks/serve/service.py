"""The state that routes share: the models, the settings, the metrics, the threads for slow work, and the callers."""

import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gptworks.confined import Task
from gptworks.infer.engine import Engine
from gptworks.infer.loop import EngineLoop
from gptworks.serve.errors import APIError
from gptworks.serve.metrics import Metrics
from gptworks.serve.models import ServedModel, Tokens
from gptworks.serve.settings import MAX_WATCHING, MAX_WATCHING_EACH, ServerSettings
from gptworks.serve.sign_in import SignIn

_NEED_NO_SLOT = 16
"""Number of requests accepted in addition to one per text, for work without a slot, such as tokenizing."""


@dataclass(eq=False)
class Caller:
    """The sender of one request, and the resources that the request uses. Routes find it in `request.state.caller`."""

    client: str
    """The client's name: the digest of its API key, or its address."""
    n_texts: int = 0
    """Number of this request's texts, counted for its client: the choices of each prompt, or the texts to embed."""
    works: bool = False
    """Whether the request counts as work: its body is complete, and it has not become a stream of `Service.watch`."""
    watches: bool = False
    """Whether the request has become a stream of `Service.watch`."""
    is_page: bool = False
    """Whether the request is to a route for web pages. If its client closes the connection, the answer ends at once."""
    n_numbers: int = 0
    """Maximum number of log-probabilities in the request's answer."""
    compiles: bool = False
    """Whether the request's schema is being compiled or waits to be compiled."""
    n_tokens: int = 0
    """Number of tokens read and written for the request."""
    tasks: set[Task] = field(default_factory=set)
    """The request's work in other processes, abandoned when the request ends."""
    on_leave: list[Callable[[], None]] = field(default_factory=list)
    """Functions that are called when the request is answered or its client has gone."""

    def task(self) -> Task:
        """Return a new task, which is abandoned when the request ends."""
        task = Task()
        self.tasks.add(task)
        return task

    def abandon(self) -> None:
        for task in self.tasks:
            task.abandon()


class Service:
    """A server's state, used between `start` and `close`."""

    def __init__(self, engines: Mapping[str, Engine], settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._models: dict[str, ServedModel] = {}
        self.load: Callable[[str, Caller], Awaitable[ServedModel]] | None = None
        """A function that loads a model by name for a caller or raises an APIError; None: only `models` are served."""
        self.threads = ThreadPoolExecutor(2, "gptworks text")
        """Threads that tokenize and render templates."""
        self.schema_threads = ThreadPoolExecutor(2, "gptworks schemas")
        """Threads that wait for schemas to compile; separate, so that no text waits for a schema."""
        self.embedding_thread = ThreadPoolExecutor(1, "gptworks embeddings")
        self.sign_in: SignIn | None = None
        """The studio's sign-in; None without the studio. With a sign-in, requests need a session or an API key, except
        for the guard's open paths and the sign-in itself."""
        self.draining = False
        """Whether the server is about to end and accepts no new requests."""
        self.bodies_bytes = 0
        """Total bytes of the request bodies that are being read."""
        self.callers: set[Caller] = set()
        """The senders of all unanswered requests, except those for /health."""
        self.n_answered = 0
        self._began = time.monotonic()
        self.runs = False
        """Whether the service is between `start` and `close`."""
        self.metrics.in_flight.set_function(lambda: self.in_flight)
        for name, engine in engines.items():
            self.add(name, engine)

    def start(self) -> None:
        self.runs = True
        for model in self.models:
            model.loop.start()

    def add(self, name: str, engine: Engine) -> ServedModel:
        """Serve one more model; return its `ServedModel`."""
        engine.max_waiting = self.settings.max_waiting
        tokens, metrics = Tokens(engine, self.settings), self.metrics.add(name, engine.statistics)
        model = self._models[name] = ServedModel(name, engine, EngineLoop(engine), tokens, metrics)
        if self.runs:
            model.loop.start()
        return model

    def remove(self, name: str) -> None:
        """Stop serving a model, and wait until its unfinished texts have ended. Slow: call it in a thread."""
        self._models.pop(name).loop.close()
        self.metrics.remove(name)

    @property
    def models(self) -> tuple[ServedModel, ...]:
        """The served models."""
        return tuple(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """Return the model with this name (None: the first model); raises an APIError if there is no such model."""
        model = next(iter(self.models), None) if name is None else self._models.get(name)
        if model is None:
            known = ", ".join(self._models) or "none yet"
            wanted = "no model" if name is None else f"no model {name[:128]!r}"
            raise APIError(404, f"there is {wanted} here; there is {known}.", param="model", code="model_not_found")
        return model

    async def model(self, name: str | None, caller: Caller) -> ServedModel:
        """Return the model with this name, loaded if needed; see `load` and `get`."""
        if self.load is not None and name is not None:
            return await self.load(name, caller)
        return self.get(name)

    @property
    def max_texts(self) -> int:
        """Maximum number of texts that run or wait, for all models together."""
        return sum(self.settings.max_waiting + model.engine.most_texts for model in self.models)

    @property
    def max_in_flight(self) -> int:
        return self.max_texts + _NEED_NO_SLOT

    @property
    def max_texts_each(self) -> int:
        """Maximum number of one client's texts that run or wait."""
        return max(1, round(self.settings.client_share * self.max_texts))

    def close(self) -> None:
        """End all texts, whose readers get a RunError, and stop the engines' and the service's threads."""
        self.runs = False
        for model in self.models:
            model.loop.close(drain=False)
        for caller in list(self.callers):
            caller.abandon()
        for threads in (self.threads, self.schema_threads, self.embedding_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def leave(self, caller: Caller) -> None:
        """Free a request's resources after its answer, or after its client has left."""
        self.callers.discard(caller)
        caller.abandon()
        for call in caller.on_leave:
            call()

    @property
    def in_flight(self) -> int:
        """Number of unanswered requests, except those for /health."""
        return len(self.callers)

    @property
    def n_working(self) -> int:
        """Number of requests that count as work; see `Caller.works`."""
        return sum(one.works for one in tuple(self.callers))

    def held(self, client: str, number: Callable[[Caller], int]) -> tuple[int, int]:
        """Return two sums of `number(caller)`: over the requests of one client, and over all requests."""
        counted = [(one.client, number(one)) for one in tuple(self.callers)]
        return sum(n for name, n in counted if name == client), sum(n for _, n in counted)

    def watch(self, caller: Caller) -> None:
        """Count a request as a stream of changes instead of work; raises an APIError if there are too many streams."""
        n, n_all = self.held(caller.client, lambda one: one.watches)
        if n >= MAX_WATCHING_EACH or n_all >= MAX_WATCHING:
            raise APIError(
                429, f"{n_all} pages are kept up to date, {n} of this client; at most {MAX_WATCHING} and "
                f"{MAX_WATCHING_EACH} can be: close one.", code="too_many_pages",
            )  # fmt: skip
        caller.works, caller.watches = False, True

    def take_places(self, caller: Caller, n_texts: int, n_numbers: int = 0) -> None:
        """Count texts and log-probabilities of a request until `leave`; raises an APIError if there are too many."""
        (held, _), each = self.held(caller.client, lambda one: one.n_texts), self.max_texts_each
        if held + n_texts > each:
            found = f"{n_texts} texts in one request" if n_texts > each else f"this client has {held} unfinished texts"
            raise APIError(400 if n_texts > each else 429, f"{found}; a client may have {each} at once.",
                           code="client_share")  # fmt: skip
        most = self.settings.max_logprob_numbers
        mine, all_together = self.held(caller.client, lambda one: one.n_numbers)
        for there, limit in ((mine, int(self.settings.client_share * most)), (all_together, most)):
            if there and there + n_numbers > limit:
                raise APIError(
                    429, f"other answers hold {there} log-probabilities, of at most {limit}: try again later.",
                    code="too_many_logprobs",
                )  # fmt: skip
        caller.n_texts += n_texts
        caller.n_numbers += n_numbers

    def summary(self) -> str:
        """Return one line with the number of requests and tokens so far."""
        found = [model.engine.statistics() for model in self.models]
        n_tokens = sum(one.prompt_tokens + one.generated_tokens for one in found)
        seconds = time.monotonic() - self._began
        return f"served {self.n_answered:,} requests and {n_tokens:,} tokens in {seconds:,.0f} s."

    @property
    def failure(self) -> str | None:
        """A message with a failed engine's model and type of error; None if no engine has failed. After a failure,
        requests are refused."""
        for model in self.models:
            if (failure := model.loop.check()) is not None:
                return f"the engine of {model.name} has failed ({type(failure.error).__name__})"
        return None

    @property
    def healthy(self) -> bool:
        return all(model.loop.alive for model in self.models)
