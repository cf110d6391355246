"""Read a text or a document with a checkpoint of a run. Token losses are cached, and runs' data is kept open."""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from gptworks.data.shards import MANIFEST_FILE, Split, TokenShards
from gptworks.errors import UserError
from gptworks.files import Stamp, stamp
from gptworks.interpret.hooks import Check
from gptworks.interpret.text import Costs, TokenizedText, check_ids
from gptworks.runs.data import RunData, data_of_run
from gptworks.serve.models import ServedModel
from gptworks.studio.loaded import Wanted
from gptworks.tokenizer import fingerprint

MOST_KEPT = 64
"""Maximum number of cached results. Each result is the losses of one text under one checkpoint."""

MOST_OPEN = 4
"""Maximum number of runs whose data is kept open."""

_Result = TypeVar("_Result")


class _Gone(Exception):
    """Stops a computation when no client waits for its result any more."""


@dataclass
class Reader:
    """Runs one computation at a time in a thread, and caches losses."""

    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gptworks reading"))
    _kept: "OrderedDict[tuple[Wanted, str], Costs]" = field(default_factory=OrderedDict)

    async def compute(self, work: Callable[[Check], _Result]) -> _Result:
        """Run `work(check)` in the thread and return its result. `work` must call `check` often: `check` raises an
        exception once the client has left or the time is up."""
        gone = threading.Event()

        def check() -> None:
            if gone.is_set():
                raise _Gone

        def guarded() -> _Result:
            check()
            return work(check)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, guarded)
        finally:
            gone.set()

    def nats(self, reading: "Reading", text: TokenizedText, check: Check) -> Costs:
        """Return the loss of each token in nats, from the cache if it was computed before."""
        key = reading.wanted, hashlib.sha256(text.ids.tobytes()).hexdigest()
        if key not in self._kept:
            self._kept[key] = text.token_nats(reading.model.engine.model, check)
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]


class OpenData:
    """Opens the data of runs, and keeps the most recently used data open. Not thread-safe."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], tuple[RunData, Stamp | None]] = OrderedDict()

    def of(self, wanted: Wanted) -> RunData:
        """Return the data of a checkpoint's run.

        Raises:
            UserError: the run was imported, its data is missing or was made by another tokenizer, or the checkpoint was
                deleted.
        """
        folder = wanted.run.folder
        try:
            trained_on = str(wanted.checkpoint.state().get("data_fingerprint") or "")
        except OSError:
            raise UserError(f"{wanted.name} was deleted just now: choose another checkpoint.") from None
        key = (folder, trained_on, stamp(folder / "recipe.yaml"))
        if key not in self._open or stamp(self._open[key][0].prepared.folder / MANIFEST_FILE) != self._open[key][1]:
            opened = data_of_run(wanted.run.id, folder, trained_on)
            self._open[key] = opened, stamp(opened.prepared.folder / MANIFEST_FILE)
        self._open.move_to_end(key)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[key][0]


@dataclass(frozen=True)
class Reading:
    """A checkpoint, its loaded model, and the open data of runs. The methods are slow."""

    wanted: Wanted
    model: ServedModel
    data: OpenData

    def text(self, text: str | None, document: int | None, tokens: list[int] | None) -> TokenizedText:
        """Return a text, a document of the run's validation split, or token ids as a `TokenizedText`.

        Raises:
            UserError: the text has too many tokens; the model lacks one of the token ids; the document does not exist;
                or the data cannot be opened (see `OpenData.of`).
        """
        if tokens is not None:
            check_ids(self.model.engine.model, np.array(tokens))
            return TokenizedText.of_tokens(self.model.engine.tokenizer, tokens)
        if text is not None:
            return TokenizedText.of_text(self.model.engine.tokenizer, text)
        assert document is not None
        try:
            return TokenizedText.of_document(self.model.engine.tokenizer, self.shards("validation"), document)
        except UserError as error:
            raise UserError(f"{error} Paste a text instead.") from None

    def same_text(self, text: TokenizedText, other: "Reading") -> TokenizedText:
        """Return the text of the reading `other`, tokenized for this reading's model."""
        mine, theirs = (fingerprint(one.model.engine.tokenizer) for one in (self, other))
        return text if mine == theirs else TokenizedText.of_text(self.model.engine.tokenizer, "".join(text.pieces))

    def spelled(self, token: int) -> dict[str, Any]:
        """Return a token's id and its spelling, as JSON."""
        return {"id": token, "spelling": self.model.tokens.spell(token)[0]}

    def shards(self, split: Split) -> TokenShards:
        """Return a split of the data that the run was trained on.

        Raises:
            UserError: see `OpenData.of`.
        """
        return self.data.of(self.wanted).shards(split)
