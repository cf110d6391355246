"""Generation by a model in training: in its precision, and never compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gptworks.device import Precision


@contextmanager
def generating(precision: Precision) -> Iterator[None]:
    """Inside, an engine may run a model that is being trained.

    Products are rounded as in a training step, so that answers come from the policy in training. Compiled blocks run
    uncompiled: a growing cache has another shape at each token.
    """
    with torch.compiler.set_stance("force_eager"), precision.autocast():
        yield
