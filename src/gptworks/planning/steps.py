"""The number of optimizer steps of a run."""

from gptworks.config import TrainConfig
from gptworks.errors import UserError


def planned_steps(
    train: TrainConfig,
    context_length: int,
    n_train_tokens: int | None,
    windows_per_epoch: int | None = None,
    estimated: bool = False,
) -> tuple[int | None, str]:
    """The number of optimizer steps, None if unknown, and the setting that limits it first: max_steps or epochs.

    estimated: whether the tokens or windows are an estimate; the returned words then say so.

    An epoch visits each window of `gptworks.data.batches.Batches` once, or `windows_per_epoch` rows that are cut
    otherwise; a run is a whole number of steps.
    """
    if windows_per_epoch is None and n_train_tokens is not None and n_train_tokens <= context_length:
        raise UserError(
            f"n_train_tokens={n_train_tokens} is shorter than one window (context_length={context_length}, and one): "
            f"use more text or a shorter context_length"
        )
    bounds = [] if train.max_steps is None else [(train.max_steps, f"max_steps={train.max_steps}")]
    unknown: list[str] = []
    about = "about " if estimated else ""
    windows, text = windows_per_epoch, f"{about}{windows_per_epoch:,} samples" if windows_per_epoch else ""
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
