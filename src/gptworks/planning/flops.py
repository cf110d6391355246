"""FLOPs of a model's forward and backward pass, and of training with its objective's further passes.

A multiply-add is two operations. Only matrix products are counted. Norms, activations, softmax, rotation and the
embedding lookup are together a few thousandths of the work.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod

from gptworks.config import FreezeConfig, LoRAConfig, ModelConfig, Recipe, computes_again
from gptworks.errors import UserError
from gptworks.model.outline import Outline, Sizes, formed_pairs
from gptworks.planning.params import require_vocab_size, trained, trains
from gptworks.planning.state import teacher_config

BACKWARD_PER_FORWARD = 2
"""The backward pass of a matrix product has two products of the same size (Kaplan et al., 2020, section 2.1)."""

TRAINING_PER_FORWARD = 1 + BACKWARD_PER_FORWARD


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one forward pass over one sequence of `length` tokens, all layers together.

    `attention_dense` and `attention_causal` count the scores and the weighted sums of values. `attention_dense` counts
    all (query, key) pairs that plain products compute, as `torch.utils.flop_counter` does: T × T, or in a layer whose
    window is at most half the text, each block of `window` tokens with itself and the previous one. `attention_causal`
    counts only pairs that the mask allows: the work of a kernel that skips all others.
    """

    length: int
    query_key_value: int
    out: int
    attention_dense: int
    attention_causal: int
    mlp: int
    """FLOPs of the MLP; in a mixture of experts, of each token's chosen experts, the shared expert and the router."""
    head: int
    laboratory: int = 0
    """FLOPs of the gates of attention and of values, and of the projections that are added to values."""
    future: int = 0
    """FLOPs of the heads that predict tokens beyond the next, including each head's product with the unembedding. Only
    training uses these heads, so the totals exclude them."""

    @property
    def projections(self) -> int:
        """FLOPs of the query, key, value and output projections."""
        return self.query_key_value + self.out

    @property
    def total_dense(self) -> int:
        """FLOPs of the whole pass, with `attention_dense` for attention."""
        return self.projections + self.attention_dense + self.mlp + self.head + self.laboratory

    @property
    def total_causal(self) -> int:
        """FLOPs of the whole pass, with `attention_causal` for attention."""
        return self.projections + self.attention_causal + self.mlp + self.head + self.laboratory

    @property
    def per_token_dense(self) -> float:
        return self.total_dense / self.length

    @property
    def per_token_causal(self) -> float:
        return self.total_causal / self.length

    @property
    def training_per_token_dense(self) -> float:
        """FLOPs per token of a forward and a backward pass with dense attention, including the heads in `future`."""
        return TRAINING_PER_FORWARD * (self.per_token_dense + self.future / self.length)


def visible_pairs(length: int, window: int | None) -> int:
    """Return the number of (query, key) pairs that a causal mask allows: Σ min(i, window) for i from 1 to length."""
    band = length if window is None else min(window, length)
    return band * (band + 1) // 2 + (length - band) * band


def forward_flops(config: ModelConfig, length: int | None = None) -> ForwardFlops:
    """Count the FLOPs of one forward pass over `length` tokens (default: the full context), with all logits.

    Raises:
        UserError: the vocabulary size is unknown, or `length` is not between 1 and the context.
    """
    require_vocab_size(config)
    length = config.context_length if length is None else length
    if not 1 <= length <= config.context_length:
        raise UserError(f"length={length} is not between 1 and context_length={config.context_length}")
    products = Products(config, length, config.n_future_tokens - 1, by_expert=False)
    parts = {part: n // products.parts for part, n in products.forward.items()}
    return ForwardFlops(
        length=length,
        query_key_value=parts["query_key_value"],
        out=parts["attention_output"],
        attention_dense=parts["attention_scores"],
        attention_causal=products.causal,
        mlp=parts["mlp"],
        head=parts["head"],
        laboratory=parts.get("laboratory", 0),
        future=parts.get("future_heads", 0),
    )


class Products(Outline):
    """FLOPs of one text's forward and backward pass by part and by module, for a model that may be partly frozen.

    The backward pass of y = x·W has a product of the same size for the gradient of x if x depends on a trained
    parameter, and another product for the gradient of W if W is trained.
    """

    def __init__(
        self,
        config: ModelConfig,
        length: int,
        n_future: int,
        adapter: LoRAConfig | None = None,
        freeze: FreezeConfig | None = None,
        by_expert: bool = True,
    ) -> None:
        """With `by_expert`, each expert is a module of its own. Otherwise, the block's first expert counts for all,
        which saves minutes for 1,000 layers of 4,096 experts. Patterns in `freeze` may name experts, so with patterns
        each expert is a module.
        """
        super().__init__(config, n_future)
        if config.n_experts and not by_expert and (freeze is None or not freeze.patterns):
            self.experts_a_visit = config.n_experts
        self.length, self.lora, self.freeze = length, adapter, freeze
        self.parts = config.n_experts or 1
        """`forward`, `backward` and `modules` hold FLOPs times this number, so an expert's share is an integer."""
        self.forward: defaultdict[str, int] = defaultdict(int)
        self.backward: defaultdict[str, int] = defaultdict(int)
        self.modules: dict[str, tuple[int, int]] = {}
        """(forward, backward) FLOPs by module; `blocks.0.attention` has only the scores and weighted sums."""
        self.causal = 0
        """Forward FLOPs of attention for only the pairs that the causal mask allows."""
        self.walk()

    def tensor(self, group: str, name: str, *shape: int) -> bool:
        return trains(name if self.layer is None else f"blocks.{self.layer}.{name}", self.lora, self.freeze)

    def product(self, part: str, module: str, sizes: Sizes, x: bool, trained: bool, share: int | None = None) -> None:
        n = self._flops(prod(sizes), share)
        self._note(part, module, n, n * x + n * trained)

    def adapter(self, module: str, sizes: Sizes, x: bool, share: int | None) -> bool:
        if self.lora is None or not self.lora.adapts(module):
            return False
        a, b = (self._flops(self.lora.rank * width, share) for width in sizes)
        self._note("adapter", module, a + b, 2 * b + a + a * x)
        return True

    def scores(self, module: str, window: int | None, q: bool, k: bool, v: bool) -> None:
        per_pair = 2 * self.config.n_heads * self.config.d_head  # FLOPs of the scores; the weighted sum has as many
        n = per_pair * formed_pairs(self.length, window) * self.parts
        self._note("attention_scores", module, 2 * n, n * (q + k + (q or k) + v))
        self.causal += 2 * per_pair * visible_pairs(self.length, window)

    def _flops(self, elements: int, share: int | None) -> int:
        return 2 * self.length * elements * (self.parts if share is None else share)

    def _note(self, part: str, module: str, forward: int, backward: int) -> None:
        self.forward[part] += forward
        self.backward[part] += backward
        before = self.modules.get(module, (0, 0))
        self.modules[module] = (before[0] + forward, before[1] + backward)


@dataclass(frozen=True)
class Work:
    """FLOPs per token of a training step, with rows of full length and dense attention."""

    forward: dict[str, float]
    """Forward FLOPs per token by part, such as `mlp` or `teacher`."""
    backward: dict[str, float]
    again_per_token: float
    """FLOPs per token that activation checkpointing recomputes. `per_token` excludes them, as PaLM's MFU does."""
    before_first_step_per_token: float = 0.0
    """FLOPs per token of the pass that scores each sample once before training; 0 if there is no such pass."""

    @property
    def per_token(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def training_work(recipe: Recipe) -> Work:
    """Count the FLOPs per token of training with this recipe.

    Raises:
        UserError: the vocabulary size is unknown, or a teacher's recipe cannot be read.
    """
    length, model = recipe.row_length, recipe.model
    products = training_products(recipe, by_expert=False)
    forward = {part: n / (length * products.parts) for part, n in products.forward.items()}
    backward = {part: n / (length * products.parts) for part, n in products.backward.items()}
    plain = forward_flops(model, length).per_token_dense + forward.get("adapter", 0.0)
    again = _computed_again(recipe, products, trained(model, recipe.adapter, recipe.freeze).n_still)
    if (teacher := teacher_config(recipe)) is not None:
        forward["teacher"] = forward_flops(teacher, length).per_token_dense
    if rollouts := recipe.objective.rollouts:
        answered = min(1.0, rollouts.max_tokens / length)
        prompts = (1 - answered) / rollouts.group_size  # a group's answers share the prefill of the prompt
        forward["sampling"] = plain * (answered + prompts) / rollouts.steps
        forward["sampling_policy"] = plain / rollouts.steps
        if recipe.objective.keeps_start:
            forward["reference"] = (plain - forward.get("adapter", 0.0)) / rollouts.steps
    return Work(
        forward=forward,
        backward={name: backward.get(name, 0.0) for name in forward},
        again_per_token=again / length,
        before_first_step_per_token=plain if recipe.objective.scores_start else 0.0,
    )


def _computed_again(recipe: Recipe, products: Products, n_still: int) -> float:
    """Return the FLOPs that activation checkpointing recomputes for a text. Recomputation of a block stops at the last
    tensor to be saved, so the MLP's last product is not recomputed if no later tensor is saved."""
    model, train = recipe.model, recipe.train
    saves_behind = model.norm_placement != "before" or model.n_experts or model.dropout_residual or recipe.adapter
    whole = saves_behind or train.parallel.tensor_parallel > 1
    once: defaultdict[int, float] = defaultdict(float)
    n_runs = Counter(model.layer_uses)
    for name, (forward, _) in products.modules.items():
        if name.startswith("blocks.") and (whole or not name.endswith(".mlp.down")):
            layer = int(name.split(".")[1])
            once[layer] += forward / (products.parts * n_runs[layer])
    uses = list(enumerate(model.layer_uses))[n_still:]
    return sum(once[layer] for use, layer in uses if computes_again(train.activation_checkpointing, use))


def training_products(recipe: Recipe, by_expert: bool) -> Products:
    """Return the products of a row of full length in training. An adapter's products count with its layer."""
    model, n_future = recipe.model, len(recipe.train.future_weights)
    return Products(model, recipe.row_length, n_future, recipe.adapter, recipe.freeze, by_expert)
