"""Check prompts and settings, and turn them into requests for the engine."""

import math
import threading
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from gptworks.errors import UserError, shortened
from gptworks.infer.constrain import Constraint, Constraints
from gptworks.infer.defaults import stated_sampling
from gptworks.infer.healing import Healing, Spellings
from gptworks.infer.logprobs import PromptScores
from gptworks.infer.request import Listener, Overflow, Prompt, Request
from gptworks.infer.room import Room
from gptworks.infer.sampling import SamplingSettings
from gptworks.infer.text import Sample
from gptworks.special_tokens import special_tokens, stated_of
from gptworks.tokenizer import encodings, prompt_ids, vocabulary_size


class Admission:
    """Makes an engine's requests, and refuses requests that the engine cannot serve. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, room: Room) -> None:
        """Raises a UserError if the tokenizer or the room's drafter does not fit the room's model."""
        self.n_ids, n_rows = vocabulary_size(tokenizer), room.model.config.vocab_size
        if self.n_ids > n_rows:
            raise UserError(
                f"the tokenizer has {self.n_ids} tokens and the model's vocabulary {n_rows}: they do not belong "
                f"together. Give the tokenizer that the model was trained with."
            )
        if room.drafter is not None:
            room.drafter.check(self.n_ids, room.model)
        self._tokenizer, self._room, self._special = tokenizer, room, special_tokens(tokenizer)
        stated = stated_of(tokenizer)
        self.defaults = SamplingSettings.of(**stated_sampling({} if stated is None else stated.generation)[0])
        """Settings for requests without settings: `SAMPLING`, with the values that the model states instead."""
        self._constraints: Constraints | None = None
        self._constraints_lock = threading.Lock()

    def request(
        self,
        prompt: Prompt,
        settings: SamplingSettings | None = None,
        *,
        n_samples: int = 1,
        overflow: Overflow = "error",
        prompt_logprobs: int | None = None,
        score_from: int = 1,
        generates: bool = True,
        listener: Listener | None = None,
        **changes: Any,
    ) -> Request:
        """Check the arguments and return a new request, which is not queued yet.

        Args:
            prompt, settings, n_samples, overflow, changes: as in `Engine.pieces`.
            prompt_logprobs: report the log-probabilities of the prompt's tokens, and of this many most likely tokens at
                each position, in `Request.prompt_logprobs`. None: report nothing.
            score_from: index of the first prompt token to report; earlier tokens may be reused from the cache.
            generates: whether to continue the prompt; False: only score it.
            listener: called with each piece, or with the error that ends the request, in the thread of `Engine.step`.

        Raises:
            UserError: an argument is invalid; see also `Engine.pieces`.
            QueueFull: the grammars in use have reached their memory limit.
        """
        settings = SamplingSettings.of(settings or self.defaults, **changes)
        ids, context = self.encode_prompt(prompt), self._room.context
        n_read = len(ids) if generates else len(ids) - 1
        if n_samples < 1:
            raise UserError(f"n_samples={n_samples}: it must be 1 or more.")
        if overflow not in ("error", "slide"):
            raise UserError(f'overflow="{overflow}": it must be "error" or "slide".')
        if n_read > context and overflow == "error":
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model's context {context}: shorten it, or use --slide "
                f'(overflow="slide" in Python), which reads its last {self._room.restart_tokens}.'
            )
        if prompt_logprobs is not None and (prompt_logprobs < 0 or n_read > context):
            raise UserError(
                f"prompt_logprobs={prompt_logprobs} for {len(ids)} tokens: it must be 0 or more, for a prompt of at "
                f"most {context} tokens."
            )
        if not 1 <= score_from <= max(1, len(ids) - 1):
            raise UserError(f"score_from={score_from}: it must be a token from 1 to {len(ids) - 1} of the prompt.")
        self.check_ids("logit_bias", settings.logit_bias)
        self.check_ids("stop_token_ids", settings.stop_token_ids)
        if sum(bias == -math.inf for bias in settings.logit_bias.values()) == self.n_ids:
            raise UserError("logit_bias forbids every token of the vocabulary: leave one.")
        constrained = settings.json_schema is not None or settings.regex is not None
        grammar = self.constraints().grammar(settings) if constrained else None
        heals = settings.heal and isinstance(prompt, str) and not constrained and prompt_logprobs is None
        ids, ending = self.spellings.split(ids) if heals and generates else (ids, b"")

        def constraint() -> Constraint | Healing | None:
            if grammar is not None:
                return Constraint(grammar)
            return Healing(self.spellings, ending) if ending else None

        samples = [
            Sample(i, ids, settings, self._tokenizer, self._special.ends, constraint())
            for i in range(n_samples if generates else 0)
        ]
        scores = PromptScores(ids, score_from, prompt_logprobs)
        return Request(ids, samples, overflow, scores, listener)

    def encode_prompt(self, prompt: Prompt, *, warns: bool = True) -> list[int]:
        """Return a prompt's token ids.

        A text's ids include the special tokens that the tokenizer puts around a prompt, such as bos. An empty text
        gives the tokens that begin a document.

        Warns (UserWarning) of characters or words that the tokenizer does not know, unless `warns` is false.

        Raises:
            UserError: the prompt has no tokens, or ids outside the vocabulary.
        """
        if not isinstance(prompt, str):
            self.check_ids("the prompt", prompt)
            if not prompt:
                raise UserError("the prompt has no tokens: give at least one.")
            return list(prompt)
        ids = prompt_ids(self._tokenizer, prompt)
        if prompt and len(ids) == len(self._special.before) + len(self._special.after):
            raise UserError(f"the prompt {shortened(prompt)!r} has no token this tokenizer knows: give other text.")
        if not ids:
            raise UserError("the prompt is empty and this tokenizer has no token to begin a document: give some text.")
        if warns:
            self._warn_of_unknown(prompt, ids)
        return ids

    @cached_property
    def spellings(self) -> Spellings:
        """The bytes of the tokenizer's tokens."""
        return Spellings(self._tokenizer)

    def constraints(self) -> Constraints:
        """Return the grammar compiler for this tokenizer; the first call makes it.

        Raises:
            UserError: llguidance is not installed, or a token's text depends on its neighbors in this tokenizer.
        """
        with self._constraints_lock:
            if self._constraints is None:
                self._constraints = Constraints(self._tokenizer)
            return self._constraints

    def check_ids(self, what: str, ids: Iterable[int]) -> None:
        """Raise a UserError that names `what` if one of the ids is not in the vocabulary."""
        for token in ids:
            if not 0 <= token < self.n_ids:
                raise UserError(
                    f"{what} has token id {token}, which is not in the vocabulary: ids go from 0 to {self.n_ids - 1}."
                )

    def _warn_of_unknown(self, prompt: str, ids: list[int]) -> None:
        unknown = self._special.unk
        if unknown is None or unknown not in ids:
            return
        encoding = encodings(self._tokenizer, [prompt], offsets=True)[0]
        spans = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token == unknown]
        named = ", ".join(dict.fromkeys(repr(prompt[start:end]) for start, end in spans))
        warnings.warn(f"the tokenizer does not know {named}: the model reads <unk> there.", stacklevel=5)
