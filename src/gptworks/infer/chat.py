"""A conversation: turns, where the run has a chat template; with a base model, one transcript that it continues."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gptworks.chat_template import Message
from gptworks.errors import UserError
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece
from gptworks.tokenizer import encode_text


class ChatSession:
    """A transcript of what was sent and what the model wrote.

    A base model has no notion of turns: it continues the transcript as plain text. When the transcript outgrows the
    context, its oldest tokens fall out for good, down to the last half of the context.
    """

    def __init__(self, engine: Engine, settings: SamplingSettings | None = None, **changes: Any) -> None:
        """Settings as for `Engine.generate`.

        Raises:
            UserError: an unknown or impossible setting.
        """
        self.engine = engine
        self.settings = SamplingSettings.of(settings, **changes)
        self.reset()

    def reset(self) -> None:
        """Forget the transcript."""
        self.token_ids: list[int] = []
        self.n_turns = 0
        self.n_forgotten_tokens = 0
        """Tokens that fell out of the transcript; the caller should warn the user when it leaves 0."""

    def send(self, text: str) -> Iterator[str]:
        """Append text to the transcript and stream the model's continuation, which is appended as it comes.

        Empty text lets the model go on. A stream that is not read to its end leaves what was generated so far.

        Raises:
            UserError: no tokens come of the first text, or the tokenizer cannot read the text.
        """
        if not self.token_ids:
            self.token_ids = self.engine.encode_prompt(text)
        else:
            self.token_ids += encode_text(self.engine.tokenizer, text)
        self._forget()
        seed = None if self.settings.seed is None else self.settings.seed + self.n_turns  # each turn draws anew
        self.n_turns += 1
        return self._reply(self.engine.pieces(self.token_ids, self.settings, overflow="slide", seed=seed))

    def _reply(self, pieces: Iterator[Piece]) -> Iterator[str]:
        for piece in pieces:
            if piece.token_id is not None:
                self.token_ids.append(piece.token_id)
                self._forget()
            if piece.text:
                yield piece.text

    def _forget(self) -> None:
        """Drop what the engine's window drops, so that the next turn goes on with what the model still sees."""
        if len(self.token_ids) > self.engine.context:
            n_dropped = len(self.token_ids) - self.engine.restart_tokens
            self.token_ids = self.token_ids[n_dropped:]
            self.n_forgotten_tokens += n_dropped


class TurnSession(ChatSession):
    """Turns of a user and an assistant, written as the run's chat template has them.

    When a conversation outgrows the context, its oldest turns are forgotten, the system's excepted.
    """

    def __init__(
        self, engine: Engine, settings: SamplingSettings | None = None, *, system: str = "", **changes: Any
    ) -> None:
        """Settings as for `Engine.generate`; `system` is the system message, before the first turn.

        Raises:
            UserError: the run has no chat template, or a setting is unknown or impossible.
        """
        if engine.chat_template is None:
            raise UserError("this run has no chat template: it is a base model, which has no turns.")
        self._template, self._system = engine.chat_template, system
        super().__init__(engine, settings, **changes)
        ends = (*self.settings.stop_token_ids, *self._template.end_token_ids())
        self.settings = replace(self.settings, stop_token_ids=tuple(dict.fromkeys(ends)))

    def reset(self) -> None:
        """Forget all turns."""
        super().reset()
        self.messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []

    def send(self, text: str) -> Iterator[str]:
        """Add the user's turn and stream the assistant's, which is added as far as it is read.

        Raises:
            UserError: the template refuses the turns, or this one alone is longer than the context.
        """
        messages, ids, n_forgotten = self._fitting([*self.messages, {"role": "user", "content": text}])
        seed = None if self.settings.seed is None else self.settings.seed + self.n_turns
        pieces = self.engine.pieces(ids, self.settings, seed=seed)
        self.messages, self.token_ids = messages, ids
        self.n_forgotten_tokens += n_forgotten
        self.n_turns += 1
        return self._answer(pieces)

    def _answer(self, pieces: Iterator[Piece]) -> Iterator[str]:
        answer: Message = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        for piece in pieces:
            if piece.text:
                answer["content"] += piece.text
                yield piece.text

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int], int]:
        """The turns less the oldest, until there is room for an answer; their tokens; how many tokens that cost."""
        room = self.engine.context - min(self.settings.max_tokens, self.engine.context // 2)
        ids = self._template.encode(messages, add_generation_prompt=True)
        n_before, first = len(ids), 1 if self._system else 0
        while len(ids) > room and len(messages) > first + 2:
            messages = messages[:first] + messages[first + 2 :]  # without a question and its answer
            ids = self._template.encode(messages, add_generation_prompt=True)
        return messages, ids, n_before - len(ids)


def chat_session(
    engine: Engine, settings: SamplingSettings | None = None, system: str = "", **changes: Any
) -> ChatSession:
    """Turns where the run has a chat template, a growing text where it has none.

    Raises:
        UserError: an unknown or impossible setting, or a system message for a base model.
    """
    if engine.chat_template is not None or system:
        return TurnSession(engine, settings, system=system, **changes)
    return ChatSession(engine, settings, **changes)
