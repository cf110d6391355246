"""A checkpoint that rank 0 chooses and that every rank uses: a folder may change between two looks at it."""

from collections.abc import Callable
from pathlib import Path

from gptworks.checkpoint import Checkpoint
from gptworks.errors import UserError
from gptworks.train.distributed.ranks import Ranks


def agreed_checkpoint(ranks: Ranks, run_dir: Path, choose: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """What `choose` returns on rank 0, on every rank. The other ranks find it by its name and the sum of its manifest.

    Raises:
        UserError: a rank does not see that checkpoint in `run_dir`; on all ranks.
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
    blind = ranks.all_reduce([float(rank == ranks.rank and not sees) for rank in range(ranks.size)])
    if any(blind):
        names = ", ".join(f"rank {rank}" for rank, missing in enumerate(blind) if missing)

        def refuse() -> None:
            raise UserError(
                f"{names} of {ranks.size} does not see {checkpoint.folder} as rank 0 does: the folder must lie on a "
                f"disk that all machines share, and nothing may delete checkpoints from it meanwhile."
            )

        ranks.from_rank_zero(refuse)
    return checkpoint
