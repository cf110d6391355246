"""gptworks: design, plan, train, evaluate and run your own GPT-family language models.

    import gptworks

    run = gptworks.train("demo")
    print(gptworks.load(run).generate("def ", max_tokens=100))

Functions and classes are imported on first use, so that `import gptworks` is fast.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
    # Make waiting threads release their cores. libgomp's threads first spin for some 40 microseconds, so that they are
    # still awake for the next operation of a step. OpenMP reads these variables when torch loads it, so they have no
    # effect in a program that has already imported torch.
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}

__version__ = "0.2.0"

if TYPE_CHECKING:
    from gptworks.api import evaluate, read_run, train
    from gptworks.config import ModelConfig, Recipe
    from gptworks.data.prepare import prepare
    from gptworks.estimates import plan, plan_serving, rehearse
    from gptworks.infer.backends.cache import SlotCache
    from gptworks.infer.engine import Engine, load
    from gptworks.model.gpt import GPT
    from gptworks.presets import preset
    from gptworks.recipe import load_recipe

_HOMES = {
    "ModelConfig": "gptworks.config",
    "Recipe": "gptworks.config",
    "load_recipe": "gptworks.recipe",
    "preset": "gptworks.presets",
    "prepare": "gptworks.data.prepare",
    "GPT": "gptworks.model.gpt",
    "SlotCache": "gptworks.infer.backends.cache",
    "Engine": "gptworks.infer.engine",
    "load": "gptworks.infer.engine",
    "evaluate": "gptworks.api",
    "plan": "gptworks.estimates",
    "plan_serving": "gptworks.estimates",
    "read_run": "gptworks.api",
    "rehearse": "gptworks.estimates",
    "train": "gptworks.api",
}

__all__ = [
    "GPT",
    "Engine",
    "ModelConfig",
    "Recipe",
    "SlotCache",
    "__version__",
    "evaluate",
    "load",
    "load_recipe",
    "plan",
    "plan_serving",
    "prepare",
    "preset",
    "read_run",
    "rehearse",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gptworks' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
