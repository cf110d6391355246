"""Routes of the Model tab: the parts of a run's architecture, the cost of each part, and a checkpoint's weights."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from gptworks.config import Recipe
from gptworks.describe.model_sheet import ModelSheet, tensor_facts
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
from gptworks.recipe import load_recipe
from gptworks.serve.app import body_of
from gptworks.studio.answers import as_json
from gptworks.studio.loaded import Wanted
from gptworks.studio.play import Chosen, Which
from gptworks.studio.state import studio_of

router = APIRouter(prefix="/studio/model", include_in_schema=False)
Tree = dict[str, Any]

MOST_VALUES = 8192
"""Maximum length of a vector whose elements are sent."""


class SheetRequest(Chosen):
    layer: Annotated[int, Field(ge=0)] = 0
    """Index of the block to show."""


class WeightsRequest(Chosen):
    against: Which = None
    """The checkpoint of the run to compare with, or null for no comparison."""
    tensor: Annotated[str, Field(min_length=1, max_length=512)]


def _stored(wanted: Wanted, recipe: Recipe, names: Sequence[str]) -> list[StoredWeights]:
    """Return the named tensors as a checkpoint stores them.

    Raises:
        UserError: the model has no such tensor; or the checkpoint is damaged, or does not match the recipe.
    """
    _verify(wanted)
    return stored_weights(wanted.checkpoint, recipe, names)


@lru_cache(maxsize=256)
def _verify(wanted: Wanted) -> None:
    """Verify a checkpoint's weights, only once per checkpoint, since the checksum of a large file takes seconds."""
    wanted.checkpoint.verify("model.safetensors")


# ------------------------------------------------------------------------------------------- the model's parts


@router.post("/sheet")
async def model_sheet(request: Request) -> Response:
    """Return the parts of a model and of one block, the cost of each part, and the totals."""
    studio, body = studio_of(request), await body_of(request, SheetRequest)
    wanted = await studio.engines.find(body.model, body.checkpoint)

    def work(_: Check) -> Tree:
        recipe = load_recipe(wanted.run.folder)
        sheet = ModelSheet(recipe, count_tensors(recipe).shapes)
        found = sheet.at(body.layer, lambda names: [_of_tensor(one) for one in _stored(wanted, recipe, names)])
        return {"model": wanted.run.id, "step": wanted.checkpoint.step} | found

    return as_json(await studio.reader.compute(work))


def _of_tensor(one: StoredWeights) -> Tree:
    return tensor_facts(one.name, one.shape, one.kind, one.stored_bytes, one.adapter is not None)


# ------------------------------------------------------------------------------------------ a checkpoint's weights


@router.post("/weights")
async def model_weights(request: Request) -> Response:
    """Return a tensor's histogram and moments at one or two checkpoints, the relative change between two checkpoints,
    and the elements of a short vector."""
    return await _of_checkpoints(request, _weights)


@router.post("/spectrum")
async def model_spectrum(request: Request) -> Response:
    """Return a matrix's singular values, divided by the largest, and its ranks at one or two checkpoints."""
    return await _of_checkpoints(request, _spectra)


async def _of_checkpoints(request: Request, look: Callable[[list[tuple[int, StoredWeights]], Check], Tree]) -> Response:
    studio, body = studio_of(request), await body_of(request, WeightsRequest)
    steps = [body.checkpoint, *([] if body.against is None else [body.against])]
    both = [await studio.engines.find(body.model, step) for step in steps]

    def work(check: Check) -> Tree:
        recipe = load_recipe(both[0].run.folder)
        of = [(one.checkpoint.step, _stored(one, recipe, [body.tensor])[0]) for one in both]
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
    """Return the elements of a vector with at most MOST_VALUES elements; None for other tensors."""
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
