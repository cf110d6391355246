"""What a training run comes to before it starts: parameters, steps, tokens, FLOPs and bytes on disk."""

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from gptworks.config import Recipe, TrainConfig
from gptworks.errors import UserError
from gptworks.plan.flops import forward_flops
from gptworks.plan.params import ParameterCount, count_parameters
from gptworks.plan.published import readable
from gptworks.plan.tables import Table, or_unknown, parameters_json

COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. (2022), table 3: about 20 tokens for each parameter at every size."""


@dataclass(frozen=True)
class Plan:
    """What a run comes to before it starts."""

    name: str
    parameters: ParameterCount
    flops_per_token: float
    """Forward and backward, at the training length, attention dense."""
    tokens_per_step: int
    steps: int | None
    """Optimizer steps; None where nothing known bounds them."""
    steps_reason: str
    """Which setting gives the steps, or why they are unknown."""
    optimizer_state_bytes: int
    shard_bytes_per_token: int
    n_train_tokens: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens that the run reads, repeats included."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def total_flops(self) -> float | None:
        return None if self.steps is None else self.steps * self.flops_per_step

    @property
    def tokens_per_parameter(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters.total

    @property
    def compute_optimal_tokens(self) -> int:
        """About as many tokens as a model of this size deserves (Hoffmann et al., 2022)."""
        return COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER * self.parameters.total

    @property
    def weights_bytes(self) -> int:
        """Weights in fp32, a tied head once; the file adds a header of some kilobytes."""
        return 4 * self.parameters.total

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and optimizer state."""
        return self.weights_bytes + self.optimizer_state_bytes

    @property
    def shards_bytes(self) -> int | None:
        """Training tokens on disk."""
        return None if self.n_train_tokens is None else self.n_train_tokens * self.shard_bytes_per_token

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Labelled figures for people."""
        optimal = f"about {COMPUTE_OPTIMAL_TOKENS_PER_PARAMETER} are compute-optimal (Hoffmann et al., 2022)"
        shards = f"{self.shard_bytes_per_token} B a token"
        if self.shards_bytes is not None:
            shards = f"{readable(self.shards_bytes, 'B')} ({shards})"
        return [
            ("parameters", f"{self.parameters.total:,}"),
            ("tokens a step", f"{self.tokens_per_step:,}"),
            ("steps", f"{or_unknown(self.steps)} ({self.steps_reason})"),
            ("tokens in all", or_unknown(self.tokens)),
            ("tokens a parameter", f"{or_unknown(self.tokens_per_parameter, '.3g')} ({optimal})"),
            ("training FLOPs a token", readable(self.flops_per_token, "FLOP")),
            ("training FLOPs a step", readable(self.flops_per_step, "FLOP")),
            ("training FLOPs in all", "unknown" if self.total_flops is None else readable(self.total_flops, "FLOP")),
            ("weights on disk, fp32", readable(self.weights_bytes, "B")),
            ("one checkpoint on disk", readable(self.checkpoint_bytes, "B")),
            ("token shards on disk", shards),
        ]

    def to_json(self) -> dict[str, Any]:
        """Stable keys; null where a figure is unknown before the run."""
        return {
            "name": self.name,
            "parameters": parameters_json(self.parameters),
            "tokens_per_step": self.tokens_per_step,
            "steps": self.steps,
            "steps_reason": self.steps_reason,
            "tokens": self.tokens,
            "tokens_per_parameter": self.tokens_per_parameter,
            "compute_optimal_tokens": self.compute_optimal_tokens,
            "flops": {
                "per_token": self.flops_per_token,
                "per_step": self.flops_per_step,
                "total": self.total_flops,
            },
            "disk": {
                "weights_bytes": self.weights_bytes,
                "optimizer_state_bytes": self.optimizer_state_bytes,
                "checkpoint_bytes": self.checkpoint_bytes,
                "shard_bytes_per_token": self.shard_bytes_per_token,
                "shards_bytes": self.shards_bytes,
            },
        }

    def to_markdown(self) -> str:
        """The plan as a table."""
        return f"# {self.name}: plan\n\n{Table(('', ''), 'll', self.facts).markdown()}\n"

    def __rich__(self) -> RenderableType:
        return Table((self.name, "plan"), "ll", self.facts).rich()


def plan(recipe: Recipe, n_train_tokens: int | None = None) -> Plan:
    """What training `recipe` comes to, where `n_train_tokens` is the size of its prepared training split, if known.

    Raises:
        UserError: the vocabulary is not known yet, or the training split is shorter than one window.
    """
    model, train = recipe.model, recipe.train
    parameters = count_parameters(model)
    steps, reason = planned_steps(train, model.context_length, n_train_tokens)
    muon = parameters.block_matrices if train.optimizer == "muon" else 0
    return Plan(
        name=recipe.name,
        parameters=parameters,
        flops_per_token=forward_flops(model).training_per_token_dense,
        tokens_per_step=train.batch_size * model.context_length,
        steps=steps,
        steps_reason=reason,
        optimizer_state_bytes=4 * (2 * (parameters.total - muon) + muon),
        shard_bytes_per_token=2 if model.vocab_size <= 2**16 else 4,
        n_train_tokens=n_train_tokens,
    )


def planned_steps(train: TrainConfig, context_length: int, n_train_tokens: int | None) -> tuple[int | None, str]:
    """Optimizer steps and the setting that gives them: the first reached of max_steps and epochs, as far as known.

    An epoch visits each window of `gptworks.data.batches.Batches` once; a run is a whole number of steps.
    """
    if n_train_tokens is not None and n_train_tokens <= context_length:
        raise UserError(
            f"n_train_tokens={n_train_tokens} is shorter than one window (context_length={context_length}, and one): "
            f"use more text or a shorter context_length"
        )
    bounds: list[tuple[int, str]] = []
    unknown: list[str] = []
    if train.max_steps is not None:
        bounds.append((train.max_steps, f"max_steps={train.max_steps}"))
    if train.epochs is not None and n_train_tokens is not None:
        windows = max(1, (n_train_tokens - context_length) // context_length)
        steps = max(1, round(train.epochs * windows / train.batch_size))
        bounds.append((steps, f"epochs={train.epochs:g} over {n_train_tokens:,} tokens"))
    elif train.epochs is not None:
        unknown.append(f"epochs={train.epochs:g} needs the number of training tokens")
    if train.max_minutes is not None:
        unknown.append(f"max_minutes={train.max_minutes:g} depends on the machine's speed")
    if not bounds:
        return None, "; ".join(unknown)
    steps, reason = min(bounds)
    return steps, "; ".join((f"{'at most, by ' if unknown else ''}{reason}", *unknown))
