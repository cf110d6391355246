"""A head that is untied late (`train.untie_after_steps`), against two plain trainings in float64, one after the
other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

import tiny
from gptworks.checkpoint import checkpoints
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.planning.arrange import refusal
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from gptworks.training.optim.optimizer import Optimizer
from gptworks.training.state import EMBEDDING, HEAD, LateUntying, WeightAverage
from tiny import plain_model, plain_training

SHAPE: dict[str, Any] = {"vocab_size": 19, "context_length": 12, "n_layers": 1, "d_model": 16, "n_heads": 2}
STEPS, UNTIED = 7, 4


def batch(step: int) -> Tensor:
    return torch.randint(19, (3, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: GPT, step: int) -> Tensor:
    tokens = batch(step)
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def test_a_tied_training_and_then_an_untied_one() -> None:
    settings = plain_training(max_steps=STEPS, learning_rate=0.01, untie_after_steps=UNTIED)
    torch.manual_seed(0)
    model = GPT(plain_model(**SHAPE, tie_embeddings=False)).double()
    tied = GPT(plain_model(**SHAPE, tie_embeddings=True)).double()
    tied.load_state_dict({name: x for name, x in model.state_dict().items() if name != HEAD})

    optimizer, average = Optimizer(model, settings), WeightAverage(model, settings)
    untying, scaler = LateUntying(model, optimizer, UNTIED), torch.amp.GradScaler("cpu", enabled=False)
    for step in range(STEPS):
        untying.begin(step, average)
        loss_of(model, step).backward()
        optimizer.set_rate(1.0)
        optimizer.step(scaler)
        optimizer.zero_grad()

    def plain(of: GPT) -> torch.optim.AdamW:
        groups = [
            {"params": [p for p in of.parameters() if (p.ndim < 2) == vector], "weight_decay": 0.0 if vector else 0.1}
            for vector in (False, True)
        ]
        return torch.optim.AdamW(groups, lr=0.01, betas=settings.betas, eps=settings.eps)

    def go_on(of: GPT, by: torch.optim.AdamW, steps: range) -> None:
        for step in steps:
            by.zero_grad()
            loss_of(of, step).backward()
            by.step()

    first = plain(tied)
    go_on(tied, first, range(UNTIED))
    untied = GPT(plain_model(**SHAPE, tie_embeddings=False)).double()
    untied.load_state_dict(tied.state_dict() | {HEAD: tied.token_embedding.weight})
    second, before = plain(untied), dict(tied.named_parameters())
    for name, parameter in untied.named_parameters():
        state = first.state[before[EMBEDDING if name == HEAD else name]]
        second.state[parameter] = {key: value.clone() for key, value in state.items()}
    go_on(untied, second, range(UNTIED, STEPS))
    for (name, ours), theirs in zip(model.named_parameters(), untied.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=name)


def test_checkpoints_hold_the_embedding_as_head_and_then_a_head(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, max_steps=4, checkpoint_every=2, keep_checkpoints=9, untie_after_steps=3)
    tree["model"]["tie_embeddings"] = False
    train(parse_recipe(tree))
    after, before = (load_file(each.folder / "model.safetensors") for each in checkpoints(tmp_path / "run")[:2])
    assert torch.equal(before[HEAD], before[EMBEDDING])
    assert not torch.equal(after[HEAD], after[EMBEDDING])
    moments = [set(load_file(each.folder / "optimizer.safetensors")) for each in checkpoints(tmp_path / "run")[:2]]
    assert f"{HEAD}/exp_avg" in moments[0] and f"{HEAD}/exp_avg" not in moments[1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"model": {"tie_embeddings": True}}, "tie_embeddings=true"), ({"freeze": {"first_blocks": 1}}, "freeze")],
)
def test_what_cannot_be_untied_late_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, untie_after_steps=3)
    tree["model"] |= {"tie_embeddings": False} | changes.pop("model", {})
    with pytest.raises((UserError, ValidationError), match=f"untie_after_steps=3 and .*{named}"):
        parse_recipe(tree | changes)


def test_shares_of_weights_refuse_it_by_name(tmp_path: Path) -> None:
    tree = tiny.recipe_tree(tmp_path, untie_after_steps=3, optimizer="adamw", parallel={"strategy": "fsdp"})
    tree["model"]["tie_embeddings"] = False
    found = refusal(parse_recipe(tree), 2)
    assert found is not None and "train.untie_after_steps=3" in found.rule
