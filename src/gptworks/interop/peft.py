"""Adapters in PEFT's file format: `export_adapter` writes a run's adapter, `import_adapter` makes a run of an adapter.

    adapter_config.json           rank, alpha and the names of the adapted modules in transformers
    adapter_model.safetensors     base_model.model.<module>.lora_A.weight [r, I], lora_B.weight [O, r]

r: rank; I: inputs; O: outputs.

transformers may join several of our matrices into one, such as query, key and value of a GPT-2. Their adapters are then
joined too, without loss: the joined adapter's rank is the sum of all ranks, A is stacked, and B is block-diagonal.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.checkpoint import LoadedRun, Report, load_run
from gptworks.config import ADAPTED_MODULES, LoRAConfig, ModelConfig
from gptworks.errors import UserError
from gptworks.files import check_free, check_tree, copy_folder, new_folder, write_whole
from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.interop.huggingface.family import Family
from gptworks.interop.huggingface.fitting import choose_family
from gptworks.interop.huggingface.importing import import_huggingface, read_folder_config
from gptworks.interop.huggingface.settings import biases
from gptworks.interop.huggingface.verify import (
    compare_logits,
    load_theirs,
    quiet,
    require,
    sequences_for,
    verify_import,
)
from gptworks.interop.peft_settings import CONFIG_FILE, MERGE, LoraSettings, read_settings
from gptworks.interop.steps import further_training, leave_out_heads, write_run
from gptworks.interop.tensors import Place, tensor_places
from gptworks.model.lora import is_adapter, remove_lora
from gptworks.recipe import parse_section, run_name
from gptworks.tensors import read_tensors
from gptworks.tokenizer import load_tokenizer

TENSORS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

Pair = tuple[Tensor, Tensor]
"""A [r, I] and B [O, r] of one matrix, to which the adapter adds scale · B·A."""


@dataclass(frozen=True)
class AdapterExport:
    """The result of exporting an adapter."""

    folder: Path
    base: str
    """The Hugging Face folder of the adapter's base model, or the model's name on the hub."""
    modules: int
    parameters: int
    logit_difference: float | None
    """Largest difference between the run's logits and PEFT's; None without a comparison."""


@dataclass(frozen=True)
class AdapterImport:
    """The result of importing an adapter."""

    run_dir: Path
    adapter: LoRAConfig
    parameters: int
    logit_difference: float | None
    """Largest difference between the run's logits and PEFT's; None without a comparison."""


def export_adapter(
    run: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    checkpoint: str = "best",
    verify: bool = True,
    report: Report = lambda _: None,
) -> AdapterExport:
    """Write a run's adapter as a folder that PEFT loads with a Hugging Face model.

    Args:
        base: the base model's Hugging Face folder, or the model's name on the hub. None: also write the base to
            `out/base`.
        verify: compare base and adapter in PEFT with our model; not possible with a name on the hub.

    Raises:
        UserError: the run has no adapter; PEFT's format cannot represent the adapter; the adapter was trained on a
            quantized base, and `base` is given; transformers lacks the model's architecture; `out` is not empty; or
            `verify` is true, and PEFT is not installed or `base` is not a local folder.
        RunError: PEFT's logits differ from the run's, or the disk is full or fails. No partial folder is left.
    """
    out = Path(out).absolute()
    check_free(out)
    loaded = load_run(run, checkpoint, full=True, merge=False, report=report)
    adapter = loaded.recipe.adapter
    if adapter is None:
        raise UserError(f"{run} has no adapter: leave --adapter out.")
    if adapter.embeddings:
        raise UserError(f"{run} also trained its embeddings (adapter.embeddings): export it merged, without --adapter.")
    if base is not None and adapter.base != "full":
        raise UserError(
            f"{run} was trained on weights rounded to {adapter.base} (adapter.base), and --base {base} has others: "
            f"leave --base out to write the rounded ones to {out / 'base'}."
        )
    leave_out_heads(loaded.model)
    config, tokenizer = loaded.model.config, load_tokenizer(loaded.tokenizer_folder)
    if base is not None and (Path(base) / "config.json").exists():
        family, _ = read_folder_config(Path(base))
    else:
        family, _ = choose_family(config, tokenizer)
    if verify:
        require("peft")
    theirs = to_peft(family, config, adapter, loaded.model.state_dict())
    base_name, difference = str(out / "base" if base is None else base), None
    with new_folder(out) as aside:
        if base is None:
            report("writing the base")
            export_huggingface(run, aside / "base", checkpoint=checkpoint, verify=verify, merge=False, report=report)
        _write(aside, theirs, adapter, base_name, family)
        if verify:
            here = aside / "base" if base is None else Path(base)
            if not here.is_dir():
                raise UserError(f"--base {base} is not a local folder, so it cannot be compared: give --no-verify.")
            report("comparing it with the run in peft")
            difference = _verify(aside, here, loaded, tokenizer)
    n_parameters = sum(a.numel() + b.numel() for a, b in theirs.values())
    return AdapterExport(out, base_name, len(theirs), n_parameters, difference)


def to_peft(family: Family, config: ModelConfig, adapter: LoRAConfig, tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Return A and B of each adapted module, by the module's name in transformers. Raises a UserError if PEFT's format
    cannot represent one of the adapters."""
    adapters = [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]
    ours = {module: (tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"]) for module in adapters}
    adapted = family.adapted(config)
    if "qkv" in biases(config) - biases(adapted) and adapter.adapts("attention.out"):
        raise UserError(
            f"a `{family.model_type}` merges the value's biases into the output projection, whose adapter would change "
            f"them: export the run merged, without --adapter."
        )
    if not adapted.qk_norm and (factor := config.score_scale / adapted.score_scale) != 1.0:
        ours |= {name: (a, factor * b) for name, (a, b) in ours.items() if name.endswith(".query")}
    return {
        place.theirs.removesuffix(".weight"): _joined([ours.get(module) for module in modules], place, config, tensors)
        for place, modules in _places(family, config, tensors)
        if any(module in ours for module in modules)
    }


def _places(family: Family, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Place, list[str]]]:
    """Yield the `Place` in transformers of each weight, and our names of the modules in that place. Raises a UserError
    if an adapter belongs to experts that transformers stores as one tensor, not as modules."""
    names = [name for name in tensors if name.endswith(".weight")]
    for place in tensor_places(family.places, config, names):
        modules = [name.removesuffix(".weight") for name in place.ours]
        if place.layout.stacked and any(f"{module}.lora_a" in tensors for module in modules):
            raise UserError(
                f"a `{family.model_type}` stores all experts in one tensor, which PEFT cannot adapt: export the "
                f"run merged, without --adapter, or train with adapter.targets=attention."
            )
        yield place, modules


def _joined(parts: list[Pair | None], place: Place, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Pair:
    """Return the adapter, A and B, of a matrix in transformers that joins one or more of ours.

    Args:
        parts: the adapter of each of our matrices, or None for a matrix without an adapter.
    """
    there = [pair for pair in parts if pair is not None]
    rank, at = sum(len(a) for a, _ in there), 0
    columns = []
    for name, pair in zip(place.ours, parts, strict=True):
        whole = there[0][1].new_zeros(tensors[name].size(0), rank)  # [O, rank]
        if pair is not None:
            whole[:, at : at + len(pair[0])] = pair[1]
            at += len(pair[0])
        columns.append(whole)
    b = place.layout.join(columns, config)
    return torch.cat([a for a, _ in there]), _upright(b, place)


def _upright(x: Tensor, place: Place) -> Tensor:
    """Return `x`, transposed if transformers stores the matrix of this place as [I, O]. PEFT's B is always [O, r]."""
    return x.T if place.layout.transposed else x


def _write(folder: Path, pairs: dict[str, Pair], adapter: LoRAConfig, base: str, family: Family) -> None:
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / TENSORS_FILE, {"format": "pt"})
    ranks = {re.escape(module): len(a) for module, (a, _) in pairs.items() if len(a) != adapter.rank}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "fan_in_fan_out": family.model_type == "gpt2",
        "target_modules": list(pairs),
        "rank_pattern": ranks,
        "alpha_pattern": {module: adapter.scale * rank for module, rank in ranks.items()},
        "inference_mode": True,
    }
    write_whole(folder / CONFIG_FILE, json.dumps(settings, indent=2) + "\n", new=True)


def _verify(folder: Path, base: Path, loaded: LoadedRun, tokenizer: Tokenizer) -> float:
    """Compare our model with base and adapter in PEFT; return the largest difference between the logits."""
    with quiet():
        theirs = require("peft").PeftModel.from_pretrained(load_theirs(base), folder, local_files_only=True).eval()
        sequences = sequences_for(loaded.model, tokenizer, loaded.recipe.train.sample_prompts)
        return compare_logits(remove_lora(loaded.model, merge=True), theirs, sequences)[0]


# ------------------------------------------------------------------------------------------------------- import


def import_adapter(
    folder: str | Path,
    run_dir: str | Path,
    base: str | Path,
    *,
    verify: bool = True,
    report: Report = lambda _: None,
) -> AdapterImport:
    """Make a run from a PEFT adapter and its base.

    Args:
        base: the run folder or Hugging Face folder of the base model.
        verify: compare the run with base and adapter in PEFT, if PEFT is installed.

    Raises:
        UserError: the folder has no LoRA adapter; the adapter does more than LoRA, or does not fit the base; `verify`
            is true, and PEFT cannot load the adapter; or `run_dir` is not empty.
        RunError: the logits differ from PEFT's, or the disk is full or fails. No partial folder is left.
    """
    folder, run_dir, base = Path(folder), Path(run_dir), Path(base)
    check_free(run_dir)
    check_tree(folder)
    settings, tensors = read_settings(folder), _read_tensors(folder)
    with new_folder(run_dir) as aside:
        loaded, family = _load_base(base, aside / "base", report)
        weights = loaded.model.state_dict()
        adapter, changed = from_peft(family, loaded.model.config, settings, tensors, weights)
        train = further_training(loaded.model.config, adapter=True)
        update = {"name": run_name(run_dir), "run_dir": run_dir, "adapter": adapter, "freeze": None, "train": train}
        recipe = loaded.recipe.model_copy(update=update)
        copy_folder(loaded.tokenizer_folder, aside / "tokenizer", inside=loaded.tokenizer_folder.parent)
        card = f"# {recipe.name}\n\nAn imported LoRA adapter of the model in `{base.name}`.\n"
        write_run(aside, recipe, weights | changed, card)
        difference = None
        if verify:
            difference = verify_import(aside, "peft", lambda: _in_peft(base, folder, aside / "base"), report)
        shutil.rmtree(aside / "base", ignore_errors=True)
    n_parameters = sum(tensor.numel() for name, tensor in changed.items() if is_adapter(name))
    return AdapterImport(run_dir, adapter, n_parameters, difference)


def _load_base(base: Path, aside: Path, report: Report) -> tuple[LoadedRun, Family]:
    """Return the base as a run, and its architecture in transformers. A Hugging Face folder is imported to `aside`."""
    if (base / "recipe.yaml").exists():
        loaded = load_run(base, full=True, report=report)
        return loaded, choose_family(loaded.model.config, load_tokenizer(loaded.tokenizer_folder))[0]
    import_huggingface(base, aside, verify=False, report=report)
    return load_run(aside), read_folder_config(base)[0]


def _in_peft(base: Path, adapter: Path, aside: Path) -> Any:
    """Load base and adapter in PEFT. A base that is a run is first exported to `aside`."""
    if (base / "recipe.yaml").exists():
        export_huggingface(base, aside, verify=False)
        base = aside
    return require("peft").PeftModel.from_pretrained(load_theirs(base), adapter, local_files_only=True)


def from_peft(
    family: Family,
    config: ModelConfig,
    settings: LoraSettings,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> tuple[LoRAConfig, dict[str, Tensor]]:
    """Convert PEFT's settings and tensors (by name, without PEFT's prefix) to our adapter.

    Each module's adapter is padded with zeros to the largest rank. All adapters get the first module's scale, and each
    B is multiplied by its own scale divided by this scale. If only some modules of a kind have an adapter in PEFT, the
    others get an adapter of zeros.

    Args:
        weights: our weights of the base, by name.

    Returns:
        The adapter's settings, and tensors by name: A and B of each module, and the base's matrices that PEFT's
        initialization changed.

    Raises:
        UserError: a tensor does not belong to the model, has a wrong shape or rank, is missing, or contradicts the
            settings.
    """
    left = dict(tensors)
    found: dict[str, tuple[Tensor, Tensor, float]] = {}
    changed: dict[str, Tensor] = {}
    factor = config.score_scale / family.adapted(config).score_scale if not config.qk_norm else 1.0
    for place, modules in _places(family, config, weights):
        theirs = place.theirs.removesuffix(".weight")
        a, b = left.pop(f"{theirs}.lora_A.weight", None), left.pop(f"{theirs}.lora_B.weight", None)
        targeted = settings.targets(theirs)
        if a is None and b is None and not (targeted and settings.target_modules != "all-linear"):
            continue
        if f"{theirs}.lora_embedding_A" in left:  # an embedding's adapter, which is refused below
            continue
        if a is None or b is None:
            missing = " and ".join(f"`{theirs}.lora_{half}.weight`" for half, x in (("A", a), ("B", b)) if x is None)
            raise UserError(f"{TENSORS_FILE} has no {missing}, but {CONFIG_FILE} names the module: it is incomplete.")
        if not targeted:
            raise UserError(
                f"{TENSORS_FILE} has an adapter of `{theirs}`, which target_modules, exclude_modules and "
                f"layers_to_transform in {CONFIG_FILE} exclude: PEFT would ignore it. Correct the settings."
            )
        scales = [factor if name.endswith(".query.weight") else 1.0 for name in place.ours]
        whole = place.layout.join([weights[n].float() * s for n, s in zip(place.ours, scales, strict=True)], config)
        _check_shapes(theirs, a, b, settings.rank_of(theirs), _upright(whole, place).shape)
        parts = place.layout.split(_upright(b.float(), place), config)
        scale = settings.scale_of(theirs)
        found |= {module: (a.float(), part, scale) for module, part in zip(modules, parts, strict=True)}
        if (taken := settings.part_of_base(theirs, whole, place.layout.transposed)) is not None:
            rest = place.layout.split(whole - taken, config)
            changed |= {n: (w / s).contiguous() for n, w, s in zip(place.ours, rest, scales, strict=True)}
    targets = {module.rpartition(".")[2] for module in found}
    strange = sorted(left) + sorted(targets.difference(*ADAPTED_MODULES.values()))
    if strange or not found:
        raise UserError(
            f"the adapter has `{strange[0] if strange else 'nothing'}`, for which gptworks has no adapter in a "
            f"`{family.model_type}`: it supports only the blocks' linear layers. {MERGE}."
        )
    rank, scale = max(len(a) for a, _, _ in found.values()), next(iter(found.values()))[2]
    fields = {"rank": rank, "alpha": scale * rank, "dropout": settings.lora_dropout, "targets": sorted(targets)}
    adapter = parse_section(fields, LoRAConfig, CONFIG_FILE)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.dim() == 2 and adapter.adapts(module):
            a, b = weight.new_zeros(rank, weight.size(1)), weight.new_zeros(weight.size(0), rank)
            if module in found:
                their_a, their_b, their_scale = found[module]
                a[: len(their_a)], b[:, : len(their_a)] = their_a, their_b * (their_scale / adapter.scale)
                if module.endswith(".query"):
                    b /= factor
            changed |= {f"{module}.lora_a": a, f"{module}.lora_b": b}
    return adapter, changed


def _check_shapes(module: str, a: Tensor, b: Tensor, rank: int, shape: torch.Size) -> None:
    """Raise UserError unless A is [rank, I] and B [O, rank], for a matrix of `shape` [O, I] (outputs, inputs)."""
    given, expected = (tuple(a.shape), tuple(b.shape)), ((rank, shape[1]), (shape[0], rank))
    if given != expected:
        raise UserError(
            f"the adapter of `{module}` has the shapes {given[0]} and {given[1]}; the model and the rank in "
            f"{CONFIG_FILE} require {expected[0]} and {expected[1]}."
        )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors by name, without PEFT's prefix."""
    path = folder / TENSORS_FILE
    if not path.exists():
        raise UserError(f"{folder} has no {TENSORS_FILE}: gptworks reads only safetensors.")
    tensors: dict[str, Tensor] = {}
    fix = "Save the adapter again, or use another one."
    held = read_tensors(path, None, inside=folder, owner="an adapter", fix=fix)
    for name, tensor in held.items():
        short = name.removeprefix(PREFIX)
        if short in tensors:
            raise UserError(f"{path} has `{short}` twice, with and without `{PREFIX}`: keep one.")
        tensors[short] = tensor
    return tensors
