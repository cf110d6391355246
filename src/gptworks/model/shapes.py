"""Contexts for building a model on the meta device: its tensors have names, shapes and dtypes, but no values yet."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RANDOM = frozenset((nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_))


class OnMeta:
    """Mixin for a torch mode: while the mode is active, new tensors are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._meta = torch.device("meta")

    def __enter__(self) -> Self:
        self._meta.__enter__()
        super().__enter__()  # type: ignore[misc]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[misc]
        self._meta.__exit__(*error)


class ShapesOnly(OnMeta, TorchFunctionMode):
    """Context for building a model on the meta device that skips random initial values.

    Meta tensors have no values, yet for their first random operation torch imports its compiler, which takes as long as
    importing torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
