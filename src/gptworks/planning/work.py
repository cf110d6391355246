"""FLOPs of training by part, including the additional passes that an objective needs."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from gptworks.config import Recipe, computes_again
from gptworks.planning.flops import Products, forward_flops
from gptworks.planning.objectives import teacher_config
from gptworks.planning.trained import trained


@dataclass(frozen=True)
class Work:
    """FLOPs per token of a training step, with rows of full length and dense attention."""

    forward: dict[str, float]
    """Forward FLOPs per token by part, such as `mlp` or `teacher`."""
    backward: dict[str, float]
    again_per_token: float
    """FLOPs per token that activation checkpointing recomputes. `per_token` excludes them, as PaLM's MFU does."""
    before_first_step_per_token: float = 0.0
    """FLOPs per token of the pass that scores each sample once before training; 0 if the objective needs none."""

    @property
    def per_token(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def training_work(recipe: Recipe) -> Work:
    """Count the FLOPs per token of training with this recipe.

    Raises:
        UserError: the vocabulary size is unknown, or a teacher's recipe cannot be read.
    """
    length, model = recipe.row_length, recipe.model
    products = _products(recipe, by_expert=False)
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
    tensor to be saved, so it leaves out the MLP's last product if no later tensor is saved."""
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


def work_of_modules(recipe: Recipe) -> dict[str, tuple[float, float]]:
    """Return the (forward, backward) FLOPs per token of each module with matrix products, by its name in the model.

    An adapter counts with its layer. `blocks.0.attention` has only the scores and weighted sums.
    """
    products = _products(recipe, by_expert=True)
    n = recipe.row_length * products.parts
    return {name: (forward / n, backward / n) for name, (forward, backward) in products.modules.items()}


def _products(recipe: Recipe, by_expert: bool) -> Products:
    model, n_future = recipe.model, len(recipe.train.future_weights)
    return Products(model, recipe.row_length, n_future, recipe.adapter, recipe.freeze, by_expert)
