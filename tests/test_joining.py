"""Rows that join examples as turns: the tokens of the joined conversation, others in each epoch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.config import IGNORED, Recipe
from gptworks.data.conversations.examples import encode_conversation
from gptworks.data.conversations.packing import find_joint
from gptworks.data.conversations.reading import iter_conversations
from gptworks.data.opened import open_prepared
from gptworks.data.prepare import prepare
from gptworks.data.samples import Conversations, open_samples
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train
from serving import byte_tokenizer
from test_instruction import losses

SYSTEM_AT_FIRST = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + BUILT_IN["chatml"]
)
TEMPLATES = {"alpaca": "alpaca", "chatml": "chatml", "plain": "plain", "system": SYSTEM_AT_FIRST}


def joined(folder: Path, template: str, rows: list[Any] | None = None, **train_settings: Any) -> Recipe:
    tree = chats.tune_tree(folder, rows, max_steps=6, **train_settings)
    del tree["initialize_from"]
    tree["model"]["context_length"] = 256
    if template == SYSTEM_AT_FIRST:
        (folder / "template.jinja").write_text(template, encoding="utf-8")
        template = str(folder / "template.jinja")
    added = ["<|im_start|>", "<|im_end|>"]
    tree["tokenizer"] = {"type": "bpe", "vocab_size": 300, "added_tokens": added, "chat_template": template}
    tree["objective"] = {"type": "instruction", "packing": "turns", "allow": ["no-base-run"]}
    return parse_recipe(tree)


def opened(recipe: Recipe) -> tuple[Conversations, ChatTemplate]:
    prepared = prepare(recipe)
    samples, template = open_samples(recipe, prepared.folder), open_prepared(prepared.folder).chat_template
    assert isinstance(samples, Conversations) and template is not None
    return samples, template


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_row_is_the_conversation_of_its_examples(tmp_path: Path, name: str) -> None:
    recipe = joined(tmp_path, TEMPLATES[name])
    samples, template = opened(recipe)
    records = [one.messages for one in iter_conversations(recipe.data.conversations)]
    number_of = samples.train_shards.examples()["record"]
    seen = []
    for epoch in range(2):
        documents = []
        for row in range(samples.per_epoch):
            [shown] = samples.rows(row, epoch)
            here = [piece.document for piece in shown.pieces]
            assert [piece.begins_text for piece in shown.pieces] == [True] + [False] * (len(here) - 1)
            expected = encode_conversation(template, [turn for i in here for turn in records[number_of[i]]])
            n = len(expected.ids) - 1
            assert shown.inputs[:n].tolist() == expected.ids[:-1].tolist()
            targets = np.where(expected.learned[1:], expected.ids[1:].astype(np.int64), IGNORED)
            assert shown.targets[:n].tolist() == targets.tolist() and (shown.targets[n:] == IGNORED).all()
            assert shown.positions is not None and shown.positions[:n].tolist() == list(range(n))
            documents.append(here)
        assert sorted(i for here in documents for i in here) == list(range(len(number_of))), (
            "an epoch visits each example once"
        )
        seen.append({tuple(sorted(here)) for here in documents})
    assert max(len(here) for here in documents) > 2
    assert len(seen[0] & seen[1]) < len(seen[0]) / 2, "other examples are joined in the next epoch"


def test_batches_depend_only_on_the_position(tmp_path: Path) -> None:
    samples, _ = opened(joined(tmp_path, "chatml"))
    n = samples.per_epoch
    whole = samples.batch(n - 2, 0, 4)  # crosses the border of an epoch
    for i in range(4):
        for one, all_of_them in zip(samples.batch(n - 2, i, 1), whole, strict=True):
            assert (one[0] == all_of_them[i]).all()
    again = opened(joined(tmp_path, "chatml"))[0]
    assert all((a == b).all() for a, b in zip(again.batch(n - 2, 0, 4), whole, strict=True))


def test_what_cannot_be_joined_keeps_its_own_text(tmp_path: Path) -> None:
    """A conversation that ends with a question has no answer to follow, and one that is cut no end."""
    question = {"messages": [{"role": role, "content": "what of it?"} for role in ("user", "assistant", "user")]}
    rows = [question, {"instruction": "go on", "output": "on " * 600}, *chats.records(20)]
    recipe = joined(tmp_path, "chatml", rows)
    records = [
        {"messages": [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]}
        if "instruction" in row
        else row
        for row in rows
    ]
    chats.write_jsonl(tmp_path / "chats.jsonl", records)
    samples, _ = opened(recipe)
    number_of = samples.train_shards.examples()["record"].tolist()
    found = 0
    for row in range(samples.per_epoch):
        [shown] = samples.rows(row)
        for piece, following in zip(shown.pieces, shown.pieces[1:], strict=False):
            if number_of[piece.document] in (0, 1):
                assert following.begins_text
                found += 1
        for piece in shown.pieces:
            if number_of[piece.document] == 1:
                assert len(shown.pieces) == 1 and shown.padding == 0
                found += 1
    assert found >= 1 and samples.context_length == 256


def test_a_template_that_cannot_be_joined_is_refused() -> None:
    tokenizer = byte_tokenizer()
    for source in (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.last else 'before' }}<|im_end|>{% endfor %}",
        "{{ messages | length }}" + BUILT_IN["chatml"],
    ):
        with pytest.raises(UserError, match=r"objective\.packing=turns.*set packing=true"):
            find_joint(ChatTemplate(source, tokenizer))


def test_a_run_that_joins_is_resumed_exactly(tmp_path: Path) -> None:
    settings = {
        "precision": "fp32",
        "optimizer": "adamw",
        "batch_size": 4,
        "checkpoint_every": 2,
        "schedule": "constant",
    }
    whole = joined(tmp_path, "chatml", **settings)
    train(whole)
    expected = losses(whole.run_dir)
    parts = whole.model_copy(update={"run_dir": tmp_path / "parts"})
    train(parts.model_copy(update={"train": parts.train.model_copy(update={"max_steps": 3})}))
    train(parts, resume=True)
    assert losses(parts.run_dir) == expected and len(expected) == 6
