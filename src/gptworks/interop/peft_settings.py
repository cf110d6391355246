"""`adapter_config.json`: what each setting of PEFT's LoRA means for the weights, and which settings are refused.

Each key is in one of three tables: read here, without effect on a finished adapter, or refused by name with the
reason. A key that stands in none of them is refused unless it is empty.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks.errors import UserError

CONFIG_FILE = "adapter_config.json"

READ = frozenset({
    "peft_type", "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias",
})  # fmt: skip
"""Settings that decide what the tensors mean."""

WITHOUT_EFFECT = frozenset({
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
    "megatron_core", "runtime_config", "qalora_group_size", "eva_config", "ensure_weight_tying", "fan_in_fan_out",
})  # fmt: skip
"""Settings that change nothing of a finished adapter: notes, what only training reads, options of features that are
refused below, and `fan_in_fan_out`, which PEFT itself sets by the kind of each layer."""

REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the merged matrix",
    "use_qalora": "QALoRA pools the adapter's inputs",
    "use_bdlora": "BD-LoRA keeps blocks of a diagonal",
    "lora_bias": "the adapter has biases of its own",
    "modules_to_save": "it replaces whole modules of the base",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it adapts parameters that are not modules",
    "layer_replication": "it repeats layers of the base, which makes another model",
    "alora_invocation_tokens": "the adapter works only after certain tokens",
    "arrow_config": "it routes between several adapters",
    "velora_config": "VeLoRA is another kind of adapter",
    "monteclora_config": "MonteCLoRA is another kind of adapter",
    "kasa_config": "KaSA changes the base with singular values",
    "megatron_config": "its layers are Megatron's",
    "loftq_config": "LoftQ replaces the base's weights by quantized ones, which the adapter's folder does not hold",
    "corda_config": "CorDA changes the base by activations that the adapter's folder does not hold",
    "lora_ga_config": "LoRA-GA changes the base by gradients that the adapter's folder does not hold",
}
"""What else an adapter may do than LoRA, and why that cannot be read. Empty values are fine."""

PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva"})
"""Values of `init_lora_weights`, beside true and false, that leave the base as it is."""
CORRECTED_INITS = frozenset({"pissa", "olora"})
"""Those that take a part from the base, which follows from the base alone."""

_CONVERT = (
    "Save the adapter again with PEFT's `save_pretrained(path_initial_model_for_weight_conversion=...)`, which makes "
    "it plain LoRA, or merge it in PEFT and import the merged model"
)
_QUANTIFIERS = 8
_PATTERN_CHARACTERS = 2000


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of an adapter, checked: each one is read, has no effect, or is empty.

    Raises:
        UserError: no readable file, or settings that make another kind of adapter.
    """
    path = folder / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path}: no such file. Give a folder that PEFT's `save_pretrained` wrote.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise UserError(f"{path} holds {type(settings).__name__}, not a mapping.")
    _check(settings, path)
    return settings


def _check(settings: Mapping[str, Any], path: Path) -> None:
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{path} has peft_type `{settings.get('peft_type')}`: gptworks reads LORA alone.")
    if settings.get("bias", "none") != "none":
        raise UserError(f"{path} has bias `{settings['bias']}`: gptworks reads adapters that leave biases alone.")
    _check_init(settings.get("init_lora_weights", True), path)
    for name, value in settings.items():
        if name in READ or name in WITHOUT_EFFECT or not value:
            continue
        reason = REFUSED.get(name, "gptworks does not know this setting, so it may be more than LoRA")
        raise UserError(f"{path} has `{name}`={_short(value)}: {reason}. {_CONVERT}.")
    _number(settings, "r", path, whole=True)
    _number(settings, "lora_alpha", path)
    if settings.get("lora_dropout") and not 0 <= _number(settings, "lora_dropout", path) < 1:
        raise UserError(f"{path} has `lora_dropout`={settings['lora_dropout']!r}: it must be at least 0 and below 1.")
    for name, whole in (("rank_pattern", True), ("alpha_pattern", False)):
        pattern = settings.get(name) or {}
        if not isinstance(pattern, dict):
            raise UserError(f"{path} has `{name}`={_short(pattern)}: it must be a mapping from modules to numbers.")
        for module in pattern:
            _check_pattern(module, name, path)
            _number(pattern, module, path, whole=whole)
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        value = settings.get(name) or []
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(n, str) for n in value)):
            raise UserError(f"{path} has `{name}`={_short(value)}: it must be a pattern or a list of names.")
        for pattern in [value] if isinstance(value, str) else value:
            _check_pattern(pattern, name, path)
    layers = settings.get("layers_to_transform")
    layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(isinstance(n, int) for n in layers):
        raise UserError(f"{path} has `layers_to_transform`={_short(layers)}: it must be numbers of layers.")


def _check_init(init: Any, path: Path) -> None:
    if isinstance(init, bool) or (isinstance(init, str) and _start(init) in PLAIN_INITS | CORRECTED_INITS):
        return
    reason = "gptworks does not know this start, which may change the base"
    if isinstance(init, str) and init.startswith("pissa_niter_"):
        reason = "its part of the base was found by a random search, so no one can take it away again, PEFT included"
    elif isinstance(init, str):
        reason = {
            "loftq": REFUSED["loftq_config"], "lora_ga": REFUSED["lora_ga_config"], "corda": REFUSED["corda_config"],
        }.get(init.lower().split("_niter")[0], reason)  # fmt: skip
    raise UserError(f"{path} has `init_lora_weights`={_short(init)}: {reason}. {_CONVERT}.")


def _start(init: Any) -> Any:
    """PEFT ignores the case of these two."""
    return init.lower() if isinstance(init, str) and init.lower() in ("olora", "gaussian") else init


def _number(values: Mapping[str, Any], name: str, path: Path, whole: bool = False) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise UserError(f"{path} has `{name}`={_short(value)}: it must be a {'whole ' if whole else ''}number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (number <= 0 and name != "lora_dropout"):
        raise UserError(f"{path} has `{name}`={_short(value)}: it must be finite and above 0.")
    return number


def _check_pattern(pattern: str, name: str, path: Path) -> None:
    """Refuse regular expressions that take forever or do not compile: the file may come from anyone."""
    repeated_group = re.search(r"\)[*+{]", pattern)
    if repeated_group or len(re.findall(r"(?<!\\)[*+{]", pattern)) > _QUANTIFIERS or len(pattern) > _PATTERN_CHARACTERS:
        raise UserError(f"{path} has the pattern {_short(pattern)} in `{name}`, which may take forever to match: name "
                        f"the modules in a list.")  # fmt: skip
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{path} has the pattern {_short(pattern)} in `{name}`: {error}.") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


# ------------------------------------------------------------------------------------------- what modules they name


def is_targeted(settings: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT puts an adapter beside a module, by its rules; for a module that it could adapt."""
    targets, excluded = settings.get("target_modules"), settings.get("exclude_modules")
    if excluded and _named(excluded, module):
        return False
    if targets in (None, [], "all-linear"):  # PEFT writes the names that it found; by itself this says nothing
        return True
    if isinstance(targets, str) or module in targets:
        return _named(targets, module)
    return _named(targets, module) and _in_layers(settings, module)


def _named(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _in_layers(settings: Mapping[str, Any], module: str) -> bool:
    layers = settings.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    patterns = settings.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if found := re.match(rf".*\.{pattern}\.(\d+)\.", module):
            return int(found[1]) in (layers if isinstance(layers, list) else [layers])
    return False


def _of_pattern(settings: Mapping[str, Any], name: str, module: str) -> Any:
    """What the first pattern that names the module says, or None."""
    patterns = settings.get(name) or {}
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), None)


def rank_of(settings: Mapping[str, Any], module: str) -> int:
    """The rank of a module's adapter."""
    rank = _of_pattern(settings, "rank_pattern", module)
    return int(settings["r"] if rank is None else rank)


def scale_of(settings: Mapping[str, Any], module: str) -> float:
    """The factor of B·A."""
    alpha, rank = _of_pattern(settings, "alpha_pattern", module), rank_of(settings, module)
    alpha = float(settings["lora_alpha"] if alpha is None else alpha)
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def part_of_base(settings: Mapping[str, Any], module: str, weight: Tensor, transposed: bool) -> Tensor | None:
    """What the adapter's start took from the base: to be subtracted, since the adapter holds it. None: nothing.

    PiSSA (Meng et al., 2024) starts with the largest singular parts of W, OLoRA (Büyükakyüz, 2024) with the first
    columns of its QR decomposition.

    Args:
        weight: the base's matrix as transformers keeps it, fp32.
        transposed: it is [in, out]. PEFT's PiSSA turns it and its OLoRA does not, so that an untrained OLoRA of a
            square matrix of a GPT-2 does change the model there.

    Returns:
        fp32, of the same shape.
    """
    kind, rank = _start(settings.get("init_lora_weights", True)), rank_of(settings, module)
    if kind == "pissa":
        u, s, v = torch.linalg.svd(weight.T if transposed else weight, full_matrices=False)
        part: Tensor = (u[:, :rank] * s[:rank]) @ v[:rank]
        return part.T if transposed else part
    if kind == "olora":
        q, r = torch.linalg.qr(weight)
        product: Tensor = q[:, :rank] @ r[:rank]
        return scale_of(settings, module) * product
    return None
