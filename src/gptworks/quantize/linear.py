"""Layers with a packed matrix, and the GPT that has such layers.

The layers compute in the dtype of their inputs, so that code for a GPT also runs a quantized one. Casting the model
(`.bfloat16()`) changes the dtype of its computations, not its packed matrices.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from gptworks.choices import Weights
from gptworks.config import LoRAConfig, ModelConfig
from gptworks.kernels import dispatch
from gptworks.model.gpt import GPT
from gptworks.model.layers import cap, product_dtype
from gptworks.model.lora import LowRank, adapted
from gptworks.model.shapes import ShapesOnly
from gptworks.quantize.formats import KINDS, dequantize, empty, rows_at_once, unpacked
from gptworks.quantize.panels import from_panels, rows_from_panels


class PackedMatrix(nn.Module):
    """A packed matrix [N, K], see formats.py."""

    weight: Tensor
    scale: Tensor | None
    panel = 0
    """Rows per panel (panels.py); 0: stored row by row. In panels, `weight` and the `scale` of int4 are 1-D."""

    def __init__(self, kind: Weights, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns
        weight, scale = empty(kind, rows, columns)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.dtype = torch.float32
        """The dtype to which the module was last cast. `dequantized` and embeddings return values of this dtype."""

    @property
    def kind(self) -> Weights:
        return KINDS[self.weight.dtype]

    @property
    def row_by_row(self) -> tuple[Tensor, Tensor | None]:
        """Weight and scale in the layout of formats.py; copies if the matrix is stored in panels."""
        weight, scale = self.weight, self.scale
        if weight.dim() == 1:
            weight = from_panels(weight, self.rows, self.panel)[:, : self._row_elements]
        if scale is not None and weight.dtype == torch.uint8 and scale.dim() == 1:
            scale = from_panels(scale, self.rows, self.panel)
        return weight, scale

    @property
    def _row_elements(self) -> int:
        """Number of elements in a row of `weight`."""
        return self.columns // 2 if self.weight.dtype == torch.uint8 else self.columns

    def dequantized(self) -> Tensor:
        """Return the matrix [N, K], unpacked to this module's dtype."""
        return dequantize(*self.row_by_row, self.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x [..., K] · matrixᵀ, [..., N], in x's dtype."""
        weight, scale = self.row_by_row
        n_rows = self.rows if x.device.type != "cpu" else rows_at_once(weight, self.columns)
        weights = torch.split(weight, n_rows)
        scales = [None] * len(weights) if scale is None else torch.split(scale, n_rows)
        parts = [dispatch.linear(x, dequantize(w, s, x.dtype)) for w, s in zip(weights, scales, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module. A cast changes only `dtype`, not the packed tensors."""
        packed = {"weight": self.weight, "scale": self.scale}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, before in packed.items():
            after = getattr(self, name)
            if before is not None and after.dtype != before.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the matrix row by row, because the panels' layout depends on the machine."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in zip(("weight", "scale"), self.row_by_row, strict=True):
            if tensor is not None:
                destination[prefix + name] = tensor

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.rows} × {self.columns}"


class QuantizedLinear(PackedMatrix):
    """A linear layer with a packed matrix and, optionally, an unpacked bias."""

    def __init__(self, kind: Weights, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__(kind, rows, columns)
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N], in x's dtype, or in `product_dtype` if x requires a gradient."""
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _Product.apply(x.to(product_dtype(x)), *self.row_by_row)  # type: ignore[no-untyped-call]
        else:
            y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class LoRAQuantizedLinear(LowRank, QuantizedLinear):
    """A quantized linear layer with an adapter (QLoRA; Dettmers et al., 2023)."""

    def __init__(self, base: QuantizedLinear, config: LoRAConfig) -> None:
        """Add an adapter to `base`; the new layer shares the tensors of `base`."""
        with ShapesOnly():
            super().__init__(base.kind, base.rows, base.columns, base.bias is not None)
        (self.weight, self.scale), self.bias = base.row_by_row, base.bias
        self.attach(base.columns, base.rows, config, base.weight.device, base.dtype)
        self.train(base.training)


@adapted.register
def _(base: QuantizedLinear, config: LoRAConfig) -> LowRank:
    return LoRAQuantizedLinear(base, config)


class _Product(torch.autograd.Function):
    """The product x · matrixᵀ. Only the packed matrix is saved for the backward pass, which unpacks it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return dispatch.linear(x, unpacked(weight, scale, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return dispatch.linear(gradients[0], unpacked(weight, scale, gradients[0].dtype).T), None, None


class QuantizedEmbedding(PackedMatrix):
    """An embedding with a packed matrix; it unpacks only the rows of its input tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [...] to embeddings [..., K]."""
        weight, scale = self.weight, self.scale
        weight = self._rows_of(weight, tokens)[..., : self._row_elements]
        if scale is not None:
            scale = self._rows_of(scale, tokens) if weight.dtype == torch.uint8 else scale[tokens]
        return dequantize(weight, scale, self.dtype)

    def _rows_of(self, tensor: Tensor, tokens: Tensor) -> Tensor:
        return rows_from_panels(tensor, tokens, self.rows, self.panel) if tensor.dim() == 1 else tensor[tokens]


class QuantizedGPT(GPT):
    """A GPT with packed matrices."""

    def __init__(self, config: ModelConfig, kinds: Mapping[str, Weights]) -> None:
        """Build the model with uninitialized packed matrices. On the meta device, the model takes no memory.
        `kinds`: the kind of each packed matrix, by module name, such as `blocks.0.mlp.up`."""
        super().__init__(config)
        hold_packed(self, kinds)

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, C], unpacked at each access."""
        return self._head.dequantized() if isinstance(self._head, PackedMatrix) else self._head.weight

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [..., V] of features [..., C]."""
        if isinstance(self._head, PackedMatrix):
            return cap(self._head.product(features), self.config.logit_softcap)
        return super().logits(features)

    @property
    def _head(self) -> Any:
        return self.token_embedding if self.untied_head is None else self.untied_head

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computations."""
        return next(self.norm.parameters()).dtype

    @property
    def weights(self) -> str:
        """The kinds of the packed matrices, smallest first, such as `int4` or `int4, int8`."""
        order = ("int4", "int8", "fp16", "bf16")
        return ", ".join(sorted({module.kind for _, module in packed_matrices(self)}, key=order.index))


def weights_of(model: GPT) -> str:
    """Return the kinds of a model's matrices as text, such as `int4, int8`; for an unpacked model, bf16, fp16 or
    fp32."""
    return model.weights if isinstance(model, QuantizedGPT) else KINDS.get(model.dtype, "fp32")


def hold_packed(model: GPT, kinds: Mapping[str, Weights]) -> GPT:
    """Replace the modules named in `kinds` by uninitialized packed ones, in place; return the model."""
    for name, kind in kinds.items():
        model.set_submodule(name, _packed(model.get_submodule(name), kind))
    return model


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights of a model by name: its parameters, and the buffers of its packed matrices."""
    packed = {f"{name}.{part}": x for name, matrix in packed_matrices(model) for part, x in matrix.named_buffers()}
    return dict(model.named_parameters()) | packed


def packed_matrices(model: nn.Module) -> list[tuple[str, PackedMatrix]]:
    """Return the name and module of each packed matrix in the model."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, PackedMatrix)]


def _packed(module: nn.Module, kind: Weights) -> PackedMatrix:
    """Return an uninitialized packed module of the same shape as `module`."""
    if isinstance(module, nn.Linear):
        return QuantizedLinear(kind, module.out_features, module.in_features, module.bias is not None)
    assert isinstance(module, nn.Embedding), f"{type(module).__name__} has no packed form"
    return QuantizedEmbedding(kind, module.num_embeddings, module.embedding_dim)
