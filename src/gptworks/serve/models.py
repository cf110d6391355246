"""The served models: each has a name, a tokenizer, and an engine that steps in its own thread."""

import functools
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gptworks.chat_template import ChatTemplate
from gptworks.data.spelling import Speller
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend
from gptworks.infer.engine import Engine
from gptworks.infer.loop import EngineLoop
from gptworks.serve import openai
from gptworks.serve.errors import APIError, blaming, invalid
from gptworks.serve.metrics import ModelMetrics
from gptworks.serve.settings import ServerSettings
from gptworks.tokenizer import StreamDecoder, token_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class Tokens:
    """Tokenizes prompts for one model, checks their length, and decodes token ids.

    Routes encode prompts in a thread, so that a long prompt delays no other request. The methods' argument `param` is
    the field of the request that an error names.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.tokenizer, self.context, self._admission = engine.tokenizer, engine.context, engine.admission
        sizes = token_bytes(engine.tokenizer)
        fitting = settings.max_prompt_bytes if sizes is None else engine.context * max(1, *sizes)
        self.max_bytes = min(settings.max_prompt_bytes, fitting)
        """Maximum bytes of a text; a longer text has too many tokens for the context, or exceeds the server's limit."""

    def read(self, prompt: str | list[int], param: str) -> list[int]:
        """Return the token ids of a prompt given as text or ids; see `encode` and `check`."""
        return self.encode(prompt, param) if isinstance(prompt, str) else self.check(prompt, param)

    def encode(self, text: str, param: str) -> list[int]:
        """Return a prompt's token ids. Raises an APIError if the text is too long, has no tokens or cannot be encoded.
        Slow: call it in a thread."""
        if (n_bytes := len(text.encode())) > self.max_bytes:
            raise invalid(
                param,
                f"{n_bytes} bytes of text; this model's context of {self.context} tokens and the server's limit allow "
                f"{self.max_bytes}.",
                code="context_length_exceeded",
            )
        with blaming(param):
            ids = self._admission.encode_prompt(text, warns=False)
        return self.check(ids, param)

    def check(self, ids: list[int], param: str) -> list[int]:
        """Return the given ids. Raises an APIError if there are too many, or if an id is not in the vocabulary."""
        if len(ids) > self.context:
            message = f"{len(ids)} tokens; this model's context is {self.context}."
            raise invalid(param, message, code="context_length_exceeded")
        with blaming(param):
            self._admission.check_ids("it", ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens, as it would be streamed."""
        decoder = StreamDecoder(self.tokenizer)
        return "".join([*map(decoder.push, ids), decoder.flush()])

    def spell(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's spelling, which no other token has, and its bytes (None if tokens do not spell bytes)."""
        return self._speller.spell(token)

    @functools.cached_property
    def _speller(self) -> Speller:
        return Speller(self.tokenizer)


@dataclass
class ServedModel:
    """A served model: its name, its engine, the engine's thread and the tokenizer."""

    name: str
    engine: Engine
    loop: EngineLoop
    tokens: Tokens
    metrics: ModelMetrics
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
        """Return the model's chat template or, without one, the template with this source. Slow for a new source.

        Raises:
            APIError: the model has no template, and `source` is None.
            UserError: the source does not compile.
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
    """Raise a UserError if `name` cannot be a model's name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a model's name: use up to 128 letters, digits and . _ : -")
