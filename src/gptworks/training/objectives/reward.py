"""GRPO (Shao et al., 2024): raises the probability of answers whose reward exceeds the mean reward of their group.

    prompt ─► our engine generates a group of answers ─► rewards ─► advantages ─► clipped policy gradient

The answers of a round, which `steps_per_rollout` steps use, depend only on the recipe, the round's number, the numbers
of the micro-batches and the weights. Answers that several steps use are stored in the run folder, where a run resumed
between these steps finds them.

Shapes: B answers, G answers per group, T tokens of the longest prompt with its answer.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from gptworks.config import IGNORED, Recipe
from gptworks.config.objective import RewardObjective
from gptworks.data.conversations.examples import last_answer
from gptworks.data.permutation import Int64s, evenly_spaced, shuffled
from gptworks.data.samples import Batch, Prompts, Samples, padded
from gptworks.device import Precision
from gptworks.errors import RunError, UserError
from gptworks.evaluation.loss import LossReport, Workers
from gptworks.files import replacing_by_name
from gptworks.infer.engine import Engine
from gptworks.infer.request import Completion
from gptworks.infer.sampling import SamplingSettings
from gptworks.model.gpt import GPT, eval_mode
from gptworks.model.lora import LowRank, is_adapter
from gptworks.model.loss import target_logprobs
from gptworks.quantize.linear import weight_tensors
from gptworks.tensors import Expected, read_tensors
from gptworks.training.objectives.base import Objective, RunContext, generating
from gptworks.training.objectives.next_token import Losses, LossFunction, StepBatches, with_routing
from gptworks.training.objectives.reward_function import REWARD_FILE, Prompt, keep_reward_file, load_reward, reward_of
from gptworks.training.objectives.rollouts import ROLLOUTS, RolloutStore

REFERENCE_MODEL = "reference-model.safetensors"

EVALUATED_AT_ONCE = 64
"""Maximum number of validation prompts that a rank answers together. Before each such group, the run checks for a
signal to stop."""

_LEAST_DEVIATION = 1e-6


def advantages(rewards: Tensor, group_size: int, scale: bool = True) -> Tensor:
    """Return each reward minus its group's mean, [B]; if `scale`, divided by the group's standard deviation (Shao et
    al., 2024, section 4.1.2). If all rewards of a group are equal, their advantages are 0."""
    groups = rewards.view(-1, group_size)
    above = groups - groups.mean(-1, keepdim=True)
    return (above / (groups.std(-1, keepdim=True) + _LEAST_DEVIATION) if scale else above).flatten()


def policy_loss(
    objective: RewardObjective,
    logprobs: Tensor,
    old: Tensor,
    reference: Tensor | None,
    advantage: Tensor,
    counted: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the answers' losses (Shao et al., 2024, eq. 3 and 4), and the figures to report, as sums.

    Args:
        logprobs, old, reference: each token's log-probability under the current policy, the policy that generated the
            answers, and the starting model, [B, T]. If `reference` is None, there is no KL term.
        advantage: each answer's advantage, [B].
        counted: whether a token belongs to the answer, [B, T].
    """
    n_tokens = counted.sum(-1).clamp(min=1)
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - objective.clip, 1 + objective.clip)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    figures = {"clipped_share": (((ratio != clipped) & counted).sum(-1) / n_tokens).sum()}
    if reference is not None:
        apart = reference - logprobs
        kl = apart.exp() - apart - 1  # an unbiased estimate, never negative (Schulman, 2020)
        gain = gain - objective.beta * kl
        figures["kl"] = (kl.where(counted, 0).sum(-1) / n_tokens).sum()
    return -(gain.where(counted, 0).sum(-1) / n_tokens).sum(), figures


def scaled_logprobs(model: GPT, features: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return log π of each target at a sampling temperature, float32 [B, T]; 0 where the target is −100."""
    # with this softcap, the result equals capping the logits, then dividing them by the temperature
    softcap = model.config.logit_softcap and model.config.logit_softcap / temperature
    return target_logprobs(features / temperature, model.head_weight, targets, softcap)


def trains_adapters_only(model: GPT) -> bool:
    """Return whether training changes only an adapter. The model without the adapter then equals the starting
    model."""
    return all(is_adapter(name) for name, parameter in model.named_parameters() if parameter.requires_grad)


def sampling_gap(logprobs: Tensor, prompt_tokens: Sequence[int], answers: Sequence[Completion]) -> Tensor:
    """Return each answer's mean absolute difference between the engine's and the training step's log-probabilities of
    the generated tokens, in nats, float32 [B].

    The policy gradient assumes that answers are sampled from the policy in training. But the engine adds numbers in
    another order and may round differently; the gap measures the effect.

    Args:
        logprobs: the training step's log-probability of each target at temperature 1, [B, T].
        prompt_tokens: number of tokens in each answer's prompt.
        answers: the engine's answers, with its log-probabilities.
    """
    gaps = torch.zeros(len(answers))
    for row, (n_prompt, answer) in enumerate(zip(prompt_tokens, answers, strict=True)):
        if answer.logprobs:
            theirs = torch.tensor([token.logprob for token in answer.logprobs])
            gaps[row] = (logprobs[row, n_prompt - 1 : n_prompt - 1 + len(theirs)] - theirs).abs().mean()
    return gaps


class Reward(Objective):
    """The objective of GRPO: prompts and generated answers; `batch_size` is a number of answers."""

    settings: RewardObjective
    generates = True
    kept_files = (REFERENCE_MODEL, REWARD_FILE, ROLLOUTS)

    def take_data(self, recipe: Recipe, samples: Samples) -> None:
        super().take_data(recipe, samples)
        assert isinstance(samples, Prompts)
        self._examples = samples.examples
        train, shared = self.train, self.settings.steps_per_rollout
        self._prompts_per_step = train.batch_size // self.settings.group_size
        n_behind = (train.keep_checkpoints + 2) * -(-train.checkpoint_every // shared)  # rounds a rollback may need
        self._store = RolloutStore(self.recipe.run_dir, n_behind)
        self._round: tuple[int, dict[int, Batch]] | None = None  # (number, batches by micro-step)
        self._start: GPT | None = None

    def check(self, recipe: Recipe) -> None:
        name = self.settings.reward
        try:
            reward_of(load_reward(name), name, "", Prompt([], "", ""))
        except RunError as error:
            raise UserError(f"{error} It must take any text, the empty one too.") from None

    @property
    def n_validation(self) -> int:
        return len(self._prompts["validation"])

    # --------------------------------------------------------------------------------------------------- begin

    def begin(self, run: RunContext) -> None:
        self._run, self._function = run, load_reward(self.settings.reward)
        self._end = self._end_token(run.engine)
        self._prompts = {split: self._fitting_prompts(split) for split in self._examples}
        self._numbers = {split: list(prompts) for split, prompts in self._prompts.items()}
        keep_reward_file(self.settings.reward, self.recipe.run_dir, run.is_new, run.ranks.is_rank_zero)
        if self.settings.beta:
            self._start = self._starting_model()

    def _end_token(self, engine: Engine) -> int:
        """Return the id of the token that the chat template writes to end an answer; UserError if there is none."""
        ends = () if engine.chat_template is None else engine.chat_template.end_token_ids
        if not ends:
            raise UserError(
                "the chat template writes no end token after an answer, so the model could not learn to end one: set "
                "tokenizer.chat_template to one that does."
            )
        return ends[0]

    def _fitting_prompts(self, split: str) -> dict[int, Prompt]:
        """Return the prompts of a split that leave room in the context for `max_tokens` more tokens, by number;
        UserError if fewer than half of the prompts do."""
        examples, tokenizer, prompts = self._examples[split], self._run.engine.tokenizer, {}
        n_prompts = len(examples.n_tokens)
        for i in range(n_prompts):
            ids, learned = examples.tokens(i)
            start = last_answer(learned)
            if 0 < start <= self.context_length - self.settings.max_tokens:
                prompt, answer = ids[:start].tolist(), ids[start:][learned[start:]].tolist()
                prompts[i] = Prompt(prompt, tokenizer.decode(prompt), tokenizer.decode(answer))
        if 2 * len(prompts) < n_prompts:
            raise UserError(
                f"{n_prompts - len(prompts):,} of {n_prompts:,} {split} prompts leave no room for "
                f"objective.max_tokens={self.settings.max_tokens} in a context of {self.context_length}: lower "
                f"it, or give shorter prompts."
            )
        if len(prompts) < n_prompts:
            self._run.report(f"{n_prompts - len(prompts):,} {split} prompts are too long for the context and left out")
        return prompts

    def _starting_model(self) -> GPT | None:
        """Return the starting model; None if it equals the current model without its adapter. A new run stores the
        starting weights in the run folder; a resumed run reads them from there."""
        if trains_adapters_only(self._run.model):
            return None
        path = self.recipe.run_dir / REFERENCE_MODEL
        start = copy.deepcopy(self._run.model).requires_grad_(False).eval()
        if self._run.is_new:
            if self._run.ranks.is_rank_zero:
                with replacing_by_name(path) as aside:
                    save_file({name: p.detach().cpu() for name, p in weight_tensors(start).items()}, aside)
            return start
        wanted = {name: Expected.like(tensor) for name, tensor in weight_tensors(start).items()}
        fix = "It holds the weights that the run began with: restore it from a copy, or give another run_dir=."
        start.load_state_dict(read_tensors(path, wanted, inside=path.parent, owner="the reference model", fix=fix))
        return start

    # ------------------------------------------------------------------------------------------------- rollouts

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Return the numbers of the prompts to answer for a micro-batch, int64 [size / G]."""
        number = self._round_of(position)
        n_here = size // self.settings.group_size
        first = number * self._prompts_per_step + micro_step * n_here
        numbers = self._numbers["train"]
        chosen = shuffled(np.arange(first, first + n_here), len(numbers), self.recipe.seed)
        return (torch.tensor([numbers[i] for i in chosen.tolist()]),)

    def _round_of(self, position: int) -> int:
        """Return the number of the round of answers that the step at `position` uses; all steps have one batch size."""
        return position // self.train.batch_size // self.settings.steps_per_rollout

    def count(self, batch: Batch) -> int:
        return batch[0].size(0)

    def generate(self, position: int, asked: StepBatches) -> StepBatches:
        shared, number = self.settings.steps_per_rollout, self._round_of(position)
        if self._round is None or self._round[0] != number:
            prompts = {i: chosen.tolist() for i, (chosen,) in zip(asked.numbers, asked.rows, strict=True)}
            is_first = position // self.train.batch_size % shared == 0
            made = None if is_first else self._store.read(number, prompts)
            if made is None:
                made = {i: self._answered(number, i, chosen) for i, chosen in prompts.items()}
                if shared > 1:
                    self._store.write(number, made, prompts)
            self._round = (number, made)
        device = self._run.model.device
        rows = [tuple(x.to(device, non_blocking=True) for x in self._round[1][i]) for i in asked.numbers]
        return StepBatches(asked.numbers, rows, sum(map(self.count, rows)), sum(batch[0].numel() for batch in rows))

    def _answered(self, number: int, micro_step: int, chosen: list[int]) -> Batch:
        """Generate answers to the `chosen` prompts; return the batch to train on.

        The batch has inputs and targets, int64 [B, T]; rewards, advantages and `sampling_gap`, [B]; log-probabilities
        under the current policy and, with `beta`, the starting model, [B, T]. The policy's log-probabilities are
        computed as in a training step, not taken from the engine, whose kernels round differently. Without dropout, the
        probability ratios are thus exactly 1 in the first step on these answers.
        """
        settings, model = self.settings, self._run.model
        prompts = [self._prompts["train"][i] for i in chosen]
        seeds = np.random.SeedSequence((self.recipe.seed, number, micro_step)).generate_state(len(chosen), np.uint32)
        answers = self._answers(prompts, seeds.tolist(), settings.group_size)
        pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
        rewards = torch.tensor([self._reward(prompt, answer) for prompt, answer in pairs], dtype=torch.float64)
        advantage = advantages(rewards, settings.group_size, settings.scale_by_deviation)
        inputs, targets = padded([self._row(*pair) for pair in pairs], self.context_length)
        old, plain = self._logprobs(model, inputs, targets, also_plain=True)
        gap = sampling_gap(plain, [len(prompt.ids) for prompt, _ in pairs], [answer for _, answer in pairs])
        batch = (inputs, targets, rewards.float(), advantage.float(), gap, old)
        if not settings.beta:
            return batch
        if self._start is not None:
            return (*batch, self._logprobs(self._start, inputs, targets)[0])
        with without_adapter(model):
            return (*batch, self._logprobs(model, inputs, targets)[0])

    def _reward(self, prompt: Prompt, answer: Completion) -> float:
        self._run.ranks.count_work()  # the other ranks must not time out if the user's function is slow
        return reward_of(self._function, self.settings.reward, answer.text, prompt)

    def _answers(self, prompts: list[Prompt], seeds: list[int], n_samples: int) -> list[list[Completion]]:
        """Generate `n_samples` answers to each prompt; an answer ends at the chat template's end token or after
        `max_tokens` tokens."""
        engine, requests = self._run.engine, []
        for prompt, seed in zip(prompts, seeds, strict=True):
            sampling = SamplingSettings(
                temperature=self.settings.temperature,
                max_tokens=self.settings.max_tokens,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=(self._end,),
                logprobs=0,
            )
            requests.append(engine.submit(prompt.ids, sampling, n_samples=n_samples))
        with generating(self._run.precision):
            return engine.finish(requests)

    def _row(self, prompt: Prompt, answer: Completion) -> tuple[Int64s, npt.NDArray[np.bool_]]:
        """Return the tokens of a prompt followed by its answer, and a mask of the answer's tokens."""
        ids = np.array([*prompt.ids, *answer.token_ids, *([self._end] if answer.finish_reason == "stop" else [])])
        return ids, np.arange(len(ids)) >= len(prompt.ids)

    def _logprobs(self, model: GPT, inputs: Tensor, targets: Tensor, also_plain: bool = False) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probabilities without dropout, at the sampling temperature and, if `also_plain`, at
        temperature 1; float32 [B, T] on the CPU. Gradients stay enabled, though unused, to run the kernels of training.
        """
        inputs, targets = inputs.to(model.device), targets.to(model.device)
        with eval_mode(model), self._run.precision.autocast():
            features = model.features(inputs)
            sampled = plain = scaled_logprobs(model, features, targets, self.settings.temperature)
            if also_plain and self.settings.temperature != 1:
                plain = scaled_logprobs(model, features, targets, 1.0)
        return sampled.detach().float().cpu(), plain.detach().float().cpu()

    # ----------------------------------------------------------------------------------------------------- loss

    def loss_without_data(self, model: GPT) -> LossFunction:
        keeps_start = self.settings.beta > 0 and not trains_adapters_only(model)
        tensors = [*model.parameters(), *model.buffers()] if keeps_start else []
        held = [torch.zeros_like(each) for each in tensors]  # takes as much memory as the starting model

        def without_answers(model: GPT, batch: Batch, start: list[Tensor] = held) -> Losses:
            of_answers, of_tokens = (torch.zeros(batch[0].shape[:n], device=model.device) for n in (1, 2))
            scores = (of_answers,) * 3 + (of_tokens,) * (2 if self.settings.beta else 1)
            return self.loss(model, (*batch, *scores))

        return without_answers

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """Return the `policy_loss` of a batch from `_answered`."""
        inputs, targets, rewards, advantage, gap, old, *start = batch
        router_logits: list[Tensor] = []
        counted = targets != IGNORED
        features = model.features(inputs, router_logits=router_logits)
        logprobs = scaled_logprobs(model, features, targets, self.settings.temperature)
        loss, figures = policy_loss(self.settings, logprobs, old, start[0] if start else None, advantage, counted)
        figures |= {"reward": rewards.sum(), "answer_tokens": counted.sum(), "sampling_gap": gap.sum()}
        return with_routing(loss, loss, router_logits, model, len(inputs), self._routing, figures)

    def evaluate(self, model: GPT, workers: Workers, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """Generate one answer to each evaluated validation prompt, always with the same seeds; return the negative mean
        reward as loss, and the mean reward. Ranks divide the prompts."""
        prompts, numbers = self._prompts["validation"], self._numbers["validation"]
        chosen = torch.tensor([numbers[place] for place in evenly_spaced(len(numbers), self.n_evaluated)])
        n_chosen = len(chosen)
        lots = (chosen[first : first + EVALUATED_AT_ONCE] for first in range(0, n_chosen, EVALUATED_AT_ONCE))
        total = 0.0
        for _, lot in workers.split_batches((lot, lot) for lot in lots):
            own = lot[lot != IGNORED].tolist()
            asked = [prompts[i] for i in own]
            answers = self._answers(asked, [self.recipe.seed + i for i in own], 1)
            total += sum(self._reward(prompt, answer) for prompt, (answer,) in zip(asked, answers, strict=True))
        (total,) = workers.all_reduce_numbers([total])
        return LossReport(-total, n_chosen, unit="negative reward"), {"reward": total / n_chosen}


@contextmanager
def without_adapter(model: GPT) -> Iterator[None]:
    """Return a context in which the model computes without its adapter."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank)]
    factors = [module.factor for module in adapters]
    for module in adapters:
        module.factor = 0.0
    try:
        yield
    finally:
        for module, factor in zip(adapters, factors, strict=True):
            module.factor = factor
