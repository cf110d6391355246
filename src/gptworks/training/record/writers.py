"""Writers that pass the records of metrics.jsonl on to other programs: TensorBoard, Weights & Biases."""

import os
import uuid
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from gptworks.config import Recipe
from gptworks.errors import UserError, not_installed
from gptworks.files import read_text, remove_tree, write_whole
from gptworks.training.record.metrics import LOG, MetricsLog, Record, Writer


def check_writers(names: Sequence[str]) -> None:
    """Raise UserError if a logger is not installed; the message explains how to install it. Called before any work."""
    for name in names:
        if find_spec(name) is None:
            raise not_installed(name, name, f"train.loggers={name}")


def open_log(recipe: Recipe, resume_step: int, resume_rollbacks: int = 0) -> MetricsLog:
    """Open a run's log with the recipe's writers, which first receive the log's earlier records; see `MetricsLog`."""
    writers = [WRITERS[name](recipe) for name in recipe.train.loggers]
    return MetricsLog(recipe.run_dir / LOG, resume_step, writers, resume_rollbacks=resume_rollbacks)


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record by path, such as train/loss."""
    return dict(_scalars(str(record["kind"]), {k: v for k, v in record.items() if k != "step"}))


def _scalars(path: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(f"{path}/{key}", value)
        elif isinstance(value, list):  # one value per layer
            yield from _scalars(f"{path}/{key}", {str(i): each for i, each in enumerate(value, 1)})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}/{key}", value


def texts(record: Record) -> dict[str, str]:
    """Return a sample record's text, with the prompt first, as {"sample/PROMPT": text}; empty for other records."""
    return {f"sample/{record['prompt']!r}": record["prompt"] + record["text"]} if record["kind"] == "sample" else {}


class TensorBoard:
    """Writes event files to `tensorboard/` in the run folder; a resumed run replaces them, so no record is repeated."""

    def __init__(self, recipe: Recipe) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = recipe.run_dir / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._events: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add a record to the event files."""
        for name, value in scalars(record).items():
            self._events.add_scalar(name, value, record["step"])
        for name, text in texts(record).items():
            self._events.add_text(name, f"```\n{text}\n```", record["step"])

    def close(self) -> None:
        """Write the buffered records to the files."""
        self._events.close()


class WeightsAndBiases:
    """Sends records to a run of Weights & Biases, which continues when training is resumed.

    Offline (`WANDB_MODE=offline`), a resumed run replaces its files in the run folder's `wandb/`. A server accepts a
    step only once: if a step runs again, the server keeps the first record, although the second may differ after a
    rollback or a change of the schedule.
    """

    def __init__(self, recipe: Recipe) -> None:
        import wandb

        folder = recipe.run_dir / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        name = folder / "gptworks-run-id"
        if not name.exists():
            write_whole(name, uuid.uuid4().hex[:12], inside=recipe.run_dir)
        self._id = read_text(name, 64, inside=recipe.run_dir).strip()
        for old in folder.glob(f"offline-run-*-{self._id}"):
            remove_tree(old)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "gptworks"),
                id=self._id,
                name=recipe.run_dir.name,
                dir=str(recipe.run_dir),
                config=recipe.model_dump(mode="json"),
                resume="allow",
                settings={"quiet": True},
            )
        except Exception as error:  # wandb raises many types of errors, mostly about the account
            raise UserError(
                f"Weights & Biases cannot be used: {' '.join(str(error).split())}. Run `wandb login`, set "
                f"WANDB_MODE=offline, or leave wandb out of train.loggers."
            ) from error
        self._first_step: int = self._run.step  # 0 for a new run; otherwise the server's last step + 1

    def write(self, record: Record) -> None:
        """Send a record, unless the server already has a record of its step. One step's records are combined."""
        if record["step"] >= self._first_step:
            self._run.log({**scalars(record), **texts(record)}, step=record["step"])

    def close(self) -> None:
        """Wait until all records are sent."""
        self._run.finish()


WRITERS: dict[str, type[Writer]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
