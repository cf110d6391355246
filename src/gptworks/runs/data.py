"""The data of a run, a recipe or a dataset: its documents, the rows a model sees, and the samples of each step."""

import itertools
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.checkpoint import all_checkpoints
from gptworks.config import Recipe
from gptworks.data.info import Info, dataset_info
from gptworks.data.opened import Prepared, find_of_run, open_prepared
from gptworks.data.permutation import Int64s
from gptworks.data.prepare import find_prepared
from gptworks.data.rows import Row
from gptworks.data.samples import Samples, open_samples
from gptworks.data.search import SearchIndex
from gptworks.data.shards import MANIFEST_FILE, Split, TokenShards, redo
from gptworks.data.spelling import Speller
from gptworks.data.workers import Progress
from gptworks.errors import UserError
from gptworks.files import fetched_path
from gptworks.recipe import load_dataset_recipe, load_recipe
from gptworks.tokenizer import StreamDecoder, fingerprint, load_tokenizer, token_bytes
from gptworks.training.prefetch import cut_windows
from gptworks.training.samples import StepSamples, samples_of_step, steps_done

MOST_CONTEXT = 1 << 20
BEFORE = 16
"""Number of tokens decoded before the first shown token, since a character's first bytes may be in them."""
_COUNTED_TOKENS = 1 << 20

Tree = dict[str, Any]
Check = Callable[[], None]
"""A function that long work calls regularly, and that may raise an exception to stop the work."""


@dataclass
class RunData:
    """The data of a run, a recipe or a dataset. Its methods are slow: they read and verify files."""

    id: str
    folder: Path | None
    """The run's folder; None for the data of a recipe or a dataset."""
    recipe: Recipe | None
    """The training recipe; None for a dataset."""
    prepared: Prepared
    _indexes: dict[Split, SearchIndex] = field(default_factory=dict)
    _info: Info | None = None

    @cached_property
    def samples(self) -> Samples:
        """The samples that training reads. Raises a UserError if a file was changed or lacks data, there is no recipe,
        or its rows are too long to show."""
        if self.recipe is None:
            raise UserError(f"{self.id} is a dataset: what a model sees depends on a recipe. Give one, or a run.")
        if self.recipe.row_length > MOST_CONTEXT:
            raise UserError(
                f"{self.id} has rows of {self.recipe.row_length} tokens: rows of up to {MOST_CONTEXT} are shown. "
                f"Its documents can be read."
            )
        with self.checked():
            return open_samples(self.recipe, self.prepared.folder, verify=True)

    @cached_property
    def _token_bytes(self) -> Int64s | None:
        sizes = token_bytes(self.prepared.tokenizer)
        return None if sizes is None else np.array(sizes, dtype=np.int64)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.prepared.tokenizer)

    def shards(self, split: Split) -> TokenShards:
        return TokenShards(self.prepared.folder, split)

    def index(self, split: Split) -> SearchIndex:
        """Return the search index of a split's text. The index may not be built yet."""
        with self.checked():
            if split not in self._indexes:
                self._indexes[split] = SearchIndex(self.prepared, split)
            return self._indexes[split]

    def info(self, report: Progress = lambda done, total: None) -> Info:
        """Return figures about the data, computed once; see `dataset_info`."""
        with self.checked():
            if self._info is None:
                self._info = dataset_info(self.prepared, report)
            return self._info

    def document(self, split: Split, number: int, first: int, n: int, check: Check = lambda: None) -> Tree:
        """Return a document's size, and at most n of its tokens from token `first` on, as JSON.

        `n_bytes` is the size of the document's text without special tokens; None if token ids do not determine it. Each
        token's `learned` says whether it counts in the loss; None for plain text. Raise a UserError if the document or
        token does not exist."""
        with self.checked():
            shards = self.shards(split)
            start, end = shards.document(number)
            if first and first >= end - start:
                raise UserError(f"token {first} is not in document {number}, which has {end - start}, from 0.")
            at, n = start + first, min(n, end - start - first)
            before = shards.read(max(start, at - BEFORE), min(first, BEFORE))
            examples = self.prepared.manifest.holds_examples
            learned = shards.read_learned(at, n).tolist() if examples else itertools.repeat(None)
            tokens = self._tokens(before, shards.read(at, n))
            return {
                "n_tokens": end - start,
                "n_bytes": self._n_bytes(shards, start, end, check),
                "tokens": [token | {"learned": counts} for token, counts in zip(tokens, learned, strict=False)],
            }

    def _n_bytes(self, shards: TokenShards, start: int, end: int, check: Check) -> int | None:
        sizes, total = self._token_bytes, 0
        if sizes is None or self.prepared.manifest.splits[shards.split].unknown_tokens:
            return None
        for at in range(start, end, _COUNTED_TOKENS):
            check()
            total += int(sizes[shards.read(at, min(_COUNTED_TOKENS, end - at))].sum())
        return total

    def rows(self, number: int, epoch: int) -> list[Row]:
        """Return the rows that a model sees of training item `number`: a window, a row of conversations, a pair or a
        prompt. Raise a UserError if the number is too large.
        """
        with self.checked():
            self.samples.train_shards.verify()
            if number >= (n := self.samples.n_items):
                raise UserError(f"there is no {self.samples.item_name} {number}: an epoch has {n}, numbered from 0.")
            return self.samples.rows(number, epoch)

    def rows_of_step(
        self, step: int, first: int, n: int, check: Check = lambda: None
    ) -> tuple[StepSamples, list[tuple[Tree, Row]]]:
        """Return a step's samples, and the rows of n of these samples, from sample `first` of the batch on. Each row
        comes with its `sample` (index in the batch), and the `epoch` and `number` of its training item. Raise a
        UserError if the run has not reached the step, or the step has no such sample."""
        samples, whole = self.step(step), self.samples.context_length
        assert self.recipe is not None  # else `self.step` has raised an error
        length = self.recipe.train.length_at(step - 1, whole)
        runs = cut_windows(samples.position, samples.n_samples, whole // length)
        places = [(position + i, part) for position, part, n_samples in runs for i in range(n_samples)]
        if first >= len(places):
            raise UserError(f"sample {first} is not in the batch, which has {len(places)}, from 0.")
        rows: list[tuple[Tree, Row]] = []
        for sample, (position, part) in enumerate(places[first : first + n], first):
            check()
            epoch, number = self.samples.item(position)
            found = self.rows(number, epoch)
            if length < whole:
                found = [row.part(part * length, length) for row in found]
            rows += [({"sample": sample, "epoch": epoch, "number": number}, row) for row in found]
        return replace(samples, n_samples=len(places)), rows

    def _tokens(self, before: Int64s, ids: Int64s) -> list[Tree]:
        """Return the tokens `ids` as JSON, each with its spelling and the text that it completes.

        before: the tokens before `ids`, whose bytes may belong to the first character.
        """
        stream = StreamDecoder(self.prepared.tokenizer)
        for token in before.tolist():
            stream.push(token)
        n = self.prepared.manifest.vocab_size
        return [
            {"id": token, "text": stream.push(token), "spelling": self._speller.spell(token)[0] if token < n else ""}
            for token in ids.tolist()
        ]

    def shown(self, row: Row, first: int, n: int, nats: Sequence[float | None] | None = None) -> Tree:
        """Return a row as JSON, with n of its tokens from token `first` on. nats: a model's loss on each token of the
        row."""
        found = self._tokens(row.ids[max(0, first - BEFORE) : first], row.ids[first : first + n])
        begins = {one.at: {"document": one.document, "first": one.first, "alone": one.begins_text}
                  for one in row.pieces}  # fmt: skip
        learned = row.learned
        tokens = [
            {**token, "learned": bool(learned[i]), "nats": nats[i] if nats is not None and learned[i] else None,
             "begins": begins.get(i)}
            for i, token in enumerate(found, first)
        ]  # fmt: skip
        return {"answer": row.answer, "n_tokens": len(row.ids), "n_learned": int(learned.sum()),
                "padding": row.padding, "documents": len(row.pieces), "tokens": tokens}  # fmt: skip

    def step(self, step: int) -> StepSamples:
        """Return the samples of one of the run's steps. Raise a UserError if the data is not a run's, the run has not
        reached the step, or its files are damaged."""
        if self.folder is None or self.recipe is None:
            raise UserError(f"{self.id} is not a run: it has no training steps. Give a run folder.")
        with self.checked():
            return samples_of_step(self.recipe, self.folder, step)

    @property
    def steps_done(self) -> int:
        return 0 if self.folder is None else steps_done(self.folder)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Turn errors of damaged files inside this context into a UserError."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, IndexError, OSError, OverflowError) as error:
            raise UserError(
                f"the data of {self.id} cannot be read ({type(error).__name__}: {error}). {redo(self.prepared.folder)}"
            ) from None


def data_of(place: str | Path, overrides: Sequence[str] = ()) -> RunData:
    """Open the data of `place`: the folder of a dataset or a run, or a recipe whose data has been built. Raise a
    UserError if the data is missing or was changed, or `overrides` are given for a dataset."""
    folder = fetched_path(place)
    if (folder / MANIFEST_FILE).is_file():
        if overrides:
            raise UserError(f"{place} is a dataset, which has no settings: leave out {overrides[0]}.")
        return RunData(str(place), None, None, open_prepared(folder))
    recipe = load_dataset_recipe(place, overrides)
    if folder.is_dir() and (found := all_checkpoints(folder)):
        return data_of_run(str(place), folder, str(found[0].state().get("data_fingerprint") or ""), overrides)
    prepared = find_prepared(recipe)
    if prepared is None:
        raise UserError(f"the data of {place} is not built: run `gptworks data build {shlex.quote(str(place))}` first.")
    return RunData(str(place), None, recipe if isinstance(recipe, Recipe) else None, prepared)


def data_of_run(name: str, folder: Path, trained_on: str, overrides: Sequence[str] = ()) -> RunData:
    """Open the data that a run was trained on, found by its fingerprint `trained_on`. Raise a UserError if the run was
    imported, or its data is missing or was made by another tokenizer."""
    if not trained_on:
        raise UserError(
            f"{name} was not trained here but imported, so there is no prepared data of it. Choose a run that was "
            f"trained, or a dataset."
        )
    recipe = load_recipe(folder, overrides)
    prepared = find_of_run(recipe, folder, trained_on)
    if prepared is None:
        raise UserError(
            f"the data that {name} was trained on is not in {recipe.data.cache_dir}, its data.cache_dir. Put it back "
            f"there, or make it again with `gptworks data build {shlex.quote(str(folder))}`."
        )
    tokenizer = load_tokenizer(folder / "tokenizer")
    if prepared.manifest.tokenizer_sha256 != fingerprint(tokenizer):
        raise UserError(f"{prepared.folder} was made by another tokenizer: it is not the text of {name}.")
    return RunData(name, folder, recipe, prepared)
