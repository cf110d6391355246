"""The run folder: opened by one process at a time, never overwritten silently, and described when the run ends."""

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch

from gptworks import __version__
from gptworks.checkpoint import write_whole
from gptworks.config import Recipe
from gptworks.errors import RunError, UserError
from gptworks.recipe import load_recipe, save_recipe

FIXED_FOR_A_RUN = ("seed", "model", "tokenizer", "data")
"""Recipe sections a resumed run may not change: its weights or the order of its samples depend on them."""


@contextlib.contextmanager
def open_run_folder(recipe: Recipe, resume: bool) -> Iterator[None]:
    """Lock the run folder for this process, creating it for a new run.

    Raises:
        UserError: another process is using it; or it holds a run and `resume` is false; or it holds something else;
            or the run in it was started with other settings.
    """
    folder = recipe.run_dir
    check_run_folder(recipe, resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"run folder {folder} is in use by another process: wait for it, or give another run_dir=."
        ) from None
    except OSError as error:
        raise RunError(f"run folder {folder} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()


def check_run_folder(recipe: Recipe, resume: bool) -> None:
    """Refuse a run folder that this recipe must not write to, before any work is done.

    Raises:
        UserError: see `open_run_folder`.
    """
    folder = recipe.run_dir
    if folder.exists() and not folder.is_dir():
        raise UserError(f"run_dir={folder} is a file: give another run_dir=.")
    if (folder / "recipe.yaml").exists():
        if not resume:
            raise UserError(
                f"{folder} already holds a run, and a run is never overwritten: add --resume to go on with it, "
                f"give another run_dir=, or delete the folder."
            )
        before = load_recipe(folder)
        for section in FIXED_FOR_A_RUN:
            ours, theirs = getattr(recipe, section), getattr(before, section)
            if section == "model" and ours.vocab_size == 0:  # not known before the data is prepared
                ours = ours.model_copy(update={"vocab_size": theirs.vocab_size})
            if section == "data":  # where the shards lie and how they are made may change, what they hold may not
                ours, theirs = (x.model_copy(update={"cache_dir": Path(), "processes": 0}) for x in (ours, theirs))
            if ours != theirs:
                raise UserError(
                    f"{folder} was started with another `{section}`: {_difference(ours, theirs)}. "
                    f"Resume with the same settings, or start anew with another run_dir=."
                )
    elif folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise UserError(f"run_dir={folder} exists and holds other files, not a run: give another run_dir=.")


def _difference(ours: object, theirs: object) -> str:
    if not hasattr(ours, "model_dump") or not hasattr(theirs, "model_dump"):
        return f"it was {theirs} and is now {ours}"
    new, old = ours.model_dump(mode="json"), theirs.model_dump(mode="json")
    key = next(key for key in {**old, **new} if old.get(key) != new.get(key))
    return f"`{key}` was {old.get(key)} and is now {new.get(key)}"


def write_recipe(recipe: Recipe) -> None:
    """Save the resolved recipe in the run folder, replacing an earlier one at once."""
    aside = recipe.run_dir / ".recipe.yaml.writing"
    save_recipe(recipe, aside)
    aside.replace(recipe.run_dir / "recipe.yaml")


def write_model_card(recipe: Recipe, device: str, figures: dict[str, str], training: dict[str, str]) -> None:
    """Write `model-card.md`: what the model is, what it was trained on and how good it is."""
    model = recipe.model
    sources = ", ".join(
        f"{source.type} {getattr(source, 'path', None) or getattr(source, 'url', None) or ''}".strip()
        for source in recipe.data.sources
    )
    windows = sum(window is not None for window in model.layer_windows)
    architecture = {
        "layers × width × heads": f"{model.n_layers} × {model.d_model} × {model.n_heads}"
        + (f" ({model.n_kv_heads} key/value heads)" if model.n_kv_heads != model.n_heads else ""),
        "context": f"{model.context_length:,} tokens" + (f"; {windows} layers see {model.window:,}" if windows else ""),
        "vocabulary": f"{model.vocab_size:,} ({recipe.tokenizer.type})",
        "position, norm, MLP": f"{model.position}, {model.norm}, {model.mlp} of {model.d_ff:,}",
        "head": "tied to the embedding" if model.tie_embeddings else "its own matrix",
    }
    made_with = {
        "sources": sources,
        "device": device,
        "gptworks, torch, Python": f"{__version__}, {torch.__version__}, {platform.python_version()}",
    }
    sections = {"Results": figures, "Architecture": architecture, "Training": training | made_with}
    parts = [f"# {recipe.name}", "A language model trained with gptworks. Every figure here was measured in the run."]
    for heading, rows in sections.items():
        table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
        parts.append(f"## {heading}\n\n| | |\n|---|---|\n{table}")
    parts.append("Use it with `gptworks generate` and this folder; `recipe.yaml` beside this file repeats the run.")
    write_whole(recipe.run_dir / "model-card.md", "\n\n".join(parts) + "\n")
