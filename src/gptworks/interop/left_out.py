"""Remove the parts of a model that no export keeps."""

from gptworks.model.gpt import GPT


def leave_out_heads(model: GPT) -> list[str]:
    """Remove the heads of tokens beyond the next: no other program has them, and no logit depends on them.

    Returns:
        A note about the removed heads for the export's reader; an empty list if the model has none.
    """
    n = model.drop_future_heads()
    what = "the head of 1 token" if n == 1 else f"the heads of {n} tokens"
    return [f"{what} beyond the next (model.n_future_tokens={n + 1}) left out"] if n else []
