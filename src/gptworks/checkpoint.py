"""Crash-safe checkpoints: written aside, flushed to disk, described by a manifest of sha256 sums, then renamed.

    checkpoints/step-000500/
        model.safetensors       the weights
        optimizer.safetensors   `parameter/key` → tensor
        state.json              counters of the run
        manifest.json           bytes and sha256 of the three and of itself, written last

A folder with the final name is complete: a crash at any moment leaves either it or nothing. What time or a failing disk
does to it later is found by its manifest.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gptworks.config import LoRAConfig, ModelConfig, Recipe
from gptworks.errors import RunError, UserError
from gptworks.files import make_folder, sealed_json, sha256_file, sync, unsealed_json, why_not_written
from gptworks.model import GPT
from gptworks.model.lora import add_lora, has_adapter, merge_lora
from gptworks.quantize.convert import packed_kinds
from gptworks.quantize.linear import QuantizedGPT
from gptworks.recipe import load_recipe
from gptworks.tensors import Expected, Stored, Wanted, read_tensors, stored_tensors

FORMAT = 2
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
"""What a manifest describes."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose name says its step."""

    folder: Path

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.folder.name.removeprefix("step-"))

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            UserError: a file is missing, truncated or changed; it is named.
        """
        for name, entry in self._described_files().items():
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"checkpoint {self.folder} is damaged: {path} is missing.")
            if path.stat().st_size != entry["bytes"]:
                raise UserError(
                    f"{path} is damaged: {path.stat().st_size:,} bytes, its manifest says {entry['bytes']:,}."
                )
            if sha256_file(path) != entry["sha256"]:
                raise UserError(f"{path} is damaged: its sha256 differs from the manifest's.")

    def _described_files(self) -> dict[str, dict[str, Any]]:
        """Bytes and sha256 of each file, by the manifest."""
        manifest = self.folder / "manifest.json"
        try:
            tree = unsealed_json(manifest.read_bytes())
        except FileNotFoundError:
            raise UserError(f"checkpoint {self.folder} is damaged: {manifest} is missing.") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{manifest} is damaged: {error}.") from None
        if tree.get("format") != FORMAT:
            raise UserError(f"{manifest} has format {tree.get('format')} and this gptworks reads {FORMAT}.")
        files = tree.get("files")
        if not isinstance(files, dict) or set(files) != set(FILES):
            raise UserError(f"{manifest} is damaged: `files` must describe {', '.join(FILES)}.")
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
        """The sha256 of its manifest, which tells checkpoints of one step apart; None where it has none."""
        try:
            return sha256_file(self.folder / "manifest.json")
        except OSError:
            return None

    @property
    def is_whole(self) -> bool:
        """Whether every file is as the manifest says."""
        try:
            self.verify()
        except UserError:
            return False
        return True

    def model_tensors(self, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """The weights by name; see `read_tensors`, which refuses those that are not as `wanted` says."""
        return read_tensors(self.folder / "model.safetensors", wanted)

    @property
    def is_quantized(self) -> bool:
        """Whether its matrices are packed, as `gptworks quantize` does it; of a damaged file, false."""
        try:
            stored = stored_tensors(self.folder / "model.safetensors")
        except UserError:
            return False
        return any(tensor.dtype != torch.float32 for tensor in stored.values())

    def optimizer_tensors(self, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """The optimizer's state by `parameter/key`; see `read_tensors`."""
        return read_tensors(self.folder / "optimizer.safetensors", wanted, owner="the run's optimizer")

    def state(self) -> dict[str, Any]:
        """The counters of the run, a JSON object.

        Raises:
            OSError: it cannot be read. UserError: it is no JSON object.
        """
        path = self.folder / "state.json"
        try:
            state = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged: {error}. Restore it from a copy.") from None
        if not isinstance(state, dict):
            raise UserError(f"{path} is damaged: it holds no JSON object. Restore it from a copy.")
        return state

    @property
    def best_step(self) -> int | None:
        """The step with the lowest validation loss, by its state; None where that is damaged."""
        try:
            step = self.state().get("best_step")
        except (OSError, UserError):
            return None
        return step if type(step) is int and step >= 0 else None


def save_checkpoint(
    run_dir: Path,
    step: int,
    model_tensors: dict[str, Tensor],
    optimizer_tensors: dict[str, Tensor],
    state: dict[str, Any],
) -> Checkpoint:
    """Write `checkpoints/step-<step>` so that it is there whole or not at all.

    Raises:
        RunError: the disk is full or refuses; earlier checkpoints are untouched and nothing half-written stays.
    """
    parent = run_dir / "checkpoints"
    final = checkpoint_of_step(run_dir, step).folder
    aside = parent / f".writing-step-{step:06d}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        make_folder(parent)
        aside.mkdir()
        for name, tensors in (("model", model_tensors), ("optimizer", optimizer_tensors)):
            whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(whole, aside / f"{name}.safetensors", {"format": "pt"})
        (aside / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(aside.iterdir())
        }
        manifest = {"format": FORMAT, "step": step, "files": files}
        (aside / "manifest.json").write_text(sealed_json(manifest), encoding="utf-8")
        for path in aside.iterdir():
            sync(path)
        sync(aside)
        if final.exists():  # a damaged one that a resumed run has come past again
            remove_checkpoint(Checkpoint(final))
        aside.rename(final)
        sync(parent)
    except (OSError, SafetensorError) as error:
        needed_bytes = sum(
            tensor.nbytes for tensors in (model_tensors, optimizer_tensors) for tensor in tensors.values()
        )
        reason = why_not_written(error, parent, needed_bytes)
        shutil.rmtree(aside, ignore_errors=True)
        kept = ", ".join(checkpoint.folder.name for checkpoint in checkpoints(run_dir)) or "none"
        raise RunError(
            f"checkpoint at step {step} could not be written to {parent}: {reason}. Earlier ones kept: {kept}."
        ) from error
    return Checkpoint(final)


def remove_checkpoint(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint. A crash leaves it whole, or what is left of it under another name: never a damaged one."""
    aside = checkpoint.folder.with_name(f".removing-{checkpoint.folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.folder.rename(aside)
    sync(aside.parent)
    shutil.rmtree(aside)


def checkpoint_of_step(run_dir: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, whether it is there or not."""
    return Checkpoint(run_dir / "checkpoints" / f"step-{step:06d}")


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """The run's checkpoints, newest first."""
    found = [Checkpoint(path) for path in (run_dir / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def newest_verified(
    run_dir: Path, report: Report = lambda _: None, *, up_to_step: int | None = None
) -> Checkpoint | None:
    """The newest checkpoint that matches its manifest, of those up to a step; damaged ones are reported."""
    for checkpoint in checkpoints(run_dir):
        if up_to_step is not None and checkpoint.step > up_to_step:
            continue
        try:
            checkpoint.verify()
        except UserError as damage:
            report(f"{damage} Going back to the checkpoint before it.")
        else:
            return checkpoint
    return None


def choose_checkpoint(run_dir: Path, which: str = "best", report: Report = lambda _: None) -> Checkpoint:
    """The run's `best` or `last` checkpoint, or the one of a step, verified.

    A damaged best falls back to the best before it that is whole, or to the newest, and says so.

    Raises:
        UserError: the folder is no run, has no checkpoint, lacks the step asked for, or everything is damaged.
    """
    if not (run_dir / "recipe.yaml").exists():
        raise UserError(f"{run_dir} is not a run folder: it has no recipe.yaml. `gptworks train RECIPE` makes one.")
    available = checkpoints(run_dir)
    if not available:
        raise UserError(f"run {run_dir} has no checkpoint yet: let it train to its first one (train.checkpoint_every).")
    if which not in ("best", "last"):
        steps = [checkpoint.step for checkpoint in available]
        if not which.isdigit() or int(which) not in steps:
            raise UserError(f"checkpoint `{which}` is not in {run_dir}: use best, last or one of {sorted(steps)}.")
        asked = available[steps.index(int(which))]
        asked.verify()
        return asked
    damaged: set[int] = set()
    for checkpoint in available if which == "best" else ():  # where the best by the newest is damaged, ask the next
        best = checkpoint.best_step
        chosen = next((one for one in available if one.step == best), None)
        if best is None or best in damaged or chosen is None:
            continue
        try:
            chosen.verify()
            return chosen
        except UserError as damage:
            damaged.add(best)
            report(f"{damage} Using another that is whole.")
    found = newest_verified(run_dir, report)
    if found is None:
        raise UserError(f"every checkpoint of {run_dir} is damaged: train again, or restore them from a copy.")
    return found


@dataclass(frozen=True)
class LoadedRun:
    """A run's model with the checkpoint's weights, and the recipe and tokenizer that belong to it."""

    model: GPT
    recipe: Recipe
    tokenizer_folder: Path
    checkpoint: Checkpoint


def load_run(
    run_dir: str | Path,
    which: str = "best",
    *,
    overrides: Sequence[str] = (),
    device: torch.device | str = "cpu",
    full: bool = False,
    merge: bool = True,
    report: Report = lambda _: None,
) -> LoadedRun:
    """Load a run's model for use, in eval mode.

    Args:
        overrides: settings that win over the recipe's and leave the weights as they are, such as
            `model.context_length=1024` and `model.rope_scaling.type=yarn`.
        full: refuse a quantized run, for what needs the weights as they were trained.
        merge: add an adapter to the weights; False: leave it beside them.

    Raises:
        UserError: as `choose_checkpoint`; or the weights do not belong to the recipe's model, or are quantized.
    """
    run_dir = Path(run_dir)
    if run_dir.is_file() and run_dir.suffix in (".yaml", ".yml"):
        made = load_recipe(run_dir).run_dir
        raise UserError(f"{run_dir} is a file, not a run folder. Give the folder that training it makes: {made}.")
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run folder. `gptworks train RECIPE` makes one below runs/.")
    checkpoint = choose_checkpoint(run_dir, which, report)
    if full:
        require_full_weights(checkpoint)
    recipe = load_recipe(run_dir, overrides)
    model = load_model(checkpoint, recipe.model, device, adapter=recipe.adapter, merge=merge)
    return LoadedRun(model, recipe, run_dir / "tokenizer", checkpoint)


def require_full_weights(checkpoint: Checkpoint) -> None:
    """Refuse a quantized checkpoint.

    Raises:
        UserError: it is one.
    """
    if checkpoint.is_quantized:
        raise UserError(
            f"{checkpoint.folder.parents[1]} is quantized: it can be used and evaluated, not trained, exported or "
            f"quantized again. Take the run that it was made from; its model-card.md names it."
        )


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device | str = "cpu",
    *,
    adapter: LoRAConfig | None = None,
    merge: bool = True,
) -> GPT:
    """The model with a checkpoint's weights, in eval mode; a QuantizedGPT where matrices are packed.

    Args:
        adapter: what the checkpoint's adapter is, where it holds one.
        merge: add the adapter to the weights.

    Raises:
        UserError: names, shapes or dtypes of the weights are not those of `config`, or one is not finite.
    """
    with torch.device("meta"):
        model = GPT(config)

    def wanted(stored: Mapping[str, Stored]) -> dict[str, Expected]:
        nonlocal model
        with torch.device("meta"):
            if kinds := packed_kinds(model, {name: tensor.dtype for name, tensor in stored.items()}):
                model = QuantizedGPT(config, kinds)
            if adapter is not None and has_adapter(stored):
                add_lora(model, adapter)
        return {name: Expected.like(tensor) for name, tensor in model.state_dict().items()}

    tensors = checkpoint.model_tensors(wanted)
    model.load_state_dict(tensors, assign=True)
    if model.rotary is not None:
        model.rotary.reset()
    if merge:
        merge_lora(model)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model.to(device).eval()
