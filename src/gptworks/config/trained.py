"""Settings for training only an adapter, or only the parameters that are not frozen."""

import fnmatch
from typing import Literal

from pydantic import Field

from gptworks.config.base import Count, Fixed, Fraction, PositiveInt, Section, derived

ADAPTED_MODULES = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
"""Linear layers of a block that an adapter can train, by group. `mlp` includes the experts' layers."""


class LoRAConfig(Section):
    """Low-rank adaptation (Hu et al., 2021): matrices W become W + alpha/rank · B·A. Training
    changes only A and B and, with `embeddings`, the token embedding and the head."""

    type: Fixed[Literal["lora"]] = Field("lora", description="LoRA.")
    base: Fixed[Literal["full", "int8", "int4"]] = Field(
        "full",
        description="Format of the blocks' frozen matrices. int8, int4: packed, and unpacked one at a time for each "
        "product (QLoRA; Dettmers et al., 2023).",
    )
    rank: Fixed[PositiveInt] = Field(8, le=65_536, description="Rows of A and columns of B (r).")
    alpha: Fixed[float] = Field(
        default_factory=derived("rank", lambda rank: 2.0 * rank),
        gt=0,
        description="B·A is multiplied by alpha / rank. Default: 2 × rank.",
    )
    dropout: Fixed[Fraction] = Field(0.0, description="Dropout rate of A's input.")
    targets: Fixed[
        tuple[Literal["all", "attention", "mlp", "query", "key", "value", "out", "gate", "up", "down"], ...]
    ] = Field(("all",), min_length=1, description="Linear layers of the blocks: by name, by group, or all.")
    embeddings: Fixed[bool] = Field(
        False, description="Also train the token embedding and the head, as new tokens require."
    )

    @property
    def scale(self) -> float:
        """Factor by which B·A is multiplied."""
        return self.alpha / self.rank

    def trains(self, parameter: str) -> bool:
        """Return whether training changes the base model's parameter with this name."""
        return self.embeddings and parameter in ("token_embedding.weight", "untied_head.weight")

    def adapts(self, module: str) -> bool:
        """Return whether the module with this name, such as `blocks.0.mlp.up`, has an adapter."""
        part = module.rpartition(".")[2]
        family = next((family for family, parts in ADAPTED_MODULES.items() if part in parts), None)
        return family is not None and not {"all", family, part}.isdisjoint(self.targets)


class FreezeConfig(Section):
    """Parameters that are not trained."""

    embeddings: Fixed[bool] = Field(
        False, description="Freeze embeddings of tokens, positions, token pairs and values, and a tied head."
    )
    first_blocks: Fixed[Count] = Field(0, description="Number of first blocks to freeze.")
    patterns: Fixed[tuple[str, ...]] = Field(
        (), description="Patterns of parameter names, such as `blocks.*.mlp.*` or `norm.weight`."
    )

    def freezes(self, parameter: str) -> bool:
        """Return whether the parameter with this name, such as `blocks.0.mlp.up.weight`, is frozen."""
        first, _, rest = parameter.partition(".")
        if first == "blocks" and int(rest.partition(".")[0]) < self.first_blocks:
            return True
        tables = ("token_embedding", "position_embedding", "bigram_embedding", "value_embeddings")
        if first in tables and self.embeddings:
            return True
        return any(fnmatch.fnmatchcase(parameter, pattern) for pattern in self.patterns)
