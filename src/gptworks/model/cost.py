"""An operation of the model as memory sees it, and what the sizes of its tensors depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gptworks.config import ModelConfig

RESIDUAL, ATTENTION, WEIGHTS_KEPT = "residual_stream_and_norms", "attention", "attention_weights"
MLP, COPIES, DROPOUT, ADAPTER = "mlp", "weight_copies", "dropout_masks", "adapter_inputs"
"""Kinds of saved tensors."""


@dataclass(frozen=True)
class Stage:
    """An operation as memory sees it. Sizes are bytes, parameters are elements.

    Its backward pass makes `leaves` and the gradients of its parameters while everything saved and the gradient that
    arrives still stand; then those go. A gradient that `merges` is added to one of its size that waits already.
    """

    name: str
    saved: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    arrives: int = 0
    leaves: int = 0
    merges: bool = False
    scratch: int = 0
    """More that its backward pass needs at its worst moment."""
    matrices: int = 0
    vectors: int = 0
    for_own: Mapping[str, int] = field(default_factory=dict)
    """Of what is saved, what the gradients of its own parameters alone need."""
    own_scratch: int = 0
    """The same of the scratch memory."""


@dataclass(frozen=True)
class Shapes:
    """What sizes depend on besides the architecture."""

    config: ModelConfig
    batch_size: int
    """Sequences of a micro-batch."""
    length: int
    product_bytes: int
    """Of an element in matrix products: 4, or 2 under autocast."""
    on_cpu: bool
    several_texts: bool = False
    """Whether a row holds several texts: then a bias stands in for masks."""

    @property
    def n_tokens(self) -> int:
        return self.batch_size * self.length

    @property
    def autocast(self) -> bool:
        return self.product_bytes != 4

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
