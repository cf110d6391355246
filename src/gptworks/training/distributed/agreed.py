"""Checks that all ranks see the same run folder, and the choice of one checkpoint for all. Rank 0 chooses it, since the
folder may change while ranks look."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from gptworks.checkpoint import Checkpoint
from gptworks.errors import UserError
from gptworks.files import read_regular, write_whole
from gptworks.training.distributed.ranks import Ranks

SHARED = ".shared"
"""Name of a temporary file in the run folder: rank 0 writes random characters to it, which all ranks must find."""

SHARED_SECONDS = 5.0


def agreed_checkpoint(ranks: Ranks, run_dir: Path, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Return, on every rank, the checkpoint that `choose` returns on rank 0; ranks compare the sha256 of its manifest.

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
    """Check that every rank sees the run folder: rank 0 writes random characters to a file, and the others look for it
    for up to `SHARED_SECONDS`, since a network file system may show a new file late.

    Raises:
        UserError: a rank does not find the file; raised on all ranks.
        RunError: rank 0 cannot write to the folder.
    """
    if ranks.size == 1:
        return
    file = run_dir / SHARED

    def written() -> str:
        token = secrets.token_hex(16)
        write_whole(file, token)
        return token

    token, until = ranks.from_rank_zero(written), time.monotonic() + SHARED_SECONDS
    with ranks.busy():
        while not (sees := _holds(file, token)) and time.monotonic() < until:
            time.sleep(0.1)
    try:
        why = f"the run folder {run_dir} as rank 0 does"
        refuse_blind(ranks, sees, why, "run_dir must lead to it on each of them")
    finally:
        if ranks.is_rank_zero:
            file.unlink(missing_ok=True)


def _holds(file: Path, text: str) -> bool:
    try:
        return read_regular(file, 1024).decode("ascii", "replace") == text
    except (OSError, UserError):
        return False


def refuse_blind(ranks: Ranks, sees: bool, what: str, rule: str) -> None:
    """Raise an error on all ranks if `sees` is false on any rank; the message names the ranks where it is false.

    Args:
        what: the file or folder that a rank may fail to see, for the message.
        rule: what must hold, besides a shared disk, for the message.

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
