"""Models of which only names, shapes and dtypes of tensors are needed, as before weights are read into them."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RANDOM = frozenset((nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_))


class OnMeta:
    """The part of a mode of torch that creates tensors on the meta device while the mode is active."""

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

    Such a tensor has no values, but for its first random operation torch imports its compiler, which takes as long as
    importing torch.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
