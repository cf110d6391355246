"""The checkpoints that a run keeps, and the thread that writes them during training."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gptworks.checkpoint import Checkpoint, all_checkpoints, remove_checkpoint
from gptworks.errors import RunError
from gptworks.files import remove_tree
from gptworks.training.checkpoint_files import TensorPart, save_checkpoint
from gptworks.training.distributed.writers import ONE_WRITER, Writers

Signature = tuple[tuple[str, int, int, int], ...]


def remove_old(run_dir: Path, keep: int, keep_every: int = 0, known: set[Signature] | None = None) -> None:
    """Delete old checkpoints, and leftovers of interrupted writes and deletions.

    A full checkpoint has the optimizer's state, so that a run can resume from it. These are kept:

    - the newest `keep` undamaged full checkpoints, and the best checkpoint that each of them names
    - without counting towards `keep`, because a run never rolls back to them: the newest full checkpoint if it was
      saved after a skipped step, and damaged full ones newer than the last counted one
    - with `keep_every`, full checkpoints at multiples of `keep_every` steps, and the weights of step 0
    - the newest checkpoint with only weights, if newer than every undamaged full one

    Args:
        known: signatures of checkpoints that matched their manifests. These checkpoints are not read again while
            unchanged. Checkpoints found to match now are added.

    Raises:
        RunError: a deletion fails.
    """
    known = set() if known is None else known
    found = all_checkpoints(run_dir)
    available, weights = ([each for each in found if each.weights_only == kind] for kind in (False, True))
    kept, whole, n_counted = {0} if keep_every else set[int](), set[int](), 0
    for checkpoint in available:
        if keep_every and checkpoint.step % keep_every == 0:
            kept.add(checkpoint.step)
        if n_counted == keep:
            continue
        if not _is_whole(checkpoint, known):
            kept.add(checkpoint.step)
            continue
        whole.add(checkpoint.step)
        state = checkpoint.state()
        if not state.get("skipped_in_a_row") or checkpoint is available[0]:
            kept |= {checkpoint.step, checkpoint.best_step or checkpoint.step}
        n_counted += not state.get("skipped_in_a_row")
    kept |= {each.step for each in weights[:1] if each.step > max(whole, default=0)}
    try:
        for checkpoint in found:
            if checkpoint.step not in kept or (checkpoint.weights_only and checkpoint.step in whole):
                remove_checkpoint(checkpoint)
        for leftover in (run_dir / "checkpoints").glob(".*ing-*-*"):
            remove_tree(leftover)
    except OSError as error:
        raise RunError(f"old checkpoints in {run_dir} could not be deleted: {error}.") from error


def remove_newer(run_dir: Path, step: int, *, weights_only: bool = False) -> None:
    """Delete the checkpoints after a step, the newest first, so that an interrupted deletion can be repeated.

    Args:
        weights_only: delete only those without optimizer state.

    Raises:
        RunError: a deletion fails.
    """
    try:
        for checkpoint in all_checkpoints(run_dir):
            if checkpoint.step > step and (checkpoint.weights_only or not weights_only):
                remove_checkpoint(checkpoint)
    except OSError as error:
        raise RunError(f"checkpoints after step {step} in {run_dir} could not be deleted: {error}.") from error


def _is_whole(checkpoint: Checkpoint, known: set[Signature]) -> bool:
    signature = _signature(checkpoint)
    if signature not in known and checkpoint.is_whole:
        known.add(signature)
    return signature in known


def _signature(checkpoint: Checkpoint) -> Signature:
    """Return name, bytes, modification time and inode of each file."""
    stats = [(path.name, path.stat()) for path in sorted(checkpoint.folder.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


class CheckpointWriter:
    """Saves checkpoints during training. Each rank copies its parts of the tensors, and its thread writes the copies.

    At most one save is in flight. The next call, or the end of the `with`, raises the error of a failed save.
    """

    def __init__(self, run_dir: Path, keep: int, keep_every: int = 0, writers: Writers = ONE_WRITER) -> None:
        self.run_dir, self.keep, self.keep_every, self._writers = run_dir, keep, keep_every, writers
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        self.copied_bytes = 0
        """Bytes of this rank's largest copy so far."""
        self._known: set[Signature] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._writers.give_up()
        self._pool.shutdown()
        if error is None:  # otherwise the caller gets `error`
            self.wait()

    def save(self, step: int, tensors: Mapping[str, Iterable[tuple[str, TensorPart]]], state: dict[str, Any]) -> None:
        """Wait for the earlier save, copy the parts, and begin to write them. All ranks call this.

        Args:
            tensors: this rank's parts of the `model` and, unless only weights are saved, of the `optimizer`.

        Raises:
            RunError: the earlier save failed.
        """
        self.wait()
        copies = {kind: {name: part.copied() for name, part in named} for kind, named in tensors.items()}
        copied_bytes = sum(part.copied_bytes for parts in copies.values() for part in parts.values())
        self.copied_bytes = max(self.copied_bytes, copied_bytes)
        self._in_flight = self._pool.submit(self._write, step, copies, state)

    def _write(self, step: int, parts: Mapping[str, Mapping[str, TensorPart]], state: dict[str, Any]) -> None:
        saved = save_checkpoint(self.run_dir, step, parts["model"], parts.get("optimizer"), state, self._writers)
        if not self._writers.is_rank_zero:
            return
        self._known.add(_signature(saved))  # no need to verify: its manifest is new
        remove_old(self.run_dir, self.keep, self.keep_every, self._known)

    def check(self) -> None:
        """Raise the error of a save that has failed."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight.

        Raises:
            RunError: the save failed.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()
