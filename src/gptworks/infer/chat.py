"""Chat sessions: turns if the run has a chat template, otherwise a transcript that a base model continues."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptworks.chat_template import Message
from gptworks.config import ConversationsSource
from gptworks.data.conversations.reading import iter_conversations
from gptworks.errors import UserError
from gptworks.files import check_regular, open_to_append
from gptworks.infer.engine import Engine
from gptworks.infer.fitting import fit_conversation
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import FinishReason, Pace, Piece
from gptworks.tokenizer import encode_text
from gptworks.units import counted

MOST_FILE_BYTES = 1 << 24
"""Maximum size of a conversation file that `ChatSession.load` reads."""


class ChatSession:
    """A chat with a base model, without turns: the model continues the whole transcript as plain text.

    When the transcript outgrows the context, its oldest tokens are removed until half the context is full.
    """

    system = ""
    _unit = "token"

    def __init__(self, engine: Engine, settings: SamplingSettings | None = None, **changes: Any) -> None:
        """For `settings`, `changes` and the errors, see `Engine.pieces`."""
        self.engine = engine
        self.settings = SamplingSettings.of(settings or engine.defaults, **changes)
        self.reset()

    def reset(self) -> None:
        """Begin an empty conversation."""
        self.token_ids: list[int] = []
        self.said: list[Message] = []
        """The conversation as messages of user and assistant."""
        self.n_turns = 0
        self.n_forgotten = 0
        """Number of oldest tokens (in a `TurnSession`: messages) that the model no longer reads."""
        self.pace = Pace()
        """Decoding speed of the last answer, over the part that the caller has read."""
        self.finish_reason: FinishReason | None = None
        """Finish reason of the last answer; None if the caller has not read the answer to its end."""
        self._before: tuple[int, list[int], int] | None = None

    def send(self, text: str) -> Iterator[str]:
        """Append a text to the transcript, and yield the model's continuation in parts.

        Each part that the caller reads is appended too, and stays if the caller stops early. An empty text lets the
        model continue the transcript.

        Raises:
            UserError: the first text has no tokens, or the tokenizer cannot encode the text.
        """
        before = self._state()
        if not self.token_ids:
            self.token_ids = self.engine.encode_prompt(text)
        else:
            self.token_ids += encode_text(self.engine.tokenizer, text)
        self._forget()
        pieces = self.engine.pieces(self.token_ids, self.settings, overflow="slide", seed=self._next_seed())
        return self._answer(text, before, pieces)

    @property
    def forgotten(self) -> str:
        """Size of the oldest part of the conversation, which the model no longer reads, such as "40 tokens". A
        `TurnSession` counts messages: "4 messages". Empty if the model reads everything."""
        return counted(self.n_forgotten, self._unit) if self.n_forgotten else ""

    @property
    def messages(self) -> list[Message]:
        """The system message, if any, and all messages of user and assistant."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.said]

    @property
    def last_text(self) -> str:
        """The user's last text.

        Raises:
            UserError: the user has written no text, or has taken it back.
        """
        if self._before is None:
            raise UserError("there is no last text: write one first.")
        return str(self.said[-2]["content"])

    def take_back(self) -> str:
        """Remove the user's last text and the model's answer; return the text.

        Raises:
            UserError: the user has written no text, or has taken it back.
        """
        text, before = self.last_text, self._before
        assert before is not None
        n_said, self.token_ids, self.n_forgotten = before
        del self.said[n_said:]
        self._before = None
        return text

    def set_system(self, text: str) -> None:
        """Replace the system message from the next turn on; an empty text removes it.

        Raises:
            UserError: the model is a base model, which takes no system message.
        """
        raise UserError("a base model has no system message: it continues what you write.")

    def save(self, path: Path) -> int:
        """Append the conversation to a .jsonl file, as a record with `messages`; return the number of messages.

        Raises:
            UserError: the conversation is empty, the path does not end in .jsonl, or the file cannot be written.
        """
        if not self.said:
            raise UserError("there is nothing to save yet.")
        _check_name(path)
        line = json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n"
        try:
            with open_to_append(path) as file:
                if file.seek(0, 2):
                    file.seek(-1, 2)
                    line = line if file.read() == b"\n" else f"\n{line}"
                file.write(line.encode("utf-8", "replace"))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from None
        return len(self.messages)

    def load(self, path: Path) -> int:
        """Continue the last conversation of a .jsonl file, in any known format; return its number of messages.

        Raises:
            UserError: the file is missing, larger than `MOST_FILE_BYTES`, broken or not a .jsonl file; the turns do
                not alternate, or do not end with an answer; or there is a system message for a base model. The session
                then stays unchanged.
        """
        _check_name(path)
        try:
            check_regular(path, MOST_FILE_BYTES)
            [last] = deque(iter_conversations([ConversationsSource(type="conversations", path=str(path))]), 1)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise error if isinstance(error, UserError) else UserError(f"{path} holds no conversation.") from None
        self._restore(last.messages, path)
        return len(last.messages)

    # --------------------------------------------------------------------------------------- internal parts

    def _restore(self, messages: Sequence[Message], path: Path) -> None:
        n_system = int(messages[0]["role"] == "system")
        said = list(messages[n_system:])
        roles = [message["role"] for message in said]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            raise UserError(
                f"{path}: a chat continues turns of user and assistant that alternate and end with an answer; these "
                f"are {', '.join(roles[:8])}{', …' if len(roles) > 8 else ''}."
            )
        before, ids = self._encoded(said[:-2]), self._encoded(said)
        if n_system or self.system:
            self.set_system(messages[0]["content"] if n_system else "")
        self.reset()
        self.token_ids, self.said = ids, said
        self._forget()
        self._before = len(said) - 2, before[-self.engine.context :], 0

    def _encoded(self, said: Sequence[Message]) -> list[int]:
        """Return the token ids of a transcript; an empty list for an empty transcript."""
        text = "".join(message["content"] for message in said)
        return self.engine.encode_prompt(text) if text else []

    def _state(self) -> tuple[int, list[int], int]:
        return len(self.said), list(self.token_ids), self.n_forgotten

    def _next_seed(self) -> int | None:
        return None if self.settings.seed is None else self.settings.seed + self.n_turns

    def _answer(self, text: str, before: tuple[int, list[int], int], pieces: Iterator[Piece]) -> Iterator[str]:
        """Add a turn that `take_back` can undo; yield the text of the turn's answer, read from `pieces`."""
        answer: Message = {"role": "assistant", "content": ""}
        self.said += [{"role": "user", "content": text}, answer]
        self._before, self.pace, self.finish_reason = before, Pace(), None
        self.n_turns += 1
        return self._read(pieces, answer)

    def _read(self, pieces: Iterator[Piece], answer: Message) -> Iterator[str]:
        for piece in pieces:
            self.finish_reason = piece.finish_reason
            self.pace.push(piece)
            if piece.token_id is not None:
                self._written(piece.token_id)
            if piece.text:
                answer["content"] += piece.text
                yield piece.text

    def _written(self, token: int) -> None:
        self.token_ids.append(token)
        self._forget()

    def _forget(self) -> None:
        """Drop the tokens that the engine's sliding window drops, so that the next turn can reuse the cached tokens."""
        if len(self.token_ids) > self.engine.context:
            n_dropped = len(self.token_ids) - self.engine.restart_tokens
            self.token_ids = self.token_ids[n_dropped:]
            self.n_forgotten += n_dropped


class TurnSession(ChatSession):
    """A chat in turns of user and assistant, rendered by the run's chat template.

    When the conversation outgrows the context, the model no longer reads the oldest turns; see `fit_conversation`.
    """

    _unit = "message"

    def __init__(
        self, engine: Engine, settings: SamplingSettings | None = None, *, system: str = "", **changes: Any
    ) -> None:
        """For `settings`, `changes` and further errors, see `Engine.pieces`.

        Args:
            system: the system message, before the first turn.

        Raises:
            UserError: the run has no chat template.
        """
        self._template = engine.require_chat_template("Chat with it without a system message.")
        self.system = system
        super().__init__(engine, settings, **changes)
        self.settings = self.settings.ending_at(self._template.end_token_ids)

    def set_system(self, text: str) -> None:
        """Replace the system message from the next turn on; an empty text removes it."""
        self.system = text

    def send(self, text: str) -> Iterator[str]:
        """Add the user's turn, and yield the assistant's answer in parts. Each part that the caller reads is added to
        the conversation.

        Raises:
            UserError: the template refuses the turns, or the system message and this turn together exceed the context.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, n_dropped = fit_conversation(self._template, messages, self.engine.context, self.settings.max_tokens)
        pieces = self.engine.pieces(ids, self.settings, seed=self._next_seed())
        before = self._state()
        self.token_ids, self.n_forgotten = ids, n_dropped
        return self._answer(text, before, pieces)

    def _encoded(self, said: Sequence[Message]) -> list[int]:
        return []  # `send` encodes all messages again

    def _written(self, token: int) -> None:
        """Do nothing: the next `send` encodes this answer."""


def _check_name(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise UserError(f"{path}: a file of conversations needs a name that ends in .jsonl.")


def chat_session(
    engine: Engine, settings: SamplingSettings | None = None, system: str = "", **changes: Any
) -> ChatSession:
    """Return a TurnSession if the run has a chat template, otherwise a ChatSession.

    Raises:
        UserError: a setting is unknown or impossible, or a base model is given a system message.
    """
    if engine.chat_template is not None or system:
        return TurnSession(engine, settings, system=system, **changes)
    return ChatSession(engine, settings, **changes)
