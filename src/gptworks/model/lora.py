"""LoRA (Hu et al., 2021): adapters that add a trained product B·A of low rank to a linear layer's frozen matrix W.

    y = W·x + alpha/rank · B·A·dropout(x)

B starts at zero, so that training begins with the base model's results. Merged, W + alpha/rank · B·A is one matrix.

Shapes: r rank, I inputs, O outputs of a layer.
"""

import math
from collections.abc import Iterable
from functools import singledispatch

import torch
from torch import Tensor, nn

from gptworks.config import LoRAConfig
from gptworks.kernels import dispatch
from gptworks.model.gpt import GPT
from gptworks.model.layers import Dropout, Linear
from gptworks.model.shapes import ShapesOnly

LORA_PARTS = ("lora_a", "lora_b")


class LowRank(nn.Module):
    """Base class that adds B·A to a layer with frozen parameters. Subclasses list it before the layer's class."""

    def attach(self, n_in: int, n_out: int, config: LoRAConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Freeze the layer; create A with random values from torch's global random state, and B with zeros."""
        for frozen in self.parameters():
            frozen.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(config.rank, n_in, device=device, dtype=dtype))  # [r, I]
        self.lora_b = nn.Parameter(torch.zeros(n_out, config.rank, device=device, dtype=dtype))  # [O, r]
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as in the authors' code
        self.factor, self.dropout = config.scale, Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., I] to [..., O]: the layer's output plus the adapter's."""
        small = dispatch.linear(self.dropout(x), self.lora_a)  # [..., r]
        plain: Tensor = super().forward(x)
        return plain + self.factor * dispatch.linear(small, self.lora_b)


class LoRALinear(LowRank, Linear):
    """A linear layer with an adapter; `weight` and `bias` keep their names and are frozen."""

    def __init__(self, base: nn.Linear, config: LoRAConfig) -> None:
        """Use the parameters of `base` itself, without copying them."""
        with ShapesOnly():
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.attach(base.in_features, base.out_features, config, base.weight.device, base.weight.dtype)
        self.train(base.training)

    @torch.no_grad()
    def plain(self, merge: bool) -> Linear:
        """Return a layer without an adapter; with `merge`, its matrix includes the adapter's product."""
        weight = merged_weight(self.weight, self.lora_a, self.lora_b, self.factor) if merge else self.weight
        with ShapesOnly():
            linear = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight, linear.bias = nn.Parameter(weight.detach()), self.bias
        return linear.train(self.training)


@singledispatch
def adapted(base: nn.Module, config: LoRAConfig) -> LowRank:
    """Return `base` with an adapter. Each layer class registers its own implementation of this function."""
    raise TypeError(f"{type(base).__name__} has no adapter")


@adapted.register
def _(base: nn.Linear, config: LoRAConfig) -> LowRank:
    return LoRALinear(base, config)


def add_lora(model: GPT, config: LoRAConfig) -> GPT:
    """Add adapters to the layers that `config` names, and freeze all parameters that `config` does not train.
    Change the model and return it."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(config.trains(name))
    for name, module in list(model.named_modules()):
        if config.adapts(name):
            model.set_submodule(name, adapted(module, config))
    return model


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, factor: float) -> Tensor:
    """Return a matrix [O, I] plus its adapter's product, computed in float64 and rounded once."""
    return (weight.double() + factor * (lora_b.double() @ lora_a.double())).to(weight.dtype)


def remove_lora(model: GPT, merge: bool = False) -> GPT:
    """Remove the adapters of unquantized layers; with `merge`, first add each one's product to its layer's matrix.
    Change the model and return it."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            model.set_submodule(name, module.plain(merge))
    return model


def is_adapter(name: str) -> bool:
    """Whether the tensor with this name belongs to an adapter."""
    return name.rpartition(".")[2] in LORA_PARTS


def has_adapter(names: Iterable[str]) -> bool:
    """Whether a checkpoint with tensors of these names contains an adapter."""
    return any(map(is_adapter, names))
