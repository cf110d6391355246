"""Draft a recipe for a folder of texts with the model and training settings of another recipe."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks.config import ENDS
from gptworks.draft.drafted import Drafted, Row, Sections
from gptworks.draft.pretraining import FIRST_SHAPE, Search, Shape
from gptworks.errors import UserError
from gptworks.recipe import name_for, parse_recipe, read_recipe


@dataclass(eq=False)
class Like(Search):
    """A search that keeps another recipe's model, and measures a step to choose the number of steps.

    The training settings of the other recipe stay, with two exceptions. A warmup that is as long as the run or longer
    is shortened, and a micro-batch that does not fit in memory is made smaller.
    """

    like: str | Path = field(kw_only=True)

    def __post_init__(self) -> None:
        """Read the other recipe; raise a UserError if it does not train a new model on text."""
        super().__post_init__()
        origin, self.tree = read_recipe(self.like)
        self.recipe = parse_recipe({"name": name_for(self.out)} | self.tree, origin)
        if self.recipe.data.records or self.recipe.initialize_from:
            raise UserError(f"--like {self.like}: it fine-tunes a model. Take a recipe that trains one on text.")
        self.vocabulary = self.bytes_per_token(self.recipe.tokenizer)

    def _best(self, most: Shape = FIRST_SHAPE) -> Shape:
        return FIRST_SHAPE

    def _step_tokens(self, candidate: Drafted) -> int:
        return candidate.plan.tokens_per_step

    def _candidate(self, shape: Shape, step_tokens: int = 0, steps: int = 10**6, rate: float | None = None) -> Drafted:
        vocab_size, bytes_per_token = self.vocabulary
        n_train_tokens = self.n_train_tokens(bytes_per_token)
        why = self.length_reason(steps * step_tokens, n_train_tokens, rate)
        train = {key: value for key, value in (self.tree.get("train") or {}).items() if key not in ENDS}
        if self.recipe.train.warmup_steps >= steps:
            train["warmup_steps"] = steps // 20
        data: dict[str, Any] = self.tree["data"] | {"sources": self.texts.sources}
        own = {"model", "tokenizer", "data", "train", "name", "run_dir"}
        sections: Sections = {
            "": _rows({key: value for key, value in self.tree.items() if key not in own}),
            "model": _rows(self.tree["model"]),
            "tokenizer": _rows(self.tree["tokenizer"]),
            "data": _rows(data),
            "train": [("max_steps", steps, why), *_rows(train)],
        }
        return self.planned({name: rows for name, rows in sections.items() if rows}, n_train_tokens, vocab_size)


def _rows(settings: dict[str, Any]) -> list[Row]:
    return [(key, value, "") for key, value in settings.items()]
