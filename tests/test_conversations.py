"""Records of three shapes in files of four kinds, and the errors for broken ones."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import chats
from chats import write_jsonl
from gptworks.config import ConversationsSource
from gptworks.data.conversations.reading import Conversation, fraction_held_out, is_held_out, iter_conversations
from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.recipe import parse_recipe

ALPACA = {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": 7}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Ho"}, {"type": "text", "text": "w?"}]},
        {"role": "assistant", "content": "So."},
    ]
}
TURNS = {
    "alpaca": [("user", "Translate.\n\nGuten Tag"), ("assistant", "Good day")],
    "sharegpt": [("user", "Hi"), ("assistant", "Hello")],
    "messages": [("system", "Be brief."), ("user", "How?"), ("assistant", "So.")],
}


def read(path: Path | str, **settings: Any) -> list[Conversation]:
    return list(iter_conversations([ConversationsSource(type="conversations", path=str(path), **settings)]))


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(("shape", "record"), [("alpaca", ALPACA), ("sharegpt", SHAREGPT), ("messages", MESSAGES)])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "NDJSON", "json", "parquet", "dataset", "saved"])
def test_shapes_are_recognized_in_every_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, record: dict[str, Any], kind: str
) -> None:
    file = tmp_path / f"data.{kind}"
    if shape == "messages":  # a table's column has one type
        record = {"messages": [message | {"content": text} for message, (_, text) in zip(
            record["messages"], TURNS[shape], strict=True)]}  # fmt: skip
    if kind in ("jsonl", "NDJSON"):
        write_jsonl(file, [record, record])
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress((json.dumps(record) + "\n").encode() * 2))
    elif kind == "json":
        file.write_text(json.dumps([record, record]))
    elif kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist([record, record]), file)
    else:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        file = tmp_path / "folder"
        if kind == "dataset":
            file.mkdir()
            write_jsonl(file / "train.jsonl", [record, record])
        else:
            datasets.Dataset.from_list([record, record]).save_to_disk(file)
    if kind in ("dataset", "saved"):
        source = ConversationsSource(type="conversations", dataset=str(file))
        found = list(iter_conversations([source]))
    else:
        found = read(file)
    assert [(turns(one), one.shape, one.record) for one in found] == [
        (TURNS[shape], shape, 1),
        (TURNS[shape], shape, 2),
    ]


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("CSV", ";"), ("tsv", "\t")])
def test_a_table_gives_one_record_a_row(tmp_path: Path, ending: str, delimiter: str) -> None:
    rows = [["instruction", "input", "output"], ["Translate.", "Guten Tag", "Good day"], ["Sum up.", "", "In short"]]
    with (tmp_path / f"data.{ending}").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    found = read(tmp_path)
    assert [(turns(one), one.shape) for one in found] == [
        (TURNS["alpaca"], "alpaca"), ([("user", "Sum up."), ("assistant", "In short")], "alpaca"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "Q", "answer": "A"}, [("user", "Q"), ("assistant", "A")]),  # GSM8K
        (
            {"system_prompt": "S", "question": "Q", "response": "A"},  # OpenOrca
            [("system", "S"), ("user", "Q"), ("assistant", "A")],
        ),
        ({"query": "Q", "response": "A", "history": [["q", "a"]]},
         [("user", "q"), ("assistant", "a"), ("user", "Q"), ("assistant", "A")]),  # ms-swift
        ({"instruction": "Q", "context": "C", "response": "A", "category": "qa"},
         [("user", "Q\n\nC"), ("assistant", "A")]),  # Dolly
        ({"input": "Q", "output": "A"}, [("user", "Q"), ("assistant", "A")]),
        ({"instruction": "", "input": "Q", "output": "A"}, [("user", "Q"), ("assistant", "A")]),
        ({"conversations": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
         [("user", "Q"), ("assistant", "A")]),
        ({"messages": [{"from": "Human ", "value": "Q"}, {"from": "GPT", "value": "A"}]},
         [("user", "Q"), ("assistant", "A")]),
        ({"messages": '[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]'},
         [("user", "Q"), ("assistant", "A")]),
        ({"messages": [{"role": "user", "content": "Q"}, {"role": "model", "content": "A"}]},
         [("user", "Q"), ("assistant", "A")]),
    ],
)  # fmt: skip
def test_fields_that_published_datasets_use_are_read(
    tmp_path: Path, record: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    (found,) = read(write_jsonl(tmp_path / "x.jsonl", [record]))
    assert (turns(found), found.unread) == (expected, ())


def test_fields_in_another_case_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`Instruction` is perhaps `instruction`; `Response` is perhaps `response`"):
        read(write_jsonl(tmp_path / "x.jsonl", [{"Instruction": "Q", "Response": "A"}]))
    with pytest.raises(UserError, match=r"fields are prompt, chosen, rejected; `chosen` is .* of type preferences"):
        read(write_jsonl(tmp_path / "x.jsonl", [{"prompt": "Q", "chosen": "A", "rejected": "B"}]))


def test_messages_in_parts_and_files_of_a_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", [MESSAGES])
    (tmp_path / "a.json").write_text(json.dumps([ALPACA, {"prompt": "p", "completion": "c", "input": ""}]))
    found = read(tmp_path)
    assert [(Path(one.origin).name, one.shape) for one in found] == [
        ("a.json", "alpaca"), ("a.json", "alpaca"), ("b.jsonl", "messages"),
    ]  # fmt: skip
    assert [turns(one) for one in found] == [TURNS["alpaca"], [("user", "p"), ("assistant", "c")], TURNS["messages"]]


BROKEN: list[tuple[Any, str]] = [
    ({"asked": "?"}, r"record 2: no field `instruction`; its fields are asked .*`instruction` and `output`"),
    ({"instruction": "x"}, r"record 2: no answer: none of the fields output, .*read as alpaca"),
    ({"instruction": "x", "output": 3}, r"record 2: `output` is a int, not text"),
    ({"instruction": None, "output": "y"}, r"record 2: `instruction` is nothing, not text"),
    (SHAREGPT, r"record 2: no field `instruction`; its fields are conversations, id \(its file is read as alpaca\)"),
    (["x"], r"2: a list, not an object|record 2: it is a list"),
]


@pytest.mark.parametrize(("record", "message"), BROKEN)
def test_a_broken_record_is_named(tmp_path: Path, record: Any, message: str) -> None:
    (tmp_path / "data.json").write_text(json.dumps([ALPACA, record]))
    with pytest.raises(UserError, match=message):
        read(tmp_path / "data.json")


def test_broken_turns_are_named(tmp_path: Path) -> None:
    for turn, message in (
        ({"role": "robot", "content": "x"}, "turn 1 has the role 'robot'; known are system, user, human"),
        ({"role": "user"}, "turn 1 of `messages` is not an object with `role` and `content`"),
        ({"role": "user", "content": 1}, "`content` of turn 1 is a int, not text"),
    ):
        with pytest.raises(UserError, match=message):
            read(write_jsonl(tmp_path / "x.jsonl", [{"messages": [turn]}]))
    with pytest.raises(UserError, match="`messages` is empty, not a list of turns"):
        read(write_jsonl(tmp_path / "x.jsonl", [{"messages": []}]))


def test_a_list_in_a_wrongly_named_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.json", [ALPACA, ALPACA])
    with pytest.raises(UserError, match=r"name the file \.jsonl"):
        read(tmp_path / "x.json")
    (tmp_path / "y.json").write_text(json.dumps(ALPACA))
    with pytest.raises(UserError, match=r"holds an object with the keys .*, not a list"):
        read(tmp_path / "y.json")


def test_few_prompts_too_have_one_that_is_held_out() -> None:
    """At the given fraction, a third of the sets of 20 prompts have none."""
    raised = 0
    for seed in range(60):
        for n in (2, 5, 20):
            prompts = [[{"role": "user", "content": f"{seed}, {i}?"}] for i in range(n)]
            fraction = fraction_held_out(iter(prompts), 0.05)
            held_out = [is_held_out(prompt, fraction) for prompt in prompts]
            given = [is_held_out(prompt, 0.05) for prompt in prompts]
            assert held_out == given if any(given) else sum(held_out) == 1
            raised += n == 20 and not any(given)
    assert 10 < raised < 35
    assert fraction_held_out(prompts[:1] * 3, 1e-9) == 1e-9, "all prompts are equal: none is left to train on"


@pytest.mark.parametrize(("n", "message"), [(0, "hold no record, and"), (1, "hold records of one prompt, and")])
def test_too_few_prompts_to_hold_one_out_are_named(tmp_path: Path, n: int, message: str) -> None:
    tree = chats.tune_tree(tmp_path, chats.records(1) * n)
    tree["tokenizer"] = {"type": "char", "chat_template": "plain"}
    with pytest.raises(UserError, match=f"data.sources {message} .* give two prompts or more"):
        prepare(parse_recipe(tree))


def test_a_dataset_of_few_records_has_both_splits(tmp_path: Path) -> None:
    for n in (2, 3, 25):
        folder = tmp_path / str(n)
        folder.mkdir()
        tree = chats.tune_tree(folder, chats.records(n))
        tree["data"]["validation"] = {"fraction": 0.001}
        tree["tokenizer"] = {"type": "bpe", "vocab_size": 257, "chat_template": "plain"}
        splits = prepare(parse_recipe(tree)).manifest.splits
        assert (splits["train"].documents, splits["validation"].documents) == (n - 1, 1)
