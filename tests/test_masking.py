"""Which tokens of a conversation are learned, against rules written for each template."""

import multiprocessing
from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer

from gptworks.chat_template import BUILT_IN, ChatTemplate, Message
from gptworks.config import BPETokenizer, CharTokenizer
from gptworks.data.conversations import examples
from gptworks.data.conversations.examples import encode_conversation, encode_records
from gptworks.errors import UserError
from gptworks.tokenizer import add_tokens, train_tokenizer

CHAT: list[Message] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "Where is\nthe <|im_end|> école?"},
    {"role": "assistant", "content": "Là-bas, near the <|im_end|>."},
    {"role": "user", "content": "assistant\nSure?"},
    {"role": "assistant", "content": "Yes"},
]
ANSWERS = [CHAT[2]["content"], CHAT[4]["content"]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "".join(message["content"] for message in CHAT) + "### Response:\nAssistant: User:\n\n" * 4
    return add_tokens(
        train_tokenizer(BPETokenizer(type="bpe", vocab_size=300), [text * 3]), ["<|im_start|>", "<|im_end|>"]
    )


def learned_texts(template: ChatTemplate, messages: list[Message]) -> list[str]:
    example = encode_conversation(template, messages)
    runs: list[list[int]] = [[]]
    for token_id, learned in zip(example.ids.tolist(), example.learned.tolist(), strict=True):
        if learned:
            runs[-1].append(token_id)
        elif runs[-1]:
            runs.append([])
    plain = template.tokenizer
    return [plain.decode(run, skip_special_tokens=False) for run in runs if run]


@pytest.mark.parametrize(("name", "end", "space"), [
    ("chatml", "<|im_end|>", ""), ("alpaca", "<|endoftext|>", ""), ("plain", "<|endoftext|>", " "),
])  # fmt: skip
def test_only_answers_and_their_end_tokens_are_learned(tokenizer: Tokenizer, name: str, end: str, space: str) -> None:
    template = ChatTemplate(BUILT_IN[name], tokenizer)
    assert learned_texts(template, CHAT) == [space + answer + end for answer in ANSWERS]
    example = encode_conversation(template, CHAT)
    assert example.ids.tolist() == template.encode(CHAT)
    assert example.all_end and example.as_given
    assert example.text_bytes == len(template.render(CHAT).encode())


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_text_before_an_answer_is_what_generation_reads(tokenizer: Tokenizer, name: str) -> None:
    template = ChatTemplate(BUILT_IN[name], tokenizer)
    example = encode_conversation(template, CHAT[:3])
    first = example.learned.tolist().index(True)
    assert example.ids[:first].tolist() == template.encode(CHAT[:2], add_generation_prompt=True)


def test_an_answer_that_would_merge_with_the_text_before_it(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(BUILT_IN["alpaca"], tokenizer)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\n\nLate"}]
    example = encode_conversation(template, chat)
    first = example.learned.tolist().index(True)
    assert example.ids[:first].tolist() == template.encode(chat[:1], add_generation_prompt=True)
    assert example.ids.tolist() != template.encode(
        chat
    )  # there, a token holds the end of one and the start of the other
    assert tokenizer.decode(example.ids[first:].tolist()) == "\n\n\nLate\n\n"


def test_a_template_without_an_end_token() -> None:
    plain = train_tokenizer(CharTokenizer(type="char"), ["UA: qYesno\n"])
    template = ChatTemplate(
        "{% for m in messages %}{{ 'U: ' if m.role == 'user' else 'A: ' }}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}A: {% endif %}",
        plain,
    )
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Yes"}]
    example = encode_conversation(template, chat)
    assert not example.all_end and example.as_given
    assert learned_texts(template, chat) == ["Yes\n"]


def test_a_template_that_changes_an_answer(tokenizer: Tokenizer) -> None:
    shouted = BUILT_IN["chatml"].replace("message['content']", "message['content'] | upper")
    assert not encode_conversation(ChatTemplate(shouted, tokenizer), CHAT[:3]).as_given
    trimmed = BUILT_IN["chatml"].replace("message['content']", "message['content'] | trim")
    assert encode_conversation(ChatTemplate(trimmed, tokenizer), CHAT[:3]).as_given


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Tokenizer) -> None:
    forgetful = "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match=r"writes the turns before it, .* differently than in the complete .*turn 3"):
        encode_conversation(ChatTemplate(forgetful, tokenizer), CHAT)


@dataclass(frozen=True)
class Record:
    where: str
    conversations: list[list[Message]]
    unlearned: frozenset[int] = frozenset()


def test_processes_change_nothing_and_name_the_record_that_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(BUILT_IN["chatml"], tokenizer)
    records = [
        Record(f"record {i}", [[*CHAT[:4], {"role": "assistant", "content": f"No. {i}"}], CHAT[: 3 + i % 3]])
        for i in range(50)
    ]
    one_process = list(encode_records(template, records, 1))
    monkeypatch.setattr(examples, "_BATCH_CHARACTERS", 500)
    monkeypatch.setattr(examples, "_BATCHES_WORTH_A_POOL", 2)
    shared = list(encode_records(template, records, 2))
    assert [record for record, _ in shared] == records
    for (_, ones), (_, others) in zip(one_process, shared, strict=True):
        assert len(ones) == 2
        for one, other in zip(ones, others, strict=True):
            assert one.ids.tolist() == other.ids.tolist()
            assert one.learned.tolist() == other.learned.tolist()
            assert (one.text_bytes, one.all_end, one.as_given) == (other.text_bytes, other.all_end, other.as_given)
    changing = ChatTemplate("{{ messages | length }}" + template.source, tokenizer)
    with pytest.raises(UserError, match="record 0: the chat template writes the turns"):
        list(encode_records(changing, records, 2))
    assert not multiprocessing.active_children()
