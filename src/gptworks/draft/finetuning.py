"""Draft a recipe that fine-tunes a run on conversations or preference pairs, sized by the data and a measured step."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gptworks.chat_template import TEMPLATE_FILE
from gptworks.config import Recipe
from gptworks.config.defaults import ADAPTER_TIMES, HIGHEST_TUNING_RATE, TUNING_RATE_TIMES_WIDTH, tuning_rate
from gptworks.data.conversations.inspection import Finding, inspect_records
from gptworks.data.conversations.packing import Examples, find_joint
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare
from gptworks.data.samples import open_samples
from gptworks.data.shards import TokenShards
from gptworks.device import choose_device, this_device
from gptworks.draft.drafted import Drafted, Row, Sections, parsed
from gptworks.errors import UserError
from gptworks.interop.hub import find_model
from gptworks.planning.devices import Device
from gptworks.planning.fit import divisors
from gptworks.planning.run import Plan
from gptworks.planning.run import plan as plan_recipe
from gptworks.planning.steps import DataSize
from gptworks.recipe import load_recipe, near_run, not_a_run, run_name, with_vocab_size
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import load_tokenizer
from gptworks.training.rehearsal.measure import measure_speed
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.training.start import check_start
from gptworks.units import readable

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

LORA_RANK = 8

ADAPTED: tuple[Literal["full", "int8", "int4"], ...] = ("full", "int8", "int4")
"""Formats of the base model's weights under an adapter, in the order in which they are tried."""

STEPS_AN_EPOCH, LARGEST_BATCH = 30, 32
ROW_MULTIPLE, MOST_TIMES_LONGER = 64, 8
"""Rows are a multiple of 64 tokens, or as long as the context. Rows of joined examples are at most 8 times as long as
rows of single examples."""
EPOCHS = ((10_000, 1), (1_000, 2), (0, 3))
"""Pairs (minimum number of examples, number of epochs)."""


@dataclass(frozen=True)
class Tuning(Drafted):
    """A recipe that fine-tunes a run, with its plan and statistics of its data."""

    data_lines: list[str]
    findings: list[Finding]
    """Faults of the data that would stop training."""

    def lines(self) -> list[str]:
        """Return lines that describe the run's parameters, steps, time and memory."""
        plan = self.plan
        what = "added to those" if plan.recipe.adapter or plan.recipe.freeze else "all"
        return [
            f"trains      {plan.trained.parameters:,} parameters, {what} of {plan.recipe.initialize_from}",
            f"steps       {plan.steps:,} of {plan.train.batch_size} × {plan.setting.row_length:,} tokens: "
            f"{plan.train.epochs:g} epochs",
            f"context     {plan.recipe.model.context_length:,} tokens, as its base has",
            *self.time_and_memory(),
        ]

    def text(self) -> str:
        return self.file([f"Drafted by `gptworks tune` on {self.plan.device.name}.", "", *self.lines()])


def base_run(base: str, report: Callable[[str], None]) -> Path:
    """Return the run to start from. If `base` is a Hugging Face folder or a model on the hub, import it into a folder
    in runs/, whose name depends on the contents, so that the next call finds the imported run.

    Raises:
        UserError: `base` is neither a run nor a model, or cannot be imported.
        RunError: the hub cannot be reached.
    """
    if (Path(base) / "recipe.yaml").exists():
        return Path(base)
    if not Path(base).exists() and (near := near_run(Path(base))) is not None and Path(base).parent == near.parent:
        raise not_a_run(Path(base))
    found = find_model(base, report)
    if (found.folder / "adapter_config.json").exists():
        raise UserError(
            f"{base} is an adapter: `gptworks import {shlex.quote(str(base))} runs/NAME --base FOLDER` makes "
            f"a run of it and its base, which can be tuned."
        )
    if not (found.folder / "config.json").exists():
        raise UserError(
            f"{base} is neither a run folder nor a Hugging Face folder: it has no recipe.yaml and no config.json."
        )
    name = Path(base.partition("@")[0]) if found.source else found.folder
    files = ((file, file.stat()) for file in sorted(found.folder.iterdir()) if file.is_file())
    contents = found.source or [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in files]
    run = Path("runs") / f"{run_name(name)}-{sha256(repr(contents).encode()).hexdigest()[:8]}"
    if not run.exists():
        from gptworks.interop.huggingface import import_huggingface

        run.parent.mkdir(exist_ok=True)
        import_huggingface(found.folder, run, source=found.source, report=report)
        report(f"imported {base} as {run}")
    return run


def draft_tuning(
    run: Path,
    data: Path,
    out: Path,
    preference: bool = False,
    *,
    prepare: Callable[[Recipe], Prepared] = prepare,
) -> Tuning:
    """Draft the recipe that fine-tunes a run on a file of conversations or preference pairs.

    Args:
        out: the recipe's file, which also names the recipe.
        prepare: function that turns the data into tokens, as `gptworks.data.prepare.prepare` does.

    Raises:
        UserError: the data cannot be read, or the model does not fit in memory with any way of training.
    """
    draft = _Draft(run, data, out, preference)
    check_start(draft.recipe())
    prepared = prepare(draft.recipe())
    draft.fit_to(prepared)
    device = choose_device()
    for draft.adapted in (None, *ADAPTED):
        plan = draft.planned(prepared, this_device(device))
        if plan.fits:
            break
    else:
        raise UserError(
            f"{run}: not even an adapter of int4 weights fits in memory: {readable(plan.peak.total_bytes, 'B')} at "
            f"the peak, and {readable(plan.device.memory_bytes, 'B')} are free. Take a smaller model."
        )
    inspection = inspect_records(plan.recipe, prepared)
    plan = replace(plan, measured=measure_speed(Rehearsal.of(plan, device.type)))
    return Tuning(draft.sections(), plan, inspection.lines, inspection.findings)


class _Draft:
    """The settings of a recipe, chosen step by step."""

    def __init__(self, run: Path, data: Path, out: Path, preference: bool) -> None:
        self.run, self.data, self.out, self.preference = run, data, out, preference
        self.base = load_recipe(run).model
        self.template = _template(run)
        self.row = self.least_row = self.base.context_length
        self.vocab_size = 0
        self.joins = False
        """Whether examples become turns of one conversation."""
        self.batch, self.micro, self.epochs, self.steps = 1, 1, 1, 1
        self.adapted: Literal["full", "int8", "int4"] | None = None
        """Format of the base model's weights under an adapter; None if all weights are trained."""

    def fit_to(self, prepared: Prepared) -> None:
        """Choose the length of rows, the batch size and the epochs to suit the examples, and whether to join them."""
        shards = TokenShards(prepared.folder, "train")
        lengths = Examples(shards, self.row, packing=False).n_tokens
        wanted = int(np.quantile(lengths, 0.99)) - 1
        self.row = self.least_row = min(self.row, max(1, -(-wanted // ROW_MULTIPLE)) * ROW_MULTIPLE)
        if "added_tokens" in self.template and self.base.vocab_size >= prepared.manifest.vocab_size:
            self.vocab_size = self.base.vocab_size  # keep the base's size, which has spare rows for the added tokens
        rows = open_samples(self.recipe(prepared), prepared.folder).per_epoch
        n_examples = len(lengths) // (2 if self.preference else 1)
        self.epochs = 1 if self.preference else next(n for least, n in EPOCHS if n_examples >= least)
        while self.batch < LARGEST_BATCH and rows >= 2 * self.batch * STEPS_AN_EPOCH:
            self.batch *= 2
        self.steps = max(1, round(self.epochs * rows / self.batch))
        if not self.preference and _can_join(prepared):
            self._join()
        self.micro = self.batch

    def _join(self) -> None:
        """Choose longer rows of joined examples and fewer rows in a batch, with as many tokens per step as before."""
        self.joins = True
        times = 1
        while times < min(self.batch, MOST_TIMES_LONGER) and 2 * times * self.row <= self.base.context_length:
            times *= 2
        self.row, self.batch = times * self.row, self.batch // times

    def planned(self, prepared: Prepared, device: Device) -> Plan:
        """Return the plan with the largest micro-batch that fits in memory, or with the smallest micro-batch if none
        fits. To make a micro-batch fit, halve the length of rows of joined examples and double the batch, as often as
        needed."""
        while True:
            for micro in divisors(self.batch):
                self.micro = micro
                recipe = self.recipe(prepared)
                samples = open_samples(recipe, prepared.folder).per_epoch
                size = DataSize(prepared.manifest.splits["train"].tokens, samples)
                plan = plan_recipe(recipe, size, device=device)
                if plan.fits:
                    return plan
            if self.row < 2 * self.least_row:
                return plan
            self.row, self.batch = self.row // 2, 2 * self.batch

    def recipe(self, prepared: Prepared | None = None) -> Recipe:
        """Return the recipe with the settings chosen so far, and with the size of the vocabulary if `prepared` is
        given."""
        recipe = parsed(self.sections(), self.out)
        return recipe if prepared is None else with_vocab_size(recipe, prepared.manifest.vocab_size)

    def sections(self) -> Sections:
        """Return the settings chosen so far, with their reasons, by section."""
        model: list[Row] = []
        if self.vocab_size:
            model.append(("vocab_size", self.vocab_size, "the base's, which has spare rows"))
        objective: list[Row] = [("type", "instruction", "loss on the answers only")]
        if self.joins:
            objective.append(("packing", "turns", "so that it also learns to answer later in a chat"))
        if self.preference:
            objective = [
                ("type", "preference", "raises the chosen answer over the rejected one (Rafailov et al., 2023)"),
                ("beta", 0.1, "limits the drift from the base"),
            ]
        adapter: list[Row] = [
            ("rank", LORA_RANK, "all weights do not fit in memory (LoRA, Hu et al., 2021)"),
            *([("embeddings", True, "the new tokens must be learned")] if "added_tokens" in self.template else []),
        ]
        if self.adapted not in (None, "full"):
            adapter.append(("base", self.adapted, "full weights do not fit with an adapter either (QLoRA, 2023)"))
        source = {"type": "preferences" if self.preference else "conversations", "path": str(self.data)}
        sections: Sections = {
            "": [("initialize_from", str(self.run), "its weights, model and tokenizer")],
            "model": model,
            "objective": objective,
            "tokenizer": [(key, value, _TEMPLATE_REASONS[key]) for key, value in self.template.items()],
            "data": [("sources", [source], ""), ("validation", {"fraction": 0.05}, "")],
            "adapter": adapter if self.adapted else [],
            "train": self._train(),
        }
        return {name: rows for name, rows in sections.items() if rows}

    def _train(self) -> list[Row]:
        rate = tuning_rate(self.base.d_model, judged=self.preference, adapter=self.adapted is not None)
        why = f"{TUNING_RATE_TIMES_WIDTH} / d_model (Yang et al., 2022)"
        why += f"; {ADAPTER_TIMES} times that for an adapter" if self.adapted else ""
        why += "; a fifth on pairs" if self.preference else ""
        why += f"; at most {HIGHEST_TUNING_RATE:g}" if rate == HIGHEST_TUNING_RATE else ""
        is_short = self.row < self.base.context_length
        return [
            ("epochs", self.epochs, ""),
            ("batch_size", self.batch, f"at least {STEPS_AN_EPOCH} steps an epoch, if the data suffices"),
            *([("micro_batch_size", self.micro, "as many at a time as fit")] if self.micro != self.batch else []),
            *([("row_tokens", self.row, "shorter than its context: trains faster")] if is_short else []),
            ("optimizer", "adamw", ""),
            ("learning_rate", rate, why),
            ("weight_decay", 0.0, ""),
            ("warmup_steps", self.steps // 20, ""),
            ("schedule", "cosine", ""),
            ("final_rate_fraction", 0.1, ""),
            ("evaluate_every", max(1, self.steps // 6), ""),
            ("evaluate_sequences", 64, ""),
            ("checkpoint_every", max(1, self.steps // 3), ""),
            ("sample_every", max(1, self.steps // 3), ""),
            ("sample_held_out", 2, "questions of held-out conversations, chosen before training"),
        ]


def _can_join(prepared: Prepared) -> bool:
    """Return whether the dataset's chat template allows objective.packing=turns."""
    try:
        return prepared.chat_template is not None and bool(find_joint(prepared.chat_template))
    except UserError:
        return False


_TEMPLATE_REASONS = {
    "chat_template": "the base has none of its own",
    "added_tokens": "the base has no token that ends a text",
}


def _template(run: Path) -> dict[str, Any]:
    """Return the `tokenizer` settings that choose a chat template; empty if the base has a template."""
    if (run / "tokenizer" / TEMPLATE_FILE).exists():
        return {}
    tokenizer = load_tokenizer(run / "tokenizer")
    if all(tokenizer.token_to_id(token) is not None for token in CHATML_TOKENS):
        return {"chat_template": "chatml"}
    if "eos_token" not in special_tokens(tokenizer).names:
        return {"chat_template": "chatml", "added_tokens": list(CHATML_TOKENS)}
    return {"chat_template": "alpaca"}
