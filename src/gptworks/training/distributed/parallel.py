"""Division of a model and its batches among devices, and the collectives of the devices.

    ranks = data × tensor    a mesh of two dimensions, tensor the inner one

    data      each rank has its own micro-batches of the step. ddp: each has the complete model, and gradients are
              reduced during the last micro-batch's backward pass (sums.py), or after it if tensor > 1. fsdp: each has a
              shard of every tensor except the blocks' vectors and routers, and blocks are gathered as they are used
              (FSDP2).
    tensor    ranks have the same micro-batches and a shard of each block's heads and inner width. Embeddings, norms and
              the head are replicated.

Gradients are float32. They are summed over ranks, not averaged, because the loss is already divided by the number of
targets of the step. FSDP gathers a block's matrices in the precision of the products, so they are rounded as in
autocast. Shards, embedding, head, vectors, routers and the residual stream are float32.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import set_checkpoint_early_stop

from gptworks.config import IGNORED, ModelConfig, Recipe, TrainConfig
from gptworks.data.samples import Batch
from gptworks.device import Scalars
from gptworks.model.gpt import GPT
from gptworks.planning.layout import ONE_DEVICE, Layout
from gptworks.quantize.linear import packed_matrices
from gptworks.training.checkpoint_files import TensorPart
from gptworks.training.distributed.deferred import Deferred
from gptworks.training.distributed.ranks import ALONE, Ranks
from gptworks.training.distributed.shards import DIMENSIONS, divided_over, local, part_of, places_of, sizes_of
from gptworks.training.distributed.sums import GradientSums, Timed

Holders = Mapping[str, int]
"""The rank of each tensor that only one rank keeps, by the tensor's name."""

NO_HOLDERS: Holders = {}


class StopAsked(Exception):
    """A signal to stop the run interrupted an evaluation."""


class Parallel:
    """Training on one device. `ManyDevices` overrides the methods that need other devices."""

    layout = ONE_DEVICE
    ranks = ALONE
    gathers_once = False
    """Whether sharded blocks are gathered once, not in each forward pass, to generate texts. This is so if
    all blocks fit on every rank, or if the objective generates answers."""
    mesh: DeviceMesh | None = None
    """All ranks, in dimensions data and tensor; None for a single rank."""

    def __init__(self, train: TrainConfig, varying_widths: bool = False) -> None:
        """With `varying_widths`, batches differ in length, and blocks are compiled for any length."""
        self.compile, self.varying_widths = train.compile, varying_widths
        self.stop_asked: Callable[[], str | None] = lambda: None
        """Returns the signal that asked this process to stop, or None. Evaluations call it before each batch."""
        self.micro_batch_size = train.micro_batch_size
        self._data_rank, self._n_data = 0, 1

    @property
    def samples(self) -> bool:
        """Whether this rank takes part in generating samples."""
        return True

    def micro_steps(self, batch_size: int) -> range:
        """Return the numbers of this rank's micro-batches within a step of `batch_size` samples."""
        return range(self._data_rank, batch_size // self.micro_batch_size, self._n_data)

    def build(self, make: Callable[[], GPT], device: torch.device) -> GPT:
        """Make a model on the device, or this rank's parts of it; `make` draws from torch's global generator."""
        return self.place(make(), device)

    def place(self, model: GPT, device: torch.device) -> GPT:
        """Move the model, or this rank's parts of it, to the device."""
        compile_blocks(model, self.compile, device, self.varying_widths)
        self.parameters = dict(model.to(device).named_parameters())
        return model

    def all_reduce(self, value: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks, in place, and return it."""
        return value

    def all_reduce_numbers(self, numbers: list[float]) -> list[float]:
        """Return the sum of each number over the data-parallel ranks, in float64."""
        return numbers

    def begin_all_reduce(self, timed: Timed) -> None:
        """Let the next backward pass all-reduce the gradients, if the layout allows it.

        Call this method before the step's last backward pass. `timed` measures waits for other ranks.
        """

    def finish_gradients(self) -> None:
        """Finish the all-reduce of the step's gradients. Call it after the last micro-batch."""

    def gradient_norm(self, prefix: str = "", scalars: Scalars | None = None) -> float:
        """Return the norm of the gradients of all parameters whose names start with `prefix`.

        Args:
            scalars: numbers that the host reads together with the norm; by default, the host reads only the norm.
        """
        scalars = Scalars() if scalars is None else scalars
        named = self.parameters.items()
        norm = nn.utils.get_total_norm([p.grad for n, p in named if p.grad is not None and n.startswith(prefix)])
        scalars["norm"] = norm
        return scalars["norm"]

    def clip_gradients(self, max_norm: float, norm: float) -> None:
        """Scale the gradients, whose norm is `norm`, down to `max_norm` if `norm` is larger."""
        parameters = self.parameters.values()
        device = next(p.grad.device for p in parameters if p.grad is not None)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.full((), norm, device=device))

    def shard_tensors(self, tensors: dict[str, Tensor], holders: Holders = NO_HOLDERS) -> dict[str, Tensor]:
        """Return this rank's shards of whole tensors, by name. A tensor that another rank keeps is on the meta device.

        Names are `parameter` or, for the optimizer's state, `parameter/key`.
        """
        return tensors

    def parts(self, tensors: dict[str, Tensor], holders: Holders = NO_HOLDERS) -> Iterator[tuple[str, TensorPart]]:
        """Yield the parts of tensors that this rank writes to a checkpoint. Together, ranks write each element once.

        `tensors` are this rank's shards, as `shard_tensors` returns them.
        """
        return ((name, TensorPart.whole(tensor)) for name, tensor in tensors.items())

    @contextmanager
    def inference_mode(self, generates: bool = False) -> Iterator[None]:
        """Context in which the model is used but not trained. All ranks must enter it together.

        Args:
            generates: whether the engine generates texts in the context, with a forward pass for each token. If
                `gathers_once`, sharded blocks are then gathered only on entry.
        """
        yield

    def split_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches of an evaluation.

        Raises:
            StopAsked: a rank was asked to stop; all ranks raise it before the same batch.
        """
        for batch in batches:
            if self.stop_asked():
                raise StopAsked
            yield batch


def choose_parallel(recipe: Recipe, ranks: Ranks, device: torch.device, layout: Layout) -> Parallel:
    """Make the `Parallel` of a layout. All ranks must call it together."""
    if ranks.size == 1:
        return Parallel(recipe.train, recipe.objective.varying_widths)
    return ManyDevices(recipe.train, ranks, mesh_of(layout, device), layout, recipe.objective.varying_widths)


def mesh_of(layout: Layout, device: torch.device) -> DeviceMesh:
    """Make the mesh of all ranks, in dimensions data and tensor. All ranks must call it together."""
    return init_device_mesh(device.type, (layout.data_parallel, layout.tensor_parallel), mesh_dim_names=DIMENSIONS)


class ManyDevices(Parallel):
    """This rank's part of a model that is trained on several devices."""

    mesh: DeviceMesh

    def __init__(
        self, train: TrainConfig, ranks: Ranks, mesh: DeviceMesh, layout: Layout, varying_widths: bool = False
    ) -> None:
        super().__init__(train, varying_widths)
        self.ranks, self.mesh, self.layout, self._sharded = ranks, mesh, layout, layout.sharding != "none"
        self._data, self._tensor = mesh["data"], mesh["tensor"]
        self._data_rank, self._n_data = self._data.get_local_rank(), self._data.size()
        self.micro_batch_size = train.rank_micro_batch_size(self._n_data)

    @property
    def samples(self) -> bool:
        """True on the first data-parallel rank, and on all ranks if each forward pass gathers blocks."""
        return self._data_rank == 0 or (self._sharded and not self.gathers_once)

    # ------------------------------------------------------------------------------------------- model

    def build(self, make: Callable[[], GPT], device: torch.device) -> GPT:
        """Make this rank's parts of a model. If ranks divide the model, memory holds these parts and one whole tensor
        at a time; with `init: induction`, it holds more (see deferred.py)."""
        if self.layout.n_parts == 1:
            return self.place(make(), device)
        with Deferred() as deferred:
            model = make()
        deferred.name(model)
        config = model.config
        self._divide(model, device)
        model.to_empty(device=device)
        deferred.fill(dict(model.named_parameters()), config, self.mesh)
        model.reset_tables(device)
        return self._placed(model)

    def place(self, model: GPT, device: torch.device) -> GPT:
        """Shard a model that every rank built from the same seed; return it with this rank's parts."""
        self._divide(model, device)
        return self._placed(model.to(device))

    def _divide(self, model: GPT, device: torch.device) -> None:
        """Shard the model's parameters, block by block.

        Parameters outside the blocks form one FSDP group, the root's, because a tied embedding is also the head.
        """
        if self._tensor.size() > 1:
            for block in model.blocks:
                parallelize_module(block, self._tensor, tensor_plan(model.config), src_data_rank=None)
            heads = ("n_heads", "n_kv_heads")  # a cache has room for this rank's heads only
            here = {name: getattr(model.config, name) // self._tensor.size() for name in heads}
            model.config = model.config.model_copy(update=here)
            # Recomputation that stops early never reads its last all-reduce, whose result then stays in memory.
            model.features = set_checkpoint_early_stop(False)(model.features)  # type: ignore[method-assign]
        compile_blocks(model, self.compile, device, self.varying_widths)  # before FSDP adds hooks to them
        if self._sharded:
            gathered = torch.bfloat16 if self.layout.gathers == "bf16" else None
            policy = MixedPrecisionPolicy(gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
            for block in model.blocks:
                whole = {parameter for name, parameter in block.named_parameters() if is_whole(name, parameter)}
                fully_shard(
                    block, mesh=self._data, mp_policy=policy, ignored_params=whole,
                    reshard_after_forward=self.layout.sharding == "fsdp",
                )  # fmt: skip
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            fully_shard(model, mesh=self._data, mp_policy=policy, reshard_after_forward=False)
            register_fsdp_forward_method(model, "features")  # keeps the root gathered, since the loss needs the head
            for module in _sharded_modules(model):
                module.set_gradient_divide_factor(1.0)  # sum gradients; do not average them
                module.set_force_sum_reduction_for_comms(True)

    def _placed(self, model: GPT) -> GPT:
        """Prepare a sharded model on its device for collectives, and return it."""
        for module in _sharded_modules(model):
            module.unshard()  # allocates buffers now: buffers allocated in inference mode could not be trained
            module.reshard()
        self.model, self.parameters = model, dict(model.named_parameters())
        if self._data.size() > 1:
            trained = [p for p in self.parameters.values() if p.requires_grad and "data" not in divided_over(p)]
            self._sums = GradientSums(reversed(trained), self._data.get_group())
        # count forward passes: each looks up the embedding
        model.token_embedding.register_forward_pre_hook(lambda *_: self.ranks.count_work())
        return model

    @contextmanager
    def inference_mode(self, generates: bool = False) -> Iterator[None]:
        in_bf16 = self._sharded and self.layout.gathers == "bf16"  # products with gathered bf16 matrices need autocast
        sharded = list(_sharded_modules(self.model))
        once = generates and self.gathers_once
        for module in sharded if once else ():
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            with torch.autocast(self.mesh.device_type, dtype=torch.bfloat16, enabled=in_bf16):
                yield
        finally:
            # Else parameters that a forward pass gathered would stay gathered, with averaged or outdated weights.
            for module in sharded:
                module.reshard()
            for block in _sharded_modules(self.model.blocks) if once else ():
                block.set_reshard_after_forward(self.layout.sharding == "fsdp", recurse=False)

    # --------------------------------------------------------------------------------------- gradients

    def all_reduce(self, value: Tensor) -> Tensor:
        distributed.all_reduce(value, group=self._data.get_group())
        return value

    def all_reduce_numbers(self, numbers: list[float]) -> list[float]:
        counts = self._tensor.get_local_rank() == 0  # count once: other tensor ranks saw the same sequences
        return self.ranks.all_reduce([number * counts for number in numbers])

    def begin_all_reduce(self, timed: Timed) -> None:
        if self.layout.sums_in_backward:
            self._sums.begin(timed)

    def finish_gradients(self) -> None:
        self.ranks.count_point()
        if self._tensor.size() > 1:
            self._agree_over_tensor_ranks()
        if self._data.size() > 1:
            self._sums.finish()

    def _agree_over_tensor_ranks(self) -> None:
        """Make gradients of replicated parameters equal on all tensor ranks.

        Gradients of query and key norms are summed, because each rank computes them from its own heads only. Other
        gradients differ only by the order in which some kernels add; all ranks take the first tensor rank's.
        """
        group = self._tensor.get_group()
        for name, gradient in self._local_gradients().items():
            if "tensor" in divided_over(self.parameters[name]):
                continue
            if name.endswith(("query_norm.weight", "key_norm.weight")):
                distributed.all_reduce(gradient, group=group)
            else:
                distributed.broadcast(gradient, group=group, group_src=0)

    def gradient_norm(self, prefix: str = "", scalars: Scalars | None = None) -> float:
        scalars = Scalars() if scalars is None else scalars
        by_copies: dict[int, list[Tensor]] = {}
        for name, gradient in self._local_gradients().items():
            if not name.startswith(prefix):
                continue
            sizes = [sizes_of(self.mesh)[dimension] for dimension in divided_over(self.parameters[name])]
            copies = self.ranks.size // math.prod(sizes)
            by_copies.setdefault(copies, []).append(gradient)
        for copies, there in by_copies.items():
            scalars[f"norm/{copies}"] = nn.utils.get_total_norm(there)
        squares = [scalars[f"norm/{copies}"] ** 2 / copies for copies in by_copies]
        (square,) = self.ranks.all_reduce([sum(squares)])
        return float(square**0.5)

    def clip_gradients(self, max_norm: float, norm: float) -> None:
        for gradient in self._local_gradients().values():
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))

    def _local_gradients(self) -> dict[str, Tensor]:
        return {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    # -------------------------------------------------------------------------------------- checkpoints

    def shard_tensors(self, tensors: dict[str, Tensor], holders: Holders = NO_HOLDERS) -> dict[str, Tensor]:
        return {name: self._shard(name, tensor, holders.get(name)) for name, tensor in tensors.items()}

    def _shard(self, name: str, tensor: Tensor, holder: int | None) -> Tensor:
        if holder is not None:
            return tensor if holder == self.ranks.rank else torch.empty_like(tensor, device="meta")
        parameter = self.parameters.get(name, self.parameters.get(name.rpartition("/")[0]))
        if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
            return tensor
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)

    def parts(self, tensors: dict[str, Tensor], holders: Holders = NO_HOLDERS) -> Iterator[tuple[str, TensorPart]]:
        copies = {name for name, place in places_of(self.mesh).items() if place > 0}
        for name, tensor in tensors.items():
            if name in holders and self.ranks.rank in (0, holders[name]):  # rank 0 names all tensors
                yield name, TensorPart.whole(tensor)
            elif name not in holders and copies <= set(divided_over(tensor)):  # the first of equal copies
                yield name, TensorPart(tuple(tensor.shape), part_of(tensor, self.mesh), local(tensor))

    # --------------------------------------------------------------------------------------- evaluation

    def split_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield every n-th batch on n data-parallel ranks.

        In the last round, a rank without a batch yields the round's last batch with all targets ignored, because all
        ranks must take part in gathering blocks.
        """
        n, index = self._data.size(), self._data.get_local_rank()
        while turn := list(islice(batches, n)):
            if self.ranks.agree_to_stop(self.stop_asked()):
                raise StopAsked
            inputs, targets, *texts = turn[min(index, len(turn) - 1)]
            yield inputs, targets if index < len(turn) else torch.full_like(targets, IGNORED), *texts


def compile_blocks(model: GPT, setting: str, device: torch.device, varying_widths: bool = False) -> None:
    """Make each block compile at its first run, if `compiles_blocks` returns true.

    If batches vary in width, one graph serves all widths: a graph per width would soon exceed torch's limit of 8, after
    which blocks run uncompiled.
    """
    if compiles_blocks(model, setting, device):
        for block in model.blocks:
            block.compile(dynamic=varying_widths)


def compiles_blocks(model: GPT, setting: str, device: torch.device) -> bool:
    """Return whether the blocks are compiled: with `block` always, with `auto` on CUDA if no matrices are packed.

    In compiled blocks, packed matrices might stay unpacked until the backward pass.
    """
    return setting == "block" or (setting == "auto" and device.type == "cuda" and not packed_matrices(model))


def tensor_plan(model: ModelConfig) -> dict[str, ParallelStyle]:
    """Return a block's tensor-parallel plan: projections to heads and inner width are split by columns, and
    projections to the residual stream by rows. Projections of the same input share one copy of the input, so that the
    input's gradient is all-reduced once."""
    gate: dict[str, ParallelStyle] = {"mlp.gate": ColwiseParallel()} if model.gated else {}
    whole = Replicate()
    return gate | {
        "attention": PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


def is_whole(name: str, parameter: Tensor) -> bool:
    """Return whether FSDP leaves a block's parameter replicated, in float32: vectors and routers are small, and are not
    rounded for products."""
    return parameter.ndim < 2 or name == "mlp.router.weight"


def _sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
