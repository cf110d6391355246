"""Peak memory of a training step, by part, computed from the configuration.

The peak is the largest sum on a step's timeline. Weights, optimizer state and tokens are held throughout. The blocks'
saved tensors accumulate in the forward pass; the loss then needs its buffers. In the backward pass each operation needs
buffers, frees its saved tensors and makes gradients. The optimizer comes last. See `gptworks.model.cost`.

The estimates exclude the process itself (Python and torch: about 400 MB on a CPU; the CUDA context on a GPU), memory
inside kernels, and memory that the allocator cannot use between allocations of different sizes.
"""

from collections import Counter
from dataclasses import replace

from gptworks.config import computes_again
from gptworks.config.optimizers import OPTIMIZERS
from gptworks.model.cost import ATTENTION, COPIES, RESIDUAL, LayerCost, Shapes, Stage
from gptworks.model.gpt import GPT
from gptworks.model.loss import loss_chunk_bytes, scoring_bytes
from gptworks.model.rotary import rotary_tables_bytes
from gptworks.model.scores import bias_bytes, is_blocked
from gptworks.planning.host import building_bytes, placed_bytes, starting_bytes
from gptworks.planning.inference import kv_cache_bytes
from gptworks.planning.layout import BUCKET_BYTES, shards_of
from gptworks.planning.serving import step_bytes
from gptworks.planning.setting import ANSWERS_AT_ONCE, UNPACKED_ELSEWHERE, UNPACKED_ON_CPU, Setting, slots_for
from gptworks.planning.state import held_weights_bytes, optimizer_scratch_bytes, owned_state_bytes, state_in_parts_bytes
from gptworks.planning.timeline import (
    AVERAGE,
    CACHE,
    CHECKPOINT,
    COMMUNICATION,
    GRADIENTS,
    LOSS,
    OPTIMIZER,
    OTHER_MODELS,
    STARTING,
    TEMPORARY,
    TOKENS,
    WEIGHTS,
    Peak,
    Timeline,
    as_first,
    as_trained,
)

RECEIVING = 2
"""Number of buffers, as large as a gathered block, that FSDP holds in a forward pass: the buffer that receives a block,
and the buffer of the previous block, which it frees only after this block's gathering has begun."""


def training_peak(setting: Setting) -> Peak:
    """Estimate the peak memory of a device in training steps after the first. If the run saves, include the generation
    of texts and, on a CPU, the start of the run."""
    lengths = (setting.row_length, *setting.shorter_lengths)
    moments = [_Step(setting, length).run() for length in lengths]
    if setting.on_cpu and setting.saves:
        moments += _beginning(setting)
    if setting.n_texts and setting.saves:
        moments.append(generation_peak(setting, gathered=setting.objective.rollouts is not None))
    return max(moments, key=lambda peak: peak.total_bytes)


def generation_peak(setting: Setting, gathered: bool = False) -> Peak:
    """Estimate the peak memory of a device between steps, while an engine generates samples or answers.

    With `gathered`, FSDP gathers all blocks once; otherwise it gathers each block in each step of the engine.
    """
    return _Step(setting, setting.row_length).generating(gathered)


def _beginning(setting: Setting) -> list[Peak]:
    """Return the memory in use on a CPU while each rank builds the model and while it reads starting weights; see
    `gptworks.planning.host`."""
    moments = [Peak("building the model", {WEIGHTS: building_bytes(setting)})]
    if setting.starts_from:
        parts = {WEIGHTS: placed_bytes(setting), STARTING: starting_bytes(setting)}
        moments.append(Peak("starting weights", parts))
    return moments


class _Step(Timeline):
    """Follows the memory in use through one micro-batch and the optimizer's update."""

    def __init__(self, setting: Setting, length: int) -> None:
        super().__init__()
        self.setting, self.layout = setting, setting.layout
        self.model = setting.rank_model
        self.parameters, self.trained = setting.of_rank
        self.shards = shards_of(self.parameters, self.model, self.trained, self.layout.n_shards)
        self.sharded = self.layout.n_shards > 1
        n_rows = setting.micro_batch_size * setting.objective.rows_per_sample * (setting.row_length // length)
        self.shapes = Shapes(
            config=self.model,
            batch_size=n_rows,
            length=length,
            product_bytes=4 if setting.precision == "fp32" else 2,
            on_cpu=setting.on_cpu,
            several_texts=setting.several_texts,
            has_flash=setting.has_flash,
            has_fused=setting.has_fused,
            fuses_groups=setting.fuses_groups,
        )
        self.uses = self.model.layer_uses  # the block that runs at each position of the forward pass
        self.layers = range(self.trained.n_still, len(self.uses))  # positions with a backward pass
        self.element_bytes = 2 if self.layout.gathers == "bf16" else 4  # bytes per element of gathered matrices
        self.gathered_bytes = self.element_bytes * self.shards.block if self.sharded else 0
        # autocast makes no copies of gathered weights in its own dtype
        self.no_copies = self.sharded and self.element_bytes == self.shapes.product_bytes
        self.reducing_bytes = 0  # input of the latest reduce-scatter, which may still be running
        self.bucket_bytes = 0  # gradients collected for the next all-reduce
        self.block_gradients_bytes = 0  # one block's gradients before their reduce-scatter
        self.packed = self.trained.base != "full"
        modules = self.trained.modules or (None,) * self.model.n_layers
        self.kinds = [(self.model.layer_kind(layer), modules[layer]) for layer in range(self.model.n_layers)]
        self.costs = {
            kind: self._layer_cost(layer) for kind, layer in {kind: i for i, kind in enumerate(self.kinds)}.items()
        }
        entry = GPT.entry_cost(self.shapes) if self.trained.embedding else []
        self.entry = [stage for stage in entry if not stage.module or f"{stage.module}.weight" in self.trained.outside]
        self.final_norm, *self.future = GPT.exit_cost(self.shapes, setting.n_future)

    def _layer_cost(self, layer: int) -> LayerCost:
        cost, no_copies = GPT.layer_cost(self.shapes, layer), self.no_copies or self.packed
        stages = [as_trained(stage, self.trained, self.shapes, layer, no_copies) for stage in cost.stages]
        lookups = [stage for stage in cost.lookups if self.trained.moves(stage.module, layer)]
        return replace(cost, stages=stages, lookups=lookups)

    def _cost(self, use: int) -> LayerCost:
        return self.costs[self.kinds[self.uses[use]]]

    def run(self) -> Peak:
        self._start()
        self._forward()
        self._loss()
        self._backward()
        s = self.setting
        n_shares = self.layout.data_parallel if self.sharded else 1
        scratch = optimizer_scratch_bytes(
            self.parameters, s.optimizer, s.optimizer_state, self.trained, s.on_cpu, s.decays_cautiously, n_shares
        )
        if (ownership := OPTIMIZERS[s.optimizer].ownership) is not None and self.layout.n_parts > 1:
            whole = Counter(s.whole[1].matrices)
            scratch = max(scratch, ownership.scratch_bytes(whole, self.layout.world_size))
        self.mark("optimizer", scratch)
        return self.peak

    def generating(self, gathered: bool) -> Peak:
        """Return the memory while an engine generates texts; see `generation_peak`."""
        setting, model = self.setting, self.model
        n_slots, capacity = slots_for(setting.n_texts, setting.text_tokens, setting.on_cpu)
        length = min(capacity, model.context_length)
        self._start()
        self.hold(GRADIENTS, -self.held[GRADIENTS])
        if self.sharded:
            n_kept = model.n_layers if gathered or self.layout.sharding == "zero2" else 1
            self.hold(COMMUNICATION, 4 * self.shards.outside + n_kept * self.gathered_bytes)
        if gathered:  # before there is a cache; the buffer that receives the last block is still there
            self.mark("blocks gathered to generate texts", self.gathered_bytes, COMMUNICATION)
        bytes_each = self.shapes.product_bytes
        self.hold(CACHE, n_slots * kv_cache_bytes(model, length, bytes_each))
        if not setting.on_cpu:
            n_texts, tokens = min(setting.n_texts, ANSWERS_AT_ONCE), min(setting.text_tokens, length)
            self.hold(TEMPORARY, step_bytes(model, n_texts, tokens, bytes_each, bytes_each, setting.has_flash))
        self.mark("texts generated", 0 if gathered else RECEIVING * self.gathered_bytes, COMMUNICATION)
        return self.peak

    def _start(self) -> None:
        weights = self.shards.rank_bytes(held_weights_bytes(self.parameters, self.trained), 4 * self.shards.whole)
        gradients = self.shards.rank_bytes(4 * self.trained.parameters, 4 * self.shards.trained_whole)
        average = gradients if self.setting.averages else 0
        self.hold(WEIGHTS, weights)
        self.hold(OTHER_MODELS, self.setting.other_models_bytes)
        self.hold(OPTIMIZER, self._state_bytes())
        self.hold(AVERAGE, average)
        if self.setting.saves and self.setting.on_cpu:
            self.hold(CHECKPOINT, weights + average + self.held[OPTIMIZER])  # copies for the checkpoint
        self.hold(TOKENS, (3 if self.setting.several_texts else 2) * 8 * self.shapes.n_tokens)
        self.hold(ATTENTION, rotary_tables_bytes(replace(self.shapes, length=self.setting.row_length)))
        if self.setting.accumulates:
            self.hold(GRADIENTS, gradients)

    def _state_bytes(self) -> int:
        """Return the bytes of optimizer state on a rank; on the fullest rank if owners keep the matrices' state."""
        s = self.setting
        in_parts = state_in_parts_bytes(self.parameters, s.optimizer, self.trained, s.optimizer_state)
        owned = owned_state_bytes(s.optimizer, s.whole[1].matrices, self.layout.world_size)
        return self.shards.rank_bytes(in_parts, 8 * self.shards.trained_whole) + owned

    def _block(self, use: int) -> list[Stage]:
        stages = self._cost(use).stages
        if use == self.layers[0] and not self.trained.embedding:
            stages = [as_first(stage, self.trained, self.shapes, self.uses[use]) for stage in stages]
        makes = self.trained.rank or self._computes_again(use)  # makes new copies: autocast caches trained weights only
        if not makes and use != self._first_kept(use):
            return [replace(s, saved={**s.saved, COPIES: 0}) if s.matrices else s for s in stages]
        return stages

    def _reads_apart(self, use: int) -> bool:
        """Return whether a block saves a tensor computed from its input, but not the input itself.

        A block with a skip connection saves its input plus the skipped output. The first block with a backward pass
        saves only its normalized input if nothing before it is trained: torch's RMSNorm on a CPU needs no more.
        """
        layer, first = self.uses[use], use == self.layers[0]
        norm = self.shapes.on_cpu and self.model.norm == "rmsnorm" and self.trained.moves("norm1", layer)
        return self.model.layer_skips(layer) or (first and norm and not self.trained.embedding)

    def _kept_next_to_stream(self, use: int) -> int:
        """Return the bytes kept besides a recomputed block's input. They include an earlier block's output that a skip
        connection adds, unless the earlier block's successor saves that output as its own input."""
        after = self.model.n_layers - use
        reads = self.model.layer_skips(use) and after != use
        skipped = reads and self._reads_apart(after) and not self._computes_again(after)
        return self._cost(use).kept_bytes + skipped * self.shapes.floats(self.model.d_model)

    def _first_kept(self, use: int) -> int | None:
        """Return the first use of this block that is not recomputed, or None. Autocast keeps the matrix copies of this
        use for all uses."""
        layer = self.uses[use]
        return next((u for u in self.layers if self.uses[u] == layer and not self._computes_again(u)), None)

    def _computes_again(self, layer: int) -> bool:
        return computes_again(self.setting.checkpointing, layer)

    def _forward(self) -> None:
        self.hold(ATTENTION, bias_bytes(self.shapes))
        if self.sharded:  # embedding, head and last norm stay gathered until the backward pass ends
            self.mark("embedding, gathered", 2 * 4 * self.shards.outside, COMMUNICATION)
            self.hold(COMMUNICATION, 4 * self.shards.outside)
        for stage in self.entry:
            self.hold_saved(stage)
        kept = self.gathered_bytes if self.layout.sharding == "zero2" else 0
        self.hold(COMMUNICATION, kept * self.trained.n_still)
        for use in range(self.trained.n_still):
            self.mark(f"layer {use + 1}, forward", self._cost(use).passing_bytes)
        for layer in self.layers:
            self.hold(COMMUNICATION, kept)
            if self._computes_again(layer):
                self._hold_copies(layer)  # autocast keeps the copies until it exits, after the loss
                self.hold(RESIDUAL, self.shapes.floats(self.model.d_model))
                self.hold(ATTENTION, self._kept_next_to_stream(layer))
            else:
                for stage in self._block(layer):
                    self.hold_saved(stage)
            arriving = (1 + RECEIVING) * self.gathered_bytes - kept
            self.mark(f"layer {layer + 1}, forward", arriving, COMMUNICATION)
            self._mark_unpacked(layer, f"layer {layer + 1}, forward")
        if not self._keeps_bias:
            self.hold(ATTENTION, -bias_bytes(self.shapes))
        self.hold_saved(self.final_norm)

    def _hold_copies(self, layer: int, sign: int = 1) -> None:
        if self.trained.rank:  # an adapter's base is frozen, and autocast caches copies of trained weights only
            return
        if self._first_kept(layer) is not None or self._runs(layer)[0] != layer:  # another run holds the copies
            return
        copied = (stage.saved.get(COPIES, 0) for stage in self._block(layer) if stage.matrices)
        self.hold(COPIES, sign * sum(copied))

    def _loss(self) -> None:
        """Account for a chunk's logits and the gradients of features and head, as `gptworks.model.loss` makes them."""
        shapes, vocabulary, width = self.shapes, self.model.vocab_size, self.model.d_model
        objective, taught = self.setting.objective, self.setting.objective.teacher_run is not None
        for stage in self.future:
            self.hold_saved(stage)
        n_tokens = 1 + len(self.future)  # number of tokens predicted from each position
        features = n_tokens * shapes.products(width)
        head = vocabulary * width if self.trained.head else 0  # elements of the head's gradient; a frozen head has none
        self.hold(LOSS, features)  # the features' gradient; if targets are scored, first a copy of the features
        copy = shapes.product_bytes * vocabulary * width if shapes.autocast else 0
        several = replace(shapes, batch_size=n_tokens * shapes.batch_size)
        if objective.scores_targets:  # such losses compute gradients in the backward pass, after autocast
            self.mark("loss", scoring_bytes(several, vocabulary) + copy + features, LOSS)
            self._drop_copies()
        chunk = loss_chunk_bytes(several, vocabulary, head, taught)
        also = features  # the features, or a copy of the features at scored positions
        if taught:  # the teacher's features, and its head as a copy in the products' dtype
            theirs = self.setting.teacher_width or width
            also += features + 2 * shapes.products(theirs) + copy * theirs // width
        self.mark("loss", chunk + copy + also, LOSS)
        self.hold(LOSS, 4 * head)
        if objective.scores_targets:  # the gradient at scored positions is copied into a gradient for all
            self.mark("loss, backward", features)
        else:  # the scaled gradients are new tensors
            self._drop_copies()
            self.mark("loss, backward", features + 4 * head)
        self.hold(LOSS, -features)
        self.hold(TEMPORARY, features)
        if not self.model.tie_embeddings:
            self.hold(LOSS, -4 * head)
            self._gain(head)
        for stage in reversed(self.future):
            self._go_back(stage, f"{stage.name}, backward")
        self.hold(TEMPORARY, -features if self.future else 0)  # only the sum of the heads' feature gradients remains

    def _drop_copies(self) -> None:
        """Free the matrix copies of recomputed blocks, as autocast does when it exits."""
        for layer in filter(self._computes_again, self.layers):
            self._hold_copies(layer, -1)

    def _backward(self) -> None:
        self._go_back(self.final_norm, "final norm, backward")
        for layer in reversed(self.layers):
            self._gather(layer)
            apart, stream = self._reads_apart(layer), self.shapes.floats(self.model.d_model)
            if self._computes_again(layer):
                self.hold(RESIDUAL, 0 if apart else -stream)  # the recomputed stages save the block's input
                for stage in self._block(layer):
                    self.hold_saved(stage)
                    self.mark(f"{stage.name} of layer {layer + 1}, computed again", stage.unsaved)
            for stage in reversed(self._block(layer)):
                self._go_back(stage, f"{stage.name} of layer {layer + 1}, backward", layer)
            if self._computes_again(layer):
                self.hold(RESIDUAL, -stream if apart else 0)
                self.hold(ATTENTION, -self._kept_next_to_stream(layer))
            for stage in self._cost(layer).lookups:
                self._go_back(stage, f"{stage.name}, backward")
            if layer == self.layers[-1]:
                self.hold(TEMPORARY, GPT.shared_gradients_bytes(self.shapes, self.trained.embedding))
            if self.sharded:
                self._reduce(self.shards.trained_block, self.gathered_bytes, f"layer {layer + 1}, gradients reduced")
        if self._keeps_bias:
            self.hold(ATTENTION, -bias_bytes(self.shapes))
        tied = self.held[LOSS] if self.entry else 0  # bytes of a tied head's gradient
        self.hold(LOSS, -tied)
        self.hold(TEMPORARY, tied)
        for stage in reversed(self.entry):
            self._go_back(stage, f"{stage.name}, backward")
        self.hold(TEMPORARY, -self.held[TEMPORARY] if self.entry else 0)
        if self.sharded:
            self._reduce(self.shards.trained_outside, 4 * self.shards.outside, "embedding, reduced")
            self._end_reduction()
        self._add_up_over_ranks()

    def _gather(self, layer: int) -> None:
        """Hold the weights that FSDP2 gathers for a block's backward pass, and prefetches for the next block."""
        if self.sharded and self.layout.sharding == "fsdp":
            if layer == self.model.n_layers - 1:  # only this block's weights were not prefetched
                self.hold(COMMUNICATION, self.gathered_bytes)
            self.mark(f"layer {layer + 1}, gathered", self.gathered_bytes, COMMUNICATION)
            self.hold(COMMUNICATION, self.gathered_bytes if layer > 0 else 0)

    def _reduce(self, elements: int, gathered_bytes: int, moment: str) -> None:
        """Account for the end of a group's backward pass: free gathered weights, reduce gradients to float32 shards."""
        self.hold(COMMUNICATION, -gathered_bytes)
        self._end_reduction()
        whole, share = 4 * elements, 4 * elements // self.layout.data_parallel
        self.mark(moment, whole, COMMUNICATION)
        self.hold(GRADIENTS, -self.block_gradients_bytes)
        self.block_gradients_bytes = 0
        copy = whole if self.shapes.on_cpu else 0  # gloo reduces in a copy of its input
        self.mark(moment, whole + copy + share, COMMUNICATION)
        self.hold(GRADIENTS, 0 if self.setting.accumulates else share)
        self.hold(COMMUNICATION, whole)
        self.reducing_bytes = whole

    def _end_reduction(self) -> None:
        self.hold(COMMUNICATION, -self.reducing_bytes)
        self.reducing_bytes = 0

    def _add_up_over_ranks(self) -> None:
        """Account for the all-reduce of unsharded gradients, one bucket at a time."""
        if self.layout.data_parallel > 1:
            there = 4 * (self.shards.trained_whole if self.sharded else self.trained.parameters)
            largest = 0 if self.sharded else 4 * self.shards.largest
            if self.layout.sums_in_backward:
                self.hold(COMMUNICATION, -self.held[COMMUNICATION])
            self.mark("gradients added up over ranks", min(there, BUCKET_BYTES + largest), COMMUNICATION)

    def _runs(self, use: int) -> list[int]:
        """Return the positions in the forward pass at which the block of position `use` runs with a backward pass."""
        return [u for u in self.layers if self.uses[u] == self.uses[use]]

    def _go_back(self, stage: Stage, moment: str, use: int | None = None) -> None:
        """Account for a stage's backward pass; see `Stage`. If a block runs several times, autograd adds up the
        gradients of all its runs before it makes the gradients of the block's weights."""
        product = self.shapes.product_bytes
        # Bytes of the matrices' gradient, or of the unpacked weights if the matrices are packed.
        gradient = product * stage.matrices if self.packed or not self.trained.rank else 0
        momentary = gradient + max(stage.leaves + stage.scratch + 4 * stage.table, self._unpacking_bytes(stage))
        if (stage.module or stage.name) in self.trained.targets:  # an adapter scales the arriving gradient
            dropped = 3 * stage.leaves - stage.arrives if self.trained.dropout else 0  # 3 gradients of the input exist
            momentary = max(momentary, stage.arrives, 2 * stage.leaves, dropped)
        self.mark(moment, momentary)
        self.hold_saved(stage, -1)
        self.hold(TEMPORARY, stage.leaves - stage.arrives)
        if stage.merges:
            self.mark(moment, gradient + stage.leaves)
            self.hold(TEMPORARY, -stage.leaves)
        runs = [use] if use is None else self._runs(use)
        waiting = product * stage.matrices * self._has_gradients(in_block=use is not None)
        if use != runs[0]:
            self.hold(TEMPORARY, waiting if use == runs[-1] else 0)
            return
        if self.shapes.autocast and not self.no_copies and not self.trained.rank:
            self.mark(moment, (product + 4) * stage.matrices)
        self.hold(TEMPORARY, 0 if use == runs[-1] else -waiting)
        self._gain(stage.matrices + stage.table, stage.vectors, in_block=use is not None)

    def _has_gradients(self, in_block: bool) -> bool:
        """Return whether the matrices and vectors in a stage get gradients; `as_trained` has removed frozen ones."""
        return not self.trained.rank if in_block else bool(self.trained.outside)

    @property
    def _keeps_bias(self) -> bool:
        """Whether the attention bias that separates a row's texts is kept for the backward pass."""
        return self.setting.checkpointing != "none" or not is_blocked(self.shapes)

    def _gain(self, matrices: int, vectors: int = 0, in_block: bool = False) -> None:
        """Hold a stage's new gradients, or add them to the gradients of earlier micro-batches.

        Gradients of a block's matrices include the adapters'. Sharded matrices have whole gradients until
        `_reduce`; a block's vectors and router are never sharded.
        """
        added = self.trained.added * matrices // self.parameters.block_matrices if in_block else 0
        if not self._has_gradients(in_block):
            matrices = vectors = 0
        matrices += added
        if self.sharded:
            before_bytes = self.element_bytes * matrices
            self.block_gradients_bytes += before_bytes
            self.hold(GRADIENTS, before_bytes)
            matrices = 0
        self.mark("gradients added up", 4 * (matrices + vectors) if self.setting.accumulates else 0)
        if not self.setting.accumulates:
            self.hold(GRADIENTS, 4 * (matrices + vectors))
        self.bucket_bytes += 4 * (matrices + vectors)
        if self.layout.sums_in_backward and self.bucket_bytes >= BUCKET_BYTES:  # replaces the last bucket
            self.hold(COMMUNICATION, self.bucket_bytes - self.held[COMMUNICATION])
            self.mark("gradients added up over ranks")
            self.bucket_bytes = 0

    def _mark_unpacked(self, use: int, moment: str) -> None:
        product = self.shapes.product_bytes * self.packed
        self.mark(moment, max(product * stage.matrices + self._unpacking_bytes(stage) for stage in self._block(use)))

    def _unpacking_bytes(self, stage: Stage) -> int:
        """Return the bytes for unpacking a stage's matrix, some rows at a time; 0 if the matrix is not packed."""
        at_once = UNPACKED_ON_CPU if self.shapes.on_cpu else UNPACKED_ELSEWHERE
        return (6 if self.shapes.autocast else 5) * min(stage.matrices, at_once) if self.packed else 0
