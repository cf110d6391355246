"""Rows of several examples: no token is lost, and no example affects another."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import chats
from gptworks.config import IGNORED, Recipe
from gptworks.data.conversations.packing import Examples, evaluation_rows, pack, stack
from gptworks.data.prepare import prepare
from gptworks.data.samples import open_samples
from gptworks.data.shards import TokenShards
from gptworks.errors import UserError
from gptworks.model.gpt import GPT
from gptworks.model.scores import Scores, attend, attend_reference, texts_bias
from gptworks.recipe import parse_recipe
from gptworks.training.objectives.next_token import next_token
from tiny import plain_model

T = 128


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    tree = chats.tune_tree(tmp_path_factory.mktemp("packing"))
    tree["tokenizer"] = {
        "type": "bpe", "vocab_size": 300, "added_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": "chatml",
    }  # fmt: skip
    return parse_recipe(tree)


@pytest.fixture(scope="module")
def shards(recipe: Recipe) -> TokenShards:
    return TokenShards(prepare(recipe).folder, "train")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_every_item_has_a_place_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack(np.array(lengths), 12)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 12 for row in rows)
    filled = sorted(sum(lengths[item] for item in row) for row in rows)
    assert (
        len(rows) == 1 or filled[0] + filled[1] > 12
    )  # a row is begun only where no other has room for its first item


def test_rows_hold_the_examples_and_their_answers(shards: TokenShards) -> None:
    examples = Examples(shards, T)
    assert max(map(len, examples.rows)) > 1
    for number, members in enumerate(examples.rows):
        inputs, targets, positions, starts = examples.row(number)
        at = 0
        for example in members:
            ids, learned = (part[: T + 1] for part in examples.tokens(example))
            here = slice(at, at + len(ids) - 1)
            assert inputs[here].tolist() == ids[:-1].tolist()
            assert targets[here].tolist() == [
                i if known else IGNORED for i, known in zip(ids[1:], learned[1:], strict=True)
            ]
            assert positions[here].tolist() == list(range(len(ids) - 1))
            at += len(ids) - 1
        assert (targets[at:] == IGNORED).all()
        begins = (positions == 0).nonzero().flatten().tolist()
        assert starts.tolist() == begins + [T] * (len(starts) - len(begins))


def test_batches_are_cut_in_any_way_and_each_epoch_visits_each_row_once(recipe: Recipe) -> None:
    samples = open_samples(recipe, prepare(recipe).folder)
    examples = Examples(samples.train_shards, recipe.model.context_length)
    whole = samples.batch(20, 0, 4)
    for size in (1, 2):
        parts = [samples.batch(20, micro_step, size) for micro_step in range(4 // size)]
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))
    n = samples.per_epoch
    rows = {tuple(row[0].tolist()) for row in evaluation_rows(examples)}
    epochs = [[tuple(samples.batch(epoch * n, i, 1)[0][0].tolist()) for i in range(n)] for epoch in (0, 1)]
    assert all(Counter(epoch) == Counter(rows) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_text_has_no_examples(tmp_path: Path) -> None:
    folder = prepare(parse_recipe(chats.base_tree(tmp_path))).folder
    with pytest.raises(UserError, match="holds text, not conversations"):
        Examples(TokenShards(folder, "train"), T)


SHAPES: dict[str, dict[str, Any]] = {
    "learned positions": {"position": "learned"},
    "rotary, grouped": {"position": "rope", "n_kv_heads": 2, "norm": "rmsnorm", "mlp": "swiglu"},
    "windowed": {"position": "rope", "window": 8, "window_pattern": ("window", "full")},
    "checkpointed": {"position": "rope"},
}


def gradients(model: GPT, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    next_token(model, batch).objective.backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", ["cpu", "sdpa"])
def test_packed_equals_unpacked(shards: TokenShards, shape: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of packed rows, against those of each example in its own row, in fp32."""
    if path == "sdpa":
        monkeypatch.setattr("gptworks.kernels.cpu.LONGEST", 0)
    packed, unpacked = Examples(shards, T), Examples(shards, T, packing=False)
    config = plain_model(context_length=T, n_layers=2, d_model=32, n_heads=4, vocab_size=302, **SHAPES[shape])
    torch.manual_seed(0)
    model = GPT(config).train()
    model.activation_checkpointing = "block" if shape == "checkpointed" else "none"
    batch = stack(list(evaluation_rows(packed)))
    rows = list(evaluation_rows(unpacked))
    ours, theirs = next_token(model, batch).loss, next_token(model, stack(rows)).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    ours_by_name, total = gradients(model, batch), {}
    for inputs, targets, *_ in rows:  # without positions: a plain text of its own, as long as it is
        length = int((targets != IGNORED).nonzero().max()) + 1
        for name, gradient in gradients(model, (inputs[None, :length], targets[None, :length])).items():
            total[name] = total.get(name, 0) + gradient
    n_targets = int((batch[1] != IGNORED).sum())
    for name, gradient in ours_by_name.items():
        torch.testing.assert_close(gradient / n_targets, total[name] / n_targets, rtol=1e-5, atol=1e-6, msg=name)


def test_a_row_of_texts_by_the_definition() -> None:
    torch.manual_seed(1)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [*range(7), 0, 1, 2]])
    for window in (None, 2):
        q, k, v = (torch.randn(2, heads, 10, 4, requires_grad=True) for heads in (4, 2, 2))
        y = attend(q, k, v, Scores(window=window, bias=texts_bias(positions, window, q.dtype)))
        for row, bounds in enumerate([[0, 3, 5, 10], [0, 7, 10]]):
            for a, b in pairwise(bounds):
                part = [x[row : row + 1, :, a:b] for x in (q, k, v)]
                torch.testing.assert_close(y[row : row + 1, :, a:b], attend_reference(*part, Scores(window=window)))
