"""Routes of the Model tab: the parts of a run's architecture, the cost of each part, and a checkpoint's weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from gptworks.config import Recipe
from gptworks.config.optimizers import OPTIMIZERS
from gptworks.describe.parts import Part, parts
from gptworks.describe.sheet import describe, summary, traits
from gptworks.errors import UserError
from gptworks.interpret.hooks import Check
from gptworks.interpret.weights import (
    StoredWeights,
    bin_edges,
    count_tensors,
    histogram,
    moments,
    relative_change,
    spectrum,
    stored_weights,
)
from gptworks.planning.params import Shape
from gptworks.planning.parts import Figures, module_figures
from gptworks.recipe import load_recipe
from gptworks.serve.app import body_of
from gptworks.studio.answers import as_json
from gptworks.studio.loaded import Wanted
from gptworks.studio.play import Chosen, Which
from gptworks.studio.state import studio_of
from gptworks.units import readable

router = APIRouter(prefix="/studio/model", include_in_schema=False)
Tree = dict[str, Any]

MOST_VALUES = 8192
"""Maximum length of a vector whose elements are sent."""


class SheetRequest(Chosen):
    layer: Annotated[int, Field(ge=0)] = 0
    """Index of the block to show."""


class WeightsRequest(Chosen):
    against: Which = None
    """Another checkpoint of the run, to compare with; null: no comparison."""
    tensor: Annotated[str, Field(min_length=1, max_length=512)]


@dataclass(frozen=True)
class Shown:
    """A run's model and one of its checkpoints. Attributes and methods read files."""

    wanted: Wanted

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.wanted.run.folder)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return count_tensors(self.recipe).shapes

    @cached_property
    def figures(self) -> dict[str, Figures]:
        return module_figures(self.recipe)

    @cached_property
    def whole(self) -> Figures:
        return sum(self.figures.values(), Figures())

    def stored(self, names: list[str]) -> list[StoredWeights]:
        """Return the named tensors as the checkpoint stores them.

        Raises:
            UserError: the checkpoint is damaged, or does not match the recipe.
        """
        _verify(self.wanted)
        return stored_weights(self.wanted.checkpoint, self.recipe, names)


@lru_cache(maxsize=256)
def _verify(wanted: Wanted) -> None:
    """Verify a checkpoint's weights, but only once, because the checksum of a large file takes seconds."""
    wanted.checkpoint.verify("model.safetensors")


# ------------------------------------------------------------------------------------------- the model's parts


@router.post("/sheet")
async def model_sheet(request: Request) -> Response:
    """Return the parts of a model and of one of its blocks, with the cost of each part, and the totals."""
    studio, body = studio_of(request), await body_of(request, SheetRequest)
    shown = Shown(await studio.engines.find(body.model, body.checkpoint))
    return as_json(await studio.reader.compute(lambda _: _sheet(shown, body.layer)))


def _sheet(shown: Shown, layer: int) -> Tree:
    recipe, c = shown.recipe, shown.recipe.model
    shapes = shown.shapes  # first, because this rejects a model with too many tensors
    if layer >= c.n_layers:
        raise UserError(f"layer={layer}: the model's blocks are numbered from 0 to {c.n_layers - 1}.")
    about, made = describe(c, recipe.name), parts(c, layer)
    names = [_tensor_names(part, layer, shapes) for part in made]
    stored = {one.name: one for one in shown.stored([name for some in names for name in some])}
    facts = [{"name": name, "text": text} for name, text in (*about.facts, *_training_facts(recipe, shown.whole))]
    changed = c.model_dump(mode="json", exclude_defaults=True)
    in_block = sum(group.total for group in about.parameters.groups.values() if group.in_block)
    return {
        "model": shown.wanted.run.id, "step": shown.wanted.checkpoint.step, "name": recipe.name,
        "summary": summary(about), "traits": traits(c), "facts": facts,
        "settings": [
            {"name": f"model.{name}", "value": value, "is_default": name not in changed}
            for name, value in c.model_dump(mode="json").items()
        ],
        "layer": layer, "n_layers": c.n_layers, "window": c.layer_window(layer), "parallel": c.parallel_residual,
        "block_share": in_block / about.parameters.total,
        "parts": [
            _part(part, layer, shown) | {"tensors": [_of_tensor(stored[name]) for name in some]}
            for part, some in zip(made, names, strict=True)
        ],
    }  # fmt: skip


def _training_facts(recipe: Recipe, whole: Figures) -> Iterator[tuple[str, str]]:
    if whole.adapter_parameters:
        yield "the adapter's parameters", f"{whole.adapter_parameters:,}"
    yield "weights in training", readable(whole.weights_bytes, "B")
    yield "gradients in training", readable(whole.gradients_bytes, "B")
    yield f"optimizer state, {OPTIMIZERS[recipe.train.optimizer].name}", readable(whole.optimizer_bytes, "B")


def _tensor_names(part: Part, layer: int, shapes: dict[str, Shape]) -> list[str]:
    modules = part.in_layer(part.tensors_of or part.modules, layer)
    return [
        name for module in modules for kind in ("weight", "bias", "scale") if (name := f"{module}.{kind}") in shapes
    ]


def _part(part: Part, layer: int, shown: Shown) -> Tree:
    layers = range(shown.recipe.model.n_layers) if part.in_block else (0,)
    here, everywhere = (
        sum((shown.figures.get(name, Figures()) for i in those for name in part.in_layer(part.modules, i)), Figures())
        for those in ((layer,), layers)
    )
    named = ("key", "name", "kind", "place", "weights", "shape", "words", "source")
    return {
        **{name: getattr(part, name) for name in named},
        "share": everywhere.parameters / shown.whole.parameters,
        "tied": bool(part.tensors_of),
        "figures": list(_rows(here, everywhere, shown)),
    }


def _of_tensor(one: StoredWeights) -> Tree:
    return {
        "name": one.name, "shape": list(one.shape), "parameters": one.size, "stored": one.kind,
        "stored_bytes": one.stored_bytes, "stored_text": readable(one.stored_bytes, "B"),
        "adapted": one.adapter is not None,
    }  # fmt: skip


def _rows(here: Figures, everywhere: Figures, shown: Shown) -> Iterator[Tree]:
    """Yield each nonzero cost of a part: in one layer, in all layers, and as a share of the whole model's cost."""
    context = shown.recipe.model.context_length

    def row(key: str, name: str, unit: str, of: Callable[[Figures], float]) -> Iterator[Tree]:
        one, every, whole = map(of, (here, everywhere, shown.whole))
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


# ------------------------------------------------------------------------------------------ a checkpoint's weights


@router.post("/weights")
async def model_weights(request: Request) -> Response:
    """Return a tensor's histogram and moments, and a short vector's elements, at one checkpoint or at two."""
    return await _of_checkpoints(request, _weights)


@router.post("/spectrum")
async def model_spectrum(request: Request) -> Response:
    """Return a matrix's singular values at one checkpoint or at two."""
    return await _of_checkpoints(request, _spectra)


async def _of_checkpoints(request: Request, look: Callable[[list[tuple[int, StoredWeights]], Check], Tree]) -> Response:
    studio, body = studio_of(request), await body_of(request, WeightsRequest)
    steps = [body.checkpoint, *([] if body.against is None else [body.against])]
    both = [Shown(await studio.engines.find(body.model, step)) for step in steps]

    def work(check: Check) -> Tree:
        of = [(shown.wanted.checkpoint.step, shown.stored([body.tensor])[0]) for shown in both]
        return {"model": body.model, "tensor": body.tensor, "shape": list(of[0][1].shape), **look(of, check)}

    return as_json(await studio.reader.compute(work))


def _weights(of: list[tuple[int, StoredWeights]], check: Check) -> Tree:
    found = [moments(weights, check) for _, weights in of]
    edges = bin_edges(found)
    return {
        "edges": edges.tolist(),
        "checkpoints": [
            {"step": step, **_of_tensor(weights),
             "moments": vars(one) | {"zero": one.n_zero / one.size, "not_finite": one.n_not_finite / one.size},
             "counts": histogram(weights, edges, check).tolist(), "values": _values(weights, check)}
            for (step, weights), one in zip(of, found, strict=True)
        ],
        "relative_change": relative_change(of[1][1], of[0][1], check) if len(of) > 1 else None,
    }  # fmt: skip


def _values(weights: StoredWeights, check: Check) -> list[float] | None:
    """Return the elements of a vector of at most MOST_VALUES; None for other tensors."""
    if len(weights.shape) > 1 or weights.size > MOST_VALUES:
        return None
    return [value for part in weights.parts(check) for value in part.tolist()]


def _spectra(of: list[tuple[int, StoredWeights]], check: Check) -> Tree:
    made = []
    for step, weights in of:
        found = spectrum(weights, check)
        largest = float(found.values[0])
        made.append({
            "step": step, "largest": largest, "values": (found.values / (largest or 1.0)).tolist(),
            "stable_rank": found.stable_rank, "effective_rank": found.effective_rank,
        })  # fmt: skip
    return {"checkpoints": made}
