"""The changes that an agent may try: settings of the model and of training, except settings that decide data,
evaluation, seeds, paths or the length of runs. No value from an agent can name a file or run code."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gptworks.config import Recipe, Role, settings
from gptworks.device import choose_device, choose_precision
from gptworks.errors import UserError, did_you_mean, shortened
from gptworks.overrides import as_typed, overrides_of
from gptworks.planning.flops import forward_flops
from gptworks.recipe import load_recipe
from gptworks.runs.comparable import measured
from gptworks.runs.trials import check_comparable
from gptworks.training.setup import check_memory
from gptworks.yaml_files import parse_yaml

MOST_CHANGES = 32
MOST_KEY_CHARACTERS = 200
MOST_VALUE_CHARACTERS = 1_000
MOST_PATCH_CHARACTERS = 20_000

MOST_WORK = 8.0
"""Maximum FLOPs of a token in a changed recipe, which includes the accepted changes, divided by the FLOPs in the base
recipe. Without a limit, one pair of runs or its evaluations could use up a campaign's time."""

_LENGTH = ("train.max_steps", "train.epochs", "train.max_minutes")
_ENDLESS = ("train.max_rollbacks",)
"""Settings with which a run may take unlimited time."""
_SPEED = ("train.micro_batch_size", "train.activation_checkpointing")
"""Settings that an agent may change because they decide the time of a step, although they do not affect learning."""


def allowed_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that may be changed, with their values in the recipe."""
    return {
        one.path: one.value
        for one in settings(recipe)
        if one.path.startswith(("model.", "train."))
        and one.place is None
        and one.path not in (*_LENGTH, *_ENDLESS)
        and (one.role in (Role.FIXED, Role.STEERING) or one.path in _SPEED)
    }


def overrides_from(changes: Mapping[str, Any] | None, patch: str | None) -> list[str]:
    """Return a change as overrides `key.path=value`.

    Args:
        changes: values by path, such as {"train.optimizer": "adamw"}.
        patch: YAML that is merged into the recipe, such as `model: {n_layers: 6}`; in place of `changes`.

    Raises:
        UserError: neither `changes` nor `patch` is given, or both; there are too many changes; a key or a value is too
            long; a key is not the path of a setting; or the patch is not a mapping of `model` and `train`.
    """
    if bool(changes) == bool(patch):
        raise UserError(
            'give either `changes`, such as {"train.optimizer": "adamw"}, or `patch`, YAML such as '
            "`model: {n_layers: 6}`."
        )
    if patch:
        if len(patch) > MOST_PATCH_CHARACTERS:
            raise UserError(f"the patch has {len(patch):,} characters: give at most {MOST_PATCH_CHARACTERS:,}.")
        tree = parse_yaml(patch, "patch")
        if not isinstance(tree, dict) or not all(isinstance(part, dict) and part for part in tree.values()):
            raise UserError("the patch is not a mapping of sections: give lines such as `train: {optimizer: adamw}`.")
        if others := [str(key) for key in tree if key not in ("model", "train")]:
            raise UserError(
                f"the patch changes `{shortened(others[0], 40)}`: a change may set only model.… and train.…, "
                f"so that all tries train on the same text and are measured alike."
            )
        found = overrides_of(tree)
    else:
        assert changes is not None
        found = [f"{key}={as_typed(value)}" for key, value in changes.items()]
    if len(found) > MOST_CHANGES:
        raise UserError(f"{len(found):,} settings at once: change at most {MOST_CHANGES}.")
    for one in found:
        key, _, value = one.partition("=")
        if len(key) > MOST_KEY_CHARACTERS or not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", key):
            raise UserError(f"`{shortened(key)}` is no path of a setting: give one such as train.learning_rate.")
        if len(value) > MOST_VALUE_CHARACTERS:
            raise UserError(f"{key} has {len(value):,} characters: give at most {MOST_VALUE_CHARACTERS:,}.")
    return sorted(found, key=key_of)


def check_allowed(recipe: Recipe, overrides: list[str]) -> None:
    """Raise a UserError if the setting of an override is not allowed or does not exist. The message states the rule or
    suggests an allowed setting."""
    allowed = allowed_settings(recipe)
    paths = {one.path for one in settings(recipe)}
    for override in overrides:
        key = key_of(override)
        inside = {path for path in paths if path.startswith(f"{key}.")}
        if key in allowed or any(key.startswith(f"{path}.") for path in allowed) or (inside and inside <= set(allowed)):
            continue
        if key in paths or inside or not key.startswith(("model.", "train.")):
            raise UserError(
                f"`{key}` may not be changed: only settings of the model and of training may that do not decide data, "
                f"evaluation, seeds, paths, devices or the length of runs. `init` lists them."
            )
        raise UserError(f"`{key}` is not a setting{did_you_mean(key, allowed)} `init` lists the settings.")


def work_of_token(recipe: Recipe) -> float:
    """Return the forward FLOPs of a token. The work of training or evaluation is a multiple of these FLOPs."""
    return forward_flops(recipe.model, recipe.row_length).per_token_causal


def check_work(base: Recipe, changed: Recipe) -> None:
    """Raise a UserError if the changed recipe takes more than MOST_WORK times the base recipe's FLOPs of a token, or
    needs too much memory. Both recipes must have a vocabulary size."""
    ratio = work_of_token(changed) / work_of_token(base)
    if ratio > MOST_WORK:
        raise UserError(
            f"a token takes {ratio:.3g} times the FLOPs of the base recipe's with this change: at most {MOST_WORK:g} "
            f"times are allowed, since runs are compared in equal time. Make the change smaller."
        )
    device = choose_device(changed.train.device)
    check_memory(changed, device, choose_precision(changed.train.precision, device))


def key_of(override: str) -> str:
    return override.partition("=")[0]


def together(earlier: Iterable[str], later: Iterable[str]) -> list[str]:
    """Return overrides that apply `earlier` and then `later`.

    A later override replaces earlier overrides of the same setting and of settings inside it. In the result, a setting
    comes before the settings inside it.
    """
    later = list(later)
    replaced = tuple(f"{key_of(one)}." for one in later)
    kept = [one for one in earlier if not f"{key_of(one)}.".startswith(replaced)]
    return sorted([*kept, *later], key=key_of)


def changed_recipe(path: Any, recipe: Recipe, overrides: list[str]) -> Recipe:
    """Return the recipe in a file with overrides applied. Raise a UserError if an override is not allowed, its value is
    wrong, or it changes what the validation loss measures."""
    check_allowed(recipe, overrides)
    changed = load_recipe(path, overrides)
    for override in overrides:
        check_comparable(recipe, key_of(override), f"change {override}")
    if measured(changed) != measured(recipe):
        raise UserError("this change also changes what the validation loss measures: leave that setting out.")
    return changed
