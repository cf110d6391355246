"""Communication between the threads that write a checkpoint, one on each rank. The threads use the launcher's store
instead of collectives, because training issues collectives at the same time."""

import math
import time
from typing import Any

from gptworks.errors import RunError

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 20.0
"""Time for other ranks to write their parts after the run has failed."""


class Writers:
    """Communication of the thread that writes checkpoints; this class serves a run with one process."""

    rank = 0

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    def share(self, text: str | None = None) -> str:
        """Return rank 0's text on every rank. Each save begins with this call."""
        return text or ""

    def collect(self, text: str) -> list[str]:
        """Return the texts of all ranks on rank 0, and only this rank's text on other ranks.

        Rank 0 waits until all ranks have called this method.
        """
        return [text]

    def give_up(self) -> None:
        """Limit all waits for other ranks to `_GRACE_SECONDS` from now, because the run has failed. A wait that lasts
        longer raises a RunError in the thread that waits."""


ONE_WRITER = Writers()


class RankWriters(Writers):
    """Communication of one rank's writing thread with the threads of the other ranks."""

    def __init__(self, store: Any, rank: int, n_ranks: int) -> None:
        """`store` is a connection to the launcher's store that no other thread uses."""
        self._store, self.rank, self._n_ranks = store, rank, n_ranks
        self._n_saves, self._until = 0, math.inf

    def share(self, text: str | None = None) -> str:
        self._n_saves += 1
        key = f"save/{self._n_saves}/shared"
        if self.is_rank_zero:
            self._store.set(key, text)
        self._wait([key])
        return str(self._store.get(key).decode())

    def collect(self, text: str) -> list[str]:
        keys = [f"save/{self._n_saves}/{rank}" for rank in range(self._n_ranks)]
        self._store.set(keys[self.rank], text)
        if not self.is_rank_zero:
            return [text]
        self._wait(keys)
        texts = [one.decode() for one in self._store.multi_get(keys)]
        for key in (*keys, f"save/{self._n_saves}/shared"):
            self._store.delete_key(key)
        return texts

    def give_up(self) -> None:
        self._until = time.monotonic() + _GRACE_SECONDS

    def _wait(self, keys: list[str]) -> None:
        while not self._store.check(keys):
            if time.monotonic() > self._until:
                raise RunError("the other ranks have not written their parts of a checkpoint")
            time.sleep(_POLL_SECONDS)
