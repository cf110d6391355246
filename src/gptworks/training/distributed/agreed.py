"""Checks that all ranks see the same run folder, and chooses one checkpoint for all ranks. Rank 0 chooses the
checkpoint, because the folder may change while ranks look."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from gptworks.checkpoint import Checkpoint
from gptworks.errors import RunError, UserError
from gptworks.files import open_to_change, read_regular, url_of, why_not_written, write_at, write_whole
from gptworks.files.fetch import CACHE
from gptworks.training.distributed.ranks import Ranks

SHARED = ".shared"
"""Name of a temporary file in the run folder. Rank 0 writes random characters to it; each rank must find them, and then
writes a byte to the file."""

SHARED_SECONDS = 5.0


def agreed_checkpoint(ranks: Ranks, run_dir: Path, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Return, on every rank, the checkpoint that `choose` returns on rank 0, or None.

    Each rank compares the sha256 of the checkpoint's manifest with rank 0's.

    Raises:
        UserError: a rank does not see the checkpoint in `run_dir`; raised on all ranks.
    """

    def chosen() -> tuple[str, str | None] | None:
        checkpoint = choose()
        return None if checkpoint is None else (checkpoint.folder.name, checkpoint.manifest_sha256)

    found = ranks.from_rank_zero(chosen)
    if found is None:
        return None
    name, sha256 = found
    checkpoint = Checkpoint(run_dir / "checkpoints" / name)
    sees = checkpoint.manifest_sha256 == sha256
    refuse_blind(ranks, sees, f"{checkpoint.folder} as rank 0 does", "nothing may delete checkpoints from it meanwhile")
    return checkpoint


def check_shared(ranks: Ranks, run_dir: Path) -> None:
    """Check that every rank sees the run folder and can write its part of a file there, as a save does.

    Rank 0 makes a file of random characters, each rank writes one byte to it, and rank 0 checks that all bytes have
    arrived. A network file system has up to `SHARED_SECONDS` to show the file, and as long again to show the bytes.

    Raises:
        UserError: a rank does not find the file, or rank 0 does not find a rank's byte; raised on all ranks.
        RunError: a rank cannot write to the folder; raised on all ranks.
    """
    if ranks.size == 1:
        return
    file = run_dir / SHARED

    def written() -> str:
        token = secrets.token_hex(16)
        write_whole(file, token + "-" * ranks.size)
        return token

    token = ranks.from_rank_zero(written).encode()
    with ranks.busy():
        sees = _waited(lambda: _read(file, ranks.size).startswith(token))
    why = ""
    if sees:
        try:
            with open_to_change(file, inside=run_dir) as opened:
                write_at(opened.fileno(), b"+", len(token) + ranks.rank)
                os.fsync(opened.fileno())
        except (OSError, UserError) as error:
            why = f"rank {ranks.rank}: {why_not_written(error, run_dir, None)}"
    try:
        advice = "" if url_of(run_dir) is None else f", or set {CACHE} to a folder that they share"
        refuse_blind(
            ranks, sees, f"the run folder {run_dir} as rank 0 does", f"run_dir must lead to it on each of them{advice}"
        )
        if ranks.all_reduce([float(bool(why))])[0]:
            raise RunError(
                f"{why or 'another rank'} cannot write to the run folder {run_dir}: each rank writes its part of a "
                f"checkpoint. Give its user the permission."
            )
        with ranks.busy():
            arrived = not ranks.is_rank_zero or _waited(lambda: _read(file, ranks.size) == token + b"+" * ranks.size)
        refuse_blind(ranks, arrived, f"in {file} what the others wrote", "it must show each rank's writes to all")
    finally:
        if ranks.is_rank_zero:
            file.unlink(missing_ok=True)


def _waited(holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds, for up to `SHARED_SECONDS`; return whether it did."""
    until = time.monotonic() + SHARED_SECONDS
    while not (does := holds()) and time.monotonic() < until:
        time.sleep(0.1)
    return does


def _read(file: Path, n_ranks: int) -> bytes:
    try:
        return read_regular(file, 1024 + n_ranks)
    except (OSError, UserError):
        return b""


def refuse_blind(ranks: Ranks, sees: bool, what: str, rule: str) -> None:
    """Raise an error on all ranks if `sees` is false on any rank; the message names the ranks where it is false.

    Args:
        what: the file or folder that a rank may fail to see, for the message.
        rule: a condition that the message states in addition to the shared disk.

    Raises:
        UserError: `sees` is false on a rank.
    """
    blind = ranks.all_reduce([float(rank == ranks.rank and not sees) for rank in range(ranks.size)])
    if not any(blind):
        return
    names = ", ".join(f"rank {rank}" for rank, missing in enumerate(blind) if missing)

    def refuse() -> None:
        raise UserError(
            f"{names} of {ranks.size} does not see {what}: the folder must lie on a disk that all machines share, and "
            f"{rule}."
        )

    ranks.from_rank_zero(refuse)
