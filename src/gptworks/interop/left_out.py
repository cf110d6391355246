"""The parts of a model that no export keeps."""

from gptworks.model import GPT


def leave_out_heads(model: GPT) -> list[str]:
    """Remove the heads of tokens beyond the next, which no other program has and no logit depends on.

    Returns:
        Notes for the reader of the export.
    """
    n = model.drop_future_heads()
    what = "the head of 1 token" if n == 1 else f"the heads of {n} tokens"
    return [f"{what} beyond the next (model.n_future_tokens={n + 1}) left out"] if n else []
