"""Memory of the model's operations, and the quantities that determine their tensors' sizes.

Each module has its `cost` next to its `forward`: one `Stage` per operation, in the order of the forward pass. Sizes
follow what autograd saves: an operation's inputs or its results, whichever its derivative uses. A view costs nothing; a
tensor that two operations save counts once, at the operation whose backward pass is later. The model saves other
tensors on a CPU (`gptworks.kernels`) than on an accelerator, where attention is a fused kernel.

Under autocast the residual stream stays float32, products and the tensors between them have two-byte elements, and each
matrix has a two-byte copy that lives until its gradient is made.

Letters: N tokens of a micro-batch, C width, Q query heads × their width, K key/value heads × theirs, F MLP width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gptworks.config import ModelConfig
from gptworks.kernels import dispatch, gemm

RESIDUAL, ATTENTION, WEIGHTS_KEPT = "residual_stream_and_norms", "attention", "attention_weights"
MLP_INNER, COPIES, DROPOUT, ADAPTER = "mlp", "weight_copies", "dropout_masks", "adapter_inputs"
"""Kinds of saved tensors."""


@dataclass(frozen=True)
class Stage:
    """Memory of an operation. Sizes are in bytes, parameters in elements.

    Its backward pass gets a gradient of `arrives` bytes, and makes one of `leaves` bytes and its parameters' gradients
    while saved tensors and the arriving gradient are still held; then those two are freed. If `merges`, the leaving
    gradient is added to an existing one of its size.
    """

    name: str
    saved: Mapping[str, int] = field(default_factory=dict)
    """Bytes of saved tensors by kind."""
    arrives: int = 0
    leaves: int = 0
    merges: bool = False
    scratch: int = 0
    """Additional bytes at the peak of the backward pass."""
    unsaved: int = 0
    """Bytes of unsaved results, of this and earlier operations, in memory during the forward pass. They count, with all
    tensors saved so far, if the block is recomputed: the peak may be there."""
    matrices: int = 0
    vectors: int = 0
    table: int = 0
    """Elements of an embedding's table. Its gradient is as large, in float32, and exists before the stage ends."""
    for_own: Mapping[str, int] = field(default_factory=dict)
    """The part of `saved` that only the gradients of the operation's own parameters need."""
    own_scratch: int = 0
    """The part of `scratch` that only the gradients of the operation's own parameters need."""
    module: str = ""
    """Last part of the name of the module that has the parameters; empty: the operation's name."""
    readers: tuple[str, ...] = ()
    """The modules that read the saved input. If none of them is trained, the input is not saved."""
    reads_entry: bool = False
    """Whether the operation reads the block's input, normalized or not."""
    n_in: int = 0
    """Input width of the operation's matrices; 0: the model's width."""
    share: float = 1.0
    """Share of the tokens that the operation multiplies."""


@dataclass(frozen=True)
class LayerCost:
    """Memory of one layer."""

    stages: list[Stage]
    """The block's operations, in order."""
    lookups: list[Stage]
    """Lookups in tables of this layer only, before the block."""
    passing_bytes: int
    """Peak memory of the block if it is frozen and keeps no activations."""
    kept_bytes: int
    """Bytes kept next to the stream if the block is recomputed."""


@dataclass(frozen=True)
class Shapes:
    """The quantities that determine sizes: the architecture, the batch, the precision and the device."""

    config: ModelConfig
    batch_size: int
    """Number of sequences in a micro-batch."""
    length: int
    product_bytes: int
    """Bytes of an element in matrix products: 4, or 2 under autocast."""
    on_cpu: bool
    several_texts: bool = False
    """Whether a row holds several texts: a bias then replaces masks."""

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
        """Whether C++ computes training's operations between its products."""
        return dispatch.planned("attention", self.on_cpu) == dispatch.CPP

    @property
    def saves_result(self) -> bool:
        """Whether the MLP's result, or a tensor computed from it, is saved. If not, a recomputed block stops when its
        last operation has saved its inputs, which torch's operations do before they compute."""
        return bool(self.config.norms_behind or self.config.dropout_residual)

    @property
    def multiplies(self) -> bool:
        """Whether C++ computes products in training; see `gptworks.kernels.gemm`."""
        return self.native and not self.autocast and gemm.is_faster()

    def products(self, width: int) -> int:
        """Bytes of [N, width] in the products' precision."""
        return self.n_tokens * width * self.product_bytes

    def floats(self, width: int) -> int:
        """Bytes of [N, width] in float32."""
        return self.n_tokens * width * 4

    def mask(self, width: int) -> int:
        """Bytes that dropout saves for [N, width]: factors on a CPU, booleans elsewhere."""
        return self.products(width) if self.on_cpu else self.n_tokens * width

    def copies(self, matrices: int) -> dict[str, int]:
        """Bytes of the two-byte copies that autocast makes of matrices with this many elements."""
        return {COPIES: matrices * self.product_bytes} if self.autocast else {}
