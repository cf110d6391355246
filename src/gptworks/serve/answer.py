"""What the two endpoints that generate text do alike: settings from a request, and an answer, whole or in chunks."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from gptworks.infer.sampling import SamplingSettings
from gptworks.serve import openai
from gptworks.serve.generate import Delta, Entry, Generation

_PASSED_ON = ("top_p", "stop", "seed", "logit_bias", "frequency_penalty", "presence_penalty", "top_k", "min_p",
              "repetition_penalty", "min_tokens", "ignore_eos")  # fmt: skip


def sampling_settings(body: openai.SamplingFields, **more: Any) -> SamplingSettings:
    """The sampling settings of a request.

    Raises:
        UserError: settings that do not go together.
    """
    given = {name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # vLLM's way to say all
        given["top_k"] = 0
    if given.get("top_p") == 0:  # the likeliest token alone
        given |= {"top_p": 1.0, "top_k": 1}
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingSettings(temperature=temperature, **given, **more)


Body = TypeVar("Body", bound=openai.SamplingFields)


class Answer(ABC, Generic[Body]):
    """The texts of a request in the JSON of its endpoint."""

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

    @abstractmethod
    def choices(self, entries: list[list[Entry]]) -> list[Any]:
        """The finished texts. `entries`: the tokens of each of the generation's choices."""

    @abstractmethod
    def chunk_choices(self, delta: Delta) -> list[Any]:
        """What a stream sends of a delta; each in a chunk of its own."""

    async def whole(self) -> BaseModel:
        """All texts, when they are finished."""
        entries: list[list[Entry]] = [[] for _ in self.generation.choices]
        async for deltas in self.generation.deltas():
            for delta in deltas:
                entries[delta.choice] += delta.entries
        return self.whole_type(
            **self._frame, object=self.whole_object, choices=self.choices(entries), usage=self.generation.usage()
        )

    async def chunks(self) -> AsyncGenerator[list[BaseModel]]:
        """The texts as they come. If the last chunk gives the usage, the others have a null."""
        frame, options = {**self._frame, "object": self.chunk_object}, self.body.stream_options
        with_usage = options is not None and options.include_usage
        no_usage = {"usage": None} if with_usage else {}
        async for deltas in self.generation.deltas():
            yield [
                self.chunk_type(**frame, choices=[choice], **no_usage)
                for delta in deltas
                for choice in self.chunk_choices(delta)
            ]
        if with_usage:
            yield [self.chunk_type(**frame, choices=[], usage=self.generation.usage())]
