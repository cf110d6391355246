"""Which parameter gets which optimizer, rate and decay; the arithmetic against torch; the state's round trip."""

from typing import Any

import torch
from torch import nn

from gptworks.config import ModelConfig, TrainConfig
from gptworks.model import GPT
from gptworks.train.optim.muon import TOGETHER, Muon, batches, divided
from gptworks.train.optim.optimizer import Optimizer, parameter_groups

CONFIG = ModelConfig(
    vocab_size=30, context_length=16, n_layers=2, d_model=16, n_heads=2, position="learned", attention_bias=True,
    mlp_bias=True, tie_embeddings=False,
)  # fmt: skip
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def model_with_gradients(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def test_decay_falls_on_matrices_alone_and_every_parameter_is_in_one_group() -> None:
    model = GPT(CONFIG)
    (groups,) = parameter_groups(dict(model.named_parameters()), TrainConfig(max_steps=1, weight_decay=0.3)).values()
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    for group in groups:
        assert {shapes[name] >= 2 for name in group["names"]} == {group["weight_decay"] == 0.3}


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else() -> None:
    train = TrainConfig(max_steps=1, optimizer="muon", learning_rate=0.003, muon_learning_rate=0.02)
    (muon,) = parameter_groups(dict(GPT(CONFIG).named_parameters()), train)["muon"]
    assert muon["lr"] == muon["peak_lr"] == 0.02
    assert len(muon["names"]) == CONFIG.n_layers * 6
    assert all(name.startswith("blocks.") and name.endswith("weight") for name in muon["names"])
    assert not any("embedding" in name or "head" in name or "norm" in name for name in muon["names"])


def test_adamw_step_equals_torch_step_by_step() -> None:
    train = TrainConfig(max_steps=1, learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    ours, theirs = model_with_gradients(), model_with_gradients()
    optimizer = Optimizer(ours, train)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.2},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.005, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False,
    )  # fmt: skip
    optimizer.set_rate(0.5)
    for _ in range(3):
        optimizer.step(NO_SCALER)
        reference.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


def test_muon_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 64)] * 3 + [(96, 64), (64, 96)] * 2 + [(96, 64), (TOGETHER // 250 + 1, 250)]
    ours = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    optimizers = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn(a.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        if a.numel() < 10**6:
            assert torch.equal(a, b), a.shape
        else:  # one large matrix: products of another kernel, rounded to bfloat16
            torch.testing.assert_close(a, b, rtol=0, atol=1e-2 * 0.02)


def test_matrices_of_one_shape_go_together_up_to_a_limit() -> None:
    many = [nn.Parameter(torch.empty(1024, 1024)) for _ in range(6)]
    other, large = nn.Parameter(torch.empty(8, 8)), nn.Parameter(torch.empty(4096, 2048))
    assert [len(batch) for batch in batches([*many, other, large])] == [4, 2, 1, 1]


def test_each_rank_gets_about_the_same_work_and_no_matrix_goes_twice() -> None:
    """By the cost of an iteration: 4 s²l + 2 s³ for s the shorter side and l the longer."""
    shapes = [(768, 768), (192, 768), (192, 768), (768, 768), (2048, 768), (2048, 768), (768, 2048)] * 12
    matrices = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for n_ranks in (1, 2, 3, 8):
        shares = divided(matrices, n_ranks)
        assert sorted(id(m) for share in shares for m in share) == sorted(map(id, matrices))
        work = [sum(4 * min(m.shape) ** 2 * max(m.shape) + 2 * min(m.shape) ** 3 for m in share) for share in shares]
        assert max(work) < 1.1 * sum(work) / n_ranks, n_ranks
    assert [len(share) for share in divided(matrices[:1], 2)] == [1, 0]


def test_state_round_trips_and_the_next_step_is_identical() -> None:
    train = TrainConfig(max_steps=1, optimizer="muon")
    first = model_with_gradients()
    optimizer = Optimizer(first, train)
    optimizer.step(NO_SCALER)
    second = model_with_gradients(seed=1)
    second.load_state_dict(first.state_dict())
    restored = Optimizer(second, train)
    restored.load_state_tensors({key: value.clone() for key, value in optimizer.state_tensors().items()})
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        b.grad = a.grad
    optimizer.step(NO_SCALER)
    restored.step(NO_SCALER)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = optimizer.state_tensors(), restored.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
