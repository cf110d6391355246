"""The user's reward function: loads it, calls it, and copies its file to the run folder."""

import contextlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gptworks.errors import RunError, UserError
from gptworks.files import read_regular, write_whole

REWARD_FILE = "reward.py"
"""Name of the copy of the reward function's file in the run folder; a new run makes the copy."""

RewardFunction = Callable[..., float]
"""Called as function(completion, prompt=..., answer=...), all strings; `answer` is the answer in the dataset."""


@dataclass(frozen=True)
class Prompt:
    """A conversation of the dataset up to its last answer, and that answer."""

    ids: list[int]
    text: str
    answer: str
    """The dataset's answer to the prompt."""


def load_reward(name: str) -> RewardFunction:
    """Return the function given as `path/to/file.py:function`, after running the file.

    Raises:
        UserError: the file or the function does not exist, or the file raises an error.
    """
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"objective.reward={name}: {path} does not exist.")
    spec = importlib.util.spec_from_file_location("gptworks_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise any error
        raise UserError(f"objective.reward={name}: {path} fails when it is read: {_said(error)}.") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"objective.reward={name}: {path} has no function {function}.")
    reward: RewardFunction = found
    return reward


def reward_of(function: RewardFunction, name: str, completion: str, prompt: Prompt) -> float:
    """Return the function's reward for a completion of the prompt; error messages name the function by `name`.

    Raises:
        RunError: the function raises an error, or returns anything but a finite number.
    """
    try:
        reward = function(completion, prompt=prompt.text, answer=prompt.answer)
    except Exception as error:  # the user's code may raise any error
        raise RunError(f"objective.reward={name} fails on {completion[:60]!r}: {_said(error)}.") from error
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):  # such as for a tensor of two numbers
        if hasattr(reward, "__float__") and math.isfinite(value := float(reward)):
            return value
    raise RunError(f"objective.reward={name} gives {reward!r} for {completion[:60]!r}: it must give a finite number.")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_MOST_BYTES = 1 << 24


def keep_reward_file(name: str, run_dir: Path, is_new: bool, writes: bool) -> None:
    """Copy the function's file to a new run's folder if this rank `writes`; in a resumed run, compare it with the copy.

    Raises:
        UserError: the file has changed since the run began.
    """
    now, kept = read_regular(Path(name.rpartition(":")[0]), _MOST_BYTES), run_dir / REWARD_FILE
    if is_new and writes:
        write_whole(kept, now)
    elif not is_new and kept.exists() and read_regular(kept, _MOST_BYTES, inside=run_dir) != now:
        raise UserError(
            f"objective.reward={name} has changed since the run began: put {kept} in its place, or start a new run "
            f"with another run_dir=."
        )
