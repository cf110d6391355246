"""Preference tuning by DPO and ORPO: losses against independent ones, data, reference, and rising margins."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from gptworks.checkpoint import checkpoints, load_run
from gptworks.config import IGNORED, PreferencesSource
from gptworks.config.objective import OddsRatioObjective, PreferenceObjective
from gptworks.data.conversations.packing import Pairs
from gptworks.data.conversations.preferences import iter_pairs
from gptworks.data.prepare import find_prepared
from gptworks.data.samples import Batch
from gptworks.data.shards import TokenShards
from gptworks.describe.plan_tables import tables
from gptworks.device import choose_precision
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.loss import target_logprobs
from gptworks.planning.devices import this_cpu
from gptworks.planning.run import Plan
from gptworks.recipe import parse_recipe
from gptworks.training.distributed.parallel import Parallel
from gptworks.training.loop import train
from gptworks.training.objectives.base import choose_objective
from gptworks.training.objectives.odds_ratio import OddsRatio, odds_ratio_loss
from gptworks.training.objectives.pairs import answer_logprobs
from gptworks.training.objectives.preference import Preference, preference_loss
from gptworks.training.record.metrics import read_metrics
from gptworks.training.record.outcome import RunOutcome, read_outcome
from gptworks.training.rehearsal.estimate import estimate
from halves import assert_resumes_exactly

SMALL: dict[str, Any] = {"vocab_size": 50, "context_length": 24, "n_layers": 2, "d_model": 32, "n_heads": 4}


def rows(n_pairs: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [2P, T]: each pair has a common prompt and answers of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(50, (2 * n_pairs, 21), generator=generator)
    ids[n_pairs:, :8] = ids[:n_pairs, :8]
    targets = ids[:, 1:].clone()
    targets[:, :7] = IGNORED
    for row in range(2 * n_pairs):
        targets[row, 12 + row :] = IGNORED
    return ids[:, :-1], targets


# ------------------------------------------------------------------------------------------------------- the loss


def by_the_papers(objective: PreferenceObjective, logratios: np.ndarray, lengths: np.ndarray) -> float:
    """Return the sum of the losses in float64, computed as the papers write them."""
    n = len(logratios) // 2
    total = 0.0
    for w, r, n_w, n_r in zip(logratios[:n], logratios[n:], lengths[:n], lengths[n:], strict=True):
        if objective.loss == "ipo":
            total += (w / n_w - r / n_r - 1 / (2 * objective.beta)) ** 2
        else:
            sigmoid, eps = 1 / (1 + math.exp(-objective.beta * (w - r))), objective.label_smoothing
            total -= (1 - eps) * math.log(sigmoid) + eps * math.log(1 - sigmoid)
    return total


@pytest.mark.parametrize("settings", [{}, {"beta": 0.5, "label_smoothing": 0.2}, {"loss": "ipo", "beta": 0.05}])
def test_loss_and_gradients_are_those_of_the_papers(settings: dict[str, Any]) -> None:
    objective = PreferenceObjective.model_validate({"type": "preference", **settings})
    torch.manual_seed(0)
    model = GPT(tiny.plain_model(**SMALL)).double()
    inputs, targets = rows()
    reference = torch.linspace(-40, -20, 6, dtype=torch.float64)
    n_tokens = (targets != IGNORED).sum(-1)

    def loss() -> torch.Tensor:
        return preference_loss(objective, answer_logprobs(model, inputs, targets) - reference, n_tokens)[0]

    plain = model(inputs).log_softmax(-1)
    picked = plain.gather(-1, targets.where(targets != IGNORED, 0).unsqueeze(-1)).squeeze(-1)
    sums = picked.where(targets != IGNORED, 0).sum(-1)
    assert (answer_logprobs(model, inputs, targets) - sums).abs().max() < 1e-9
    expected = by_the_papers(objective, (sums - reference).detach().numpy(), n_tokens.numpy())
    assert loss().item() == pytest.approx(expected, abs=1e-5)

    loss().backward()
    parameter = model.blocks[0].mlp.up.weight
    assert parameter.grad is not None
    with torch.no_grad():
        step, index = 1e-5, (3, 4)
        parameter[index] += step
        above = loss()
        parameter[index] -= 2 * step
        below = loss()
        parameter[index] += step
    assert parameter.grad[index].item() == pytest.approx(((above - below) / (2 * step)).item(), rel=1e-5, abs=1e-8)


def test_the_odds_ratios_loss_and_gradients_are_those_of_the_paper() -> None:
    """Hong et al., 2024, in float64: P is the geometric mean of an answer's token probabilities; its odds are P / (1 −
    P)."""
    torch.manual_seed(0)
    model = GPT(tiny.plain_model(**SMALL, init_std=0.3)).double()
    inputs, targets = rows()
    objective = OddsRatio(OddsRatioObjective(type="odds_ratio", weight=0.3), tiny.plain_training(max_steps=1))
    losses = objective.loss(model, (inputs, targets))
    gradients = torch.autograd.grad(losses.objective, list(model.parameters()))

    total, ratios, nats = torch.zeros((), dtype=torch.float64), [], []
    probabilities = model(inputs).softmax(-1)
    for pair in range(3):
        odds, means = [], []
        for row in (pair, pair + 3):
            places = torch.nonzero(targets[row] != IGNORED)[:, 0]
            likely = torch.stack([probabilities[row, place, targets[row, place]] for place in places])
            means.append(likely.prod() ** (1 / len(places)))
            odds.append(means[-1] / (1 - means[-1]))
        ratio = odds[0] / odds[1]
        total = total - means[0].log() - 0.3 * (1 / (1 + 1 / ratio)).log()  # σ(log ratio)
        ratios.append(ratio.item())
        nats.append(-means[0].log().item())
    assert losses.objective.item() == pytest.approx(total.item(), rel=1e-6)
    assert losses.figures["log_odds_ratio"].item() == pytest.approx(sum(map(math.log, ratios)), rel=1e-5)
    assert losses.figures["chosen_nats_per_token"].item() == pytest.approx(sum(nats), rel=1e-6)
    assert losses.figures["accuracy"] == sum(ratio > 1 for ratio in ratios)
    for mine, expected in zip(gradients, torch.autograd.grad(total, list(model.parameters())), strict=True):
        assert (mine - expected).abs().max() < 1e-6 * max(1.0, expected.abs().max().item())


def test_answers_that_are_certain_or_missing_have_a_finite_loss() -> None:
    logprobs = torch.tensor([0.0, -1e-9, -2.0, 0.0, -200.0, 0.0], requires_grad=True)
    loss, _ = odds_ratio_loss(0.1, logprobs)
    loss.backward()
    assert loss.isfinite() and logprobs.grad is not None and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("selects", [True, False])
def test_logprobs_are_the_same_in_chunks(selects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gptworks.model.loss.selects_rows", lambda device: selects)
    torch.manual_seed(0)
    features, weight = torch.randn(4, 9, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(50, (4, 9))
    targets[1, :5] = IGNORED

    def made() -> list[torch.Tensor]:
        logprobs = target_logprobs(features, weight, targets)
        return [logprobs, *torch.autograd.grad((logprobs * torch.arange(9.0)).sum(), [features, weight])]

    exact = [x.detach().double().requires_grad_() for x in (features, weight)]
    logits = exact[0] @ exact[1].T
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets != IGNORED)
    expected = [chosen, *torch.autograd.grad((chosen * torch.arange(9.0)).sum(), exact)]
    for n_tokens in (1024, 7):
        monkeypatch.setattr("gptworks.model.loss.chunk_tokens", lambda device, vocab_size, n=n_tokens: n)
        for one, other in zip(made(), expected, strict=True):
            assert (one - other).abs().max() < 2e-5
    assert (target_logprobs(features, weight, torch.full_like(targets, IGNORED)) == 0).all()


# ------------------------------------------------------------------------------------------------------- the data


def pairs_of(folder: Path, records: list[Any]) -> list[Any]:
    (folder / "pairs.json").write_text(json.dumps(records))
    return list(iter_pairs([PreferencesSource(type="preferences", path=str(folder / "pairs.json"))]))


def test_three_shapes_of_record_are_read(tmp_path: Path) -> None:
    user = {"role": "user", "content": "Add.\n\n1 2"}
    good, bad = ({"role": "assistant", "content": text} for text in ("3", "4"))
    shapes = [
        {"instruction": "Add.", "input": "1 2", "output": "3", "chosen": "3", "rejected": "4"},
        {"prompt": "Add.\n\n1 2", "chosen": "3", "rejected": "4"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": "Add.\n\n1 2", "chosen": [user, good], "rejected": [user, bad]},
    ]
    for pair in pairs_of(tmp_path, shapes):
        assert (pair.prompt, pair.chosen, pair.rejected) == ([user], good, bad), pair.where


def test_conversations_in_one_text_each_are_read_as_in_hh_rlhf(tmp_path: Path) -> None:
    before = "\n\nHuman: Add.\n\n1 2\n\nAssistant: 3\n\nHuman: And 4?\n\nAssistant:"
    (pair,) = pairs_of(tmp_path, [{"chosen": f"{before} 7", "rejected": f"{before} 8: Human: 9"}])
    said = [(turn["role"], turn["content"]) for turn in pair.prompt]
    assert said == [("user", "Add.\n\n1 2"), ("assistant", "3"), ("user", "And 4?")]
    assert (pair.chosen["content"], pair.rejected["content"], pair.unread) == ("7", "8: Human: 9", ())
    (plain,) = pairs_of(tmp_path, [{"prompt": "Who?", "chosen": "Human: all of them", "rejected": "None"}])
    assert plain.chosen["content"] == "Human: all of them"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "record 1: no field `rejected`"),
        ({"chosen": "b", "rejected": "c"}, "no prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "`chosen`"),
        ({"chosen": [{"role": "user", "content": "x"}], "rejected": "c"}, "does not end with an answer"),
        ([], "not an object"),
    ],
)
def test_a_record_of_another_shape_is_named(record: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        pairs_of(tmp_path, [record])


# ------------------------------------------------------------------------------------------------------- runs


def tree_of(folder: Path, name: str, **settings: Any) -> dict[str, Any]:
    train_settings = {
        "max_steps": 12, "batch_size": 8, "micro_batch_size": 4, "optimizer": "adamw", "learning_rate": 0.003,
        "evaluate_every": 6, "evaluate_sequences": 0, "warmup_steps": 0, "schedule": "constant",
    } | settings.pop("train", {})  # fmt: skip
    tree = tiny.recipe_tree(folder, **train_settings)
    tree["model"] |= {"context_length": 64, "dropout_residual": 0.0, "dropout_attention": 0.0}
    tokenizer = {"type": "file", "path": str(folder / "base/tokenizer"), "chat_template": "plain"}
    data = tree["data"] | {"sources": [{"type": "preferences", "path": str(folder / "pairs.json")}]}
    data["validation"] = {"fraction": 0.2}
    objective = {"type": "preference"} | settings.pop("objective", {})
    return tree | {
        "run_dir": str(folder / name), "initialize_from": str(folder / "base"), "tokenizer": tokenizer, "data": data,
        "objective": objective, **settings,
    }  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base run, and pairs whose chosen answers use words that the rejected ones lack."""
    folder = tmp_path_factory.mktemp("preference")
    records = [
        {"instruction": f"line {i}:", "input": "", "chosen": "the quick fox", "rejected": "over the lazy dog"}
        for i in range(80)
    ]
    (folder / "pairs.json").write_text(json.dumps(records))
    tree = tiny.recipe_tree(folder, max_steps=8, optimizer="adamw", checkpoint_every=8)
    tree["model"] |= {"context_length": 64}
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 300}
    train(parse_recipe(tree | {"run_dir": str(folder / "base")}))
    return folder


@pytest.mark.learning
@pytest.mark.parametrize("settings", [{}, {"adapter": {"rank": 4}}, {"objective": {"loss": "ipo"}}])
def test_the_margin_on_held_out_pairs_rises_from_a_loss_that_is_known(base: Path, settings: dict[str, Any]) -> None:
    """With three seeds in fp32 and bf16, it rose by at least 37% between the evaluations; the test requires half. All
    held-out pairs were ranked correctly."""
    name = "-".join(["plain", *settings])
    train(parse_recipe(tree_of(base, name, **settings)))
    records = list(read_metrics(base / name / "metrics.jsonl"))
    first = next(record for record in records if record["kind"] == "train")
    at_start = (1 / (2 * 0.1)) ** 2 if "objective" in settings else math.log(2)  # all log-ratios are 0
    assert first["loss"] == pytest.approx(at_start, abs=1e-4)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-4)
    held_out = [record for record in records if record["kind"] == "validation"]
    assert held_out[-1]["reward_margin"] > 1.18 * held_out[0]["reward_margin"] > 0
    assert held_out[-1]["accuracy"] > 0.9
    unit = "IPO loss per pair" if "objective" in settings else "nats per pair"
    assert held_out[-1]["perplexity"] is None and held_out[-1]["unit"] == unit
    assert "perplexity" not in (base / name / "model-card.md").read_text()


@pytest.mark.learning
@pytest.mark.parametrize("settings", [{"adapter": {"rank": 4, "dropout": 0.1}}])
def test_the_odds_ratio_learns_what_is_chosen_without_a_reference_and_resumes_exactly(
    base: Path, settings: dict[str, Any]
) -> None:
    whole = assert_resumes_exactly(
        tree_of(base, "odds", objective={"type": "odds_ratio", "weight": 1.0}, **settings), 7
    )
    assert not (whole / "reference.safetensors").exists()
    records = list(read_metrics(whole / "metrics.jsonl"))
    first = next(record for record in records if record["kind"] == "train")
    held_out = [record for record in records if record["kind"] == "validation"]
    by_hand = first["chosen_nats_per_token"] + math.log1p(math.exp(-first["log_odds_ratio"]))
    assert first["loss"] == pytest.approx(by_hand, rel=0.02)  # of the means: the mean of a convex function is more
    assert held_out[-1]["log_odds_ratio"] > held_out[0]["log_odds_ratio"] + 0.1
    assert held_out[-1]["chosen_nats_per_token"] < held_out[0]["chosen_nats_per_token"]
    assert held_out[-1]["accuracy"] > 0.9
    assert held_out[-1]["perplexity"] is None and held_out[-1]["unit"] == "ORPO loss per pair"


@pytest.fixture(scope="module")
def one_step(base: Path) -> Path:
    """The folder with a run of one step next to the base run."""
    train(parse_recipe(tree_of(base, "reference", train={"max_steps": 1, "precision": "fp32"})))
    return base


def test_the_reference_is_what_the_start_gives(one_step: Path) -> None:
    base = one_step
    kept = load_file(base / "reference/reference.safetensors")
    described = json.loads((base / "reference/reference.json").read_text())
    assert set(described) >= {"data", "weights", "tensors", "sha256"}
    start = load_run(base / "base").model
    prepared = find_prepared(parse_recipe(tree_of(base, "reference")))
    assert prepared is not None
    pairs = Pairs(TokenShards(prepared.folder, "validation"), 64)
    for pair in range(3):
        for side in (0, 1):
            ids, learned = pairs.answer(pair, side)
            with torch.no_grad():
                logprobs = start(torch.from_numpy(ids)[None, :-1]).double().log_softmax(-1)[0]
            expected = sum(logprobs[i, ids[i + 1]].item() for i in np.flatnonzero(learned[1:]))
            assert kept["validation"][pair, side].item() == pytest.approx(expected, abs=1e-4)
            answer = prepared.tokenizer.decode(ids[learned].tolist())
            assert answer.strip() == ("the quick fox", "over the lazy dog")[side]


class Half:
    """One of two simulated processes: it gets every second batch, and the test makes its sums."""

    def __init__(self, rank: int) -> None:
        self.rank, self.n_batches = rank, 0

    def split_batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        batches = list(batches)
        for first in range(0, len(batches), 2):
            spare = first + self.rank >= len(batches)
            inputs, targets, *rest = batches[min(first + self.rank, len(batches) - 1)]
            self.n_batches += not spare
            yield inputs, torch.full_like(targets, IGNORED) if spare else targets, *rest

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_two_processes_share_the_reference_and_get_the_same_numbers(one_step: Path) -> None:
    recipe = parse_recipe(tree_of(one_step, "reference", train={"precision": "fp32"}))
    prepared = find_prepared(recipe)
    assert prepared is not None
    task = choose_objective(recipe, prepared.folder)
    assert isinstance(task, Preference)
    model, precision = load_run(one_step / "base").model, choose_precision("fp32", torch.device("cpu"))
    one_rank = task._logprobs(model, precision, "train", Parallel(recipe.train))
    halves = [Half(rank) for rank in range(2)]
    parts = [task._logprobs(model, precision, "train", half) for half in halves]  # type: ignore[arg-type]
    assert torch.equal(parts[0] + parts[1], one_rank)
    assert ((parts[0] != 0) ^ (parts[1] != 0)).all(), "each pair is one process's"
    assert abs(halves[0].n_batches - halves[1].n_batches) <= 1


def test_evaluate_judges_the_preferred_answers(one_step: Path) -> None:
    base = one_step
    result = tiny.gptworks("evaluate", base / "reference", "--json", "--precision", "fp32")
    assert result.returncode == 0, result.stderr
    report, kept = json.loads(result.stdout), load_file(base / "reference/reference.safetensors")
    nats = -kept["validation"][:, 0].sum().item()  # the start's: a step of training later it is near
    assert report["loss"] * report["tokens"] == pytest.approx(nats, rel=0.1)


@pytest.mark.parametrize("settings", [{"adapter": {"rank": 2, "dropout": 0.2}}])
def test_a_resumed_run_is_the_same_and_needs_its_reference(base: Path, settings: dict[str, Any]) -> None:
    whole = assert_resumes_exactly(tree_of(base, "resumed", **settings), at_step=7, forks=True)
    recipe = parse_recipe(tree_of(base, "resumed-whole", **settings, train={"max_steps": 14}))
    (whole / "reference.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"reference\.safetensors is missing or damaged"):
        train(recipe, resume=True, change=["train.max_steps"])
    assert checkpoints(whole)[0].step == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": {"loss": "ipo", "label_smoothing": 0.1}}, "loss=ipo, which has none"),
        ({"data": {"sources": [{"type": "python-stdlib"}]}}, "data.sources are text: give sources of type preferences"),
        ({"objective": {"beta": 0}}, "beta"),
        ({"objective": {"type": "odds_ratio", "beta": 0.1}}, "beta"),
        (
            {"objective": {"type": "odds_ratio"}, "data": {"sources": [{"type": "python-stdlib"}]}},
            "are text: give sources",
        ),
    ],
)
def test_what_cannot_be_is_refused(base: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_recipe(tree_of(base, "refused", **settings))


def test_pairs_that_teach_nothing_are_refused(base: Path, tmp_path: Path) -> None:
    records = [{"prompt": f"line {i}", "chosen": "the fox", "rejected": "the fox"} for i in range(40)]
    (tmp_path / "same.json").write_text(json.dumps(records))
    tree = tree_of(base, "same")
    tree["data"]["sources"][0]["path"] = str(tmp_path / "same.json")
    with pytest.raises(UserError, match=r"answers-alike: 3\d of 3\d pairs .* teach nothing.*same.json, record"):
        train(parse_recipe(tree))


# ------------------------------------------------------------------------------------------- compared with trl


@pytest.mark.trl
@pytest.mark.parametrize("settings", [{}, {"beta": 0.3}, {"loss": "ipo", "beta": 0.2}])
def test_loss_and_gradients_are_those_of_trl(settings: dict[str, Any], tmp_path: Path) -> None:
    import datasets
    import transformers
    import trl

    from gptworks.interop.huggingface import export_huggingface
    from gptworks.interop.huggingface.architectures import FAMILIES
    from gptworks.interop.tensors import tensor_places
    from hf import make_run, random_model

    objective = PreferenceObjective.model_validate({"type": "preference", **settings})
    config = tiny.plain_model(**(SMALL | {"vocab_size": 260, "norm": "rmsnorm", "mlp": "swiglu"}))
    models = {}
    for seed, name in ((0, "policy"), (1, "reference")):
        models[name] = random_model(config, seed)
        export_huggingface(make_run(tmp_path / f"{name}-run", models[name]), tmp_path / name, verify=False)
    load = transformers.AutoModelForCausalLM.from_pretrained
    policy, reference = (load(tmp_path / name, dtype=torch.float32) for name in models)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "policy")
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.decode([0])
    loss_type = "ipo" if objective.loss == "ipo" else "sigmoid"  # of cDPO, trl has no more
    trainer = trl.DPOTrainer(
        model=policy,
        ref_model=reference,
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"), beta=objective.beta, loss_type=[loss_type], use_cpu=True, bf16=False,
            report_to=[], disable_dropout=True, gradient_checkpointing=False,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "ab", "chosen": "cd", "rejected": "ef"}]),
        processing_class=tokenizer,
    )  # fmt: skip
    inputs, targets = rows()
    ids = torch.cat([inputs, targets[:, -1:].where(targets[:, -1:] != IGNORED, 0)], dim=1)
    mask = torch.cat([torch.zeros(6, 1, dtype=torch.int64), (targets != IGNORED).long()], dim=1)
    ids = torch.where(mask.bool(), torch.cat([ids[:, :1], targets], dim=1), ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    theirs = trainer.compute_loss(trainer.model, batch)
    theirs.backward()

    ours = models["policy"].train()
    with torch.no_grad():
        start = answer_logprobs(models["reference"], inputs, targets)
    n_tokens = (targets != IGNORED).sum(-1)
    loss, _ = preference_loss(objective, answer_logprobs(ours, inputs, targets) - start, n_tokens)
    (loss / 3).backward()
    assert loss.item() / 3 == pytest.approx(theirs.item(), abs=1e-5)
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    n_compared = 0
    for place in tensor_places(FAMILIES["llama"].places, config, ours.state_dict()):
        mine = place.layout.join([dict(ours.named_parameters())[name].grad for name in place.ours], config)
        other = gradients[place.theirs]
        assert (mine - other).abs().max() <= 1e-5 * max(1.0, other.abs().max().item()), place.theirs
        n_compared += 1
    assert n_compared > 10


@pytest.mark.parametrize("kind", ["preference", "odds_ratio"])
def test_a_plan_of_pairs_counts_the_tokens_that_the_run_reads(base: Path, kind: str, tmp_path: Path) -> None:
    """With answers of many lengths; before the pairs are prepared, the figures are bounds and marked so."""
    folder = tmp_path / "runs"
    shutil.copytree(base, folder)
    shutil.rmtree(folder / "data", ignore_errors=True)
    records = [
        {
            "instruction": f"line {i}:",
            "input": "",
            "chosen": "the quick fox " * (1 + i % 3),
            "rejected": "lazy " * (i % 5),
        }
        for i in range(1, 60)
        if i % 5
    ]
    (folder / "pairs.json").write_text(json.dumps(records))
    recipe = parse_recipe(tree_of(folder, kind, objective={"type": kind}, train={"max_steps": 9}))
    cpu = replace(this_cpu(), float_flops=1e12, half_flops=1e12)

    def planned() -> tuple[Plan, str]:
        found = estimate(recipe, lambda overrides: recipe, cpu)
        return found, " ".join(" ".join(cells) for table in tables(found) for cells in table.rows)

    before, shown = planned()
    assert before.at_most and before.tokens == 9 * 8 * 2 * 64 and f"at most {before.tokens:,}" in shown
    train(recipe)
    after, shown = planned()
    outcome = read_outcome(recipe.run_dir)
    assert isinstance(outcome, RunOutcome)
    assert not after.at_most and f"at most {after.tokens:,}" not in shown
    assert after.tokens == outcome.tokens < before.tokens
    assert after.flops_per_token < before.flops_per_token, "attention over shorter rows"
    assert after.seconds is not None and after.total_flops is not None
    rate = 1e12 * after.utilization
    again = after.work.again_per_token * after.tokens
    assert after.seconds == pytest.approx((after.total_flops + again) / rate, rel=1e-3)
