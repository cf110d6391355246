"""Writes checkpoints, in a thread during training, and deletes old ones.

Rank 0 makes the files, all ranks write their parts of the tensors into them at the same time, and rank 0 adds the state
and the manifest. The files are the same on any number of ranks.

The header of a safetensors file determines the position of every element, so that ranks need not send each other
tensors. `torch.distributed.checkpoint` would write metadata that can run code when read, or a file for each rank. Every
reader would have to combine these files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gptworks.checkpoint import FORMAT, Checkpoint, all_checkpoints, remove_checkpoint
from gptworks.errors import RunError
from gptworks.files import (
    Stamp,
    new_folder,
    open_new,
    open_to_change,
    remove_tree,
    sealed_json,
    sha256_file,
    stamp,
    sync,
    why_not_written,
    write_at,
    write_whole,
)
from gptworks.tensors import DTYPES
from gptworks.training.distributed.writers import ONE_WRITER, Writers


class TensorPart(NamedTuple):
    """The part of a tensor that a rank writes."""

    shape: tuple[int, ...]
    """The shape of the complete tensor."""
    place: tuple[slice, ...]
    """The part's position in the tensor: one slice for each dimension."""
    values: Tensor
    """The elements; on the meta device if another rank writes the complete tensor."""

    @classmethod
    def whole(cls, tensor: Tensor) -> "TensorPart":
        """Return a complete tensor as a part."""
        return cls(tuple(tensor.shape), tuple(slice(0, n) for n in tensor.shape), tensor)

    def copied(self) -> "TensorPart":
        """Return the part with a copy of its elements on the CPU; if they are on the meta device, the part itself."""
        return self if self.values.is_meta else self._replace(values=self.values.detach().to("cpu", copy=True))


Files = Mapping[str, Mapping[str, TensorPart]]
"""A rank's parts of tensors, by file name and tensor name."""


def save_checkpoint(
    run_dir: Path,
    step: int,
    model_tensors: Mapping[str, Tensor | TensorPart],
    optimizer_tensors: Mapping[str, Tensor | TensorPart] | None,
    state: dict[str, Any],
    writers: Writers = ONE_WRITER,
) -> Checkpoint:
    """Write a checkpoint, completely or not at all, and return it.

    Its folder is `checkpoints/step-<step>`, or `checkpoints/weights-<step>` without `optimizer_tensors`.

    Args:
        model_tensors, optimizer_tensors: this rank's parts, on the CPU or meta device. Rank 0 passes a part of
            every tensor.
        writers: the ranks that write. Each rank calls this function.

    Raises:
        RunError: on rank 0, the checkpoint could not be written. Earlier checkpoints are unchanged, and no partial one
            remains.
    """
    parent = run_dir / "checkpoints"
    final = parent / f"{'weights' if optimizer_tensors is None else 'step'}-{step:06d}"
    files = {
        f"{kind}.safetensors": {
            name: t if isinstance(t, TensorPart) else TensorPart.whole(t) for name, t in tensors.items()
        }
        for kind, tensors in (("model", model_tensors), ("optimizer", optimizer_tensors))
        if tensors is not None
    }
    if not writers.is_rank_zero:
        _add_parts(parent, files, writers)
        return Checkpoint(final)
    shared = False
    try:
        with new_folder(final, inside=run_dir) as aside:
            for name, parts in files.items():
                _make_file(aside / name, parts)
            writers.share(aside.name)
            shared = True
            n_bytes = sum(_write_parts(aside / name, parts) for name, parts in files.items())
            _check(writers.collect(str(n_bytes)), files)
            write_whole(aside / "state.json", json.dumps(state, indent=2), new=True)
            described = {
                path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
                for path in sorted(aside.iterdir())
            }
            write_whole(
                aside / "manifest.json", sealed_json({"format": FORMAT, "step": step, "files": described}), new=True
            )
            if final.exists():  # damaged: the run was resumed from an older checkpoint
                remove_checkpoint(Checkpoint(final))
    except (OSError, RunError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        reason = why_not_written(cause, parent, _n_bytes(files))
        kept = ", ".join(checkpoint.folder.name for checkpoint in all_checkpoints(run_dir)) or "none"
        raise RunError(
            f"checkpoint at step {step} could not be written to {parent}: {reason}. Earlier ones kept: {kept}."
        ) from error
    finally:
        if not shared:
            writers.share("")
    return Checkpoint(final)


def _add_parts(parent: Path, files: Files, writers: Writers) -> None:
    """Write this rank's parts into the files that rank 0 has made; report their size, or an error, to rank 0."""
    folder = writers.share()
    if not folder:  # rank 0 could not make the folder or its files
        return
    report = f"rank {writers.rank} failed"
    try:
        n_bytes = 0
        for name, parts in files.items():
            n_bytes += _write_parts(parent / folder / name, parts)
            sync(parent / folder / name)  # rank 0 may be on another machine
        report = str(n_bytes)
    except OSError as error:
        report = f"rank {writers.rank}: {why_not_written(error, parent, None)}"
    except Exception as error:
        report = f"rank {writers.rank}: {error or type(error).__name__}"
        raise
    finally:
        writers.collect(report)


def _check(reports: list[str], files: Files) -> None:
    """Raise RunError if a rank reports an error, or the reported bytes do not add up to the complete tensors."""
    for report in reports:
        if not report.isdigit():
            raise RunError(report)
    if (found := sum(map(int, reports))) != (due := _n_bytes(files)):
        raise RunError(f"the ranks have written {found:,} bytes of tensors, which have {due:,}")


def _n_bytes(files: Files) -> int:
    """Return the total bytes of the complete tensors."""
    return sum(prod(part.shape) * part.values.itemsize for parts in files.values() for part in parts.values())


def _make_file(path: Path, parts: Mapping[str, TensorPart]) -> None:
    """Make a safetensors file with space for the complete tensors, filled with zeros; raise OSError if that fails."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    dtypes, at = {dtype: name for name, dtype in DTYPES.items()}, 0
    for name, (shape, _, values) in sorted(parts.items(), key=lambda item: (-item[1].values.itemsize, item[0])):
        end = at + prod(shape) * values.itemsize
        header[name] = {"dtype": dtypes[values.dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns all tensors: they are sorted by element size above
    with open_new(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def _write_parts(path: Path, parts: Mapping[str, TensorPart]) -> int:
    """Write parts of tensors to a file made by `_make_file`, or raise OSError; return the number of bytes."""
    written = 0
    if not parts:
        return written
    with open_to_change(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n_bytes))
        for name, part in parts.items():
            if part.values.is_meta:
                continue
            values = part.values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            begin, itemsize, at = 8 + n_bytes + header[name]["data_offsets"][0], part.values.itemsize, 0
            for first, n_elements in _runs(part):
                end = at + n_elements * itemsize
                write_at(file.fileno(), values[at:end], begin + first * itemsize)
                at = end
            written += at
    return written


def _runs(part: TensorPart) -> Iterator[tuple[int, int]]:
    """Yield the contiguous ranges of the complete tensor that make up the part: the first element's index, and the
    number of elements."""
    sizes = [one.stop - one.start for one in part.place]
    if prod(sizes) == 0:
        return
    strides = [prod(part.shape[i + 1 :]) for i in range(len(sizes))]
    begin = sum(one.start * stride for one, stride in zip(part.place, strides, strict=True))
    divided = [i for i, size in enumerate(sizes) if size != part.shape[i]]
    inner = divided[-1] if divided else 0  # the part has all indices of later dimensions
    for indices in product(*map(range, sizes[:inner])):
        yield begin + sum(i * stride for i, stride in zip(indices, strides, strict=False)), prod(sizes[inner:])


class CheckpointWriter:
    """Saves checkpoints during training. Each rank copies its parts of the tensors, and a thread writes the copies.

    At most one save is in flight. The next call of a method, or the end of the `with`, raises a failed save's error.
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._writers.give_up()
        self._pool.shutdown()
        if error is None:  # otherwise the caller gets `error`
            self.wait()

    def save(self, step: int, tensors: Mapping[str, Iterable[tuple[str, TensorPart]]], state: dict[str, Any]) -> None:
        """Wait for the earlier save; then copy the parts, and begin to write the copies. All ranks call this.

        Args:
            tensors: this rank's parts and their names, under `model` and, unless only weights are saved, `optimizer`.

        Raises:
            RunError: the earlier save failed.
        """
        self.wait()
        copies = {kind: {name: part.copied() for name, part in named} for kind, named in tensors.items()}
        copied = [part.values for parts in copies.values() for part in parts.values() if not part.values.is_meta]
        self.copied_bytes = max(self.copied_bytes, sum(values.nbytes for values in copied))
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
        """Wait for the save in flight, if any; raise RunError if this save failed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()


Signature = tuple[tuple[str, Stamp | None], ...]
"""Name of each file of a checkpoint, with its `Stamp`."""


def remove_old(run_dir: Path, keep: int, keep_every: int = 0, known: set[Signature] | None = None) -> None:
    """Delete old checkpoints, and leftovers of interrupted writes and deletions.

    A full checkpoint has the optimizer's state, so that a run can resume from it. These are kept:

    - the newest `keep` full checkpoints that are undamaged and were not saved after a skipped step
    - in addition, the newest full checkpoint even if saved after a skipped step, and each damaged full checkpoint newer
      than the oldest of those `keep`
    - the best checkpoint named in each undamaged checkpoint above
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
    """Delete the checkpoints after a step; with `weights_only`, only those without optimizer state. Raise RunError if
    that fails. The newest checkpoint is deleted first, so that an interrupted deletion can be repeated."""
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
    """Return the name and the stamp of each of the checkpoint's files."""
    return tuple((path.name, stamp(path)) for path in sorted(checkpoint.folder.iterdir()))
