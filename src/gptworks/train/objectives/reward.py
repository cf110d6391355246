"""GRPO (Shao et al., 2024): answers that a function rewards above the others of their group become likelier.

    prompt ─► a group of answers, by our engine ─► rewards ─► advantages ─► clipped policy gradient

A step's answers are a function of (seed, batch number, weights). Where several steps use the same answers, these are
kept in the run folder too, so that a run that is resumed between them goes on with the same.

Shapes: B answers, G of a group, T tokens of the longest prompt with its answer.
"""

import contextlib
import copy
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from gptworks.config import IGNORED, Recipe, RewardObjective
from gptworks.data.batches import shuffled
from gptworks.data.conversations.packing import Examples
from gptworks.device import Precision
from gptworks.errors import RunError, UserError
from gptworks.evaluate.loss import LossReport, Shares
from gptworks.files import replacing
from gptworks.infer.client import completions
from gptworks.infer.engine import Engine
from gptworks.infer.request import Completion
from gptworks.infer.sampling import SamplingSettings
from gptworks.model import GPT
from gptworks.model.backend import eval_mode
from gptworks.model.lora import LoRALinear
from gptworks.model.loss import target_logprobs
from gptworks.tensors import Expected, read_tensors
from gptworks.train.generating import generating
from gptworks.train.objectives.base import Task
from gptworks.train.objectives.next_token import Batch, Losses, with_routing

RewardFunction = Callable[..., float]
"""Called as function(completion, prompt=..., answer=...), all text; answer is that of the conversation's own."""

REFERENCE_MODEL = "reference-model.safetensors"
ROLLOUTS = "rollouts"

EVALUATED_AT_ONCE = 64
"""Held-out prompts that are answered together: between two such lots a run hears that it is to stop."""

_ROUND_TOKENS = 32
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Prompt:
    """What is answered."""

    ids: list[int]
    text: str
    answer: str
    """The answer that the conversation has."""


# -------------------------------------------------------------------------------------------------- the function


def check_reward(recipe: Recipe) -> None:
    """Refuse a reward that cannot be called, before any work is done.

    Raises:
        UserError: its file or function is not there, or fails, or gives no number.
    """
    if isinstance(recipe.objective, RewardObjective):
        function = load_reward(recipe.objective.reward)
        try:
            reward_of(function, recipe.objective.reward, "", Prompt([], "", ""))
        except RunError as error:
            raise UserError(f"{error} It must take any text, the empty one too.") from None


def load_reward(name: str) -> RewardFunction:
    """The function that `path/to/file.py:function` names. The file is run.

    Raises:
        UserError: it is not there, or does not run.
    """
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"objective.reward={name}: there is no file {path}.")
    spec = importlib.util.spec_from_file_location("gptworks_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        raise UserError(f"objective.reward={name}: {path} fails when it is read: {_said(error)}.") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"objective.reward={name}: {path} has no function {function}.")
    reward: RewardFunction = found
    return reward


def reward_of(function: RewardFunction, name: str, completion: str, prompt: Prompt) -> float:
    """The reward of an answer.

    Raises:
        RunError: the function fails, or gives no finite number.
    """
    try:
        reward = function(completion, prompt=prompt.text, answer=prompt.answer)
    except Exception as error:  # the user's own code
        raise RunError(f"objective.reward={name} fails on {completion[:60]!r}: {_said(error)}.") from error
    if isinstance(reward, bool | int | float | np.number) and math.isfinite(reward):
        return float(reward)
    raise RunError(f"objective.reward={name} gives {reward!r} for {completion[:60]!r}: it must give a finite number.")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -------------------------------------------------------------------------------------------------- the objective


def advantages(rewards: Tensor, group_size: int, scale: bool = True) -> Tensor:
    """How far each reward is above its group's mean, [B], in standard deviations of the group (Shao et al., 2024,
    section 4.1.2), or unscaled. 0 where all of a group are equal."""
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
    """The sum over answers of what is minimized (Shao et al., 2024, eq. 3 and 4), and sums that are reported.

    Args:
        logprobs, old, reference: of each token, under the policy, the one that sampled, and the start, [B, T].
        advantage: [B].
        counted: true where a token is the answer's, [B, T].
    """
    n_tokens = counted.sum(-1).clamp(min=1)
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - objective.clip, 1 + objective.clip)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    figures = {"clipped_share": (((ratio != clipped) & counted).sum(-1) / n_tokens).sum()}
    if reference is not None:
        apart = reference - logprobs
        kl = apart.exp() - apart - 1  # unbiased and never negative (Schulman, 2020)
        gain = gain - objective.beta * kl
        figures["kl"] = (kl.where(counted, 0).sum(-1) / n_tokens).sum()
    return -(gain.where(counted, 0).sum(-1) / n_tokens).sum(), figures


def sampling_gap(logprobs: Tensor, prompt_tokens: Sequence[int], answers: Sequence[Completion]) -> Tensor:
    """How far the engine's log-probabilities lie from the training step's: of each answer, the mean |difference| over
    the tokens it generated, in nats; float32 [B].

    The policy gradient takes answers for samples of the policy that is trained. This is how far they are from that: the
    engine adds in another order, or rounds otherwise.

    Args:
        logprobs: of each target at temperature 1, as training computes them, [B, T].
        prompt_tokens: the length of each answer's prompt.
        answers: as the engine gave them, with log-probabilities.
    """
    gaps = torch.zeros(len(answers))
    for row, (n_prompt, answer) in enumerate(zip(prompt_tokens, answers, strict=True)):
        if answer.logprobs:
            theirs = torch.tensor([token.logprob for token in answer.logprobs])
            gaps[row] = (logprobs[row, n_prompt - 1 : n_prompt - 1 + len(theirs)] - theirs).abs().mean()
    return gaps


class Reward(Task):
    """Prompts, and answers that the model makes itself; a step's batch_size counts answers."""

    objective: RewardObjective
    rolls_out = True

    def _open(self) -> None:
        assert isinstance(self.recipe.objective, RewardObjective)
        self.objective = self.recipe.objective
        self._examples = {"train": Examples(self.train_shards, self.context_length, False),
                          "validation": Examples(self.validation_shards, self.context_length, False)}  # fmt: skip
        self._prompts_per_step = self.recipe.train.batch_size // self.objective.group_size
        self._held: tuple[int, dict[int, Batch]] | None = None  # answers of a round, by micro-step
        self._reference: GPT | None = None

    @property
    def samples_per_epoch(self) -> int:
        """Answers to all prompts, each taken in as many steps as a rollout has."""
        n_prompts = len(self._examples["train"].n_tokens)
        return n_prompts * self.objective.group_size * self.objective.steps_per_rollout

    @property
    def n_validation(self) -> int:
        return len(self._fits["validation"])

    # --------------------------------------------------------------------------------------------------- begin

    def begin(
        self,
        model: GPT,
        engine: Engine,
        precision: Precision,
        fresh: bool,
        writes: bool,
        report: Callable[[str], None],
        shares: Shares,
    ) -> None:
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise UserError(
                "objective.type=reward on sharded weights: each device answers prompts of its own. Use "
                "train.parallel.strategy=ddp and tensor_parallel=1."
            )
        self._function = load_reward(self.objective.reward)
        self._model, self._engine, self._precision, self._shares = model, engine, precision, shares
        self._end = self._end_token(engine)
        self._prompts = {split: self._read_prompts(split, report) for split in self._examples}
        self._fits = {
            split: [i for i, prompt in enumerate(prompts) if self._room(prompt) > 0]
            for split, prompts in self._prompts.items()
        }
        for split, fitting in self._fits.items():
            n_prompts = len(self._prompts[split])
            if 2 * len(fitting) < n_prompts:
                raise UserError(
                    f"{n_prompts - len(fitting):,} of {n_prompts:,} {split} prompts leave no room for "
                    f"objective.max_tokens={self.objective.max_tokens} in a context of {self.context_length}: lower "
                    f"it, or give shorter prompts."
                )
            if len(fitting) < n_prompts:
                report(f"{n_prompts - len(fitting):,} {split} prompts are too long for the context and left out")
        self._keep_function(fresh, writes)
        if self.objective.beta:
            self._reference = self._start(fresh, writes)

    def _end_token(self, engine: Engine) -> int:
        """What ends an answer: the first token that the chat template writes for it."""
        ends = () if engine.chat_template is None else engine.chat_template.end_token_ids()
        if not ends:
            raise UserError(
                "the chat template writes no end token after an answer, so the model could not learn to end one: set "
                "tokenizer.chat_template to one that does."
            )
        return ends[0]

    def _read_prompts(self, split: str, report: Callable[[str], None]) -> list[Prompt]:
        examples, tokenizer, prompts = self._examples[split], self._engine.tokenizer, []
        for i in range(len(examples.n_tokens)):
            ids, learned = examples.tokens(i)
            answered = np.flatnonzero(learned)
            gaps = np.flatnonzero(np.diff(answered) > 1)
            start = int(answered[gaps[-1] + 1 if len(gaps) else 0]) if len(answered) else len(ids)
            prompt, answer = ids[:start].tolist(), ids[start:][learned[start:]].tolist()
            prompts.append(Prompt(prompt, tokenizer.decode(prompt), tokenizer.decode(answer)))
        return prompts

    def _room(self, prompt: Prompt) -> int:
        """Whether an answer of full length fits: above 0."""
        return self.context_length + 1 - len(prompt.ids) - self.objective.max_tokens if prompt.ids else 0

    def _keep_function(self, fresh: bool, writes: bool) -> None:
        """A copy of the function's file in the run folder, to which a resumed run must be true.

        Raises:
            UserError: it has changed since the run began.
        """
        now = Path(self.objective.reward.rpartition(":")[0]).read_bytes()
        kept = self.recipe.run_dir / "reward.py"
        if fresh and writes:
            kept.write_bytes(now)
        elif not fresh and kept.exists() and kept.read_bytes() != now:
            raise UserError(
                f"objective.reward={self.objective.reward} has changed since the run began: put {kept} in its place, "
                f"or start anew with another run_dir=."
            )

    def _start(self, fresh: bool, writes: bool) -> GPT | None:
        """The model as it was when the run began; None where that is the model without its adapter."""
        adapter = self.recipe.adapter
        if adapter is not None and not adapter.embeddings:
            return None
        path = self.recipe.run_dir / REFERENCE_MODEL
        reference = copy.deepcopy(self._model).requires_grad_(False).eval()
        if fresh:
            if writes:
                save_file({name: p.detach().cpu() for name, p in reference.named_parameters()}, path)
            return reference
        wanted = {name: Expected.like(parameter) for name, parameter in reference.named_parameters()}
        fix = (
            "It holds the weights that the run began with: restore it from a copy, or start anew with another run_dir=."
        )
        reference.load_state_dict(read_tensors(path, wanted, owner="the reference model", fix=fix))
        return reference

    # ------------------------------------------------------------------------------------------------- rollouts

    def _step(self, position: int) -> int:
        """The number of the step at a position: a run of this kind has steps of one size."""
        return position // self.recipe.train.batch_size

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Which prompts a micro-batch answers, int64 [size / G]."""
        step = self._step(position)
        n_here = size // self.objective.group_size
        first = step // self.objective.steps_per_rollout * self._prompts_per_step + micro_step * n_here
        chosen = shuffled(np.arange(first, first + n_here), len(self._fits["train"]), self.recipe.seed)
        return (torch.tensor([self._fits["train"][i] for i in chosen.tolist()]),)

    def count(self, batch: Batch) -> int:
        return batch[0].size(0)

    def roll_out(self, position: int, micro_steps: Sequence[int], batches: list[Batch]) -> tuple[list[Batch], int, int]:
        step = self._step(position)
        shared = self.objective.steps_per_rollout
        number = step // shared
        if self._held is None or self._held[0] != number:
            prompts = {i: chosen.tolist() for i, (chosen,) in zip(micro_steps, batches, strict=True)}
            kept = self._read_rollouts(number, prompts) if step % shared else None
            made = kept or {i: self._answers(number, i, chosen) for i, chosen in prompts.items()}
            if shared > 1 and kept is None:
                self._write_rollouts(number, made, prompts)
            self._held = (number, made)
        device = self._model.device
        there = [tuple(x.to(device) for x in self._held[1][i]) for i in micro_steps]
        return there, sum(map(self.count, there)), sum(batch[0].numel() for batch in there)

    def _answers(self, number: int, micro_step: int, chosen: list[int]) -> Batch:
        """Inputs and targets, int64 [B, T]; rewards, advantages and `sampling_gap`, [B]; log-probabilities under the
        policy that answered, and under the start where that is asked for, [B, T].

        The policy's are computed as a training step computes them, not taken from the engine: the first step on these
        answers has ratios of 1 exactly, whatever the engine's kernels round."""
        prompts = [self._prompts["train"][i] for i in chosen]
        seeds = np.random.SeedSequence((self.recipe.seed, number, micro_step)).generate_state(len(chosen), np.uint32)
        answers = self._generate(prompts, seeds.tolist(), self.objective.group_size)
        pairs = [(prompt, answer) for prompt, group in zip(prompts, answers, strict=True) for answer in group]
        rewards = torch.tensor([self._reward(prompt, answer) for prompt, answer in pairs], dtype=torch.float64)
        advantage = advantages(rewards, self.objective.group_size, self.objective.scale_by_deviation)
        inputs, targets = self._rows(pairs)
        old, plain = self._logprobs(self._model, inputs, targets, also_plain=True)
        gap = sampling_gap(plain, [len(prompt.ids) for prompt, _ in pairs], [answer for _, answer in pairs])
        batch = (inputs, targets, rewards.float(), advantage.float(), gap, old)
        if not self.objective.beta:
            return batch
        if self._reference is not None:
            return (*batch, self._logprobs(self._reference, inputs, targets)[0])
        with without_adapter(self._model):
            return (*batch, self._logprobs(self._model, inputs, targets)[0])

    def _reward(self, prompt: Prompt, answer: Completion) -> float:
        self._shares.moved()  # the function is the user's, and may take long
        return reward_of(self._function, self.objective.reward, answer.text, prompt)

    def _generate(self, prompts: list[Prompt], seeds: list[int], n_samples: int) -> list[list[Completion]]:
        """Answers to each prompt. An answer ends with the one end token that the model is to learn."""
        requests = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            settings = SamplingSettings(
                temperature=self.objective.temperature,
                max_tokens=self.objective.max_tokens,
                seed=seed,
                ignore_eos=True,
                stop_token_ids=(self._end,),
                logprobs=0,
            )
            requests.append(self._engine.submit(prompt.ids, settings, n_samples=n_samples))
        with generating(self._precision):
            while self._engine.step():
                pass
        for request in requests:
            if request.error is not None:
                raise request.error
        return [completions(request.take(), n_samples, len(request.prompt_ids)) for request in requests]

    def _rows(self, pairs: list[tuple[Prompt, Completion]]) -> tuple[Tensor, Tensor]:
        rows = []
        for prompt, answer in pairs:
            end = [self._end] if answer.finish_reason == "stop" else []
            rows.append((prompt.ids, [*answer.token_ids, *end]))
        longest = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
        width = min(self.context_length, -(-longest // _ROUND_TOKENS) * _ROUND_TOKENS)
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        for row, (start, made) in enumerate(rows):
            ids = torch.tensor([*start, *made])
            inputs[row, : len(ids) - 1] = ids[:-1]
            targets[row, len(start) - 1 : len(ids) - 1] = ids[len(start) :]
        return inputs, targets

    def _logprobs(self, model: GPT, inputs: Tensor, targets: Tensor, also_plain: bool = False) -> tuple[Tensor, Tensor]:
        """Of each target at the sampling temperature, and at temperature 1 where asked for; float32 [B, T] on the CPU.

        Without dropout; with gradients, though nobody wants them: so the kernels are those of training.
        """
        inputs, targets = inputs.to(model.device), targets.to(model.device)
        with eval_mode(model), self._precision.autocast():
            features = model.features(inputs)
            sampled = plain = self._of_features(model, features, targets, self.objective.temperature)
            if also_plain and self.objective.temperature != 1:
                plain = self._of_features(model, features, targets, 1.0)
        return sampled.detach().float().cpu(), plain.detach().float().cpu()

    @staticmethod
    def _of_features(model: GPT, features: Tensor, targets: Tensor, temperature: float) -> Tensor:
        return target_logprobs(features / temperature, model.head_weight, targets)

    def _write_rollouts(self, number: int, made: dict[int, Batch], prompts: dict[int, list[int]]) -> None:
        folder = self.recipe.run_dir / ROLLOUTS
        folder.mkdir(exist_ok=True)
        for micro_step, batch in made.items():
            path = folder / f"round-{number:06d}-{micro_step}.safetensors"
            named = {str(i): x.contiguous() for i, x in enumerate(batch)}
            with replacing(path) as aside:
                aside.write_bytes(save(named | {"prompts": torch.tensor(prompts[micro_step])}))
            for old in folder.glob(f"round-*-{micro_step}.safetensors"):
                if old.name < f"round-{max(0, number - self._rounds_kept):06d}":
                    old.unlink()

    @property
    def _rounds_kept(self) -> int:
        """Rounds that a checkpoint to which a run may go back can lie behind."""
        train = self.recipe.train
        return (train.keep_checkpoints + 2) * -(-train.checkpoint_every // self.objective.steps_per_rollout)

    def _read_rollouts(self, number: int, prompts: dict[int, list[int]]) -> dict[int, Batch] | None:
        """The answers to each micro-step's prompts that other steps of the round have used before; None where they are
        not there, or answer other prompts."""
        made = {}
        for micro_step, chosen in prompts.items():
            path = self.recipe.run_dir / ROLLOUTS / f"round-{number:06d}-{micro_step}.safetensors"
            with contextlib.suppress(UserError, KeyError):
                tensors = read_tensors(path, None)
                if tensors.pop("prompts").tolist() == chosen:
                    made[micro_step] = tuple(tensors[str(i)] for i in range(len(tensors)))
        return made if len(made) == len(prompts) else None

    # ----------------------------------------------------------------------------------------------------- loss

    def loss(self, model: GPT, batch: Batch) -> Losses:
        inputs, targets, rewards, advantage, gap, old, *reference = batch
        router_logits: list[Tensor] = []
        counted = targets != IGNORED
        features = model.features(inputs, router_logits=router_logits)
        logprobs = self._of_features(model, features, targets, self.objective.temperature)
        start = reference[0] if reference else None
        loss, figures = policy_loss(self.objective, logprobs, old, start, advantage, counted)
        figures |= {"reward": rewards.sum(), "answer_tokens": counted.sum(), "sampling_gap": gap.sum()}
        return with_routing(loss, loss, router_logits, model, self.count(batch), **self._routing, figures=figures)

    def evaluate(self, model: GPT, shares: Shares, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The mean reward of one answer to each held-out prompt, sampled with the same seeds each time; the loss is its
        negative. Each process answers its share of them."""
        fitting = self._fits["validation"]
        n_chosen = self.n_evaluated or len(fitting)
        chosen = torch.tensor([fitting[place * len(fitting) // n_chosen] for place in range(n_chosen)])
        lots = (chosen[first : first + EVALUATED_AT_ONCE] for first in range(0, n_chosen, EVALUATED_AT_ONCE))
        total = 0.0
        for _, mine in shares.share((lot, lot) for lot in lots):
            numbers = mine[mine != IGNORED].tolist()
            prompts = [self._prompts["validation"][i] for i in numbers]
            answers = self._generate(prompts, [self.recipe.seed + i for i in numbers], 1)
            total += sum(self._reward(prompt, answer) for prompt, (answer,) in zip(prompts, answers, strict=True))
        (total,) = shares.add_up([total])
        return LossReport(-total, n_chosen, unit="negative reward"), {"reward": total / n_chosen}


@contextmanager
def without_adapter(model: GPT) -> Iterator[None]:
    """Inside, the model is what it was before its adapter."""
    adapters = [module for module in model.modules() if isinstance(module, LoRALinear)]
    scales = [module.scale for module in adapters]
    for module in adapters:
        module.scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapters, scales, strict=True):
            module.scale = scale
