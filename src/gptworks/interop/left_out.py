"""What every export leaves out of a model, in words."""

from gptworks.model import GPT


def leave_out_heads(model: GPT) -> list[str]:
    """Take away the heads of tokens beyond the next: no other program has them, and no logit depends on them."""
    n = model.drop_future_heads()
    what = "the head of 1 token" if n == 1 else f"the heads of {n} tokens"
    return [f"{what} beyond the next (model.n_future_tokens={n + 1}) left out"] if n else []
