"""Memory of the model's operations, and the quantities that decide its tensors' sizes.

Each module has its `cost` next to its `forward`: one `Stage` an operation, in the order of the forward pass. Sizes
follow what autograd saves: an operation's inputs or its results, whichever its derivative is written in; a view costs
nothing, a tensor that two operations save counts once, at the one whose backward pass is later. The model keeps
other tensors on a CPU (`gptworks.kernels`) than on an accelerator, where attention is a fused kernel.

Under autocast the residual stream stays float32, products and what lies between them are of two bytes, and each matrix
has a two-byte copy that lives until its gradient is made.

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
    """Memory held by an operation. Sizes are bytes, parameters are elements.

    Its backward pass makes `leaves` and the gradients of its parameters while saved tensors and the arriving gradient
    are still held; then those are freed. A gradient that `merges` is added to an existing one of its size.
    """

    name: str
    saved: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind."""
    arrives: int = 0
    leaves: int = 0
    merges: bool = False
    scratch: int = 0
    """Additional bytes that its backward pass needs at its peak."""
    unsaved: int = 0
    """Bytes of what is not saved, but is there in its forward pass: results of this operation and of earlier ones. They
    count where a block is computed again, next to all that it has saved so far: the peak may be there."""
    matrices: int = 0
    vectors: int = 0
    for_own: Mapping[str, int] = field(default_factory=dict)
    """The part of `saved` that only the gradients of its own parameters need."""
    own_scratch: int = 0
    """The part of `scratch` that only they need."""
    module: str = ""
    """The module that has these parameters, by the last part of its name; empty: it has the operation's name."""
    readers: tuple[str, ...] = ()
    """The modules that read its saved input. If none of them is trained, it saves no input."""
    reads_entry: bool = False
    """Whether it reads the block's input, normalized or not."""
    n_in: int = 0
    """Number of inputs of its matrices; 0: the model's width."""
    share: float = 1.0
    """Share of the tokens that it multiplies."""


@dataclass(frozen=True)
class Shapes:
    """The quantities that decide sizes: the architecture, the batch, the precision and the device."""

    config: ModelConfig
    batch_size: int
    """Sequences of a micro-batch."""
    length: int
    product_bytes: int
    """Bytes of an element in matrix products: 4, or 2 under autocast."""
    on_cpu: bool
    several_texts: bool = False
    """Whether a row holds several texts: then a bias replaces masks."""

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
        """Whether the MLP's result, or what is made of it, is saved. If not, a block that is computed again stops
        where its last operation has what it saves: torch's operations before they compute."""
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
        """Bytes of what dropout keeps for [N, width]: the factors on a CPU, booleans elsewhere."""
        return self.products(width) if self.on_cpu else self.n_tokens * width

    def copies(self, matrices: int) -> dict[str, int]:
        """The two-byte copies of matrices that autocast makes."""
        return {COPIES: matrices * self.product_bytes} if self.autocast else {}
