"""Load engines of runs' checkpoints on demand. Idle engines stay loaded within a memory limit."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gptworks.checkpoint import Checkpoint
from gptworks.choices import BackendName
from gptworks.device import choose_device, memory_bytes
from gptworks.errors import RunError, UserError
from gptworks.infer.engine import Engine, EngineFailed, load
from gptworks.infer.loop import EngineStopped
from gptworks.serve.models import ServedModel
from gptworks.serve.service import Caller, Service
from gptworks.studio.library import Library, RunFolder
from gptworks.units import readable

SHARE_OF_MEMORY = 0.25
"""Default fraction of memory that idle engines may hold. This is a fraction of all memory of a CUDA GPU, and otherwise
of the host memory that is available at the start."""


@dataclass
class Loaded:
    """An engine that is loaded, or loading."""

    name: str
    model: asyncio.Future[ServedModel]
    n_bytes: int
    """Size of the weights' file."""
    n_users: int = 0
    used_at: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """Record that a request no longer uses the engine."""
        self.n_users -= 1
        self.used_at = time.monotonic()

    @property
    def held_bytes(self) -> int:
        """Memory that the engine uses; while the engine loads, the size of its weights' file."""
        return self.model.result().engine.held_bytes if self.is_there else self.n_bytes

    @property
    def is_there(self) -> bool:
        return self.model.done() and self.model.exception() is None


@dataclass(frozen=True)
class Wanted:
    """A run's checkpoint, with the SHA-256 of its manifest, which changes if the run is trained again from step 0."""

    run: RunFolder
    checkpoint: Checkpoint
    manifest: str | None

    @property
    def name(self) -> str:
        """The engine's name in /v1/models. `Engines` adds `+` to it while an older engine has the same name."""
        return f"{self.run.id}@{self.checkpoint.step}"

    @property
    def n_bytes(self) -> int:
        """Size of the weights' file on the disk; 0 if the file does not exist."""
        path = self.checkpoint.folder / "model.safetensors"
        return path.stat().st_size if path.is_file() else 0


class Engines:
    """Loads and removes engines of a library's runs. Call its methods in asyncio's thread. Other threads read files."""

    def __init__(self, service: Service, library: Library, device: str, backend: BackendName) -> None:
        self._service, self._library, self._backend, self._device = service, library, backend, device
        self.max_idle_bytes = int(SHARE_OF_MEMORY * memory_bytes(choose_device(device)))
        """Maximum memory of the idle engines plus the engine to load; the least recently used idle engines are removed
        first."""
        self._loaded: dict[Wanted, Loaded] = {}
        self._thread = ThreadPoolExecutor(1, "gptworks loading")

    async def find(self, run: str, which: str | int | None) -> Wanted:
        """Find the checkpoint that a request names.

        Raises:
            APIError: the run or the checkpoint does not exist.
            UserError: see `Library.get`.
        """

        def look() -> Wanted:
            folder = self._library.get(run)
            checkpoint = folder.choose(which)
            return Wanted(folder, checkpoint, checkpoint.manifest_sha256)

        return await asyncio.get_running_loop().run_in_executor(self._service.threads, look)

    def is_ready(self, wanted: Wanted) -> bool:
        """Return whether the engine of a checkpoint is loaded."""
        found = self._loaded.get(wanted)
        return found is not None and found.is_there

    async def load_ahead(self, wanted: Wanted, caller: Caller) -> bool:
        """Load a checkpoint's engine before a request needs it, if this engine and the engines in use together hold at
        most `max_idle_bytes`. Engines that are already loading finish first. As with `take`, the engine stays loaded at
        least until `caller` leaves.

        Returns:
            Whether the engine is loaded.

        Raises:
            UserError, RunError: see `take`.
        """
        while wanted not in self._loaded and (
            others := [one.model for one in self._loaded.values() if not one.model.done()]
        ):
            await asyncio.wait(others)
        in_use_bytes = sum(one.held_bytes for one in self._loaded.values() if one.n_users)
        if wanted not in self._loaded and wanted.n_bytes + in_use_bytes > self.max_idle_bytes:
            return False
        await self.take(wanted, caller)
        return True

    async def take(self, wanted: Wanted, caller: Caller) -> ServedModel:
        """Return a checkpoint's served engine, which all callers share. The engine stays loaded at least until
        `caller` leaves.

        Raises:
            UserError: the model cannot be loaded, for example because it is damaged.
            RunError: the engine fails when it starts, or the server is about to stop.
        """
        found = self._loaded.get(wanted)
        if found is None:
            n_bytes = wanted.n_bytes
            future = asyncio.ensure_future(self._load(wanted, n_bytes))
            found = self._loaded[wanted] = Loaded(wanted.name, future, n_bytes)
            future.add_done_callback(lambda done: self._forget_failed(wanted, done))
        found.n_users += 1
        caller.on_leave.append(found.leave)
        return await asyncio.shield(found.model)

    async def by_name(self, name: str, caller: Caller) -> ServedModel:
        """Return the served engine for the model name `RUN` or `RUN@STEP` of the OpenAI-compatible routes."""
        run, at, step = name.rpartition("@")
        known = await asyncio.get_running_loop().run_in_executor(self._service.threads, self._library.runs)
        by_step = at and step.isascii() and step.isdigit() and name not in known
        wanted = await self.find(run, int(step[:18])) if by_step else await self.find(name, None)
        return await self.take(wanted, caller)

    def _forget_failed(self, wanted: Wanted, done: "asyncio.Future[ServedModel]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._loaded.pop(wanted, None)

    async def _load(self, wanted: Wanted, n_bytes: int) -> ServedModel:
        in_thread, service = asyncio.get_running_loop().run_in_executor, self._service
        for name in self._to_free(wanted, n_bytes):
            await in_thread(self._thread, service.remove, name)
        engine = await in_thread(self._thread, self._engine_of, wanted, n_bytes)
        if not service.runs:
            raise EngineStopped("the server is about to stop.")
        while self._loaded[wanted].name in {model.name for model in service.models}:  # an older engine is in use
            self._loaded[wanted].name += "+"
        return service.add(self._loaded[wanted].name, engine)

    def _engine_of(self, wanted: Wanted, n_bytes: int) -> Engine:
        """Load and start the engine of a checkpoint. Slow: call it in a thread."""
        there_bytes = memory_bytes(choose_device(self._device))
        if n_bytes > there_bytes:
            raise UserError(
                f"{wanted.name}: its weights have {readable(n_bytes, 'B')}, and {readable(there_bytes, 'B')} of memory "
                f"are available: close other programs."
            )
        engine = load(wanted.run.folder, wanted.checkpoint.step, device=self._device, backend=self._backend)
        try:
            engine.begin()
        except EngineFailed as error:  # only this load has failed, not an engine in use
            raise RunError(f"{wanted.name} could not be loaded: {type(error.error).__name__}.") from error
        return engine

    def _to_free(self, wanted: Wanted, n_bytes: int) -> list[str]:
        """Forget the idle engines that must be removed before `wanted` is loaded, and return their names."""
        idle = [(key, one) for key, one in self._loaded.items() if not one.n_users and one.model.done()]
        idle.sort(key=lambda pair: (pair[1].name != wanted.name, pair[1].used_at))
        held_bytes, names = n_bytes + sum(one.held_bytes for _, one in idle), []
        for key, one in idle:
            if one.name == wanted.name or held_bytes > self.max_idle_bytes:
                held_bytes -= one.held_bytes
                names.append(one.name)
                del self._loaded[key]
        return names
