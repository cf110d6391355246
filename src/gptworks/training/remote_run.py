"""Lets a run train in the mirror of a remote folder, a local copy. `remote_run` claims the folder, fetches its files,
uploads the files that training writes, and shows other processes that this process is alive.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptworks.checkpoint import Report
from gptworks.errors import RunError, UserError
from gptworks.files import make_folder, read_regular, write_whole
from gptworks.files.mirror import OWN_SESSION, SESSIONS, is_last_here, keep, last_session, refresh, written_by
from gptworks.files.remote import Remote, mirror_around, url_of
from gptworks.training.distributed.ranks import Ranks
from gptworks.training.signals import SCHEDULERS, stop_signals
from gptworks.training.uploads import Uploads

BEAT_SECONDS, STALE_SECONDS = 20.0, 80.0
"""A session's object in the store is rewritten every BEAT_SECONDS. If the object is older than STALE_SECONDS, the
session has died."""


@contextlib.contextmanager
def remote_run(run_dir: Path, ranks: Ranks, report: Report) -> Iterator[Callable[[], str | None]]:
    """Return a context in which the remote folder of the mirror `run_dir` belongs to this run, and rank 0 uploads to
    the folder. If `run_dir` is not a mirror, the context does nothing.

    The context yields a function. On rank 0, the function returns "SIGTERM" once another process has taken the folder,
    else None; on other ranks, always None.

    Raises:
        UserError: another process trains in the folder, `run_dir` lies inside a mirror, or the store refuses access.
        RunError: the store fails, files could not be uploaded at the end, or another process has taken the folder.
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
        with stop_signals(SCHEDULERS):  # a signal does not end this rank before rank 0 has uploaded
            ranks.from_rank_zero(lambda: None)
        return
    session = Session(Remote(url), report)

    ranks.from_rank_zero(lambda: session.claim(run_dir))
    try:
        uploads = Uploads(session.remote, run_dir, report, session.may_write, session.fetched)
    except BaseException:
        session.end(run_dir, False)
        raise
    thread = threading.Thread(target=uploads.run, daemon=True, name="store")
    thread.start()

    def finish(failed: bool) -> None:
        uploads.over.set()
        thread.join()
        try:
            if session.taken_by is None:
                uploads.finish(failed)
        finally:
            session.end(run_dir, uploads.is_complete)
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
    with stop_signals(SCHEDULERS):  # the first signal does not interrupt the last uploads
        ranks.from_rank_zero(lambda: finish(False))


class Session:
    """This process's claim on a remote folder: a numbered object in the store, which lets only one process create the
    object of a number."""

    def __init__(self, remote: Remote, report: Report) -> None:
        self.remote, self._report = remote, report
        self._own: dict[str, Any] = {
            "token": secrets.token_hex(8), "host": socket.gethostname(), "process": os.getpid(), "ended": False,
            "wrote": False,
        }  # fmt: skip
        if (machine := _machine()) is not None:
            self._own["machine"] = machine
        self.fetched = False
        """Whether `claim` has made the mirror's files, except tensors of checkpoints, the same as the store's."""
        self._number, self._over, self._lock = 0, threading.Event(), threading.Lock()
        self._beats = threading.Thread(target=self._beat, daemon=True, name="store")
        self.taken_by: str | None = None
        """Description of the process that has claimed the folder after this one; None if there is none."""

    def claim(self, mirror: Path) -> None:
        """Claim the folder, begin to rewrite the session's object as a sign of life, and make the mirror current.

        If the last session has not ended, first wait to see whether it has died.

        Raises:
            UserError: another process trains in the folder, or the store refuses access.
            RunError: the store fails.
        """
        remote = self.remote
        probe = f".probe-{self._own['token']}"
        entries = remote.entries()
        last = last_session(remote, entries)
        if last is None:
            remote.put(probe, b"")  # fails unless this process may write
            remote.remove(probe)
        elif not last.get("ended") and not self._is_dead(last):
            self._wait(last, probe)
        self._own["after"] = written_by(last or {})
        self._number = (last or {"number": 0})["number"] + 1
        name = self._name(self._number)
        if last is not None and is_last_here(mirror, last):
            # `is_last_here` must stay true if this process dies before the end
            self._keep(mirror, False, token=written_by(last), claims=self._own["token"])
        text = json.dumps(self._own).encode()
        try:
            remote.put(name, text, new=True)
        except FileExistsError:
            now = last_session(remote, remote.entries()) or {}
            if now.get("token") != self._own["token"]:  # otherwise, an attempt that seemed to fail made the object
                raise UserError(self._in_use(now)) from None
        self._beats.start()
        try:
            with contextlib.suppress(FileExistsError):
                remote.put(name, text, new=True)
                self._report(
                    f"{remote.url}: the store overwrites an object where it should refuse to (If-None-Match is "
                    f"ignored). It does not keep apart two runs that start at the same time: start only one."
                )
            for old in entries:
                if old.startswith(f"{SESSIONS}/") and old != name:
                    remote.remove(old)
            make_folder(mirror)
            self.fetched = refresh(mirror, last or {})
            self._keep(mirror, False)
        except BaseException:
            self._leave()
            raise

    def _wait(self, last: dict[str, Any], probe: str) -> None:
        """Wait until a session's last sign of life is older than STALE_SECONDS; raise UserError if the session gives
        another one first, or another process claims the folder."""
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
        """Whether the process of a session ran on this machine and has ended."""
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

    def may_write(self, counts: bool) -> bool:
        """Return whether the folder still belongs to this session. `Uploads` asks before each change of the folder.

        Args:
            counts: whether readers see the change; if so, the session first records that it has written.

        Raises:
            UserError, RunError: the store refuses access, or fails.
        """
        if counts and self.taken_by is None and not self._own["wrote"]:
            self._put(wrote=True)
        return self.taken_by is None

    def _beat(self) -> None:
        """Rewrite the session's object every BEAT_SECONDS until the session ends. If another process has claimed the
        folder, set `taken_by` and return."""
        while not self._over.wait(BEAT_SECONDS):
            with contextlib.suppress(Exception):  # `Uploads` reports a store that fails
                newest = last_session(self.remote, self.remote.entries())
                if newest is not None and newest["number"] > self._number:
                    self.taken_by = _who(newest)
                    return
                self._put()

    def end(self, mirror: Path, uploaded: bool) -> None:
        """Record that the session has ended, and whether everything is uploaded."""
        with contextlib.suppress(OSError, RunError, UserError):
            self._keep(mirror, uploaded)
        self._leave()

    def _leave(self) -> None:
        """End the signs of life, and record in the store that the session has ended, unless the folder was taken."""
        self._over.set()
        self._beats.join()
        if self.taken_by is None:
            with contextlib.suppress(RunError, UserError):
                self._put(ended=True)

    def _put(self, **changes: bool) -> None:
        with self._lock:
            changed = self._own | changes
            self.remote.put(self._name(self._number), json.dumps(changed).encode())
            self._own = changed

    def _name(self, number: int) -> str:
        return f"{SESSIONS}/{number:08d}"

    def _keep(self, mirror: Path, uploaded: bool, **more: str) -> None:
        write_whole(mirror / OWN_SESSION, json.dumps({**self._own, "uploaded": uploaded, **more}), private=True)


def _machine() -> str | None:
    """Return an id of the machine's current boot and this process's PID namespace; None if unknown."""
    with contextlib.suppress(OSError, UserError):
        boot = read_regular(Path("/proc/sys/kernel/random/boot_id"), 100).decode().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return None


def _who(session: dict[str, Any]) -> str:
    """Describe a session's process for a message; the store's text is untrusted, so it is escaped and cut."""
    return f"process {str(session.get('process'))[:20]!a} on {str(session.get('host'))[:100]!a}"
