"""Build datasets with datatrove on one machine, Slurm or Ray, with the same bytes as `gptworks data build`.

    steps = pipeline("recipe.yaml")
    built = LocalPipelineExecutor(steps, tasks=8, workers=4)     # or SlurmPipelineExecutor, RayPipelineExecutor
    LocalPipelineExecutor(merge_pipeline("recipe.yaml"), depends=built).run()

Each task builds one part of the dataset, in a folder below `data.cache_dir` that all tasks must be able to reach.
"""

from collections.abc import Callable
from typing import Any

from gptworks.config import AnyRecipe
from gptworks.data.prepare import build_part, merge_parts
from gptworks.errors import not_installed
from gptworks.recipe import RecipeLike, load_dataset_recipe

try:
    from datatrove.pipeline.base import PipelineStep
except ImportError:
    raise not_installed("datatrove", "datatrove", "gptworks.data.datatrove") from None


class _Step(PipelineStep):  # type: ignore[misc, unused-ignore]
    """A pipeline step that does the work of one task. It passes no documents to the next step."""

    type = "gptworks"

    def __init__(self, name: str, recipe: AnyRecipe, work: Callable[[AnyRecipe, int, int], object]) -> None:
        self.name = name
        super().__init__()
        self.recipe, self.work = recipe, work

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        with self.track_time():
            self.work(self.recipe, rank + 1, world_size)
        return
        yield


def pipeline(recipe: RecipeLike) -> list[PipelineStep]:
    """Return the pipeline in which each task builds its part of the dataset. A task uses a single process, whatever
    the recipe says. Raises UserError if the recipe has a mistake."""
    loaded = load_dataset_recipe(recipe)
    single = loaded.model_copy(update={"data": loaded.data.model_copy(update={"processes": 1})})
    return [_Step("build a part", single, build_part)]


def merge_pipeline(recipe: RecipeLike) -> list[PipelineStep]:
    """Return the pipeline that makes the dataset from all finished parts, in one task. Raises UserError if the recipe
    has a mistake."""
    return [_Step("merge the parts", load_dataset_recipe(recipe), _merge)]


def _merge(recipe: AnyRecipe, k: int, n: int) -> None:
    if k == 1:
        merge_parts(recipe)
