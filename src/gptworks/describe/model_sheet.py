"""The data sheet of a model as JSON: the parts of the model and of one block, the cost of each part, and the totals."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gptworks.config import Recipe
from gptworks.config.optimizers import OPTIMIZERS
from gptworks.describe.parts import Part, parts
from gptworks.describe.plan_tables import named
from gptworks.describe.sheet import Sheet, describe, summary, traits
from gptworks.errors import UserError
from gptworks.planning.params import Shape
from gptworks.planning.parts import Figures, module_figures
from gptworks.units import readable

Tree = dict[str, Any]


@dataclass(frozen=True)
class ModelSheet:
    """The data sheet of a recipe's model, which converts to JSON with the block of one layer."""

    recipe: Recipe
    shapes: Mapping[str, Shape]
    """The shape of each tensor."""

    @cached_property
    def figures(self) -> dict[str, Figures]:
        return module_figures(self.recipe)

    @cached_property
    def whole(self) -> Figures:
        return sum(self.figures.values(), Figures())

    @cached_property
    def about(self) -> Sheet:
        return describe(self.recipe.model, self.recipe.name)

    def at(self, layer: int, stored: Callable[[Sequence[str]], Iterable[Tree]]) -> Tree:
        """Return the sheet as JSON, with the block of one layer. `stored` returns `tensor_facts` of the named tensors.
        Raise a UserError if the model has no such layer."""
        recipe, c, about = self.recipe, self.recipe.model, self.about
        if layer >= c.n_layers:
            raise UserError(f"layer={layer}: the model's blocks are numbered from 0 to {c.n_layers - 1}.")
        made = parts(c, layer)
        names = [_tensor_names(part, layer, self.shapes) for part in made]
        tensors = {one["name"]: one for one in stored([name for some in names for name in some])}
        facts = [{"name": name, "text": text} for name, text in (*about.facts, *_training_facts(recipe, self.whole))]
        changed = c.model_dump(mode="json", exclude_defaults=True)
        in_block = sum(group.total for group in about.parameters.groups.values() if group.in_block)
        return {
            "name": recipe.name, "summary": summary(about), "traits": traits(c), "facts": facts,
            "settings": [
                {"name": f"model.{name}", "value": value, "is_default": name not in changed}
                for name, value in c.model_dump(mode="json").items()
            ],
            "layer": layer, "n_layers": c.n_layers, "window": c.layer_window(layer), "parallel": c.parallel_residual,
            "block_share": in_block / about.parameters.total,
            "parts": [
                _part(part, layer, self) | {"tensors": [tensors[name] for name in some]}
                for part, some in zip(made, names, strict=True)
            ],
        }  # fmt: skip


def tensor_facts(name: str, shape: Shape, kind: str, n_bytes: int, adapted: bool = False) -> Tree:
    """Return the sheet's entry for a tensor, as JSON: its number format and size in its file, and whether an adapter is
    added to it."""
    return {
        "name": name, "shape": list(shape), "parameters": math.prod(shape), "stored": kind, "stored_bytes": n_bytes,
        "stored_text": readable(n_bytes, "B"), "adapted": adapted,
    }  # fmt: skip


def _training_facts(recipe: Recipe, whole: Figures) -> Iterator[tuple[str, str]]:
    if whole.adapter_parameters:
        yield "the adapter's parameters", f"{whole.adapter_parameters:,}"
    yield "weights in training", readable(whole.weights_bytes, "B")
    yield "gradients in training", readable(whole.gradients_bytes, "B")
    yield f"optimizer state, {OPTIMIZERS[recipe.train.optimizer].name}", readable(whole.optimizer_bytes, "B")


def _tensor_names(part: Part, layer: int, shapes: Mapping[str, Shape]) -> list[str]:
    modules = part.in_layer(part.tensors_of or part.modules, layer)
    return [
        name for module in modules for kind in ("weight", "bias", "scale") if (name := f"{module}.{kind}") in shapes
    ]


def _part(part: Part, layer: int, sheet: ModelSheet) -> Tree:
    layers = range(sheet.recipe.model.n_layers) if part.in_block else (0,)
    here, everywhere = (
        sum((sheet.figures.get(name, Figures()) for i in those for name in part.in_layer(part.modules, i)), Figures())
        for those in ((layer,), layers)
    )
    return {
        **named(part, "key", "name", "kind", "place", "weights", "shape", "words", "source"),
        "share": everywhere.parameters / sheet.whole.parameters,
        "tied": bool(part.tensors_of),
        "figures": list(_rows(here, everywhere, sheet)),
    }


def _rows(here: Figures, everywhere: Figures, sheet: ModelSheet) -> Iterator[Tree]:
    """Yield each nonzero cost of a part: in one layer, in all layers, and as a share of the whole model's cost."""
    context = sheet.recipe.model.context_length

    def row(key: str, name: str, unit: str, of: Callable[[Figures], float]) -> Iterator[Tree]:
        one, every, whole = map(of, (here, everywhere, sheet.whole))
        if every:
            texts = [f"{round(n):,}" if not unit else readable(n, unit) for n in (one, every)]
            yield {"key": key, "name": name, "layer": one, "all": every, "layer_text": texts[0], "all_text": texts[1],
                   "share": every / whole}  # fmt: skip

    yield from row("parameters", "parameters", "", lambda f: f.parameters)
    yield from row("adapter_parameters", "parameters of its adapter", "", lambda f: f.adapter_parameters)
    yield from row("forward", "forward, a token", "FLOP", lambda f: f.forward)
    yield from row("training", "training, a token", "FLOP", lambda f: f.forward + f.backward)
    yield from row("weights_bytes", "weights in training", "B", lambda f: f.weights_bytes)
    yield from row("gradients_bytes", "gradients in training", "B", lambda f: f.gradients_bytes)
    yield from row("optimizer_bytes", "optimizer state", "B", lambda f: f.optimizer_bytes)
    yield from row("kv_cache_bytes", f"KV cache in fp16, {context:,} tokens", "B",
                   lambda f: context * f.kv_cache_bytes_per_token)  # fmt: skip
