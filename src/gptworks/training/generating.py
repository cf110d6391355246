"""How a model in training generates: in the precision that it trains in, and never compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptworks.device import Precision


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """Inside, an engine may run a model that is being trained.

    Products are done as in a training step, so that answers come from the policy that is trained, not from one of
    another rounding. Compiled blocks run as they are written: a cache that grows is another shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
