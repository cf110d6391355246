"""Chooses the layout: how devices divide a run's model and batches. If no layout is possible, names the broken rule.

`plan`, its advice, the check before training and `launch` all use these functions, so all accept the same recipes.
"""

from collections.abc import Iterable
from dataclasses import replace

from gptworks.config import ModelConfig, Recipe
from gptworks.errors import UserError
from gptworks.planning.devices import Device
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.planning.memory import training_peak
from gptworks.planning.setting import ANSWERS_AT_ONCE, Setting
from gptworks.planning.state import copies_start, other_models_bytes, teacher_config


class Refusal(str):
    """The reason why a recipe cannot run: a setting's value, the rule that it breaks, and what to change."""


def arrange(recipe: Recipe, n_ranks: int, device: Device) -> Layout | Refusal:
    """Return the layout of the recipe's model and batches on `n_ranks` devices, or the rule that the recipe breaks.

    `train.parallel` decides the layout: `strategy: auto` shards the model if the run with the whole model on each
    device does not fit and no rule forbids sharding. The sharded model may not fit either: see `need`.

    Raises:
        UserError: the recipe of a teacher cannot be read.
    """
    if recipe.train.precision == "fp16" and device.kind != "cuda":
        return Refusal(f"precision fp16 needs a CUDA device and this is {device.kind}: use auto, bf16 or fp32.")
    precision = planned_precision(recipe.train.precision, device)
    if (refused := refusal(recipe, n_ranks, precision)) is not None:
        return refused
    settings, tensor = recipe.train.parallel, recipe.train.parallel.tensor_parallel
    whole = Layout("none", n_ranks // tensor, tensor)
    if settings.strategy == "ddp" or whole.data_parallel == 1:
        return whole
    sharding, gathers = "fsdp" if settings.reshard_after_forward else "zero2", "bf16" if precision == "bf16" else "fp32"
    sharded = replace(whole, sharding=sharding, gathers=gathers)
    if settings.strategy == "fsdp":
        return sharded
    if _not_in_shares(recipe, precision, "") is not None:
        return whole
    peak = training_peak(device_setting(recipe, device, whole))
    return whole if peak.total_bytes <= device.memory_bytes else sharded


def layout_of(recipe: Recipe, n_ranks: int, device: Device) -> Layout:
    """Return the layout that `arrange` chooses.

    Raises:
        UserError: `arrange` refuses the recipe, or the recipe of a teacher cannot be read.
    """
    arranged = arrange(recipe, n_ranks, device)
    if isinstance(arranged, Refusal):
        raise UserError(arranged)
    return arranged


def refusal(recipe: Recipe, n_ranks: int, precision: str = "auto") -> Refusal | None:
    """Return the first rule that the recipe breaks on `n_ranks` devices of any size; None if it breaks no rule.

    Args:
        precision: fp32, bf16 or fp16; auto if unknown, in which case rules about precision are not checked.
    """
    tensor = recipe.train.parallel.tensor_parallel
    if n_ranks % tensor:
        return Refusal(
            f"{n_ranks} ranks are not a multiple of train.parallel.tensor_parallel={tensor}: start a multiple of "
            f"{tensor} processes with `gptworks launch`, or set tensor_parallel to a divisor of {n_ranks}."
        )
    if (refused := _batch_refusal(recipe, n_ranks // tensor)) is not None:
        return refused
    if tensor > 1:
        refused = _tensor_refusal(recipe.model, tensor) or _not_in_shares(
            recipe, precision, f"tensor_parallel={tensor}"
        )
        if refused is None and recipe.adapter is not None:
            rule = f"train.parallel.tensor_parallel={tensor} with an adapter, whose A and B are not divided"
            return Refusal(f"{rule}: set tensor_parallel=1.")
        return refused
    if n_ranks > 1 and recipe.train.parallel.strategy == "fsdp":
        return _not_in_shares(recipe, precision, "strategy=fsdp")
    return None


def _first(rules: Iterable[tuple[object, str]]) -> Refusal | None:
    """Return the text of the first broken rule, or None. Each rule is a pair (whether it is broken, text)."""
    return next((Refusal(text) for is_broken, text in rules if is_broken), None)


def _batch_refusal(recipe: Recipe, n_data: int) -> Refusal | None:
    """Return why a batch cannot be divided into equally many whole micro-batches for each of `n_data` data-parallel
    ranks; None if the batch can. If the objective generates answers, each micro-batch must have whole groups."""
    train, group = recipe.train, recipe.objective.micro_batch_multiple
    tensor, micro = train.parallel.tensor_parallel, train.rank_micro_batch_size(n_data)
    what = f"{n_data} ranks" if tensor == 1 else f"{n_data} groups of {tensor} ranks"
    sizes = [(train.batch_size, f"train.batch_size={train.batch_size}", "batch_size")]
    for until, size in train.smaller_batches:
        sizes.append((size, f"train.smaller_batches has {size} up to step {until}, which", "it"))
    rules = [
        (
            size % (n_data * micro),
            f"{given} is not a multiple of {what} × micro_batch_size={micro}: each has the same number of "
            f"micro-batches. Change {name} to a multiple of {n_data * micro}, or micro_batch_size.",
        )
        for size, given, name in sizes
    ]
    answers = (
        f"train.batch_size={train.batch_size} gives each of {what} micro-batches of {micro} answers, and the "
        f"objective.group_size={group} answers to a prompt are judged together: change batch_size to a multiple of "
        f"{n_data * group}, or take fewer ranks."
    )
    return _first((*rules, (micro % group, answers)))


def _tensor_refusal(model: ModelConfig, tensor: int) -> Refusal | None:
    setting, one = f"train.parallel.tensor_parallel={tensor}", "use strategy=fsdp and tensor_parallel=1."
    shares = [
        (
            getattr(model, name) % tensor,
            f"model.{name}={getattr(model, name)} is not a multiple of {setting}: each rank has the same share. Choose "
            f"a tensor_parallel that divides n_heads, n_kv_heads and d_ff.",
        )
        for name in ("n_heads", "n_kv_heads", "d_ff")
    ]
    future, dropped = f"model.n_future_tokens={model.n_future_tokens}", f"{model.dropout_attention:g}"
    return _first((
        *shares,
        (model.n_experts, f"{setting} does not divide experts (model.n_experts={model.n_experts}): {one}"),
        (model.n_future_tokens > 1, f"{setting} does not divide the heads of {future}: {one}"),
        (model.laboratory, f"{setting} does not divide model.{''.join(model.laboratory[:1])}: {one}"),
        (
            model.qk_norm == "whole",
            f"{setting} divides the heads, and model.qk_norm=whole normalizes them together: {one}",
        ),
        (
            model.dropout_attention,
            f"{setting} would drop the same attention weights in each rank's heads "
            f"(model.dropout_attention={dropped}): set dropout_attention to 0.",
        ),
    ))  # fmt: skip


def _not_in_shares(recipe: Recipe, precision: str, setting: str) -> Refusal | None:
    """Return why the run cannot shard its tensors; None if it can. A `setting` of `train.parallel` demands sharding."""
    where, alone, objective = f"train.parallel.{setting}", "use strategy=ddp and tensor_parallel=1", recipe.objective
    base, moments = recipe.adapter.base if recipe.adapter else "full", recipe.train.optimizer_state
    return _first((
        (
            recipe.model.repeats_layers,
            f"model.layer_repeats runs blocks several times and {where} gathers each for one run: {alone}.",
        ),
        (
            precision == "fp16",
            f"precision fp16 scales the loss by what each rank sees of the gradients, and {where} divides them: use "
            f"bf16 or fp32.",
        ),
        (
            base != "full",
            f"adapter.base={base} keeps packed matrices whole on each device and {where} divides them: {alone}, or "
            f"adapter.base=full.",
        ),
        (
            moments != "fp32",
            f"train.optimizer_state={moments} keeps moments in blocks of 256 whole on each device and {where} divides "
            f"them: {alone}, or train.optimizer_state=fp32.",
        ),
        (
            objective.rollouts and recipe.train.parallel.tensor_parallel > 1,
            f"objective.type={objective.type} samples with whole weights and {where} divides them: set "
            f"tensor_parallel=1.",
        ),
        (
            objective.rollouts and copies_start(recipe),
            f"objective.type={objective.type} with beta above 0 keeps a whole copy of the starting model and {where} "
            f"divides models: use strategy=ddp, or set objective.beta=0, or train an adapter, without which the model "
            f"is the starting model.",
        ),
    ))  # fmt: skip


def planned_precision(name: str, device: Device) -> str:
    """Return fp32, bf16 or fp16; for `auto`, the choice of `gptworks.device.choose_precision` on this device."""
    if name != "auto":
        return name
    return "bf16" if device.has_bf16 else "fp16" if device.kind == "cuda" else "fp32"


def device_setting(recipe: Recipe, device: Device, layout: Layout, precision: str | None = None) -> Setting:
    """Return `rank_setting` with the attention kernels that torch has for the device.

    Args:
        precision: precision of the matrix products; by default, as `train.precision` selects it on the device.
    """
    precision = precision or planned_precision(recipe.train.precision, device)
    setting = rank_setting(recipe, precision, device.on_cpu, layout)
    return replace(setting, has_flash=device.has_flash, has_fused=device.has_fused, fuses_groups=device.fuses_groups)


def rank_setting(recipe: Recipe, precision: str, on_cpu: bool, layout: Layout = ONE_DEVICE) -> Setting:
    """Return the properties of one rank's training step in a run that writes checkpoints.

    If the vocabulary is unknown, one token is assumed, so estimates from the result are lower bounds.

    Raises:
        UserError: a teacher's recipe cannot be read.
    """
    model, train, objective = recipe.model, recipe.train, recipe.objective
    if not model.vocab_size:
        model = model.model_copy(update={"vocab_size": 1})
        recipe = recipe.model_copy(update={"model": model})
    micro = train.rank_micro_batch_size(layout.data_parallel)
    prompts, n_held_out = (train.sample_prompts, train.sample_held_out) if train.sample_every else ((), 0)
    longest_prompt = max((len(prompt.encode("utf-8")) for prompt in prompts), default=0)  # in bytes: tokens are fewer
    if n_held_out:  # a conversation may fill the context
        whole = model.context_length
        limit = whole if recipe.data.conversations else train.held_out_tokens(whole)
        longest_prompt = max(longest_prompt, limit)
    return replace(
        Setting.of(model, train, precision, on_cpu, recipe.adapter, recipe.freeze),
        micro_batch_size=micro,
        accumulates=micro < train.batch_size // layout.data_parallel,
        saves=True,
        starts_from=recipe.initialize_from is not None,
        layout=layout,
        n_texts=ANSWERS_AT_ONCE if objective.rollouts else len(prompts) + n_held_out,
        text_tokens=model.context_length if objective.rollouts else longest_prompt + train.sample_tokens,
        objective=objective,
        several_texts=recipe.several_texts,
        other_models_bytes=other_models_bytes(recipe),
        teacher_width=teacher.d_model if (teacher := teacher_config(recipe)) is not None else 0,
    )
