"""What the routes share: the models, the settings, the metrics, and the threads for what takes long."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from gptworks.infer.engine import MOST_SLOTS, Engine
from gptworks.serve.metrics import Metrics
from gptworks.serve.models import Models
from gptworks.serve.settings import ServerSettings


class Service:
    """A server's state. `start` and `close` frame its work."""

    def __init__(self, engines: Mapping[str, Engine], settings: ServerSettings) -> None:
        """
        Raises:
            UserError: no model, or an impossible name.
        """
        self.settings = settings
        self.models = Models(engines, settings)
        self.metrics = Metrics({model.name: model.engine.statistics for model in self.models})
        self.threads = ThreadPoolExecutor(2, "gptworks text")
        """Tokenize, render templates, compile schemas."""
        self.embedding_thread = ThreadPoolExecutor(1, "gptworks embeddings")
        self.draining = False
        """Nothing new is taken: the server is about to end."""
        self.in_flight = 0
        """Requests, but for those after the server's health, that are not answered."""
        self.n_working = 0
        """Of these, those whose bodies are read."""
        self.bodies_bytes = 0
        """Of bodies that are being read."""
        self.max_in_flight = sum(settings.max_waiting + (MOST_SLOTS) for model in self.models)

    def start(self) -> None:
        for model in self.models:
            model.engine.max_waiting = self.settings.max_waiting
            model.loop.start()

    def close(self) -> None:
        """End what still runs; its readers get a RunError."""
        for model in self.models:
            model.loop.close(drain=False)
        for threads in (self.threads, self.embedding_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def healthy(self) -> bool:
        return all(model.loop.alive for model in self.models)
