"""The data that a run was trained on, opened: its documents, what the model sees at once, and what each step took."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from gptworks.config import Recipe
from gptworks.data.batches import Int64s
from gptworks.data.prepare import Prepared, find_of_run
from gptworks.data.rows import Row
from gptworks.data.shards import MANIFEST_FILE, Split, TokenShards, redo
from gptworks.errors import UserError
from gptworks.interpret.hooks import Check
from gptworks.recipe import load_recipe
from gptworks.serve.settings import ServerSettings
from gptworks.serve.tokens import Tokens
from gptworks.studio.loaded import Wanted
from gptworks.tokenizer import fingerprint, load_tokenizer, token_bytes
from gptworks.train.objectives.base import Objective
from gptworks.train.objectives.choose import choose_objective
from gptworks.train.samples import StepSamples, samples_of_step, steps_done

MOST_CONTEXT = 1 << 20
MOST_OPEN = 4
"""Runs whose data is kept open."""
BEFORE = 16
"""Tokens before a part that are decoded with it."""
_COUNTED_TOKENS = 1 << 20


@dataclass(frozen=True)
class Document:
    """A part of a document."""

    n_tokens: int
    """Of the whole."""
    n_bytes: int | None
    """Of the text that its tokens spell, special ones none; None: that depends on their neighbours."""
    before: Int64s
    """A few tokens before the part, so that a character which they began is read whole."""
    ids: Int64s
    learned: npt.NDArray[np.bool_] | None
    """Of conversations: which tokens of the part are learned."""


@dataclass
class RunData:
    """The data of a run. Its methods take long."""

    id: str
    folder: Path
    recipe: Recipe
    prepared: Prepared
    changed: int | None
    """When its manifest was written."""
    _sizes: dict[tuple[Split, int], int] = field(default_factory=dict)

    @cached_property
    def objective(self) -> Objective:
        """As training has it.

        Raises:
            UserError: a file was changed, or does not hold what the recipe needs.
        """
        if self.recipe.model.context_length > MOST_CONTEXT:
            raise UserError(
                f"{self.id} has model.context_length={self.recipe.model.context_length}: rows of up to {MOST_CONTEXT} "
                f"tokens are shown. Its documents can be read."
            )
        with self.checked():
            return choose_objective(self.recipe, self.prepared.folder, verify=True)

    @cached_property
    def _token_bytes(self) -> Int64s | None:
        sizes = token_bytes(self.prepared.tokenizer)
        return None if sizes is None else np.array(sizes, dtype=np.int64)

    @cached_property
    def spell(self) -> Callable[[int], str]:
        """The spelling of a token by itself."""
        return speller(self.prepared.tokenizer)

    def shards(self, split: Split) -> TokenShards:
        """The tokens of a split, verified once."""
        return TokenShards(self.prepared.folder, split)

    def document(self, split: Split, number: int, first: int, n: int, check: Check) -> Document:
        """The tokens of a document, from the one at `first` on, at most n of them.

        Raises:
            UserError: there is no such document or token.
        """
        with self.checked():
            shards = self.shards(split)
            starts = shards.document_starts()
            if number >= len(starts):
                raise UserError(
                    f"document {number} is not in the {split} split, which has {len(starts)}, numbered from 0."
                )
            start, end = (*starts[number : number + 2].tolist(), shards.n_tokens)[:2]
            if first and first >= end - start:
                raise UserError(f"token {first} is not in document {number}, which has {end - start}, from 0.")
            at, n = start + first, min(n, end - start - first)
            before = shards.read(max(start, at - BEFORE), min(first, BEFORE))
            learned = shards.read_learned(at, n) if self.prepared.manifest.holds_examples else None
            n_bytes = self._n_bytes(shards, number, start, end, check)
            return Document(end - start, n_bytes, before, shards.read(at, n), learned)

    def _n_bytes(self, shards: TokenShards, number: int, start: int, end: int, check: Check) -> int | None:
        sizes, key = self._token_bytes, (shards.split, number)
        if sizes is None or self.prepared.manifest.splits[shards.split].unknown_tokens:
            return None
        if key not in self._sizes:
            total = 0
            for at in range(start, end, _COUNTED_TOKENS):
                check()
                total += int(sizes[shards.read(at, min(_COUNTED_TOKENS, end - at))].sum())
            if len(self._sizes) > 1000:
                self._sizes.clear()
            self._sizes[key] = total
        return self._sizes[key]

    def rows(self, number: int, epoch: int) -> list[Row]:
        """A window, row, pair or prompt of the training split.

        Raises:
            UserError: there is none of that number.
        """
        with self.checked():
            self.objective.train_shards.verify()
            if number >= (n := self.objective.n_items):
                raise UserError(f"there is no window {number}: an epoch has {n}, numbered from 0.")
            return self.objective.rows(number, epoch)

    def step(self, step: int) -> StepSamples:
        """The samples of a step; see `samples_of_step`."""
        with self.checked():
            return samples_of_step(self.recipe, self.folder, step)

    @property
    def steps_done(self) -> int:
        return steps_done(self.folder)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Whatever a file may hold becomes a message."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, IndexError, OSError, OverflowError) as error:
            raise UserError(
                f"the data of {self.id} cannot be read ({type(error).__name__}: {error}). {redo(self.prepared.folder)}"
            ) from None


class OpenData:
    """The data of the runs that were looked at last. For one thread."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], RunData] = OrderedDict()

    def of(self, wanted: Wanted) -> RunData:
        """The data of a run.

        Raises:
            UserError: it is not there, or not the run's.
        """
        folder = wanted.run.folder
        try:
            trained_on = wanted.checkpoint.state().get("data_fingerprint")
        except OSError:
            raise UserError(f"{wanted.name} was deleted just now: choose another checkpoint.") from None
        if not isinstance(trained_on, str) or not trained_on:
            raise UserError(
                f"{wanted.run.id} was not trained here but imported, so there is no prepared data of it. Choose a run "
                f"that was trained, or compare its tokenizer under Two tokenizers."
            )
        recipe_changed = (folder / "recipe.yaml").stat().st_mtime_ns
        key = (folder, trained_on, recipe_changed)
        if key not in self._open or _changed(self._open[key].prepared.folder) != self._open[key].changed:
            self._open[key] = _open(wanted, trained_on)
        self._open.move_to_end(key)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[key]


def _changed(folder: Path) -> int | None:
    """When a folder's manifest was written; None: it is gone."""
    try:
        return (folder / MANIFEST_FILE).stat().st_mtime_ns
    except OSError:
        return None


def _open(wanted: Wanted, trained_on: str) -> RunData:
    run = wanted.run
    recipe = load_recipe(run.folder)
    prepared = find_of_run(recipe, run.folder, trained_on)
    if prepared is None:
        raise UserError(
            f"the data that {run.id} was trained on is not in {recipe.data.cache_dir}, its data.cache_dir. Put it back "
            f"there, or make it again with `gptworks prepare {run.folder}`."
        )
    tokenizer = load_tokenizer(run.folder / "tokenizer")
    if prepared.manifest.tokenizer_sha256 != fingerprint(tokenizer):
        raise UserError(f"{prepared.folder} was made by another tokenizer: it is not the text of {run.id}.")
    return RunData(run.id, run.folder, recipe, prepared, _changed(prepared.folder))


def speller(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The spelling of each token by itself."""
    tokens = Tokens(tokenizer, 1, ServerSettings())
    return lambda token: tokens.spell(token)[0] if token < tokens.n_ids else ""
