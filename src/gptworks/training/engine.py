"""The engine that generates with a model in training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptworks.chat_template import load_chat_template
from gptworks.config import Recipe
from gptworks.data.opened import Prepared
from gptworks.device import Precision
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.model.gpt import GPT


def training_engine(recipe: Recipe, prepared: Prepared, precision: Precision, model: GPT) -> Engine:
    """An engine of the run's model, tokenizer and chat template.

    Raises:
        UserError: a prompt of `train.sample_prompts` cannot be used.
    """
    template = load_chat_template(prepared.folder / "tokenizer", prepared.tokenizer)
    engine = Engine(model, prepared.tokenizer, cache_dtype=precision.dtype, chat_template=template)
    for prompt in recipe.train.sample_prompts if recipe.train.sample_every else ():
        engine.encode_prompt(prompt)
    return engine


def continuation(recipe: Recipe, precision: Precision, engine: Engine, prompt: str) -> str:
    """The model's continuation of a prompt; the seed is always the same, so that only training changes it."""
    sampling = SamplingSettings(max_tokens=recipe.train.sample_tokens, temperature=0.8, top_k=50, seed=recipe.seed)
    with generating(precision):
        return engine.generate(prompt, sampling, overflow="slide")


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """A context in which an engine may run a model that is being trained.

    Products are rounded as in a training step, so that answers come from the policy in training. Compiled blocks run
    uncompiled: a growing cache changes shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
