"""Speculative decoding: a drafter proposes tokens, which the model checks in one step (Leviathan et al., 2023).

A draft token is accepted if the model draws the same token with the text's own random number. Drafts therefore change
only the speed, not the greedy or sampled text, except for rounding in some backends (`Backend.invariant`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gptworks.choices import BackendName
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend, Chunk
from gptworks.infer.backends.native import choose_backend
from gptworks.infer.sampling import pick
from gptworks.infer.scheduler import Job, n_common_tokens
from gptworks.model.gpt import GPT
from gptworks.model.lab.future import future_features
from gptworks.planning.setting import PREFILL_TOKENS


class Drafter:
    """Proposes up to `n_tokens` draft tokens for a text."""

    def __init__(self, n_tokens: int = 4) -> None:
        """Raises a UserError if n_tokens is below 1."""
        if n_tokens < 1:
            raise UserError(f"n_tokens={n_tokens}: it must be 1 or more.")
        self.n_tokens = n_tokens
        self._n_ids = 0
        self._backend: Backend | None = None

    def draft(self, texts: Sequence[Job]) -> list[list[int]]:
        """Return draft tokens that continue each job's text, at most the job's `n_wanted`. The text's last token is not
        computed yet."""
        raise NotImplementedError

    def check(self, n_ids: int, model: GPT) -> None:
        """Raise a UserError if the drafter does not fit the model, or a tokenizer with `n_ids` ids. Called once."""
        self._n_ids = n_ids

    def reset(self, backend: Backend) -> None:
        """Prepare for the engine's new backend, whose slots are empty; the engine calls this."""

    def grow(self, n_slots: int, capacity: int) -> None:
        """Prepare for more or longer slots, which have kept their contents; the engine calls this."""


class PromptLookup(Drafter):
    """Drafts the tokens after the latest earlier occurrence of a text's last tokens (Saxena, 2023). Suits texts that
    repeat themselves."""

    def __init__(self, n_tokens: int = 8, ngram: int = 3) -> None:
        """
        Args:
            n_tokens: see `Drafter`.
            ngram: number of last tokens that must have occurred before, at least 2; one token fewer is also tried.

        Raises:
            UserError: `n_tokens` is below 1, or `ngram` is below 2.
        """
        super().__init__(n_tokens)
        if ngram < 2:
            raise UserError(f"ngram={ngram}: it must be 2 or more.")
        self.ngram = ngram

    def draft(self, texts: Sequence[Job]) -> list[list[int]]:
        return [self._draft(text.tokens, min(self.n_tokens, text.n_wanted)) for text in texts]

    def _draft(self, tokens: list[int], n_wanted: int) -> list[int]:
        for n in range(self.ngram, self.ngram - 2, -1):
            start = _last_place(tokens, n)
            if start is not None:
                return tokens[start + n : start + n + n_wanted]
        return []


def _drawn(logits: Tensor, texts: Sequence[Job], ahead: int) -> list[int]:
    """Draw a token from each row of logits [n, V], with the random number that will check the token.

    ahead: number of draft tokens before this token.
    """
    settings = [text.sample.settings for text in texts]
    shares = [1.0 if text.sample.settings.greedy else text.sample.sampler.share(ahead) for text in texts]
    return pick(logits, settings, shares)


def _slot_of(text: Job) -> int:
    assert text.slot is not None, "a text in generation has a slot"
    return text.slot


def _last_place(tokens: list[int], n: int) -> int | None:
    """Return the start index of the most recent earlier occurrence of the last n tokens; None: there was none."""
    if len(tokens) <= n:
        return None
    end, last = tokens[-n:], tokens[-1]
    for place in range(len(tokens) - 2, n - 2, -1):
        if tokens[place] == last and tokens[place - n + 1 : place + 1] == end:
            return place - n + 1
    return None


class DraftModel(Drafter):
    """Drafts with a smaller model of the same tokenizer. Draws each token with the random number that will check it."""

    def __init__(self, model: GPT, n_tokens: int = 4, *, backend: BackendName = "auto") -> None:
        """For `n_tokens` and the errors, see `Drafter`; for `backend`, see `choose_backend`."""
        super().__init__(n_tokens)
        self.model, self._backend_name = model, backend
        self._held: list[list[int]] = []  # tokens in each slot; slots are numbered as in the engine

    def check(self, n_ids: int, model: GPT) -> None:
        if n_ids > self.model.config.vocab_size:
            raise UserError(
                f"the draft model's vocabulary is {self.model.config.vocab_size} and the tokenizer has {n_ids} tokens: "
                f"give a draft model of the same tokenizer."
            )
        super().check(n_ids, model)

    def reset(self, backend: Backend) -> None:
        self._backend = None  # frees the old backend's memory before the new one is allocated
        self._backend = choose_backend(self.model, backend.n_slots, backend.capacity, name=self._backend_name)
        self._held = [[] for _ in range(backend.n_slots)]

    def grow(self, n_slots: int, capacity: int) -> None:
        assert self._backend is not None
        self._backend.grow(n_slots, capacity, [len(tokens) for tokens in self._held])
        self._held += [[] for _ in range(n_slots - len(self._held))]

    def draft(self, texts: Sequence[Job]) -> list[list[int]]:
        assert self._backend is not None
        drafts: list[list[int]] = [[] for _ in texts]
        for ahead in range(self.n_tokens):
            live = [
                (text, draft)
                for text, draft in zip(texts, drafts, strict=True)
                if ahead < text.n_wanted and len(text.tokens) + ahead <= self._backend.capacity
            ]
            if not live:
                break
            logits = self._read([(_slot_of(text), text.tokens + draft) for text, draft in live])
            for (_, draft), token in zip(live, _drawn(logits, [text for text, _ in live], ahead), strict=True):
                draft.append(token)
        return drafts

    def _read(self, texts: list[tuple[int, list[int]]]) -> Tensor:
        """Return the logits [n, V] after each of the texts (slot, tokens); compute the tokens that the slots lack."""
        assert self._backend is not None
        last = []
        for slot, tokens in texts:
            start = min(n_common_tokens(self._held[slot], tokens), len(tokens) - 1)
            self._held[slot] = tokens[:start]  # stays correct if computing fails below
            while len(tokens) - start > PREFILL_TOKENS:
                self._backend.compute([Chunk(slot, start, tokens[start : start + PREFILL_TOKENS], 0)])
                start += PREFILL_TOKENS
            last.append(Chunk(slot, start, tokens[start:]))
        logits = torch.cat(self._backend.compute(last))[:, : self._n_ids]
        for slot, tokens in texts:
            self._held[slot] = tokens
        return logits


class HeadsDraft(Drafter):
    """Drafts with the model's own heads for tokens beyond the next (model.n_future_tokens; Gloeckle et al., 2024).

    Each head draws a token from the features that the text's last token was drawn from. No other model is run. The
    number of heads also limits the number of draft tokens.
    """

    def check(self, n_ids: int, model: GPT) -> None:
        if model.config.n_future_tokens < 2:
            raise UserError(
                "the model has no heads of tokens beyond the next (model.n_future_tokens=1): draft by prompt lookup, "
                "or with a smaller model."
            )
        super().check(n_ids, model)

    def reset(self, backend: Backend) -> None:
        self._backend, backend.features = backend, {}

    def draft(self, texts: Sequence[Job]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in texts]
        found = [(text, draft, self._features(text)) for text, draft in zip(texts, drafts, strict=True)]
        live = [(text, draft, x) for text, draft, x in found if x is not None]
        if not live:
            return drafts
        assert self._backend is not None
        model = self._backend.model
        with torch.inference_mode():
            features = torch.stack([x for _, _, x in live]).to(model.dtype)  # B C
            heads = model.future_heads[: self.n_tokens]
            logits = self._backend.logits(torch.stack(future_features(heads, features)))[..., : self._n_ids]
        for ahead, row in enumerate(logits):
            for (text, draft, _), token in zip(live, _drawn(row, [text for text, _, _ in live], ahead), strict=True):
                if ahead < text.n_wanted:
                    draft.append(token)
        return drafts

    def _features(self, text: Job) -> Tensor | None:
        """Return the features [C] that a text's last token was drawn from; None if the slot lacks these
        features, for example after a copy."""
        assert self._backend is not None and self._backend.features is not None
        first, rows = self._backend.features.get(_slot_of(text), (0, ()))
        row = len(text.tokens) - 2 - first
        return rows[row] if 0 <= row < len(rows) else None
