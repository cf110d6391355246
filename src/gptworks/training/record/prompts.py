"""Prompts that a page offers for a run: those that its samples continue."""

from gptworks.config import Recipe

MOST_PROMPTS, MOST_PROMPT = 6, 400
"""Maximum number of prompts, and their maximum number of characters."""


def offered_prompts(recipe: Recipe) -> list[str]:
    """Return the first prompts of the run's samples; those that are empty or long are left out.

    Beginnings of held-out documents are not among them: a page may be for people who should not read the data.
    """
    return [prompt for prompt in recipe.train.sample_prompts if 0 < len(prompt) <= MOST_PROMPT][:MOST_PROMPTS]
