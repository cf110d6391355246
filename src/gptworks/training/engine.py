"""The engine that generates with a model in training."""

from gptworks.chat_template import load_chat_template
from gptworks.infer.engine import Engine
from gptworks.infer.sampling import SamplingSettings
from gptworks.model import GPT
from gptworks.training.generating import generating
from gptworks.training.setup import PreparedRun


def training_engine(setup: PreparedRun, model: GPT) -> Engine:
    """An engine of the run's model, tokenizer and chat template.

    Raises:
        UserError: a prompt of `train.sample_prompts` cannot be used.
    """
    tokenizer, train = setup.prepared.tokenizer, setup.recipe.train
    template = load_chat_template(setup.prepared.folder / "tokenizer", tokenizer)
    engine = Engine(model, tokenizer, cache_dtype=setup.precision.dtype, chat_template=template)
    for prompt in train.sample_prompts if train.sample_every else ():
        engine.encode_prompt(prompt)
    return engine


def continuation(setup: PreparedRun, engine: Engine, prompt: str) -> str:
    """The model's continuation of a prompt; the seed is always the same, so that only training changes it."""
    tokens, seed = setup.recipe.train.sample_tokens, setup.recipe.seed
    sampling = SamplingSettings(max_tokens=tokens, temperature=0.8, top_k=50, seed=seed)
    with generating(setup.precision):
        return engine.generate(prompt, sampling, overflow="slide")
