"""Memory of the model's operations, and the quantities that determine their tensors' sizes.

Each module has its `cost` next to its `forward`: one `Stage` per operation, in the order of the forward pass. Sizes
follow what autograd saves: the inputs and results of an operation that its derivative uses. A view costs nothing; a
tensor that two operations save counts once, at the operation whose backward pass is later. The saved tensors on a CPU
(`gptworks.kernels`) differ from those on an accelerator, where attention is a fused kernel.

Under autocast the residual stream stays float32, products and the tensors between them have two-byte elements, and each
matrix has a two-byte copy that exists until the matrix's gradient is computed.

Letters: N tokens of a micro-batch, C width, Q query heads × their width, K key/value heads × their width, F MLP width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gptworks.config import ModelConfig
from gptworks.kernels import dispatch, gemm

RESIDUAL, ATTENTION, WEIGHTS_KEPT = "residual_stream_and_norms", "attention", "attention_weights"
MLP_INNER, COPIES, DROPOUT, ADAPTER = "mlp", "weight_copies", "dropout_masks", "adapter_inputs"
"""Kinds of saved tensors: the keys of `Stage.saved`."""


@dataclass(frozen=True)
class Stage:
    """Memory of an operation. Sizes are in bytes; `matrices`, `vectors` and `table` are numbers of parameters.

    The operation's backward pass receives a gradient of `arrives` bytes. It computes a gradient of `leaves` bytes and
    its parameters' gradients, and then frees the saved tensors and the gradient received. If `merges`, the leaving
    gradient is added to an existing gradient of the same size.
    """

    name: str
    saved: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the tensors saved for the backward pass, by kind."""
    arrives: int = 0
    leaves: int = 0
    merges: bool = False
    scratch: int = 0
    """Additional bytes that the backward pass needs at its peak."""
    unsaved: int = 0
    """Bytes of unsaved results of this and earlier operations that are in memory during this operation's forward pass.
    If the block is recomputed, these results and all tensors saved so far may be the peak of memory."""
    matrices: int = 0
    vectors: int = 0
    table: int = 0
    """Number of elements of an embedding table. Its fp32 gradient has as many, and exists before the stage ends."""
    for_own: Mapping[str, int] = field(default_factory=dict)
    """The part of `saved` that only the gradients of the operation's own parameters need."""
    own_scratch: int = 0
    """The part of `scratch` that only the gradients of the operation's own parameters need."""
    module: str = ""
    """Last part of the name of the module that owns the parameters; empty if it is `name`."""
    readers: tuple[str, ...] = ()
    """Modules that read the saved input. If none of them is trained, the input is not saved."""
    reads_entry: bool = False
    """Whether the operation reads the block's input, normalized or not."""
    n_in: int = 0
    """Input width of the operation's matrices; 0 for the model's width."""
    share: float = 1.0
    """Fraction of the tokens that the operation multiplies; less than 1 for an expert."""


@dataclass(frozen=True)
class LayerCost:
    """Memory of one layer."""

    stages: list[Stage]
    """The block's operations, in the order of the forward pass."""
    lookups: list[Stage]
    """Lookups, before the block, in embedding tables that only this layer uses."""
    passing_bytes: int
    """Peak bytes of the block if it is frozen and keeps no activations."""
    kept_bytes: int
    """Bytes kept in addition to the block's input if the block is recomputed."""


@dataclass(frozen=True)
class Shapes:
    """Quantities that determine tensors' sizes: architecture, batch, precision and device."""

    config: ModelConfig
    batch_size: int
    """Number of sequences in a micro-batch."""
    length: int
    product_bytes: int
    """Bytes per element in matrix products: 4, or 2 under autocast."""
    on_cpu: bool
    several_texts: bool = False
    """Whether a row holds several texts; an attention bias or the texts' bounds then replace masks."""
    has_flash: bool = False
    """Whether torch has flash attention for the device; see `gptworks.kernels.dispatch.has_flash`."""
    has_fused: bool = True
    """Whether torch has any fused attention for training on the accelerator. False on MPS, where autograd saves the
    weights of all pairs of tokens (pytorch/pytorch#182746)."""
    fuses_groups: bool = True
    """Whether torch has fused attention for grouped queries; see `gptworks.kernels.dispatch.fuses_groups`."""

    @property
    def n_tokens(self) -> int:
        return self.batch_size * self.length

    @property
    def autocast(self) -> bool:
        return self.product_bytes != 4

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.on_cpu else "meta")

    @property
    def native(self) -> bool:
        """Whether C++ computes the operations between matrix products in training."""
        return dispatch.planned("attention", self.on_cpu) == dispatch.CPP

    @property
    def fuses_loss(self) -> bool:
        """Whether C++ or Triton computes the loss and its gradient in the logits, without probabilities in float32.
        Triton supports the GPUs that have flash attention, and comes with torch for them."""
        return self.native or self.has_flash

    @property
    def saves_result(self) -> bool:
        """Whether autograd saves the MLP's result or a tensor computed from it. If not, a block's
        recomputation stops before its last operation computes, because torch's operations save their inputs first."""
        return bool(self.config.norms_behind or self.config.dropout_residual)

    @property
    def multiplies(self) -> bool:
        """Whether C++ computes the matrix products in training; see `gptworks.kernels.gemm`."""
        return self.native and not self.autocast and gemm.is_faster()

    def products(self, width: int) -> int:
        """Bytes of a tensor [n_tokens, width] in the precision of matrix products."""
        return self.n_tokens * width * self.product_bytes

    def floats(self, width: int) -> int:
        """Bytes of a float32 tensor [n_tokens, width]."""
        return self.n_tokens * width * 4

    def mask(self, width: int) -> int:
        """Bytes that dropout saves for a tensor [n_tokens, width]: factors on a CPU, booleans elsewhere."""
        return self.products(width) if self.on_cpu else self.n_tokens * width

    def copies(self, matrices: int) -> dict[str, int]:
        """Bytes, by kind, of autocast's two-byte copies of matrices with this many elements; empty without autocast."""
        return {COPIES: matrices * self.product_bytes} if self.autocast else {}
