"""Trains in the mirror of a remote folder: `remote_run` claims the folder, fetches what it holds, uploads what training
writes, and lets other processes see that it lives.

A checkpoint's manifest is uploaded last, after the records up to its step, and deleted first: a reader of the store
finds complete checkpoints only, with the metrics that led to them. A failed upload is tried again, with growing random
waits, while training continues.
"""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptworks.errors import RunError, UserError
from gptworks.files import copy_file, make_folder, read_regular, write_whole
from gptworks.files.mirror import (
    CHECKPOINTS,
    OWN_SESSION,
    SEAL,
    SESSIONS,
    is_last_here,
    keep,
    last_session,
    refresh,
    written_by,
)
from gptworks.files.remote import Remote, mirror_around, url_of
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.signals import stop_signals

BEAT_SECONDS, STALE_SECONDS = 20.0, 80.0
"""A session is written again after each BEAT_SECONDS; one that is older than STALE_SECONDS has died."""
_POLL_SECONDS, _SMALL_SECONDS = 0.5, 60.0
"""Times between two looks for new checkpoints, and between two uploads of small files."""
_MOST_WAIT_SECONDS = 60.0
END_SECONDS = 600.0
"""At the end of a run, failed uploads are tried again for this time."""
_WHOLE_BYTES = 1 << 26
_LATE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of a scheduler that do not end the last uploads when they come first."""
Report = Callable[[str], None]
_Stamp = tuple[int, int, int]


@contextlib.contextmanager
def remote_run(run_dir: Path, ranks: Ranks, report: Report) -> Iterator[Callable[[], str | None]]:
    """Return a context in which `run_dir`, if it is the mirror of a remote folder, belongs to this run. Rank 0 uploads.
    It gives a function that returns SIGTERM if the run must stop, because another process has taken the folder.

    Raises:
        UserError: another process trains there, or the store refuses access.
        RunError: the store fails; at the end: files could not be uploaded, or another process has taken the folder.
    """
    if (url := url_of(run_dir)) is None:
        yield lambda: None
        return
    if mirror_around(run_dir) != run_dir:
        raise UserError(f"run_dir={run_dir} is part of the mirror of {url}: give another folder, or a URL.")
    keep(run_dir)
    if not ranks.is_rank_zero:
        ranks.from_rank_zero(lambda: None)
        yield lambda: None
        with stop_signals(_LATE):  # the ranks and their store outlive the uploads
            ranks.from_rank_zero(lambda: None)
        return
    session = Session(Remote(url), report)

    ranks.from_rank_zero(lambda: session.claim(run_dir))
    try:
        uploads = Uploads(session.remote, run_dir, report, lambda: session.taken_by is None, session.fetched)
    except BaseException:
        session.end(run_dir, False, False)
        raise
    threads = [threading.Thread(target=each, daemon=True, name="store") for each in (session.beat, uploads.run)]
    for thread in threads:
        thread.start()

    def finish(failed: bool) -> None:
        uploads.over.set()
        threads[1].join()
        try:
            if session.taken_by is None:
                uploads.finish(failed)
        finally:
            session.end(run_dir, uploads.is_complete, uploads.has_written)
        if session.taken_by is not None and not failed:
            raise RunError(
                f"{url} was taken over by {session.taken_by}, since the store did not get this process's sign of life "
                f"for {STALE_SECONDS:g} seconds. This run was stopped; its files are in {run_dir}."
            )

    try:
        yield lambda: None if session.taken_by is None else "SIGTERM"
    except BaseException:
        with ranks.busy():
            finish(True)
        raise
    with stop_signals(_LATE):
        ranks.from_rank_zero(lambda: finish(False))


class Session:
    """This process's claim on a remote folder: an object with the next number, which only one process can make."""

    def __init__(self, remote: Remote, report: Report) -> None:
        self.remote, self._report = remote, report
        self._own: dict[str, Any] = {
            "token": secrets.token_hex(8), "host": socket.gethostname(), "process": os.getpid(), "ended": False,
        }  # fmt: skip
        if (machine := _machine()) is not None:
            self._own["machine"] = machine
        self.fetched = False
        """Whether `claim` has made the mirror's small files those of the store."""
        self._number, self._over = 0, threading.Event()
        self.taken_by: str | None = None
        """The process that has claimed the folder after this one."""

    def claim(self, mirror: Path) -> None:
        """Claim the folder once the last session has ended or died, and make the mirror current.

        Raises:
            UserError: another process trains there. RunError: the store fails.
        """
        remote = self.remote
        probe = f".probe-{self._own['token']}"
        entries = remote.entries()
        last = last_session(remote, entries)
        if last is None:
            remote.put(probe, b"")  # shows that this process may write
            remote.remove(probe)
        elif not last.get("ended") and not self._is_dead(last):
            self._wait(last, probe)
        self._own["after"] = written_by(last or {})
        self._number = (last or {"number": 0})["number"] + 1
        name = self._name(self._number)
        if last is not None and is_last_here(mirror, last):  # so that a crash between here and the end changes nothing
            self._keep(mirror, False, token=written_by(last), claims=self._own["token"])
        try:
            remote.put(name, self._text(), new=True)
        except FileExistsError:
            now = last_session(remote, remote.entries()) or {}
            if now.get("token") != self._own["token"]:  # otherwise a try that seemed to fail has made it
                raise UserError(self._in_use(now)) from None
        for old in entries:
            if old.startswith(f"{SESSIONS}/") and old != name:
                remote.remove(old)
        make_folder(mirror)
        self.fetched = refresh(mirror, last or {})
        self._keep(mirror, False)

    def _wait(self, last: dict[str, Any], probe: str) -> None:
        """Wait until a session's sign of life is stale.

        Raises:
            UserError: it gives another one.
        """
        name = self._name(last["number"])
        age = before = self.remote.age_seconds(name, probe)
        if age < STALE_SECONDS:
            seconds = STALE_SECONDS - age
            self._report(f"{self.remote.url}: waiting up to {seconds:.0f} s to see whether {_who(last)} is alive")
        while age < STALE_SECONDS:
            time.sleep(min(BEAT_SECONDS / 4, STALE_SECONDS - age + 0.1))
            try:
                age = self.remote.age_seconds(name, probe)
            except FileNotFoundError:  # another process has claimed the folder
                age = -1.0
            if age < before:
                raise UserError(self._in_use(last))
            before = age

    def _in_use(self, last: dict[str, Any]) -> str:
        return (
            f"run_dir={self.remote.url} is in use by {_who(last)}, which trains "
            f"there now: wait for it, or give another run_dir=. A process that has died is noticed after "
            f"{STALE_SECONDS:g} seconds."
        )

    def _is_dead(self, last: dict[str, Any]) -> bool:
        """Whether the process of a session ran on this machine and is gone."""
        process, machine = last.get("process"), self._own.get("machine")
        if machine is None or last.get("machine") != machine or type(process) is not int or not 0 < process < 1 << 31:
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return process == os.getpid() and last.get("token") != self._own["token"]

    def beat(self) -> None:
        """Write the session again and again, until it ends. Stop the run if another process has claimed the folder."""
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):  # `Uploads` reports a store that fails
                newest = last_session(self.remote, self.remote.entries())
                if newest is not None and newest["number"] > self._number:
                    self.taken_by = _who(newest)
                    return
                self.remote.put(self._name(self._number), self._text())

    def end(self, mirror: Path, uploaded: bool, wrote: bool = True) -> None:
        """Record that the session has ended, whether everything is uploaded, and whether anything was."""
        self._over.set()
        with contextlib.suppress(OSError, RunError, UserError):
            self._keep(mirror, uploaded)
            if self.taken_by is None:
                self._own |= {"ended": True, "wrote": wrote}
                self.remote.put(self._name(self._number), self._text())

    def _name(self, number: int) -> str:
        return f"{SESSIONS}/{number:08d}"

    def _text(self) -> bytes:
        return json.dumps(self._own).encode()

    def _keep(self, mirror: Path, uploaded: bool, **more: str) -> None:
        write_whole(mirror / OWN_SESSION, json.dumps({**self._own, "uploaded": uploaded, **more}), private=True)


def _machine() -> str | None:
    """Return what distinguishes this machine, since its start, and this process's namespace; None if unknown."""
    with contextlib.suppress(OSError, UserError):
        boot = read_regular(Path("/proc/sys/kernel/random/boot_id"), 100).decode().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return None


def _who(session: dict[str, Any]) -> str:
    """Return the process of a session for a message; the store's text is untrusted."""
    return f"process {str(session.get('process'))[:20]!a} on {str(session.get('host'))[:100]!a}"


class Uploads:
    """Makes a remote folder like its mirror, pass by pass."""

    def __init__(
        self,
        remote: Remote,
        mirror: Path,
        report: Report,
        may_write: Callable[[], bool] = lambda: True,
        fetched: bool = False,
    ) -> None:
        """
        Args:
            may_write: asked before each change of the store.
            fetched: the mirror's small files are those of the store.
        """
        self._remote, self._mirror, self._report, self._may_write = remote, mirror, report, may_write
        self.over = threading.Event()
        self.is_complete = self.has_written = False
        self._names = set(remote.entries())
        """Objects in the store."""
        self._sent: dict[str, _Stamp] = {}
        """Small files and manifests that the store has, as they were when they were sent."""
        self._sent_at = -float("inf")
        self._n_failed = 0
        for folder in self._checkpoints():  # fetched ones, and those that an earlier session has uploaded
            name = f"{CHECKPOINTS}/{folder}/{SEAL}"
            with contextlib.suppress(FileNotFoundError, UserError):
                if name in self._names and remote.read(name, 1 << 24) == read_regular(
                    mirror / name, 1 << 24, inside=mirror
                ):
                    self._sent[name] = _stamp(mirror / name)
        if fetched:
            self._sent |= {name: _stamp(mirror / name) for name in self._small() if name in self._names}

    def run(self) -> None:
        """Upload until the run is over; wait longer after each failure."""
        wait = _POLL_SECONDS
        while not self.over.wait(wait):
            try:
                self._upload(time.monotonic() > self._sent_at + _SMALL_SECONDS)
            except (RunError, UserError, OSError) as error:
                wait = min(2.0**self._n_failed, _MOST_WAIT_SECONDS) * random.uniform(0.5, 1.0)
                if not self._n_failed:
                    self._report(f"upload failed, and is tried again while training continues: {error}")
                self._n_failed += 1
            else:
                if self._n_failed:
                    self._report(f"{self._remote.url} takes uploads again")
                wait, self._n_failed = _POLL_SECONDS, 0

    def finish(self, failed: bool) -> None:
        """Upload all that is left.

        Args:
            failed: the run ends with an error, which is reported; try each upload once.

        Raises:
            RunError: something could not be uploaded.
        """
        until, n = time.monotonic() + (0 if failed else END_SECONDS), 0
        while True:
            try:
                self._upload(True)
                if missing := self._missing():
                    raise RunError(f"the store has not taken {missing[0]}")
                self.is_complete = True
                return
            except (RunError, UserError, OSError) as error:
                if not self._may_write():
                    return
                left = self._missing()
                what = (
                    f"{len(left):,} files of the run are not in {self._remote.url}: {', '.join(left[:5])}"
                    f"{', …' if len(left) > 5 else ''} ({error}) They are in {self._mirror}; the same command with "
                    f"--resume on this machine uploads them."
                )
                if failed or time.monotonic() > until:
                    if failed:
                        self._report(what)
                        return
                    raise RunError(what) from error
                if not n:
                    self._report(f"trying for up to {END_SECONDS:g} s to upload {len(left):,} files: {error}")
                time.sleep(min(2.0**n, _MOST_WAIT_SECONDS) * random.uniform(0.5, 1.0))
                n += 1

    def _missing(self) -> list[str]:
        found = [f"{CHECKPOINTS}/{folder}/{SEAL}" for folder in self._checkpoints()]
        stamps = {name: _stamp(self._mirror / name) for name in [*found, *self._small()]}
        return [name.removesuffix(f"/{SEAL}") for name, stamp in stamps.items() if self._sent.get(name) != stamp]

    def _upload(self, small: bool) -> None:
        """Upload new checkpoints, the newest first, and delete those that training has deleted; with `small`, upload
        all other files that have changed.

        Raises:
            RunError, UserError, OSError: something could not be uploaded.
        """
        while True:
            here = self._checkpoints()
            sealed = [folder for folder in here if self._is_sent(f"{CHECKPOINTS}/{folder}/{SEAL}")]
            kept = self._resumable(here)
            if kept is not None:
                self._delete_all_but([*here, kept])
            if len(sealed) == len(here):
                break
            self._upload_checkpoint(next(folder for folder in here if folder not in sealed))
        if small:
            self._upload_small()

    def _resumable(self, here: list[str]) -> str | None:
        """Return the store's newest checkpoint with which training can continue, up to the newest here; None: the store
        has none, or this folder has none."""
        newest = next((_order(folder) for folder in here if folder.startswith("step-")), None)
        there = (name.split("/")[1] for name in self._names if name.startswith(f"{CHECKPOINTS}/step-"))
        usable = [each for each in there if f"{CHECKPOINTS}/{each}/{SEAL}" in self._names]
        return None if newest is None else max((e for e in usable if _order(e) <= newest), key=_order, default=None)

    def _upload_checkpoint(self, folder: str) -> None:
        path, below = self._mirror / CHECKPOINTS / folder, f"{CHECKPOINTS}/{folder}"
        try:
            stamp = _stamp(path / SEAL)
            if f"{below}/{SEAL}" in self._names:  # another of the same step, which must not be read half replaced
                self._remove(f"{below}/{SEAL}")
            for file in sorted(path.iterdir()):
                if file.name != SEAL:
                    self._names.add(f"{below}/{file.name}")
                    self._writing().upload(f"{below}/{file.name}", file)
            self._upload_small()
            self._writing().upload(f"{below}/{SEAL}", path / SEAL)
        except FileNotFoundError:
            if (path / SEAL).exists():
                raise
            self._report(f"{below} was deleted before it was uploaded, since uploads take longer than steps")
            return
        self._names.add(f"{below}/{SEAL}")
        self._sent[f"{below}/{SEAL}"] = stamp

    def _upload_small(self) -> None:
        for name in self._small():
            path = self._mirror / name
            with contextlib.suppress(FileNotFoundError):
                stamp = _stamp(path)
                if self._sent.get(name) == stamp:
                    continue
                if stamp[1] <= _WHOLE_BYTES:
                    self._writing().put(name, read_regular(path, 2 * _WHOLE_BYTES, inside=self._mirror))
                else:  # it may grow while it is sent
                    copy = path.with_name(f".sent-{path.name}")
                    copy.unlink(missing_ok=True)
                    copy_file(path, copy)
                    self._writing().upload(name, copy)
                    copy.unlink()
                self._names.add(name)
                self._sent[name] = stamp
        self._sent_at = time.monotonic()

    def _delete_all_but(self, folders: list[str]) -> None:
        gone = [
            name
            for name in self._names
            if name.startswith(f"{CHECKPOINTS}/") and name.count("/") == 2 and name.split("/")[1] not in folders
        ]
        for name in sorted(gone, key=lambda name: (name.split("/")[1], not name.endswith(f"/{SEAL}"))):
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._writing(name.endswith(f"/{SEAL}")).remove(name)
        self._names.discard(name)
        self._sent.pop(name, None)

    def _writing(self, counts: bool = True) -> Remote:
        """Return the store for a change of it.

        Args:
            counts: a reader of the folder sees the change.

        Raises:
            RunError: another process has taken the folder.
        """
        if not self._may_write():
            raise RunError(f"{self._remote.url} was taken by another process")
        self.has_written |= counts
        return self._remote

    def _is_sent(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self._sent.get(name) == _stamp(self._mirror / name)
        return False

    def _checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints here, the newest first."""
        found = (self._mirror / CHECKPOINTS).glob(f"[!.]*/{SEAL}")
        names = [path.parent.name for path in found]
        return sorted(names, key=lambda name: (_order(name), name), reverse=True)

    def _small(self) -> list[str]:
        """Return the names of all other files, except hidden ones."""
        found = []
        for parent, folders, files in os.walk(self._mirror):
            above = Path(parent).relative_to(self._mirror)
            folders[:] = [
                each for each in folders if not each.startswith(".") and (above / each).as_posix() != CHECKPOINTS
            ]
            paths = [above / each for each in files if not each.startswith(".")]
            found += [path.as_posix() for path in paths if not (self._mirror / path).is_symlink()]
        return sorted(found)


def _order(folder: str) -> str:
    """Return what sorts checkpoints by their step."""
    return folder.rpartition("-")[2].zfill(20)


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
