"""What is trained where that is not the whole model: an adapter, or all but what is frozen."""

import fnmatch
from typing import Literal

from pydantic import Field

from gptworks.config.base import Fixed, Fraction, PositiveInt, Section, derived

ADAPTED_MODULES = {"attention": ("query", "key", "value", "out"), "mlp": ("gate", "up", "down")}
"""Linear layers of a block that an adapter can stand beside, by family. `mlp` is that of experts too."""


class LoRAConfig(Section):
    """Low-rank adaptation (Hu et al., 2021): W + alpha/rank · B·A, of which only A and B are trained."""

    type: Fixed[Literal["lora"]] = "lora"
    base: Fixed[Literal["full", "int8", "int4"]] = Field(
        "full",
        description="How the blocks' frozen matrices are held. int8, int4: packed, and unpacked one at a time where "
        "they are multiplied (QLoRA; Dettmers et al., 2023).",
    )
    rank: Fixed[PositiveInt] = Field(8, le=65_536, description="Rows of A and columns of B (r).")
    alpha: Fixed[float] = Field(
        default_factory=derived("rank", lambda rank: 2.0 * rank),
        gt=0,
        description="B·A is multiplied by alpha / rank. Default: 2 × rank.",
    )
    dropout: Fixed[Fraction] = Field(0.0, description="Of what goes into A, in training.")
    targets: Fixed[
        tuple[Literal["all", "attention", "mlp", "query", "key", "value", "out", "gate", "up", "down"], ...]
    ] = Field(("all",), min_length=1, description="Linear layers of the blocks: by name, by family, or all.")
    embeddings: Fixed[bool] = Field(
        False, description="Train the token embedding and the head too, as tokens that are new to the model need it."
    )

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / self.rank

    def trains(self, parameter: str) -> bool:
        """Whether a parameter of the model itself is trained, by its name."""
        return self.embeddings and parameter in ("token_embedding.weight", "untied_head.weight")

    def adapts(self, module: str) -> bool:
        """Whether the adapter stands beside a module, by its name in the model, such as `blocks.0.mlp.up`."""
        part = module.rpartition(".")[2]
        family = next((family for family, parts in ADAPTED_MODULES.items() if part in parts), None)
        return family is not None and not {"all", family, part}.isdisjoint(self.targets)


class FreezeConfig(Section):
    """Parameters that training leaves as they are."""

    embeddings: Fixed[bool] = Field(
        False, description="Embeddings of tokens, positions, token pairs and values; with them a tied head."
    )
    first_blocks: Fixed[int] = Field(0, ge=0, le=1_000_000_000, description="Number of blocks, from the first.")
    patterns: Fixed[tuple[str, ...]] = Field(
        (), description="Names of parameters, such as `blocks.*.mlp.*` or `norm.weight`."
    )

    def freezes(self, parameter: str) -> bool:
        """Whether a parameter is left as it is, by its name in the model, such as `blocks.0.mlp.up.weight`."""
        first, _, rest = parameter.partition(".")
        if first == "blocks" and int(rest.partition(".")[0]) < self.first_blocks:
            return True
        tables = ("token_embedding", "position_embedding", "bigram_embedding", "value_embeddings")
        if first in tables and self.embeddings:
            return True
        return any(fnmatch.fnmatchcase(parameter, pattern) for pattern in self.patterns)
