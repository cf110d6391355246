"""GRPO: the objective against an independent one, rollouts that repeat, and a reward that rises."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from gptworks.config.objective import RewardObjective
from gptworks.errors import RunError, UserError
from gptworks.infer.engine import load
from gptworks.infer.logprobs import TokenLogprob
from gptworks.infer.request import Completion
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.objectives.reward import advantages, policy_loss, sampling_gap
from gptworks.training.objectives.reward_function import Prompt, reward_of
from gptworks.training.record.metrics import read_metrics
from gptworks.training.setup import check_train
from halves import assert_resumes_exactly


def test_advantages_are_those_of_the_paper() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 2.0, 2.0, 2.0], dtype=torch.float64)
    got = advantages(rewards, 4).numpy()
    first = np.array([1.0, 0.0, 0.0, 3.0])
    assert got[:4] == pytest.approx((first - first.mean()) / first.std(ddof=1), abs=1e-5)
    assert (got[4:] == 0).all(), "a group in which all are equal says nothing"
    assert advantages(rewards, 4, scale=False).numpy()[:4] == pytest.approx(first - first.mean())


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_objective_is_that_of_the_paper(beta: float) -> None:
    """Shao et al., 2024, eq. 3 and 4, token by token in float64; and its gradient by finite differences."""
    objective = RewardObjective(type="reward", reward="r.py:f", beta=beta, clip=0.2)
    generator = torch.Generator().manual_seed(0)
    logprobs, old, start = (torch.randn(3, 5, generator=generator, dtype=torch.float64) * 0.3 - 1 for _ in range(3))
    counted = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    advantage = torch.tensor([1.5, -0.7, 0.2], dtype=torch.float64)

    def by_hand(values: np.ndarray) -> float:
        total = 0.0
        for row in range(3):
            terms = []
            for t in counted[row].nonzero().flatten().tolist():
                ratio = math.exp(values[row, t] - float(old[row, t]))
                a = float(advantage[row])
                gain = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
                r = math.exp(float(start[row, t]) - values[row, t])
                terms.append(gain - beta * (r - math.log(r) - 1))
            total -= sum(terms) / len(terms)
        return total

    logprobs.requires_grad_()
    loss, figures = policy_loss(objective, logprobs, old, start if beta else None, advantage, counted)
    values = logprobs.detach().numpy().copy()
    assert loss.item() == pytest.approx(by_hand(values), abs=1e-10)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    for place in ((0, 1), (0, 3), (1, 2), (2, 0), (2, 4)):
        step = np.zeros_like(values)
        step[place] = 1e-6
        slope = (by_hand(values + step) - by_hand(values - step)) / 2e-6
        assert gradient[place].item() == pytest.approx(slope, abs=1e-7)
    assert 0 < figures["clipped_share"].item() < 3


# ---------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model of digits and letters, prompts, and rewards."""
    folder = tmp_path_factory.mktemp("reward")
    (folder / "rewards.py").write_text(
        "def digits(completion, prompt, answer):\n"
        "    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n\n"
        "def broken(completion, prompt, answer):\n    return 1 / len(completion)\n\n"
        "def words(completion, prompt, answer):\n    return 'good'\n\n"
        "def later(completion, prompt, answer):\n    return 1 / 0 if completion else 0\n\n"
        "def knows(completion, prompt, answer):\n"
        "    assert 'User: number' in prompt and answer.strip().isdigit() or not prompt\n"
        "    return 0.0 if not completion else float(completion[0] == ' ')\n"
    )
    records = [{"instruction": f"number {i}", "output": str(i)} for i in range(60)]
    (folder / "prompts.json").write_text(json.dumps(records))
    chance = np.random.default_rng(0)
    alphabet = list("abcdefghij0123456789")
    (folder / "letters.txt").write_text(
        "".join(f"User: number {i}\nAssistant: {''.join(chance.choice(alphabet, 8))}\n" for i in range(800))
    )
    tree = tiny.recipe_tree(folder, max_steps=40, optimizer="adamw", learning_rate=0.01, checkpoint_every=40,
                            evaluate_every=40)  # fmt: skip
    tree["model"] |= {"context_length": 64, "dropout_residual": 0.0, "dropout_attention": 0.0}
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 270}
    data = tree["data"] | {"sources": [{"type": "text", "path": str(folder / "letters.txt")}]}
    train(parse_recipe(tree | {"run_dir": str(folder / "base"), "data": data}))
    return folder


def tree_of(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    train_settings = {
        "max_steps": 16, "batch_size": 32, "micro_batch_size": 32, "optimizer": "adamw", "learning_rate": 0.003,
        "evaluate_every": 16, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0, "checkpoint_every": 5,
    } | settings.pop("train", {})  # fmt: skip
    tree = tiny.recipe_tree(folder, **train_settings)
    tree["model"] |= {"context_length": 64, "dropout_residual": 0.0, "dropout_attention": 0.0}
    objective = {
        "type": "reward", "reward": f"{folder / 'rewards.py'}:digits", "group_size": 8, "max_tokens": 10,
        "allow": ["little-learned"],
    } | settings.pop("objective", {})  # fmt: skip
    data = {"sources": [{"type": "conversations", "path": str(folder / "prompts.json")}],
            "validation": {"fraction": 0.1}, "cache_dir": str(folder / "data")}  # fmt: skip
    return tree | {
        "run_dir": str(folder / name), "initialize_from": str(folder / "base"), "data": data, "objective": objective,
        "tokenizer": {"type": "file", "path": str(folder / "base/tokenizer"), "chat_template": "plain"}, **settings,
    }  # fmt: skip


@pytest.mark.learning
@pytest.mark.parametrize(
    ("settings", "margin"), [({}, 0.21), ({"adapter": {"rank": 8}, "objective": {"beta": 0.01}}, 0.09)]
)
def test_the_mean_reward_rises_clearly(folder: Path, settings: dict[str, Any], margin: float) -> None:
    """A margin is half of the smallest rise over ten seeds, each in fp32 and bf16, and over this seed rounded as on
    four processors: 0.43, and 0.18 with the adapter, whose frozen head limits it. (At a rate of 0.02 the adapter's
    policy collapsed for some steps in 8 of 20 runs, so that rounding decided the reward after 16 steps; at 0.005 in
    none.)"""
    name = "-".join(["rises", *settings])
    rate = {"train": {"learning_rate": 0.005}} if settings else {}
    train(parse_recipe(tree_of(folder, name, **settings, **rate)))
    records = list(read_metrics(folder / name / "metrics.jsonl"))
    rewards = [record["reward"] for record in records if record["kind"] == "train"]
    assert len(rewards) == 16
    assert np.mean(rewards[-4:]) > rewards[0] + margin, rewards
    held_out = records[[record["kind"] for record in records].index("validation")]
    assert held_out["reward"] == pytest.approx(-held_out["loss"])

    def share(run: str) -> float:
        """Return the fraction of digits in forty answers."""
        answers = load(folder / run).complete("User: number 7\nAssistant:", max_tokens=10, seed=3, n_samples=40)
        return float(np.mean([sum(c.isdigit() for c in answer.text) / len(answer.text) for answer in answers]))

    assert share(name) > share("base") + margin


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_first_step_on_new_answers_is_on_policy(
    folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importance ratios are exactly 1, although the engine adds in another order; its log-probabilities are as near to
    training's as the precision allows."""
    ratios: list[float] = []

    def recorded(
        objective: RewardObjective, logprobs: torch.Tensor, old: torch.Tensor, *rest: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratios.append((logprobs - old).abs().max().item())
        return policy_loss(objective, logprobs, old, *rest)

    monkeypatch.setattr("gptworks.training.objectives.reward.policy_loss", recorded)
    tree = tree_of(
        folder, f"on-policy-{precision}", objective={"steps_per_rollout": 2, "temperature": 0.7},
        train={"precision": precision, "max_steps": 4, "micro_batch_size": 16},
    )  # fmt: skip
    train(parse_recipe(tree))
    of_steps = [max(ratios[2 * step : 2 * step + 2]) for step in range(4)]  # two micro-batches each
    assert of_steps[0] == of_steps[2] == 0
    assert min(of_steps[1], of_steps[3]) > 1e-4, "the second step on the same answers is another policy's"
    records = read_metrics(folder / f"on-policy-{precision}" / "metrics.jsonl")
    gaps = [record["sampling_gap"] for record in records if record["kind"] == "train"]
    assert len(gaps) == 4
    # half a unit of a log-probability of 4 in bf16 is 2^-7; fp32 has 16 more bits
    assert max(gaps) < (2**-7 if precision == "bf16" else 2**-18), gaps


def test_the_sampling_gap_is_the_mean_difference_over_an_answers_tokens() -> None:
    ours = torch.tensor([[9.0, -1.0, -2.0, 9.0], [-3.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    given = [[-1.5, -2.25], [-3.0], []]
    answers = [
        Completion("", [0] * len(each), "stop", 1, [TokenLogprob(0, value) for value in each] or None) for each in given
    ]
    assert sampling_gap(ours, [2, 1, 1], answers).tolist() == [0.375, 0, 0]


@pytest.mark.parametrize(
    "objective", [{"steps_per_rollout": 3, "beta": 0.1}, {"steps_per_rollout": 1, "scale_by_deviation": False}]
)
def test_a_resumed_run_is_the_same(folder: Path, objective: dict[str, Any]) -> None:
    """It resumes from step 5, which is within a round of three steps."""
    tree = tree_of(
        folder, f"resumed-{len(objective)}-{objective['steps_per_rollout']}", objective=objective,
        train={"max_steps": 8, "batch_size": 16, "micro_batch_size": 8, "evaluate_every": 8},
    )  # fmt: skip
    run = assert_resumes_exactly(tree, at_step=7, forks="beta" in objective)
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "train"]
    if "beta" in objective:
        assert records[0]["clipped_share"] == 0 and records[2]["clipped_share"] > 0
        assert records[0]["reward"] == records[2]["reward"] != records[3]["reward"]
        assert records[0]["kl"] == pytest.approx(0, abs=1e-3) and records[-1]["kl"] > records[0]["kl"]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("nowhere.py:f", "nowhere.py does not exist"),
        ("{folder}/rewards.py:digit", "has no function digit"),
        ("{folder}/rewards.py:broken", "ZeroDivisionError.*the empty one too"),
        ("{folder}/rewards.py:words", "gives 'good'"),
        ("{folder}/rewards.txt", "reward"),
    ],
)
def test_a_reward_that_cannot_be_is_refused_before_any_work(folder: Path, reward: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_train(parse_recipe(tree_of(folder, "refused", objective={"reward": reward.format(folder=folder)})))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"batch_size": 12, "micro_batch_size": 12}}, "not a multiple of objective.group_size=8"),
        ({"objective": {"max_tokens": 60}}, "leave no room"),
    ],
)
def test_other_faults_are_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        train(parse_recipe(tree_of(folder, "refused-too", **settings)))


@pytest.mark.parametrize("value", [0.5, True, np.float32(0.5), torch.tensor([0.5]), Fraction(1, 2)])
def test_a_reward_may_be_anything_that_is_one_finite_number(value: Any) -> None:
    assert reward_of(lambda *_, **__: value, "f", "", Prompt([], "", "")) == float(value)


@pytest.mark.parametrize("value", [None, "0.5", 10**400, float("nan"), [0.5], torch.zeros(2), 1j])
def test_other_rewards_are_named(value: Any) -> None:
    with pytest.raises(RunError, match="it must give a finite number"):
        reward_of(lambda *_, **__: value, "f", "", Prompt([], "", ""))


def test_a_reward_that_fails_later_ends_the_run_with_its_text(folder: Path) -> None:
    later = f"{folder / 'rewards.py'}:later"
    with pytest.raises(RunError, match=r"rewards.py:later fails on .*ZeroDivisionError"):
        train(parse_recipe(tree_of(folder, "later", objective={"reward": later})))


def test_the_function_is_given_prompt_and_answer(folder: Path) -> None:
    knows = f"{folder / 'rewards.py'}:knows"
    train(parse_recipe(tree_of(folder, "knows", objective={"reward": knows}, train={"max_steps": 1})))


def test_a_changed_reward_is_refused_when_a_run_goes_on(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text((folder / "rewards.py").read_text())
    tree = tree_of(folder, "changed", objective={"reward": f"{mine}:digits"}, train={"max_steps": 1})
    train(parse_recipe(tree))
    mine.write_text(mine.read_text() + "# another\n")
    more = tree_of(folder, "changed", objective={"reward": f"{mine}:digits"}, train={"max_steps": 2})
    with pytest.raises(UserError, match="has changed since the run began"):
        train(parse_recipe(more), resume=True)
