"""Floating-point operations of training, by part: what is frozen has no gradients, and an objective may ask for more
than a forward and a backward pass.

A product y = x·W has in its backward pass a product of the same size for the gradient of x, where something that is
trained lies before it, and one for the gradient of W, where W is trained.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gptworks.config import Recipe, computes_again
from gptworks.planning.flops import formed_pairs, forward_flops
from gptworks.planning.objectives import teacher_config
from gptworks.planning.trained import trained, trains


@dataclass(frozen=True)
class Work:
    """FLOPs a token of a training step: rows at the full context, attention dense."""

    forward: dict[str, float]
    """By part; a part is an identifier."""
    backward: dict[str, float]
    again_per_token: float
    """Of forward passes that activation checkpointing computes again. No part of the totals: see PaLM's MFU."""
    before_first_step_per_token: float = 0.0
    """Of a forward pass over each of the samples, once."""

    @property
    def per_token(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def training_work(recipe: Recipe) -> Work:
    """What the recipe's training computes.

    Raises:
        UserError: the vocabulary is not known yet, or a teacher's recipe cannot be read.
    """
    length, model = recipe.model.context_length, recipe.model
    walk = _Walk(recipe)
    walk.run()
    forward = {part: n / length for part, n in walk.forward.items()}
    backward = {part: n / length for part, n in walk.backward.items()}
    part = trained(model, recipe.adapter, recipe.freeze)
    n_still = 0 if part is None else part.n_still
    plain = forward_flops(model).per_token_dense + forward.get("adapter", 0.0)
    again = _computed_again(recipe, walk.modules, n_still)
    if (teacher := teacher_config(recipe)) is not None:
        forward["teacher"] = forward_flops(teacher, length).per_token_dense
    if rollouts := recipe.objective.rollouts:
        answered = min(1.0, rollouts.max_tokens / length)
        prompts = (1 - answered) / rollouts.group_size  # read once for all the answers of a group
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


def _computed_again(recipe: Recipe, modules: Mapping[str, tuple[float, float]], n_still: int) -> float:
    """FLOPs of a text's forward passes through blocks that are computed again, up to the last tensor that each saves:
    an MLP's last product is not made where nothing behind it is saved."""
    model, train = recipe.model, recipe.train
    saves_behind = model.norm_placement != "before" or model.n_experts or model.dropout_residual or recipe.adapter
    whole = saves_behind or train.parallel.tensor_parallel > 1
    once: defaultdict[int, float] = defaultdict(float)
    n_runs = Counter(model.layer_uses)
    for name, (forward, _) in modules.items():
        if name.startswith("blocks.") and (whole or not name.endswith(".mlp.down")):
            layer = int(name.split(".")[1])
            once[layer] += forward / n_runs[layer]
    uses = list(enumerate(model.layer_uses))[n_still:]
    return sum(once[layer] for use, layer in uses if computes_again(train.activation_checkpointing, use))


def work_of_modules(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """FLOPs a token, forward and backward, of each module that computes products, an adapter's with those of its layer.

    The modules' names are the model's; `blocks.0.attention` alone is scores and weighted sum.
    """
    walk, length = _Walk(recipe), recipe.model.context_length
    walk.run()
    return {name: (forward / length, backward / length) for name, (forward, backward) in walk.modules.items()}


class _Walk:
    """Through the model in the order of the forward pass, noting what has a gradient."""

    def __init__(self, recipe: Recipe) -> None:
        self.model, self.adapter, self.freeze = recipe.model, recipe.adapter, recipe.freeze
        self.length, self.n_future = recipe.model.context_length, len(recipe.train.future_weights)
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.modules: dict[str, tuple[float, float]] = {}

    def run(self) -> None:
        m = self.model
        moving = self._trains("token_embedding.weight")
        moving |= m.position == "learned" and self._trains("position_embedding.weight")
        moving |= m.smear and any(map(self._trains, ("smear.weight", "smear.scale")))
        bigrams = ("bigram_embedding.table.weight", "bigram_embedding.scale")
        moving |= m.bigram_vocab_size > 0 and any(map(self._trains, bigrams))
        self.embedding_moves, self.first_values_move = moving, False
        for layer in m.layer_uses:
            moving = self._block(f"blocks.{layer}.", moving, layer)
        moving |= self._norm("norm", moving)
        head = "token_embedding.weight" if m.tie_embeddings else "untied_head.weight"
        n = 2 * self.length * m.d_model * m.vocab_size
        heads, square = [f"future_heads.{i}" for i in range(self.n_future)], (m.d_model, m.d_model)
        led = [self._linear("future_heads", name, square, moving, False, self.length) for name in heads]
        back = n * (moving or any(led)) + n * self._trains(head)  # the losses of all tokens have one backward pass
        self._note("head", "head", n, back)
        for name in heads:
            self._note("future_heads", name, n, back)
        for part in ("adapter", "laboratory", "future_heads"):
            if not self.forward[part]:
                del self.forward[part]

    def _note(self, part: str, module: str, forward: int, backward: int) -> None:
        self.forward[part] += forward
        self.backward[part] += backward
        before = self.modules.get(module, (0, 0))
        self.modules[module] = (before[0] + forward, before[1] + backward)

    def _trains(self, name: str) -> bool:
        return trains(name, self.adapter, self.freeze)

    def _norm(self, name: str, moving: bool) -> bool:
        return moving or self._trains(f"{name}.weight") or (self.model.norm_bias and self._trains(f"{name}.bias"))

    def _linear(
        self, part: str, module: str, sizes: tuple[int, int], moving: bool, biased: bool, n_tokens: float
    ) -> bool:
        """A product of inputs × outputs; whether its result has a gradient."""
        n_in, n_out = sizes
        n = round(2 * n_tokens * n_in * n_out)
        weight, bias = self._trains(f"{module}.weight"), biased and self._trains(f"{module}.bias")
        self._note(part, module, n, n * moving + n * weight)
        adapted = self.adapter is not None and self.adapter.adapts(module)
        if self.adapter is not None and adapted:
            a, b = (round(2 * n_tokens * self.adapter.rank * width) for width in (n_in, n_out))
            self._note("adapter", module, a + b, 2 * b + a + a * moving)
        return moving or weight or bias or adapted

    def _block(self, prefix: str, moving: bool, layer: int) -> bool:
        m, n_tokens, window = self.model, self.length, self.model.layer_window(layer)
        queries, keys = m.n_heads * m.d_head, m.n_kv_heads * m.d_head
        before, (behind1, behind2) = m.norm_placement != "after", m.norms_behind or ("", "")
        moving |= m.layer_skips(layer) and self._trains(f"{prefix}skip.weight")
        moving |= m.residual_scalars and self._trains(f"{prefix}scalars.weight")
        normed = self._norm(f"{prefix}norm1", moving) if before else moving
        q, k, v = (
            self._linear(
                "query_key_value", f"{prefix}attention.{name}", (m.d_model, width), normed, m.qkv_bias, n_tokens
            )
            for name, width in (("query", queries), ("key", keys), ("value", keys))
        )
        v = self._values(prefix, layer, normed, v)
        if m.qk_norm:
            q = q or self._trains(f"{prefix}attention.query_norm.weight")
            k = k or self._trains(f"{prefix}attention.key_norm.weight")
        scores = 2 * queries * formed_pairs(self.length, window)  # and as much again for the weighted sum
        self._note("attention_scores", f"{prefix}attention", 2 * scores, scores * (q + k + (q or k) + v))
        given = q or k or v
        if m.attention_gate:
            given |= self._gate(f"{prefix}attention.gating", m.n_heads, normed)
        out = self._linear(
            "attention_output", f"{prefix}attention.out", (queries, m.d_model), given, m.out_bias, n_tokens
        )
        out = self._norm(f"{prefix}{behind1}", out) if behind1 else out
        entry = moving if m.parallel_residual else moving or out
        inner = self._mlp(prefix, self._norm(f"{prefix}norm2", entry) if before else entry)
        return moving or out or (self._norm(f"{prefix}{behind2}", inner) if behind2 else inner)

    def _values(self, prefix: str, layer: int, normed: bool, own: bool) -> bool:
        """Whether a layer's values have a gradient, given whether its own have: `gptworks.model.lab.stream.Values`."""
        m, kind, moving = self.model, self.model.layer_value_embedding(layer), own
        if m.value_residual:
            if not layer:
                self.first_values_move = own
            else:
                moving |= self.first_values_move or self._trains(f"{prefix}values.scalars.weight")
        if kind == "none":
            return moving
        if kind == "table":
            moving |= self._trains(f"value_embeddings.{layer}.weight")
        else:
            sizes = m.d_model, m.n_kv_heads * m.d_head
            name = f"{prefix}values.projection"
            moving |= self._linear("laboratory", name, sizes, self.embedding_moves, False, self.length)
        return moving | self._gate(f"{prefix}values.gating", m.n_kv_heads, normed)

    def _gate(self, module: str, n_gates: int, normed: bool) -> bool:
        return self._linear("laboratory", module, (self.model.d_gate, n_gates), normed, False, self.length)

    def _mlp(self, prefix: str, normed: bool) -> bool:
        m = self.model
        if not m.n_experts:
            return self._one_mlp(f"{prefix}mlp", m.d_ff, normed, self.length)
        routed = self._linear("mlp", f"{prefix}mlp.router", (m.d_model, m.n_experts), normed, False, self.length)
        share = self.length * m.n_experts_per_token / m.n_experts
        given = [self._one_mlp(f"{prefix}mlp.experts.{e}", m.d_ff, normed, share) for e in range(m.n_experts)]
        shared = m.d_ff_shared > 0 and self._one_mlp(f"{prefix}mlp.shared", m.d_ff_shared, normed, self.length)
        return routed or any(given) or shared

    def _one_mlp(self, module: str, inner: int, normed: bool, n_tokens: float) -> bool:
        m = self.model
        names = ("gate", "up") if m.gated else ("up",)
        wide = [
            self._linear("mlp", f"{module}.{name}", (m.d_model, inner), normed, m.mlp_bias, n_tokens) for name in names
        ]
        return self._linear("mlp", f"{module}.down", (inner, m.d_model), any(wide), m.mlp_bias, n_tokens)
