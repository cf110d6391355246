"""Every key that has a meaning in training programs is read with that meaning, or reported before training."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from chats import write_jsonl
from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.config import BPETokenizer, ConversationsSource, PreferencesSource
from gptworks.data.conversations.examples import encode_records
from gptworks.data.conversations.keys import LEARNING_SWITCHES, RECORD_KEYS, TURN_KEYS
from gptworks.data.conversations.preferences import Pair, iter_pairs
from gptworks.data.conversations.reading import Conversation, iter_conversations
from gptworks.errors import UserError
from gptworks.tokenizer import add_tokens, train_tokenizer

ASKED = [{"role": "user", "content": "First?"}, {"role": "assistant", "content": "one"}]
AGAIN = [{"role": "user", "content": "Second?"}, {"role": "assistant", "content": "two"}]
CHAT = {"messages": [*ASKED, *AGAIN]}
PAIR = {"prompt": "Which?", "chosen": "this", "rejected": "that"}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    trained = train_tokenizer(BPETokenizer(type="bpe", vocab_size=259), ["First? one Second? two user assistant"])
    tokenizer: Tokenizer = add_tokens(trained, ["<|im_start|>", "<|im_end|>"])
    return ChatTemplate(BUILT_IN["chatml"], tokenizer)


def read(folder: Path, *records: Any) -> list[Conversation]:
    file = folder / "records.json"
    file.write_text(json.dumps(records))
    return list(iter_conversations([ConversationsSource(type="conversations", path=str(file))]))


def pair(folder: Path, record: Any) -> Pair:
    file = folder / "pairs.json"
    file.write_text(json.dumps([PAIR, record]))
    return list(iter_pairs([PreferencesSource(type="preferences", path=str(file))]))[1]


def learned(folder: Path, template: ChatTemplate, record: Any) -> list[str]:
    """Return the learned texts of a record, by decoding its learned tokens."""
    ((_, (example,)),) = encode_records(template, read(folder, record), 1)
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(example.ids.tolist(), example.learned.tolist(), strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [template.tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def texts(record: Conversation | Pair) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in record.messages]


# ------------------------------------------------------------------------------------------- what is not learned


@pytest.mark.parametrize("name", LEARNING_SWITCHES)
@pytest.mark.parametrize("value", [0, False, 0.0, "false", "0"])
def test_an_answer_that_is_switched_off_is_read_and_not_learned(
    tmp_path: Path, template: ChatTemplate, name: str, value: Any
) -> None:
    off = {"messages": [ASKED[0], ASKED[1] | {name: value}, *AGAIN]}
    assert learned(tmp_path, template, CHAT) == ["one<|im_end|>", "two<|im_end|>"]
    assert learned(tmp_path, template, off) == ["two<|im_end|>"]
    ((_, (with_it,)),) = encode_records(template, read(tmp_path, off), 1)
    assert with_it.ids.tolist() == template.encode(CHAT["messages"])
    shared = [{"from": "human", "value": "First?", name: value}, {"from": "gpt", "value": "one", name: value}]
    assert learned(tmp_path, template, {"conversations": shared}) == []
    for on in (1, True, None):
        turns = [turn | ({name: on} if turn["role"] == "assistant" else {}) for turn in CHAT["messages"]]
        (record,) = read(tmp_path, {"messages": turns})
        assert (record.unlearned, record.unread) == (frozenset(), ())


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"weight": 0.5}, r"record 1: `weight` of turn 2 is 0\.5; it is 1 or true"),
        ({"train": "maybe"}, r"`train` of turn 2 is 'maybe'"),
        ({"loss": 2}, r"`loss` of turn 2 is 2"),
        ({"weight": 1, "train": False}, r"turn 2 states `weight` 1 and `train` False, which contradict"),
    ],
)
def test_a_switch_that_is_not_on_or_off_is_refused(tmp_path: Path, turn: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, {"messages": [ASKED[0], ASKED[1] | turn]})


def test_of_trls_prompts_and_completions_the_completion_is_learned(tmp_path: Path, template: ChatTemplate) -> None:
    record = {"prompt": [*ASKED, AGAIN[0]], "completion": [AGAIN[1]]}
    assert learned(tmp_path, template, record) == ["two<|im_end|>"]


def test_the_answers_of_alpacas_history_are_learned(tmp_path: Path, template: ChatTemplate) -> None:
    record = {"instruction": "Second?", "output": "two", "history": [["First?", "one"]], "system": "Count."}
    assert learned(tmp_path, template, record) == ["one<|im_end|>", "two<|im_end|>"]
    (read_one,) = read(tmp_path, record)
    assert texts(read_one) == [("system", "Count."), *((m["role"], m["content"]) for m in CHAT["messages"])]
    assert read_one.unread == ()
    for broken in (["First?", "one"], [["First?"]], [["First?", None]], "First?"):
        with pytest.raises(UserError, match=r"`history` is not a list of \[question, answer\]"):
            read(tmp_path, record | {"history": broken})


# ---------------------------------------------------------------------------------------------- system messages


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_message_next_to_turns_comes_first_and_once(tmp_path: Path, name: str) -> None:
    shared = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    for record in (CHAT, shared):
        (found,) = read(tmp_path, record | {name: "Count."})
        assert texts(found)[0] == ("system", "Count.") and len(found.messages) == 1 + len(next(iter(record.values())))
        assert found.unread == ()
    with_turn = {"messages": [{"role": "system", "content": "Count.\n"}, *ASKED]}
    (found,) = read(tmp_path, with_turn | {name: " Count."})
    assert [role for role, _ in texts(found)] == ["system", "user", "assistant"]
    with pytest.raises(UserError, match=r"record 1: `\w+` and the first turn are two system messages that differ"):
        read(tmp_path, with_turn | {name: "Sing."})
    with pytest.raises(UserError, match="`system` and `system_prompt` are two system messages"):
        read(tmp_path, CHAT | {"system": "a", "system_prompt": "b"})


def test_a_developers_message_is_the_system_message(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"messages": [{"role": "developer", "content": "Count."}, *ASKED]})
    assert texts(found)[0] == ("system", "Count.")


# ------------------------------------------------------------------------------------------------- what is named

VALUES: dict[str, Any] = {
    "label": False, "kto_tag": False, "weight": 0.5, "train": False, "training": False, "loss": False, "mask": True,
    "prefix": True, "tool_calls": [{"id": "1", "function": {"name": "f"}}], "tools": [{"type": "function"}],
    "score": 0.2,
}  # fmt: skip


@pytest.mark.parametrize("name", RECORD_KEYS)
def test_every_key_of_a_record_is_read_or_named(tmp_path: Path, name: str) -> None:
    value = VALUES.get(name, "something")
    if "messages" in RECORD_KEYS[name].read_in:
        if name != "messages":
            assert "something" in str(read(tmp_path, CHAT | {name: value})[0].messages)
    else:
        assert read(tmp_path, CHAT | {name: value})[0].unread == (name,)
    instruction = {"instruction": "First?", "output": "one"}
    if name == "messages":
        return  # then it is of another shape
    if "alpaca" not in RECORD_KEYS[name].read_in:
        found = read(tmp_path, instruction, instruction | {name: value})[1]
        assert found.unread == (name,)
    if "preferences" not in RECORD_KEYS[name].read_in:
        assert pair(tmp_path, PAIR | {name: value}).unread == (name,)


@pytest.mark.parametrize("name", TURN_KEYS)
def test_every_key_of_a_turn_is_read_or_named(tmp_path: Path, name: str) -> None:
    value = VALUES.get(name, "something")
    if name in (*LEARNING_SWITCHES, "role", "content"):
        return  # read: see above
    (found,) = read(tmp_path, {"messages": [ASKED[0], ASKED[1] | {name: value}]})
    assert found.unread == (f"turn.{name}",)
    of_turn = pair(tmp_path, PAIR | {"chosen": [{"role": "assistant", "content": "this", name: value}]})
    assert of_turn.unread == (f"turn.{name}",)


def test_a_question_that_is_to_be_learned_is_named(tmp_path: Path) -> None:
    for name in LEARNING_SWITCHES:
        for on in (True, 1, "true", " 1"):
            (found,) = read(tmp_path, {"messages": [ASKED[0] | {name: on}, ASKED[1]]})
            assert found.unread == (f"turn.{name}",)
        for off in (False, 0, "false", "0"):
            (found,) = read(tmp_path, {"messages": [ASKED[0] | {name: off}, ASKED[1]]})
            assert found.unread == ()


@pytest.mark.parametrize(
    "more",
    [
        {"id": 7, "source": "web", "category": "math", "split": "train", "lang": "en", "model": "x", "url": "u"},
        {"tools": [], "functions": None, "images": None, "label": True, "kto_tag": None, "train": True, "weight": 1},
        {"prompt": "First?", "prompt_id": "3"},
        {"conversations": [{"from": "human", "value": "First?"}, {"from": "gpt", "value": "one"}]},
        {"label": "geography", "timestamp": 3.5, "text": "First? one"},
    ],
)
def test_keys_without_a_meaning_and_repetitions_are_not_reported(tmp_path: Path, more: dict[str, Any]) -> None:
    (found,) = read(tmp_path, CHAT | more)
    assert found.unread == ()


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (CHAT | {"sytem": "Count."}, "sytem"),
        (CHAT | {"System": "Count."}, "System"),
        (CHAT | {"tool": [1], "functoins": [1]}, "functoins"),
        ({"messages": [ASKED[0], ASKED[1] | {"wieght": 0}]}, "turn.wieght"),
        ({"messages": [ASKED[0], ASKED[1] | {"Train": False}]}, "turn.Train"),
        ({"instruction": "First?", "output": "one", "inputs": "3"}, "inputs"),
        ({"instruction": "First?", "output": "one", "response": "uno"}, "response"),
        (CHAT | {"rejected_response": "three"}, "rejected_response"),
    ],
)
def test_a_misspelt_key_is_named(tmp_path: Path, record: dict[str, Any], named: str) -> None:
    assert read(tmp_path, record)[0].unread == (named,)


def test_scores_of_a_pair_are_named_where_they_prefer_the_rejected_answer(tmp_path: Path) -> None:
    assert pair(tmp_path, PAIR | {"score_chosen": 8.0, "score_rejected": 3, "chosen_model": "x"}).unread == ()
    wrong = pair(tmp_path, PAIR | {"score_chosen": 3.0, "score_rejected": 8.0})
    assert wrong.unread == ("score_chosen", "score_rejected")


def test_keys_of_a_table_without_values_are_not_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    turns = [
        {"role": "user", "content": "First?", "weight": None, "tool_calls": None, "name": None},
        {"role": "assistant", "content": "one", "weight": 0, "tool_calls": None, "name": None},
    ]
    rows = [{"messages": turns, "tools": None, "label": None}, {"messages": turns, "tools": "[f]", "label": False}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    source = ConversationsSource(type="conversations", path=str(tmp_path / "x.parquet"))
    first, second = iter_conversations([source])
    assert (first.unread, first.unlearned) == ((), {1})
    assert (second.unread, second.unlearned) == (("tools", "label"), {1})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
            "a part of type 'image_url'",
        ),
        ([{"type": "refusal", "refusal": "no"}], "a part of type 'refusal'"),
        (["a"], "a part a str"),
    ],
)
def test_parts_of_a_turn_that_are_not_text_are_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"record 1: `content` of turn 2 has {message}"):
        read(tmp_path, {"messages": [ASKED[0], {"role": "assistant", "content": content}]})
    with pytest.raises(UserError, match="not text, and its `tool_calls` is not read"):
        read(tmp_path, {"messages": [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [{}]}]})


# ---------------------------------------------------------------------------------------------------- preferences

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "Which?"), ("assistant", "g"), ("assistant", "b")))
SYSTEM = {"role": "system", "content": "Choose."}
EARLIER = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Which?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": " Which?\n", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"prompt": "Which?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": "Which?", "system": "Choose.", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "system": "Choose. ", "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, USER]),
        ({"prompt": "Which?", "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, [*EARLIER, USER]),
        ({"prompt": "Hello.", "chosen": [*EARLIER, USER, GOOD], "rejected": [*EARLIER, USER, BAD]}, [*EARLIER, USER]),
        ({"prompt": [*EARLIER, USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [*EARLIER, USER]),
        ({"prompt": EARLIER[:1], "chosen": [EARLIER[1], USER, GOOD], "rejected": [EARLIER[1], USER, BAD]},
         [*EARLIER, USER]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"chosen": [USER, GOOD], "rejected": "b"}, [USER]),
        ({"prompt": [SYSTEM], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        ({"instruction": "Which?", "history": [["Hello.", "Hi."]], "chosen": "g", "rejected": "b"}, [*EARLIER, USER]),
        ({"conversations": [{"from": "human", "value": "Which?"}], "chosen": {"from": "gpt", "value": "g"},
          "rejected": {"from": "gpt", "value": "b"}}, [USER]),
        ({"prompt": "Which?", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
    ],
)  # fmt: skip
def test_a_prompt_that_is_stated_several_times_is_read_once(
    tmp_path: Path, record: dict[str, Any], prompt: list[Any]
) -> None:
    found = pair(tmp_path, record)
    assert (found.prompt, found.chosen, found.rejected, found.unread) == (prompt, GOOD, BAD, ())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "What?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
         r"the prompt and `chosen` state prompts that differ .*user: 'What\?' against user: 'Which\?'"),
        ({"chosen": [USER, GOOD], "rejected": [USER | {"content": "What?"}, BAD]}, "`chosen` and `rejected` state"),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM | {"content": "Do."}, USER, BAD]}, r"'Choose.' against"),
        ({"prompt": "Which?", "system": "Do.", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]},
         "`system` and the first turn are two system messages that differ"),
        ({"chosen": [*EARLIER, USER, GOOD], "rejected": [USER, BAD]}, "`chosen` and `rejected` state prompts"),
        ({"prompt": "Which?", "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]}, "kept out of the loss"),
    ],
)  # fmt: skip
def test_prompts_that_contradict_each_other_are_refused(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"pairs\.json, record 2: .*{message}"):
        pair(tmp_path, record)


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": [USER], "input": "Of these.", "chosen": "g", "rejected": "b"}, ("input",)),
        ({"prompt": "Which?", "instruction": "Choose.", "chosen": "g", "rejected": "b"}, ("instruction",)),
        ({"prompt": "Which?", "chosen": "g", "rejected": "b", "output": "other"}, ("output",)),
        ({"prompt": "Which?", "chosen": "g", "rejected": "b", "output": "g", "input": ""}, ()),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "Which?"}]}], "chosen": "g",
          "rejected": "b"}, ()),
    ],
)  # fmt: skip
def test_of_two_ways_to_state_a_prompt_the_one_that_is_not_read_is_named(
    tmp_path: Path, record: dict[str, Any], named: tuple[str, ...]
) -> None:
    found = pair(tmp_path, record)
    assert (found.prompt, found.unread) == ([USER], named)


def test_values_that_are_deep_long_or_half_a_character_do_no_harm(tmp_path: Path) -> None:
    (found,) = read(tmp_path, CHAT | {"prompt": json.loads("[" * 500 + "]" * 500)})
    assert found.unread == ("prompt",)
    with pytest.raises(UserError, match=r"`weight` of turn 1 is 10{38}…; it is"):
        read(tmp_path, {"messages": [ASKED[1] | {"weight": 10**400}]})
    (found,) = read(tmp_path, {"instruction": "half \ud83d of one", "output": "o\udc00", "system": "\ud83d"})
    assert found.unread == ()


def test_a_file_of_lines_names_its_row(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [PAIR, PAIR, PAIR | {"chosen": [USER | {"content": "No"}, GOOD]}])
    with pytest.raises(UserError, match="record 3: the prompt and `chosen`"):
        list(iter_pairs([PreferencesSource(type="preferences", path=str(file))]))
