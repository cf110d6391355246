"""Code for both completions and chat: reads a request's sampling settings, and makes its answer, whole or in chunks."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from gptworks.infer.sampling import SamplingSettings
from gptworks.serve import openai
from gptworks.serve.generate import Delta, Entry, Generation

_PASSED_ON = openai.SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingSettings)}
"""Names of request fields that are also names of sampling settings."""


def sampling_settings(body: openai.SamplingFields, defaults: SamplingSettings, **more: Any) -> SamplingSettings:
    """Return a request's sampling settings with `more` added, and with the model's `defaults` for missing ones.

    Raises:
        UserError: settings of the request contradict each other.
    """
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's value for no limit
        given["top_k"] = 0
    if given.get("seed") == -1:  # vLLM's and llama.cpp's value for a random seed
        del given["seed"]
    if given.get("top_p") == 0:  # 0 means only the most likely token
        given |= {"top_p": 1.0, "top_k": 1}
    return SamplingSettings.of(defaults, **given, **more)


Body = TypeVar("Body", bound=openai.SamplingFields)

_TEXT = "@text@"
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class Answer(ABC, Generic[Body]):
    """The generated texts of a request, in the JSON format of its endpoint."""

    id_prefix: ClassVar[str]
    whole_type: ClassVar[type[BaseModel]]
    whole_object: ClassVar[str]
    chunk_type: ClassVar[type[BaseModel]]
    chunk_object: ClassVar[str]

    def __init__(self, generation: Generation, body: Body) -> None:
        self.generation, self.body = generation, body
        self._frame = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": generation.model.name
        }  # fmt: skip
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._around_text: dict[int, tuple[str, str]] = {}

    @abstractmethod
    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        """Return the endpoint's `choices` for the finished texts. `entries` has the tokens of each text."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[Any]:
        """Return the `choices` that a stream sends for a delta, each in a separate chunk."""

    async def whole(self) -> BaseModel:
        """Return the complete answer once all texts are finished."""
        entries: list[list[Entry]] = [[] for _ in self.generation.choices]
        async for deltas in self.generation.deltas():
            for delta in deltas:
                entries[delta.choice] += delta.entries
        return self.whole_type(
            **self._frame, object=self.whole_object, choices=self.choices(entries), usage=self.generation.usage()
        )

    async def chunks(self) -> AsyncGenerator[list[str]]:
        """Yield chunks as JSON texts, as they come. If the last chunk has the usage, `usage` is null in the others."""
        async for deltas in self.generation.deltas():
            yield [chunk for delta in deltas for chunk in self._chunks(delta)]
        if self._with_usage:
            yield [self._chunk([], self.generation.usage())]

    def _chunks(self, delta: Delta) -> list[str]:
        """Return a delta's chunks as JSON texts. Most chunks differ only in `text`, so the JSON around it is cached."""
        if not delta.text or delta.entries or delta.first or delta.finish_reason is not None:
            return [self._chunk([choice]) for choice in self.chunk_choices(delta)]
        around = self._around_text.get(delta.choice)
        if around is None:
            before, _, after = self._chunk(self.chunk_choices(delta._replace(text=_TEXT))).rpartition(_quoted(_TEXT))
            around = self._around_text[delta.choice] = before, after
        return [around[0] + _quoted(delta.text) + around[1]]

    def _chunk(self, choices: list[Any], usage: openai.Usage | None = None) -> str:
        frame = self._frame | ({"usage": usage} if self._with_usage else {})
        return self.chunk_type(**frame, object=self.chunk_object, choices=choices).model_dump_json(exclude_unset=True)
