"""Read `adapter_config.json`, PEFT's settings of an adapter, and refuse settings that gptworks does not support.

Each known key is a field of `LoraSettings`, has no effect on a finished adapter, or is refused with a reason. Unknown
keys are refused too. A key that would be refused is accepted if its value is empty, false or zero.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from gptworks.confined.expressions import find
from gptworks.errors import UserError, shortened
from gptworks.json_files import read_json
from gptworks.units import whole_number

CONFIG_FILE = "adapter_config.json"

Number = TypeVar("Number", int, float)

WITHOUT_EFFECT = frozenset({
    "task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping",
    "megatron_core", "runtime_config", "qalora_group_size", "eva_config", "ensure_weight_tying", "fan_in_fan_out",
})  # fmt: skip
"""Settings without effect on a finished adapter: metadata, training settings, options of features in `REFUSED`, and
`fan_in_fan_out`, which PEFT sets itself by each layer's kind."""

REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA scales each row of the merged matrix",
    "use_qalora": "QALoRA pools the adapter's inputs",
    "use_bdlora": "BD-LoRA keeps blocks of a diagonal",
    "lora_bias": "the adapter has biases of its own",
    "modules_to_save": "it replaces modules of the base",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "it adapts parameters that are not modules",
    "layer_replication": "it repeats layers of the base, which gives another model",
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
"""Settings of features beyond plain LoRA → the reason why gptworks refuses them, unless they are empty or false."""

INITS = frozenset({"gaussian", "orthogonal", "eva", "pissa", "olora"})
"""Accepted values of `init_lora_weights` other than true and false. Each leaves the base unchanged, or moves a part of
the base (see `part_of_base`) into the adapter."""

MERGE = "Merge it in PEFT (`merge_and_unload`), and import the merged model"
_CONVERT = (
    "Save the adapter again with PEFT's `save_pretrained(path_initial_model_for_weight_conversion=...)`, which makes "
    "it plain LoRA, or merge it in PEFT (`merge_and_unload`) and import the merged model"
)
_FIXES: Mapping[str, str] = {
    **dict.fromkeys(("loftq_config", "corda_config", "lora_ga_config"), _CONVERT),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config"), "It cannot be merged: train a plain LoRA adapter"),
}
"""Refused settings to which `MERGE` does not apply → other advice. PEFT can convert adapters whose initialization
changes the base; adapters with the last two settings cannot be merged."""
_QUANTIFIERS = 8
_SECONDS = 0.1
"""Limit on seconds of processor time for matching a pattern with a module's name."""
_PATTERN_CHARACTERS = 2000


def _check_pattern(pattern: str) -> str:
    """Return an untrusted regular expression unchanged. Raises a ValueError if it may take very long to match, or does
    not compile."""
    repeated_group = re.search(r"\)[*+{]", pattern)
    if repeated_group or len(re.findall(r"(?<!\\)[*+{]", pattern)) > _QUANTIFIERS or len(pattern) > _PATTERN_CHARACTERS:
        raise ValueError(f"the pattern {_short(pattern)} may take very long to match: name the modules in a list")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {_short(pattern)}: {error}") from None
    return pattern


_Integer = Annotated[int, Field(strict=True)]
_Whole = Annotated[int, Field(strict=True, gt=0)]
_Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Names = _Pattern | list[_Pattern] | None
"""A regular expression for module names, or a list of module names or of the last parts of names."""


class LoraSettings(BaseModel):
    """The settings in `adapter_config.json` that determine the meaning of an adapter's tensors."""

    model_config = ConfigDict(frozen=True)

    peft_type: str
    bias: str = "none"
    init_lora_weights: bool | str = True
    r: _Whole
    lora_alpha: _Number
    lora_dropout: float = Field(0.0, strict=True, ge=0, lt=1, allow_inf_nan=False)
    rank_pattern: dict[_Pattern, _Whole] = {}
    alpha_pattern: dict[_Pattern, _Number] = {}
    use_rslora: bool = Field(False, strict=True)
    target_modules: _Names = None
    exclude_modules: _Names = None
    layers_to_transform: _Integer | list[_Integer] | None = None
    layers_pattern: _Names = None

    def targets(self, module: str) -> bool:
        """Return whether the settings select a module. The module must be of a kind that PEFT can adapt."""
        if self.exclude_modules and _named(self.exclude_modules, module):
            return False
        names = self.target_modules
        if names is None or names == "all-linear":  # any module may be adapted: the saved tensors decide
            return True
        if isinstance(names, str) or module in names:
            return _named(names, module)
        return _named(names, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self.layers_to_transform is None:
            return True
        patterns, layers = self.layers_pattern or r"[^.]*", self.layers_to_transform
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if (found := find(rf".*\.{pattern}\.(\d+)\.", [module], "match", _SECONDS)[0]) is not None:
                if (layer := whole_number(found[1])) is None:
                    raise UserError(
                        f"layers_pattern={_short(pattern)} has a group: give only the name of the list of layers."
                    )
                return layer in (layers if isinstance(layers, list) else [layers])
        return False

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return _of_pattern(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """Return the factor of B·A in a module's adapter."""
        alpha, rank = _of_pattern(self.alpha_pattern, module, self.lora_alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def part_of_base(self, module: str, weight: Tensor, transposed: bool) -> Tensor | None:
        """Return the part of a base matrix that the initialization moved into the adapter; None if it moved nothing.

        PiSSA (Meng et al., 2024) initializes with the largest singular components of the matrix. OLoRA (Büyükakyüz,
        2024) initializes with the first columns of Q and rows of R in the matrix's QR decomposition.

        Args:
            weight: the base's matrix in transformers' layout, fp32.
            transposed: whether `weight` is [in, out]. As in PEFT, such a matrix is transposed for PiSSA but not for
                OLoRA.

        Returns:
            The part to subtract from the base, in fp32 and in the shape of `weight`.
        """
        kind, rank = _start(self.init_lora_weights), self.rank_of(module)
        if kind == "pissa":
            u, s, v = torch.linalg.svd(weight.T if transposed else weight, full_matrices=False)
            part: Tensor = (u[:, :rank] * s[:rank]) @ v[:rank]
            return part.T if transposed else part
        if kind == "olora":
            q, r = torch.linalg.qr(weight)
            product: Tensor = q[:, :rank] @ r[:rank]
            return self.scale_of(module) * product
        return None


def _named(names: str | list[str], module: str) -> bool:
    if isinstance(names, str):
        return find(names, [module], "fullmatch", _SECONDS)[0] is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_pattern(patterns: Mapping[str, Number], module: str, otherwise: Number) -> Number:
    """Return the value of the first pattern that matches the module by PEFT's rule, or `otherwise` if none matches."""
    for pattern, value in patterns.items():
        if find(rf"(.*\.)?({pattern})$", [module], "match", _SECONDS)[0] is not None:
            return value
    return otherwise


def read_settings(folder: Path) -> LoraSettings:
    """Read and check the settings of an adapter. Raises a UserError if the file is not readable, or describes an
    adapter that gptworks does not support."""
    path = folder / CONFIG_FILE
    settings = read_json(path, "Give a folder that PEFT's `save_pretrained` wrote.")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{path} has peft_type `{settings.get('peft_type')}`: gptworks reads only LORA.")
    if settings.get("bias", "none") != "none":
        raise UserError(f"{path} has bias `{settings['bias']}`: gptworks reads only adapters without trained biases.")
    _check_init(settings.get("init_lora_weights", True), path)
    for name, value in settings.items():
        if name in LoraSettings.model_fields or name in WITHOUT_EFFECT or not value:
            continue
        reason = REFUSED.get(name, "gptworks does not know this setting, so it may be more than LoRA")
        raise UserError(f"{path} has `{name}`={_short(value)}: {reason}. {_FIXES.get(name, MERGE)}.")
    try:
        return LoraSettings.model_validate({n: value for n, value in settings.items() if value not in (None, [])})
    except ValidationError as error:
        problem = error.errors()[0]
        name, message = str(problem["loc"][0]), problem["msg"].removeprefix("Value error, ")
        raise UserError(f"{path} has `{name}`={_short(settings.get(name))}: {message}.") from None


def _check_init(init: Any, path: Path) -> None:
    if isinstance(init, bool) or (isinstance(init, str) and _start(init) in INITS):
        return
    reasons = {
        "pissa_niter": "its part of the base was found by a random search, so not even PEFT can compute it again",
        "loftq": REFUSED["loftq_config"], "lora_ga": REFUSED["lora_ga_config"], "corda": REFUSED["corda_config"],
    }  # fmt: skip
    unknown = "gptworks does not know this initialization, which may change the base"
    reason = next((why for start, why in reasons.items() if str(init).lower().startswith(start)), unknown)
    raise UserError(f"{path} has `init_lora_weights`={_short(init)}: {reason}. {_CONVERT}.")


def _start(init: Any) -> Any:
    """Return a value of `init_lora_weights`, in lower case if PEFT ignores its case."""
    return init.lower() if isinstance(init, str) and init.lower() in ("olora", "gaussian") else init


def _short(value: Any) -> str:
    return shortened(repr(value))
