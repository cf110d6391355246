"""Runs a training step on fake CUDA tensors and records what a GPU would refuse or wait for. Run it in its own
process:

python -m gptworks.training.rehearsal.watched < rehearsal.json   (with the library of fake_cuda.cpp preloaded)
"""

import ctypes
import inspect
import os
import re
import sys
import traceback
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptworks.data.samples import Batch
from gptworks.errors import shortened
from gptworks.kernels import dispatch
from gptworks.model import moe
from gptworks.training.distributed.parallel import compiles_blocks
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.rehearsal.fake_cuda import FakeStep, Finding, Kind
from gptworks.training.rehearsal.new_process import answer
from gptworks.training.rehearsal.trace import INDEXING, Rehearsal, accumulate, answered
from gptworks.training.step import TrainStep

PACKAGE = str(Path(__file__).parents[2])
_SKIPPED = (str(Path(__file__).parent), str(Path(dispatch.__file__)))
"""Files that only pass operations on to torch. Findings name the code that calls these files."""

EXPECTED: dict[tuple[Kind, str, str], str] = {
    ("host read", "device.py", "__getitem__"): "the step's losses and gradient norm, read together",
    ("float32 product", "model/moe.py", "forward"): "the router: rounding would change the choice of experts",
}
"""Findings that gptworks causes on purpose: (kind, file, function) → reason. Optimizers add `expected_on_cuda`."""

_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten.bincount,
    _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten._linalg_eigh, _aten._linalg_check_errors,
}  # fmt: skip
"""Operations after which the host must read the result or its size."""
_COPIES = {_aten._to_copy, _aten.copy_}
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.dot, _aten._grouped_mm,
    _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention, _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable, _aten._scaled_dot_product_attention_math,
    _aten._flash_attention_forward, _aten._flash_attention_backward,
}  # fmt: skip
"""Matrix products and attention; all operations of `torch.nn.attention.varlen` are attention too."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and products, and records findings, while it is entered inside a `FakeTensorMode`.

    Operations that need values, which fake tensors lack, get substitutes (`answered`): a mask selects half of the
    elements.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._half = precision in ("bf16", "fp16")
        self.expected = dict(EXPECTED)
        self.n_operations = 0
        self.products: Counter[str] = Counter()
        self.found: Counter[tuple[Kind, str, str, str]] = Counter()
        """Number of occurrences of each finding: (kind, operation, file and line, function)."""

    def begin(self) -> None:
        """Count again from 0; findings of earlier steps stay, with count 0."""
        self.n_operations, self.products = 0, Counter()
        self.found = Counter(dict.fromkeys(self.found, 0))

    def forget_waits(self) -> None:
        """Keep only the findings of tensors on a wrong device."""
        self.found = Counter({finding: n for finding, n in self.found.items() if finding[0] == "wrong device"})

    def record(self, kind: Kind, operation: str) -> None:
        self.found[(kind, operation, *_caller())] += 1

    def __torch_dispatch__(
        self, function: Any, kinds: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            torch.is_inference_mode_enabled() and function.namespace == "aten"
        ):  # in this mode, operations may consist of other operations
            with self:
                parts = function.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        packet, name = function.overloadpacket, str(function)
        self.n_operations += 1
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in tensors:
            x.constant = None  # type: ignore[attr-defined]  # else operations on known values would run on CUDA
        on_cuda = any(x.device.type == "cuda" for x in tensors)
        on_cpu = any(x.device.type == "cpu" and x.ndim for x in tensors)
        if packet in _COPIES:
            self._copied(function, args, kwargs, name)
        elif on_cuda and on_cpu:
            from_host = packet in (_aten.index, _aten.index_put_) and args[0].device.type == "cuda"
            self.record("blocking copy" if from_host else "wrong device", name)
        if on_cuda and (packet in _READS or _selects(packet, args, kwargs)):
            self.record("host read", name)
        if packet in _PRODUCTS or function.namespace == "torch_attn":
            dtype = next(x.dtype for x in tensors)
            self.products[str(dtype).removeprefix("torch.")] += 1
            if self._half and dtype == torch.float32:
                self.record("float32 product", name)
        return answered(function, args, kwargs, selected=2)

    def _copied(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> None:
        if function.overloadpacket is _aten.copy_:
            source, target = args[1].device.type, args[0].device.type
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source = args[0].device.type
            target = torch.device(kwargs.get("device") or args[0].device).type
            waits = not kwargs.get("non_blocking", False)
        if (source, target) == ("cuda", "cpu"):
            self.record("host read", name)
        elif (source, target) == ("cpu", "cuda") and waits:
            self.record("blocking copy", name)

    def findings(self) -> Iterator[Finding]:
        """Yield the findings, grouped by kind."""
        for (kind, operation, where, function), count in sorted(self.found.items()):
            reason = self.expected.get((kind, where.partition(":")[0], function))
            yield Finding(kind, operation, where, count, reason)


def _selects(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the size of the result depends on values: the operation indexes with a mask, or repeats elements
    without `output_size`."""
    if packet in INDEXING:
        return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return packet is _aten.repeat_interleave and kwargs.get("output_size") is None


def _caller() -> tuple[str, str]:
    """Return "file:line" of the innermost code of gptworks, and its function's name. For an operation of autograd, this
    is the code of the forward pass, which anomaly mode records. The texts are empty if no code is found."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.startswith(_SKIPPED):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    lines = "".join(node.metadata.get("traceback_", ())) if node is not None else ""
    return _last_of_package(lines)


def _last_of_package(lines: str) -> tuple[str, str]:
    """Return "file:line" and function of the last line of a traceback that is gptworks' own; empty texts if none is."""
    found = re.findall(rf'File "{re.escape(PACKAGE)}/([^"]+)", line (\d+), in (\S+)', lines)
    skipped = tuple(path[len(PACKAGE) + 1 :] for path in _SKIPPED)
    own = [(f"{file}:{line}", function) for file, line, function in found if not file.startswith(skipped)]
    return own[-1] if own else ("", "")


def watched_step(rehearsal: Rehearsal) -> FakeStep:
    """Run two training steps on fake CUDA tensors in this process, and report on the second."""
    watch, n_graphs = Watch(rehearsal.precision), None
    with fake_cuda(watch):
        try:
            with watch:
                step = rehearsal.new_step()
            watch.forget_waits()  # building a model may wait for the GPU
            watch.expected |= _expected_of(step.optimizer)
            shape = rehearsal.train.batch_size, rehearsal.row_length
            batch = rehearsal.batch(torch.zeros(*shape, dtype=torch.int64, device="cuda"))
            for _ in range(2):
                watch.begin()
                with watch:
                    accumulate(step, rehearsal.train, batch)
                    step.apply(step.gradient_norm())
            _check_places(step, watch)
            if compiles_blocks(step.model, rehearsal.train.compile, torch.device("cuda")):
                n_graphs = _count_graphs(step, rehearsal, batch, watch)
        except Exception as error:  # whatever stops the step is a finding
            lines = "".join(traceback.format_exception(error))
            watch.found[("failed", _message(error), *_last_of_package(lines))] += 1
    return FakeStep(None, watch.n_operations, tuple(watch.findings()), tuple(sorted(watch.products.items())), n_graphs)


def _expected_of(optimizer: Optimizer) -> dict[tuple[Kind, str, str], str]:
    """Return the findings that an optimizer causes on purpose, in the form of `EXPECTED`."""
    return {
        (kind, str(Path(inspect.getfile(type(one))).relative_to(PACKAGE)), function): reason
        for one in optimizer.parts
        for (kind, function), reason in getattr(one, "expected_on_cuda", {}).items()
    }


def _message(error: Exception) -> str:
    return shortened(f"{type(error).__name__}: {error}".strip().split("\n")[0], 300)


@contextmanager
def fake_cuda(watch: Watch) -> Iterator[None]:
    """Context in which tensors are fake, CUDA appears available, and waits for CUDA are recorded in `watch`. Enter
    `watch` itself around the operations to watch. `torch.cuda` stays fake afterwards.

    Raises:
        RuntimeError: the library of fake_cuda.cpp is not preloaded.
    """
    install(watch)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        functorch_config.patch(fake_tensor_prefer_device_type="cuda"),
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        yield


def _check_places(step: TrainStep, watch: Watch) -> None:
    """Record the model's and the optimizer's tensors that are not on the GPU; step counts may be on the host."""
    for name, module in step.model.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.device.type != "cuda":
                    file = sys.modules[type(module).__module__].__file__ or ""
                    where = file.removeprefix(f"{PACKAGE}/")
                    watch.found[("wrong device", f"{kind} {name}.{key}".replace(" .", " "), where, "")] += 1
    for name, tensor in step.optimizer.state_tensors().items():
        if tensor.ndim and tensor.device.type != "cuda":
            watch.found[("wrong device", f"optimizer state {name}", "training/optim/optimizer.py", "")] += 1


def _count_graphs(step: TrainStep, rehearsal: Rehearsal, batch: Batch, watch: Watch) -> int:
    """Trace the blocks into graphs, as torch.compile does; return the number of graphs and record where they break."""
    from torch import _dynamo as dynamo

    given: dict[nn.Module, Any] = {}

    def keep(block: nn.Module, inputs: Any) -> None:
        given.setdefault(block, inputs)

    hooks = [block.register_forward_pre_hook(keep) for block in step.model.blocks]
    rows = tuple(x[: rehearsal.train.micro_batch_size] for x in batch)
    with step.precision.autocast(), watch:
        step.loss(step.model, rows)
    for hook in hooks:
        hook.remove()
    n_graphs = 0
    for block, inputs in given.items():
        dynamo.reset()
        try:
            with step.precision.autocast():
                shown = dynamo.explain(block)(*inputs)
        except Exception as error:  # such as an operation outside a graph whose result's size depends on values
            lines = "".join(traceback.format_exception(error))
            watch.found[("graph break", _message(error), *_last_of_package(lines))] += 1
            continue
        n_graphs += shown.graph_count
        for broken in shown.break_reasons:
            own = [frame for frame in broken.user_stack if frame.filename.startswith(PACKAGE)]
            where = f"{own[-1].filename[len(PACKAGE) + 1 :]}:{own[-1].lineno}" if own else ""
            reason = broken.reason.strip().split("\n")[0]
            watch.found[("graph break", reason, where, own[-1].name if own else "")] += 1
    return n_graphs


class _Event:
    """A substitute for `torch.cuda.Event`, done as soon as it is recorded."""

    watch: Watch

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.watch.record("host read", "torch.cuda.Event.synchronize")


class _Stream:
    """A substitute for `torch.cuda.Stream`; the fake device has only one stream."""

    watch: Watch

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        self.watch.record("host read", "torch.cuda.Stream.synchronize")


def install(watch: Watch) -> None:
    """Give this process's `torch.cuda` one fake H100; waits for it are recorded in `watch`.

    Raises:
        RuntimeError: the library of fake_cuda.cpp is not preloaded.
    """
    if not hasattr(ctypes.CDLL(None), "gptworks_fake_cuda"):
        raise RuntimeError("the library of fake CUDA was not loaded.")
    os.environ.pop("LD_PRELOAD", None)  # not for this process's children
    _Event.watch = _Stream.watch = watch
    shown = types.SimpleNamespace(
        total_memory=80 * 10**9, name="Fake H100", major=9, minor=0, multi_processor_count=132, gcnArchName=""
    )
    returned: dict[str, Any] = {
        "is_available": True, "is_initialized": False, "is_bf16_supported": True, "device_count": 1,
        "current_device": 0, "set_device": None, "_lazy_init": None, "current_stream": _Stream(),
        "default_stream": _Stream(), "stream": nullcontext(), "empty_cache": None, "get_device_name": "Fake H100",
        "get_device_capability": (9, 0), "get_device_properties": shown, "memory_allocated": 0,
        "mem_get_info": (79 * 10**9, 80 * 10**9), "max_memory_allocated": 0, "max_memory_reserved": 0,
        "memory_reserved": 0, "reset_peak_memory_stats": None, "manual_seed": None, "manual_seed_all": None,
        "_is_in_bad_fork": False, "set_rng_state": None,
    }  # fmt: skip
    replaced: dict[str, Any] = {name: lambda *_, value=value, **__: value for name, value in returned.items()}
    replaced["synchronize"] = lambda *_: watch.record("host read", "torch.cuda.synchronize")
    replaced["get_rng_state"] = lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu")
    for name, value in (replaced | {"Event": _Event, "Stream": _Stream}).items():
        setattr(torch.cuda, name, value)
    torch.backends.cuda.is_flash_attention_available = lambda: True
    count = moe.tokens_per_expert

    def tokens_per_expert(chosen: Tensor, n_experts: int) -> list[int]:  # `count` reads only real tensors
        watch.record("host read", "tolist")
        return count(chosen, n_experts)

    def tolist(x: Tensor) -> Any:  # torch's own method reads one element after the other
        if x.device.type == "cuda":
            watch.record("host read", "tolist")
        return np.full(x.shape, 2.0 if x.is_floating_point() else 0).tolist()  # 2: a norm to clip; 0: a valid token

    moe.tokens_per_expert = tokens_per_expert
    fake_tensor.FakeTensor.tolist = tolist  # type: ignore[assignment, method-assign]
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment, method-assign]
    fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]


if __name__ == "__main__":
    answer(Rehearsal, watched_step)
