"""The scenarios that test_crash_consistency.py traces in a process: `crash_worker.py SCENARIO FOLDER`."""

import os
import sys
from pathlib import Path

import torch

from gptworks.errors import RunError, UserError


def mark(name: str) -> None:
    try:
        os.open(f"/MARK/{name}", os.O_RDONLY)
    except OSError:
        return


SAVES = (("step", 1, 1), ("weights", 2, 2), ("step", 2, 2), ("weights", 3, 3), ("step", 4, 3), ("weights", 5, 5))
"""Kind, step and best of what `checkpoints` saves: bests with weights only, of which one is a step that is then saved
with everything, as where a run is stopped there."""


def save(run_dir: Path, kind: str, step: int, best: int) -> None:
    from gptworks.training.checkpoint_files import remove_old, save_checkpoint

    tensors = {"w": torch.full((64,), float(step))}
    own = None if kind == "weights" else {"w/own": tensors["w"] + 1}
    save_checkpoint(run_dir, step, tensors, own, {"step": step, "best_step": best})
    mark(f"saved {kind} {step}")
    remove_old(run_dir, keep=1)


def checkpoints(root: Path) -> None:
    """Save checkpoints of both kinds, which deletes earlier ones, and roll back to the second-to-last."""
    from gptworks.files import make_folder
    from gptworks.training.checkpoint_files import remove_newer

    make_folder(root / "run")
    for each in SAVES:
        save(root / "run", *each)
    mark("rolling back")
    remove_newer(root / "run", 4)
    mark("rolled back")


def one_more(root: Path) -> None:
    """Save one more checkpoint of each kind."""
    save(root / "run", "weights", 5, best=5)
    save(root / "run", "step", 6, best=5)


def prepare(root: Path, shard_tokens: int = 20_000) -> None:
    import tiny
    from gptworks.data.prepare import prepare
    from gptworks.recipe import parse_recipe

    tree = tiny.recipe_tree(root.parent)
    tree["data"] |= {"cache_dir": str(root / "data"), "shard_tokens": shard_tokens}
    prepare(parse_recipe(tree))
    mark("done")


def train(root: Path) -> None:
    from gptworks.recipe import load_recipe
    from gptworks.training.loop import train

    recipe = load_recipe((root.parent / "recipe").read_text(encoding="utf-8"))
    train(recipe.model_copy(update={"run_dir": root / "run"}))


def export(root: Path, verify: bool = True) -> None:
    from gptworks.interop.huggingface.exporting import export_huggingface

    export_huggingface(root.parent / "source" / "run", root / "out", verify=verify)
    mark("done")


def export_unverified(root: Path) -> None:
    """Export without the comparison of logits, which writes nothing and takes long."""
    export(root, verify=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        known = (checkpoints, one_more, prepare, train, export, export_unverified)
        {scenario.__name__: scenario for scenario in known}[sys.argv[1]](Path(sys.argv[2]))
    except (RunError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
