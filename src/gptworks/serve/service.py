"""The state that the routes share: the models, the settings, the metrics, and the threads for long work."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from gptworks.infer.engine import Engine
from gptworks.serve.caller import Caller
from gptworks.serve.errors import APIError
from gptworks.serve.metrics import Metrics
from gptworks.serve.models import Models, ServedModel
from gptworks.serve.settings import ServerSettings
from gptworks.serve.sign_in import SignIn

_NEED_NO_SLOT = 16
"""Requests beyond those that the engines accept: tokenizing, embeddings, lists of models."""


class Service:
    """A server's state. `start` and `close` frame its work."""

    def __init__(self, engines: Mapping[str, Engine], settings: ServerSettings) -> None:
        self.settings = settings
        self.models, self.metrics = Models(), Metrics()
        self.load: Callable[[str, Caller], Awaitable[ServedModel]] | None = None
        """Makes a model of a name that is not among `models`, for as long as the caller is there; or an APIError."""
        self.threads = ThreadPoolExecutor(2, "gptworks text")
        """Tokenize and render templates."""
        self.schema_threads = ThreadPoolExecutor(2, "gptworks schemas")
        """Wait for schemas to be compiled; apart, so that no text waits for a schema."""
        self.embedding_thread = ThreadPoolExecutor(1, "gptworks embeddings")
        self.sign_in: SignIn | None = None
        """Of a studio: every request needs a session of it, or an API key."""
        self.draining = False
        """The server is about to end and accepts nothing new."""
        self.in_flight = 0
        """Requests that are not yet answered, without those to /health."""
        self.n_working = 0
        """Requests in flight whose bodies are complete."""
        self.bodies_bytes = 0
        """Bytes of the bodies that are being read."""
        self.callers: set[Caller] = set()
        self.schemas: Counter[str] = Counter()
        """Schemas that are compiled or wait to be, for each client."""
        self.n_answered = 0
        self._began = time.monotonic()
        self._prompts: Counter[str] = Counter()
        self.runs = False
        """Between `start` and `close`."""
        for name, engine in engines.items():
            self.add(name, engine)

    def start(self) -> None:
        self.runs = True
        for model in self.models:
            model.loop.start()

    def add(self, name: str, engine: Engine) -> ServedModel:
        """Serve a further model."""
        engine.max_waiting = self.settings.max_waiting
        model = self.models.add(name, engine, self.settings)
        self.metrics.add(name, engine.statistics)
        if self.runs:
            model.loop.start()
        return model

    def remove(self, name: str) -> None:
        """Serve a model no longer. Takes as long as what still runs: call it in a thread."""
        model = self.models.remove(name)
        model.loop.close()
        self.metrics.remove(name)

    async def model(self, name: str | None, caller: Caller) -> ServedModel:
        """The model that a caller names; see `Models.get`."""
        if self.load is not None and name is not None:
            return await self.load(name, caller)
        return self.models.get(name)

    @property
    def max_prompts(self) -> int:
        """Prompts that may run or wait."""
        return sum(self.settings.max_waiting + model.engine.most_texts for model in self.models)

    @property
    def max_in_flight(self) -> int:
        return self.max_prompts + _NEED_NO_SLOT

    @property
    def max_prompts_each(self) -> int:
        return max(1, int(self.settings.client_share * self.max_prompts))

    def close(self) -> None:
        """End what still runs; its readers get a RunError."""
        self.runs = False
        for model in self.models:
            model.loop.close(drain=False)
        for caller in list(self.callers):
            caller.abandon()
        for threads in (self.threads, self.schema_threads, self.embedding_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    def leave(self, caller: Caller) -> None:
        """A request is answered, or its client is gone: free what it held."""
        caller.abandon()
        for call in caller.on_leave:
            call()
        self.callers.discard(caller)
        self._prompts[caller.client] -= caller.n_prompts
        if self._prompts[caller.client] <= 0:
            del self._prompts[caller.client]

    def take_places(self, caller: Caller, n_prompts: int) -> None:
        """Count a request's prompts for its client, until `leave`.

        Raises:
            APIError: the client has as many prompts as it may.
        """
        held = self._prompts[caller.client]
        if held and held + n_prompts > self.max_prompts_each:
            raise APIError(
                429,
                f"{held} prompts of this client are being worked on, and one client may have {self.max_prompts_each}: "
                f"wait for some to end.",
                code="client_share",
            )
        self._prompts[caller.client] += n_prompts
        caller.n_prompts += n_prompts

    def summary(self) -> str:
        """What has been served so far, in a line."""
        found = [model.engine.statistics() for model in self.models]
        n_tokens = sum(one.prompt_tokens + one.generated_tokens for one in found)
        return (
            f"served {self.n_answered:,} requests and {n_tokens:,} tokens in {time.monotonic() - self._began:,.0f} s."
        )

    @property
    def failure(self) -> str | None:
        """Which engine is dead, and of what kind of error, where one is: then nothing new is accepted."""
        for model in self.models:
            if (failure := model.loop.check()) is not None:
                return f"the engine of {model.name} has failed ({failure.kind})"
        return None

    @property
    def healthy(self) -> bool:
        return all(model.loop.alive for model in self.models)
