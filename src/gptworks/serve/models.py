"""The served models: each has a name, and an engine that steps in its own thread."""

import functools
import re
import time
from dataclasses import dataclass, field

from gptworks.chat_template import ChatTemplate
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend
from gptworks.infer.engine import Engine
from gptworks.infer.loop import EngineLoop
from gptworks.serve import openai
from gptworks.serve.errors import APIError
from gptworks.serve.tokens import Tokens

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass
class ServedModel:
    """A served model: its name, its engine, the engine's thread and the tokenizer."""

    name: str
    engine: Engine
    loop: EngineLoop
    tokens: Tokens
    created: int = field(default_factory=lambda: int(time.time()))
    _lent: dict[str, ChatTemplate] = field(default_factory=dict)
    """The last chat template that this model borrowed from another run, by the template's source; empty if none."""

    @functools.cached_property
    def reader(self) -> Backend:
        """The backend that computes embeddings, one text at a time; created at its first use."""
        return self.engine.reader()

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises an APIError if the model has no template."""
        if self.engine.chat_template is None:
            raise APIError(
                400,
                f"{self.name} is a base model: its run has no chat template (tokenizer/chat_template.jinja). "
                f"Use /v1/completions, or serve a model that was tuned on conversations.",
                param="messages",
                code="no_chat_template",
            )
        return self.engine.chat_template

    def template(self, source: str | None) -> ChatTemplate:
        """Return the model's chat template; if it has none, the template with this source. Slow for a new source.

        Raises:
            APIError: the model has no template, and there is no source. UserError: the source does not compile.
        """
        if source is None or self.engine.chat_template is not None:
            return self.chat_template
        if source not in self._lent:
            self._lent = {source: ChatTemplate(source, self.engine.tokenizer)}
        return self._lent[source]

    def describe(self) -> openai.Model:
        return openai.Model(
            id=self.name, object="model", created=self.created, owned_by="gptworks", max_model_len=self.engine.context
        )


def check_name(name: str) -> None:
    """Raises a UserError if `name` cannot be a model's name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a model's name: use up to 128 letters, digits and . _ : -")
