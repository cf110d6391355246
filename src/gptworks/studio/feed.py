"""Watch the studio's runs: while any client listens, one thread reads the runs' logs for all clients."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gptworks.errors import UserError
from gptworks.runs.watch import Watch
from gptworks.studio.library import Library, RunFolder, printable, state_of

_Result = TypeVar("_Result")

_SLICE_SECONDS = 0.05
_EVERY_SECONDS = 1.0
_IDLE_SECONDS = 30.0


class Feed:
    """Follows the runs' logs for the page. Call its methods in asyncio's thread, but use `watch` only through `ask`."""

    def __init__(self, library: Library) -> None:
        self.library, self.watch = library, Watch(recipe_of=library.recipes.of)
        self.states: dict[str, str] = {}
        """State of each run by id, as `state_of` returns it."""
        self.left_out: dict[str, str] = {}
        """Reasons why runs are skipped, by the run's id."""
        self._inside: dict[str, int] = {}
        """Modification time (ns) of each run's folder when its links were last checked, by the run's id."""
        self._thread = ThreadPoolExecutor(1, "gptworks runs")
        self._clients: dict[asyncio.Event, set[str]] = {}
        self._asked_at = time.monotonic()
        self._poller: asyncio.Task[None] | None = None

    async def ask(self, work: Callable[[Watch], _Result]) -> _Result:
        """Call `work` with the watched runs in the feed's thread, and return its result."""
        self._asked_at = time.monotonic()
        if self._poller is None or self._poller.done():
            await self._in_thread(self._follow)
            self._poller = asyncio.create_task(self._poll())
        return await self._in_thread(lambda: work(self.watch))

    def changes(self) -> "Changes":
        """Return an object with which one client waits for changes that happen after this call."""
        return Changes(self._clients)

    async def _poll(self) -> None:
        """Read logs until no client listens and the last call of `ask` is `_IDLE_SECONDS` ago."""
        looked_at = time.monotonic()
        while self._clients or time.monotonic() - self._asked_at < _IDLE_SECONDS:
            if time.monotonic() - looked_at > 2 * _EVERY_SECONDS:
                self._announce(await self._in_thread(self._follow))
                looked_at = time.monotonic()
            changed, has_more = await self._in_thread(lambda: self.watch.advance(_SLICE_SECONDS))
            self._announce(changed)
            await asyncio.sleep(0.005 if has_more else _EVERY_SECONDS)

    def _follow(self) -> set[str]:
        """Look for runs that appeared, disappeared or changed their state, and return their ids."""
        before, found = self.states | self.left_out, self.library.runs()
        faults = {name: self._fault(run) for name, run in found.items()}
        self.left_out = {name: fault for name, fault in faults.items() if fault is not None}
        self.watch.follow({name: run.folder for name, run in found.items() if name not in self.left_out})
        self.states = {name: state_of(one.series.folder) for name, one in self.watch.runs.items()}
        now = self.states | self.left_out
        return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}

    def _fault(self, run: RunFolder) -> str | None:
        """Return the reason for skipping a run: a link that leads out of the given folder, or a run folder that cannot
        be read. Return None for other runs."""
        try:
            changed = run.folder.stat().st_mtime_ns
            if self._inside.get(run.id) != changed:
                run.check_inside()
                self._inside[run.id] = changed
        except (UserError, OSError) as error:
            return printable(str(error))[:600]
        return None

    def _announce(self, names: set[str]) -> None:
        for event in self._clients if names else ():
            self._clients[event].update(names)
            event.set()

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Changes:
    """Collects the ids of runs that change while one client listens."""

    def __init__(self, clients: dict[asyncio.Event, set[str]]) -> None:
        self._clients, self._event = clients, asyncio.Event()
        clients[self._event] = set()

    async def take(self, seconds: float) -> set[str]:
        """Wait up to `seconds` for a change, and return the ids of the runs that changed since the last call."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return set()
        self._event.clear()
        changed, self._clients[self._event] = self._clients[self._event], set()
        return changed

    def close(self) -> None:
        self._clients.pop(self._event, None)
