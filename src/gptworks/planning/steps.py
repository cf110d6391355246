"""The size of a run's data, and the number of optimizer steps."""

from dataclasses import dataclass, field

from gptworks.config import TrainConfig
from gptworks.errors import UserError


@dataclass(frozen=True)
class DataSize:
    """The size of a training split."""

    train_tokens: int | None = None
    """Number of training tokens; None if a source is missing, or if its size is unknown until it is downloaded."""
    samples_per_epoch: int | None = None
    """Number of samples in an epoch: windows, rows, pairs or answers. None if unknown, or if the data is one dataset
    of text, whose windows follow from `train_tokens`."""
    estimated: bool = False
    """Whether the numbers are estimated from the sizes of files."""
    missing: str | None = None
    """A sentence that names a missing source, with advice; None if all sources are present."""
    datasets: dict[str, int] = field(default_factory=dict)
    """Number of training tokens of each dataset of a mixture, by name; empty if unknown, or without a mixture."""
    vocab_size: int | None = None
    """Vocabulary size of a mixture's tokenizer, if at least one of the datasets has been built; else None."""


UNKNOWN_SIZE = DataSize()


def planned_steps(train: TrainConfig, context_length: int, data: DataSize = UNKNOWN_SIZE) -> tuple[int | None, str]:
    """Return the number of optimizer steps, or None if unknown, and a clause that names the setting that decides it.

    If another limit of the run is not known in steps, the number is an upper bound, and the clause says so. An epoch
    has `samples_per_epoch` samples. If this is None, an epoch has each window of `gptworks.data.batches.Batches` once.
    The number is rounded to whole steps.

    Raises:
        UserError: the training split is shorter than one window.
    """
    n_train_tokens, windows = data.train_tokens, data.samples_per_epoch
    if windows is None and n_train_tokens is not None and n_train_tokens <= context_length:
        raise UserError(
            f"n_train_tokens={n_train_tokens} is shorter than one window (context_length={context_length}, and one): "
            f"use more text or a shorter context_length"
        )
    bounds = [] if train.max_steps is None else [(train.max_steps, f"max_steps={train.max_steps}")]
    unknown: list[str] = []
    about = "about " if data.estimated else ""
    text = f"{about}{windows:,} samples" if windows else ""
    if windows is None and n_train_tokens is not None:
        windows, text = max(1, (n_train_tokens - context_length) // context_length), f"{about}{n_train_tokens:,} tokens"
    if train.epochs is not None and windows is not None:
        n_steps = max(1, round(train.epochs * windows / train.batch_size))
        bounds.append((n_steps, f"epochs={train.epochs:g} over {text}"))
    elif train.epochs is not None:
        unknown.append(f"epochs={train.epochs:g} needs the number of training tokens")
    if train.max_minutes is not None:
        unknown.append(f"max_minutes={train.max_minutes:g} depends on the machine's speed")
    if not bounds:
        return None, "; ".join(unknown)
    steps, reason = min(bounds)
    return steps, "; ".join((f"{'at most, by ' if unknown else ''}{reason}", *unknown))
