"""The choice of a model's backend: native kernels on a CPU that supports them, otherwise torch."""

import warnings

import torch

from gptworks.choices import BackendName
from gptworks.errors import UserError
from gptworks.infer.backends.backend import Backend, TorchBackend
from gptworks.infer.backends.native import NativeBackend, refusal
from gptworks.kernels.build import Unavailable
from gptworks.kernels.library import library
from gptworks.model.gpt import GPT


def choose_backend(
    model: GPT, n_slots: int, capacity: int, *, dtype: torch.dtype | None = None, name: BackendName = "auto"
) -> Backend:
    """The backend for a model on its device: native on a CPU if the model is not in training, otherwise torch.

    Warns (UserWarning), once, if torch replaces the native backend. The result's `description` names the backend.

    Args:
        n_slots, capacity: number of texts at once, and of tokens of each.
        dtype: the caches' dtype; None: the backend's default.
        name: native: the native backend, or an error. torch: the model's own forward pass.

    Raises:
        UserError: name="native", and the native backend is unavailable.
    """
    if name == "torch" or (name == "auto" and (model.device.type != "cpu" or model.training)):
        return TorchBackend(model, n_slots, capacity, dtype=dtype)
    try:
        is_fp16 = model.token_embedding.weight.dtype == torch.float16
        if name == "auto" and is_fp16 and refusal(model) is None and not library().has_wide_vectors:
            # Without F16C, software converts each fp16 weight. Other weights are at least as fast as in torch.
            raise Unavailable("without AVX2 it is 12 times slower than torch for weights in fp16.")
        return NativeBackend(model, n_slots, capacity, dtype=dtype)
    except Unavailable as error:
        if name == "native":
            raise UserError(f"backend=native cannot compute this model here: {error} Take auto or torch.") from None
        message = f"the native engine is not used: {error} torch computes instead."
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=2)
        return TorchBackend(model, n_slots, capacity, dtype=dtype)


_warned: set[str] = set()
