"""A conversation with a base model: one growing transcript that the model continues."""

from collections.abc import Iterator
from typing import Any

from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Piece


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
        """Tokens that fell out of the transcript, for the caller to tell the user when it leaves 0."""

    def send(self, text: str) -> Iterator[str]:
        """Append text to the transcript and stream the model's continuation, which is appended as it comes.

        Empty text lets the model go on. A stream that is not read to its end leaves what was generated so far.

        Raises:
            UserError: no tokens come of the first text.
        """
        if not self.token_ids:
            self.token_ids = self.engine.encode_prompt(text)
        else:
            self.token_ids += self.engine.tokenizer.encode(text, add_special_tokens=False).ids
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
