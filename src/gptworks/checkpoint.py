"""Crash-safe checkpoints: written to a temporary folder, flushed to disk, described by a manifest, then renamed.

    checkpoints/step-000500/    a checkpoint from which training can resume
        model.safetensors       the weights
        optimizer.safetensors   `parameter/key` → tensor
        state.json              counters of the run
        manifest.json           sizes and checksums of these three files and its own checksum; written last
    checkpoints/weights-000450/ only weights: the run's best so far, at a step between two checkpoints, or the initial
                                weights (step 0)
        model.safetensors, state.json, manifest.json

A folder with the final name is complete: a crash at any time leaves either the complete folder or none. The manifest
reveals later damage.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks.choices import LoadedWeights, Weights
from gptworks.config import LoRAConfig, ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.files import (
    check_inside,
    fetch_missing,
    fetched_path,
    open_regular,
    read_regular,
    remove_tree,
    sha256_file,
    sync,
    unsealed_json,
)
from gptworks.json_files import mapping_of
from gptworks.model.gpt import GPT
from gptworks.model.lora import add_lora, has_adapter, remove_lora
from gptworks.model.shapes import ShapesOnly
from gptworks.quantize.convert import kinds_to_pack, packed_kinds, read_packed, unpack_all
from gptworks.quantize.linear import QuantizedGPT
from gptworks.recipe import load_recipe, not_a_run
from gptworks.tensors import Expected, Stored, TensorFile, Wanted, read_tensors, stored_tensors
from gptworks.units import whole_number

FORMAT = 2
MAX_JSON_BYTES = 1 << 24
"""Size limit of a manifest or state file; usual ones have a few thousand bytes."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, whose name contains its step."""

    folder: Path

    @property
    def run_dir(self) -> Path:
        """The run's folder. Links inside it may not lead outside."""
        return self.folder.parents[1]

    @property
    def step(self) -> int:
        """Number of optimizer steps done before the checkpoint."""
        return int(self.folder.name.rpartition("-")[2])

    @property
    def weights_only(self) -> bool:
        """Whether the checkpoint lacks the optimizer's state, so that training cannot resume from it."""
        return self.folder.name.startswith("weights-")

    @property
    def is_start(self) -> bool:
        """Whether the checkpoint has the run's initial weights. It can be chosen as step 0, not as best or last."""
        return self.weights_only and self.step == 0

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the checkpoint's manifest describes."""
        return ("model.safetensors", *(() if self.weights_only else ("optimizer.safetensors",)), "state.json")

    def verify(self, *names: str) -> None:
        """Compare all files, or only the named ones, with the manifest; fetch files that the mirror of a remote run
        lacks. Raises a UserError if a file is missing, truncated or changed, or the manifest is missing, damaged or in
        another format."""
        described = self._described_files()
        for name in names or described:
            path, entry = self.folder / name, described[name]
            fetch_missing(path, entry["bytes"], entry["sha256"])
            try:
                with open_regular(path, inside=self.run_dir) as file:
                    n_bytes = os.fstat(file.fileno()).st_size
                sha256 = sha256_file(path, inside=self.run_dir) if n_bytes == entry["bytes"] else ""
            except (FileNotFoundError, NotADirectoryError):
                raise UserError(f"checkpoint {self.folder} is damaged: {path} is missing.") from None
            except UserError as error:  # the path is a folder, a FIFO or a link that leads outside
                raise UserError(f"checkpoint {self.folder} is damaged: {path} is missing. {error}") from None
            if n_bytes != entry["bytes"]:
                raise UserError(f"{path} is damaged: {n_bytes:,} bytes, its manifest says {entry['bytes']:,}.")
            if sha256 != entry["sha256"]:
                raise UserError(f"{path} is damaged: its sha256 differs from the manifest's.")

    def _described_files(self) -> dict[str, dict[str, Any]]:
        """Return the size in bytes and the SHA-256 of each file, from the manifest."""
        manifest = self.folder / "manifest.json"
        try:
            tree = unsealed_json(read_regular(manifest, MAX_JSON_BYTES, inside=self.run_dir))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"checkpoint {self.folder} is damaged: {manifest} is missing.") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{manifest} is damaged: {error}.") from None
        if tree.get("format") != FORMAT:
            raise UserError(f"{manifest} has format {tree.get('format')} and this gptworks reads {FORMAT}.")
        files = tree.get("files")
        if not isinstance(files, dict) or set(files) != set(self.files):
            raise UserError(f"{manifest} is damaged: `files` must describe {', '.join(self.files)}.")
        for name, entry in files.items():
            if (
                not isinstance(entry, dict)
                or type(entry.get("bytes")) is not int
                or not isinstance(entry.get("sha256"), str)
            ):
                raise UserError(f"{manifest} is damaged: `{name}` must have `bytes`, a number, and `sha256`, a text.")
        return files

    @property
    def manifest_sha256(self) -> str | None:
        """SHA-256 of the manifest, which distinguishes checkpoints of the same step; None if it cannot be read."""
        path = self.folder / "manifest.json"
        try:
            return sha256_file(path, inside=self.run_dir, max_bytes=MAX_JSON_BYTES)
        except (OSError, UserError):
            return None

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the weights' file, from the manifest. Raises a UserError if the manifest is missing or damaged."""
        return str(self._described_files()["model.safetensors"]["sha256"])

    @property
    def is_whole(self) -> bool:
        """Whether every file agrees with the manifest."""
        try:
            self.verify()
        except UserError:
            return False
        return True

    def model_tensors(self, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """Read the weights by name; `read_tensors` checks them against `wanted`."""
        return read_tensors(self.folder / "model.safetensors", wanted, inside=self.run_dir)

    @property
    def is_quantized(self) -> bool:
        """Whether `gptworks quantize` made the checkpoint. False for a damaged file, and for an adapter on quantized
        matrices, since the adapter can be merged."""
        path = self.folder / "model.safetensors"
        try:
            if not path.exists():
                self.verify(path.name)  # fetches the file into the mirror of a remote run
            stored = stored_tensors(path, inside=self.run_dir)
        except UserError:
            return False
        return any(tensor.dtype != torch.float32 for tensor in stored.values()) and not has_adapter(stored)

    def optimizer_tensors(self, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """Read the optimizer's state by `parameter/key`; `read_tensors` checks it against `wanted`. Raises a UserError
        if the checkpoint has only weights, or for the reasons of `read_tensors`."""
        if self.weights_only:
            run = shlex.quote(str(self.run_dir))
            raise UserError(
                f"{self.folder} has weights only: training resumes from a checkpoint with the optimizer's state. "
                f"`gptworks train {run} --resume` takes the newest such checkpoint; "
                f"initialize_from={run} and another run_dir= start a new run from the best weights."
            )
        path = self.folder / "optimizer.safetensors"
        return read_tensors(path, wanted, inside=self.run_dir, owner="the run's optimizer")

    def state(self) -> dict[str, Any]:
        """Read the run's counters at this checkpoint from state.json.

        Raises:
            OSError: the file cannot be read. UserError: the file is not a JSON object.
        """
        path = self.folder / "state.json"
        try:
            return mapping_of(read_regular(path, MAX_JSON_BYTES, inside=self.run_dir))
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}. Restore it from a copy.") from None

    @property
    def best_step(self) -> int | None:
        """The run's step with the lowest validation loss so far, from state.json; None if the file states none."""
        try:
            step = self.state().get("best_step")
        except (OSError, UserError):
            return None
        return step if type(step) is int and step >= 0 else None


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint. A crash leaves the checkpoint complete, or under a name that gptworks ignores."""
    aside = checkpoint.folder.with_name(f".removing-{checkpoint.folder.name}")
    remove_tree(aside)
    checkpoint.folder.rename(aside)
    sync(aside.parent)
    remove_tree(aside)


def checkpoint_of_step(run_dir: Path, step: int) -> Checkpoint:
    """Return the checkpoint of a step, preferably one from which training can resume, otherwise one with only
    weights. If there is neither, the folder of the returned checkpoint does not exist."""
    there = (checkpoint for checkpoint in all_checkpoints(run_dir) if checkpoint.step == step)
    return next(there, Checkpoint(run_dir / "checkpoints" / f"step-{step:06d}"))


def all_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints of both kinds, newest first; for the same step, the one with only weights comes last."""
    paths = [path for path in (run_dir / "checkpoints").glob("*-*") if re.fullmatch(r"(step|weights)-\d+", path.name)]
    return sorted(map(Checkpoint, paths), key=lambda each: (-each.step, each.weights_only))


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints from which training can resume, newest first."""
    return [checkpoint for checkpoint in all_checkpoints(run_dir) if not checkpoint.weights_only]


def newest_verified(
    run_dir: Path, report: Report = lambda _: None, *, up_to_step: int | None = None
) -> Checkpoint | None:
    """Return the newest intact checkpoint from which training can resume, of step `up_to_step` at most; None if there
    is none. Damaged checkpoints are reported."""
    return _first_whole((c for c in checkpoints(run_dir) if up_to_step is None or c.step <= up_to_step), report)


def _first_whole(found: Iterable[Checkpoint], report: Report) -> Checkpoint | None:
    for checkpoint in found:
        try:
            checkpoint.verify()
        except UserError as damage:
            report(f"{damage} Using another that is whole.")
        else:
            return checkpoint
    return None


def choose_checkpoint(run_dir: Path, which: str = "best", report: Report = lambda _: None) -> Checkpoint:
    """Verify and return a run's `best` or `last` checkpoint, or the checkpoint of a step. `last` is the newest one,
    with or without the optimizer's state; the initial weights are neither best nor last.

    If `best` or `last` is damaged, this is reported, and another intact checkpoint is returned: for `last` the newest,
    for `best` the one that was the best before, or else the newest.

    Raises:
        UserError: the folder is not a run, has no checkpoint or lacks the step, or the step's checkpoint or all
            checkpoints are damaged.
    """
    if not (run_dir / "recipe.yaml").exists():
        raise not_a_run(run_dir)
    found = all_checkpoints(run_dir)
    available = [checkpoint for checkpoint in found if not checkpoint.is_start]
    if not available and which != "0":
        raise UserError(f"run {run_dir} has no checkpoint yet: let it train to its first one (train.checkpoint_every).")
    if which not in ("best", "last"):
        steps = sorted({checkpoint.step for checkpoint in found})
        if (step := whole_number(which)) is None or step not in steps:
            raise UserError(f"checkpoint `{which}` is not in {run_dir}: use best, last or one of {steps}.")
        asked = checkpoint_of_step(run_dir, step)
        asked.verify()
        return asked
    order = available
    if which == "best":  # each checkpoint's state names the best step so far; try the newest checkpoint's best first
        best_steps = dict.fromkeys(checkpoint.best_step for checkpoint in available)
        best = [checkpoint for step in best_steps for checkpoint in available if checkpoint.step == step]
        order = list(dict.fromkeys([*best, *available]))
    chosen = _first_whole(order, report)
    if chosen is None:
        raise UserError(f"every checkpoint of {run_dir} is damaged: train again, or restore them from a copy.")
    return chosen


@dataclass(frozen=True)
class LoadedRun:
    """A run's model with the weights of a checkpoint, and the run's recipe and tokenizer folder."""

    model: GPT
    recipe: Recipe
    tokenizer_folder: Path
    checkpoint: Checkpoint


def load_run(
    run_dir: str | PathLike[str],
    which: str = "best",
    *,
    overrides: Sequence[str] = (),
    device: torch.device | str = "cpu",
    full: bool = False,
    merge: bool = True,
    weights: LoadedWeights = "auto",
    report: Report = lambda _: None,
) -> LoadedRun:
    """Load a run's model, in eval mode, with its recipe and tokenizer.

    Args:
        which: best, last or a step, see `choose_checkpoint`.
        overrides: settings to replace in the recipe that do not change the weights, such as
            `model.context_length=1024` and `model.rope_scaling.type=yarn`.
        full: refuse a quantized run.
        merge, weights: see `load_model`.

    Raises:
        UserError: for the reasons of `choose_checkpoint`, `load_recipe` and `load_model`; or `full` is true, and the
            run is quantized.
    """
    run_dir = fetched_path(run_dir)
    if run_dir.is_file() and run_dir.suffix in (".yaml", ".yml"):
        made = load_recipe(run_dir).run_dir
        raise UserError(f"{run_dir} is a file, not a run folder. Give the folder that training it makes: {made}.")
    checkpoint = choose_checkpoint(run_dir, which, report)
    if full:
        require_full_weights(checkpoint)
    recipe = load_recipe(run_dir, overrides)
    model = load_model(checkpoint, recipe.model, device, adapter=recipe.adapter, merge=merge, weights=weights)
    check_inside(run_dir / "tokenizer", run_dir)
    return LoadedRun(model, recipe, run_dir / "tokenizer", checkpoint)


def require_full_weights(checkpoint: Checkpoint) -> None:
    """Raise a UserError if the checkpoint is quantized."""
    if checkpoint.is_quantized:
        raise UserError(
            f"{checkpoint.run_dir} is quantized: it can be used, evaluated and exported as a page, not trained, "
            f"exported otherwise or quantized again. Take the run that it was made from; its model-card.md names it."
        )


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    adapter: LoRAConfig | None = None,
    merge: bool = True,
    weights: LoadedWeights = "auto",
) -> GPT:
    """Load a model with a checkpoint's weights, in eval mode; a QuantizedGPT if its matrices are quantized. If the
    checkpoint has an adapter, all its quantized matrices are dequantized first.

    Args:
        adapter: settings of the checkpoint's adapter, if it has one.
        merge: merge the adapter into the weights; False: keep it separate.
        weights: format of the matrices in memory. auto: as in the checkpoint, but fp32 with an adapter. bf16, int8 and
            int4 need `merge`: each matrix is read in fp32, merged with its adapter and rounded to nearest before the
            next is read.

    Raises:
        UserError: the file is missing or damaged; names, shapes or dtypes of the weights do not fit `config`; a weight
            is not finite; or the checkpoint is already quantized in another format than `weights`.
    """
    with ShapesOnly():
        model, plain = GPT(config), GPT(config)
    kinds: dict[str, Weights] = {}

    def wanted(stored: Mapping[str, Stored]) -> dict[str, Expected]:
        nonlocal model, kinds
        with ShapesOnly():
            if kinds := packed_kinds(model, {name: tensor.dtype for name, tensor in stored.items()}):
                model = QuantizedGPT(config, kinds)
            if adapter is not None and has_adapter(stored):
                add_lora(model, adapter)
                add_lora(plain, adapter)
        return {name: Expected.like(tensor) for name, tensor in model.state_dict().items()}

    file = TensorFile(checkpoint.folder / "model.safetensors", wanted, inside=checkpoint.run_dir)
    adapted = has_adapter(file.stored)
    if asked := kinds_to_pack(plain, weights, {} if adapted else kinds, str(checkpoint.run_dir)):
        assert merge, "a separate adapter on packed weights is for training"
        with ShapesOnly():
            model = QuantizedGPT(config, asked)
        tensors = read_packed(file, asked, kinds if adapted else {}, adapter, device)
    else:
        tensors = file.read()
        if kinds and adapted:
            model, tensors = plain, unpack_all(tensors, kinds)
    model.assign(tensors)
    if merge:
        remove_lora(model, merge=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model.to(device).eval()
