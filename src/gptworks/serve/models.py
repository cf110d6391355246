"""The models that are served: each an engine that steps in a thread of its own, under a name."""

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gptworks.chat_template import ChatTemplate
from gptworks.errors import UserError
from gptworks.infer.engine import Engine
from gptworks.infer.loop import EngineLoop
from gptworks.serve import openai
from gptworks.serve.errors import APIError
from gptworks.serve.settings import ServerSettings
from gptworks.serve.tokens import Tokens

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass
class ServedModel:
    """One model."""

    name: str
    engine: Engine
    loop: EngineLoop
    tokens: Tokens
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises an APIError if it is a base model."""
        if self.engine.chat_template is None:
            raise APIError(
                400,
                f"{self.name} is a base model: its run has no chat template (tokenizer/chat_template.jinja), so it "
                f"knows no turns. Use /v1/completions, or serve a model that was tuned on conversations.",
                param="messages",
                code="no_chat_template",
            )
        return self.engine.chat_template

    def describe(self) -> openai.Model:
        return openai.Model(
            id=self.name, object="model", created=self.created, owned_by="gptworks", max_model_len=self.engine.context
        )


class Models:
    """The models by name. A request names one of them; nothing else is ever loaded."""

    def __init__(self, engines: Mapping[str, Engine], settings: ServerSettings) -> None:
        """Raises a UserError for no model, or a name that cannot be one."""
        if not engines:
            raise UserError("there is no model to serve: name a run, or several with --model NAME=RUN.")
        for name in engines:
            check_name(name)
        self._models = {
            name: ServedModel(name, engine, EngineLoop(engine), Tokens(engine.tokenizer, engine.context, settings))
            for name, engine in engines.items()
        }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """The model of that name; without one, the first.

        Raises:
            APIError: there is none.
        """
        if name is None:
            return next(iter(self._models.values()))
        model = self._models.get(name)
        if model is None:
            known = ", ".join(self._models)
            raise APIError(
                404, f"there is no model {name[:128]!r} here; there is {known}.", param="model", code="model_not_found"
            )
        return model


def check_name(name: str) -> None:
    """Raises a UserError if it cannot be a model's name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a model's name: use up to 128 letters, digits and . _ : -")
