"""The model: one class for every decoder-only variant.

`GPT` is imported on first use: `gptworks.model.outline` counts parameters and products without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gptworks.model.gpt import GPT

__all__ = ["GPT"]


def __getattr__(name: str) -> Any:
    if name != "GPT":
        raise AttributeError(f"module 'gptworks.model' has no attribute {name!r}")
    from gptworks.model.gpt import GPT

    return GPT
