"""Uploads the mirror of a remote folder while a run trains in the mirror.

A checkpoint's manifest is uploaded last, after the records up to its step, and deleted first: a reader of the store
finds complete checkpoints only, with the metrics that led to them. A failed upload is tried again, with growing random
waits, while training continues.
"""

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gptworks.checkpoint import Report
from gptworks.errors import RunError, UserError
from gptworks.files import SUMS_FILE, Stamp, copy_file, read_regular, stamp
from gptworks.files.mirror import CHECKPOINTS, SEAL
from gptworks.files.remote import Remote

_POLL_SECONDS, _SMALL_SECONDS = 0.5, 60.0
"""Seconds between two checks for new checkpoints, and between two uploads of all other files."""
_MOST_WAIT_SECONDS = 60.0
END_SECONDS = 600.0
"""Seconds for which failed uploads are tried again at the end of a run without an error."""
_WHOLE_BYTES = 1 << 26


class Uploads:
    """Sends new and changed files of a mirror to its remote folder, and deletes checkpoints there that the mirror no
    longer has."""

    def __init__(
        self,
        remote: Remote,
        mirror: Path,
        report: Report,
        may_write: Callable[[bool], bool] = lambda counts: True,
        fetched: bool = False,
    ) -> None:
        """
        Args:
            may_write: returns whether this process may change the store. Called before each change; the argument is
                whether a reader of the folder sees the change.
            fetched: whether the mirror's files, except tensors of checkpoints, equal the store's.
        """
        self._remote, self._mirror, self._report, self._may_write = remote, mirror, report, may_write
        self.over = threading.Event()
        self.is_complete = False
        self._names = set(remote.entries())
        """Names of the objects in the store."""
        self._sent: dict[str, Stamp | None] = {}
        """Files whose contents the store has: stamps of manifests and of files outside checkpoints, by name."""
        self._sent_at = -float("inf")
        self._n_failed = 0
        for folder in self._checkpoints():  # the store may have some from an earlier session
            name = f"{CHECKPOINTS}/{folder}/{SEAL}"
            with contextlib.suppress(FileNotFoundError, UserError):
                if name in self._names and remote.read(name, 1 << 24) == read_regular(
                    mirror / name, 1 << 24, inside=mirror
                ):
                    self._sent[name] = stamp(mirror / name)
        if fetched:
            self._sent |= {name: stamp(mirror / name) for name in self._small() if name in self._names}

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
        """Upload all that is left, unless another process has taken the folder.

        Args:
            failed: whether the run ends with an error; if so, try once, and only report files that are left.

        Raises:
            RunError: something could not be uploaded, and the run ends without an error.
        """
        until, n = time.monotonic() + END_SECONDS, 0
        while True:
            try:
                self._upload(True)
                if missing := self._missing():
                    raise RunError(f"the store has not taken {missing[0]}")
                self.is_complete = True
                return
            except (RunError, UserError, OSError) as error:
                if not self._may_write(False):
                    return
                left = self._missing()
                what = (
                    f"{len(left):,} files of the run are not in {self._remote.url}: {', '.join(left[:5])}"
                    f"{', …' if len(left) > 5 else ''} ({error}) They are in {self._mirror}; the same command with "
                    f"--resume on this machine uploads them."
                )
                if failed:
                    self._report(what)
                    return
                if time.monotonic() > until:
                    raise RunError(what) from error
                if not n:
                    self._report(f"trying for up to {END_SECONDS:g} s to upload {len(left):,} files: {error}")
                time.sleep(min(2.0**n, _MOST_WAIT_SECONDS) * random.uniform(0.5, 1.0))
                n += 1

    def _missing(self) -> list[str]:
        found = [f"{CHECKPOINTS}/{folder}/{SEAL}" for folder in self._checkpoints()]
        return [name.removesuffix(f"/{SEAL}") for name in [*found, *self._small()] if not self._is_sent(name)]

    def _upload(self, small: bool) -> None:
        """Upload new checkpoints, newest first, and delete checkpoints from the store that training has deleted, except
        the result of `_resumable`. With `small`, also upload all other changed files. Raise RunError, UserError or
        OSError if anything fails."""
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
        """Return the name of the store's newest checkpoint with optimizer state that is not newer than the newest such
        checkpoint of the mirror; None if there is none."""
        newest = next((_order(folder) for folder in here if folder.startswith("step-")), None)
        there = (name.split("/")[1] for name in self._names if name.startswith(f"{CHECKPOINTS}/step-"))
        usable = [each for each in there if f"{CHECKPOINTS}/{each}/{SEAL}" in self._names]
        return None if newest is None else max((e for e in usable if _order(e) <= newest), key=_order, default=None)

    def _upload_checkpoint(self, folder: str) -> None:
        path, below = self._mirror / CHECKPOINTS / folder, f"{CHECKPOINTS}/{folder}"
        try:
            now = stamp(path / SEAL)
            if now is None:
                raise FileNotFoundError(path / SEAL)
            if f"{below}/{SEAL}" in self._names:  # another checkpoint of this step: no reader may see it half replaced
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
        self._sent[f"{below}/{SEAL}"] = now

    def _upload_small(self) -> None:
        for name in self._small():
            path = self._mirror / name
            with contextlib.suppress(FileNotFoundError):
                now = stamp(path)
                if now is None or self._sent.get(name) == now:
                    continue
                if now[1] <= _WHOLE_BYTES:
                    self._writing().put(name, read_regular(path, 2 * _WHOLE_BYTES, inside=self._mirror))
                else:  # a large file may grow while it is sent
                    copy = path.with_name(f".sent-{path.name}")
                    copy.unlink(missing_ok=True)
                    copy_file(path, copy)
                    self._writing().upload(name, copy)
                    copy.unlink()
                self._names.add(name)
                self._sent[name] = now
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
        """Return the store for a change; raise RunError if another process has taken the folder. `counts`: whether a
        reader of the folder sees the change."""
        if not self._may_write(counts):
            raise RunError(f"{self._remote.url} was taken by another process")
        return self._remote

    def _is_sent(self, name: str) -> bool:
        now = stamp(self._mirror / name)
        return now is not None and self._sent.get(name) == now

    def _checkpoints(self) -> list[str]:
        """Return the names of the mirror's complete checkpoints, newest first."""
        found = (self._mirror / CHECKPOINTS).glob(f"[!.]*/{SEAL}")
        names = [path.parent.name for path in found]
        return sorted(names, key=lambda name: (_order(name), name), reverse=True)

    def _small(self) -> list[str]:
        """Return the names of all files outside checkpoints, except hidden ones and links, in the order of their
        upload."""
        found: list[Path] = []
        for parent, folders, files in os.walk(self._mirror):
            above = Path(parent).relative_to(self._mirror)
            folders[:] = [
                each for each in folders if not each.startswith(".") and (above / each).as_posix() != CHECKPOINTS
            ]
            paths = [above / each for each in files if not each.startswith(".")]
            found += [path for path in paths if not (self._mirror / path).is_symlink()]
        # The recipe is first: without it, a folder is not a run. Checksums follow the files that they list.
        order = sorted(found, key=lambda path: (path.name != "recipe.yaml", path.parent, path.name == SUMS_FILE, path))
        return [path.as_posix() for path in order]


def _order(folder: str) -> str:
    """Return a key that sorts names of checkpoints by step."""
    return folder.rpartition("-")[2].zfill(20)
