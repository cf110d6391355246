"""The features of a chat: another answer, an edited text, files, commands, and an answer that is stopped."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.cli.chat_terminal import HELP, Talk, Terminal
from gptworks.config import ConversationsSource
from gptworks.data.conversations.reading import iter_conversations
from gptworks.errors import UserError
from gptworks.infer import ChatSession, SamplingSettings, TurnSession
from gptworks.infer import chat as chat_module
from gptworks.infer.text import Piece
from test_engine import byte_tokenizer, writing


class Scripted:
    """An engine with a chat template that gives scripted answers and records its prompts."""

    context, restart_tokens, defaults = 2000, 1000, SamplingSettings()

    def __init__(self, *answers: str) -> None:
        self.tokenizer = byte_tokenizer()
        self.chat_template = ChatTemplate(BUILT_IN["chatml"], self.tokenizer)
        self.answers, self.prompts, self.seeds = list(answers), [], []

    def require_chat_template(self, _: str) -> ChatTemplate:
        return self.chat_template

    def pieces(self, ids: list[int], settings: Any, seed: int | None = None, **_: Any) -> Iterator[Piece]:
        self.prompts.append(self.tokenizer.decode(ids))
        self.seeds.append(seed)
        return self._written(self.answers.pop(0))

    def _written(self, answer: str) -> Iterator[Piece]:
        for i, character in enumerate(answer):
            if character == "^":
                os.kill(os.getpid(), signal.SIGINT)
            yield Piece(0, character, self.tokenizer.encode(character).ids[0], worked=i / 4)
        yield Piece(0, "", None, "stop")


class Typed(Terminal):
    """A terminal at which given lines are typed, and its output."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.prefilled, self.answers, self.remarks = list(lines), [], "", []

    def read(self, prompt: str, prefilled: str = "") -> str:
        self.prefilled.append(prefilled)
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.answers += text

    def remark(self, text: str) -> None:
        self.remarks.append(text)


def turns(*answers: str, **settings: Any) -> tuple[Any, TurnSession]:
    engine: Any = Scripted(*answers)
    return engine, TurnSession(engine, max_tokens=50, **settings)


def talk(session: ChatSession, *lines: str) -> Typed:
    terminal = Typed(*lines)
    Talk(session, terminal).run()
    return terminal


def contents(session: ChatSession) -> list[str]:
    return [message["content"] for message in session.said]


def test_another_answer_and_another_text_take_the_place_of_the_last() -> None:
    engine, session = turns("one", "two", "three", "four", "five", seed=7)
    terminal = talk(session, "first", "second", "/retry", "/edit third", "/edit", "fourth")
    assert contents(session) == ["first", "one", "fourth", "five"]
    assert terminal.prefilled[-2] == "third", "the text to be changed stands in the line"
    assert terminal.answers == "one\ntwo\nthree\nfour\nfive\n\n"
    assert engine.prompts[2] == engine.prompts[1] and engine.prompts[3] == engine.prompts[1].replace("second", "third")
    assert len(set(engine.seeds)) == 5, "each answer is drawn anew"
    assert session.n_turns == 5


def test_a_base_model_tries_again_from_the_same_text() -> None:
    session = ChatSession(writing("abcde"), temperature=0, max_tokens=3)
    for _ in session.send("ab"):
        pass
    before = list(session.token_ids)
    talk(session, "/retry", "a", "/retry", "/edit e", "/system be kind")
    assert contents(session) == ["ab", "cde", "e", "abc"]
    assert session.token_ids[: len(before)] == before and len(session.token_ids) == len(before) + 4


def test_commands_are_obeyed_and_unknown_ones_named() -> None:
    engine, session = turns("a", "b", "c", "d", "e", "f", temperature=1.0)
    terminal = talk(
        session, "/rety", "/zzz", "/retry", "/temperature 0.5", "/temperature", "/temperature warm", "/temperature -1",
        "/system be kind", "hello", "/usr/bin?", " /etc", '"""two', 'lines"""', "/reset", "/help", "again", "/quit",
        "more",
    )  # fmt: skip
    said = "\n".join(terminal.remarks)
    for words in (
        "no /rety: did you mean /retry?", "no /zzz: /help lists them", "there is no last text", "temperature 0.5",
        "/temperature warm: give a number", "temperature=-1.0", "(1 token)", HELP,
    ):  # fmt: skip
        assert words in said, words
    assert session.settings.temperature == 0.5
    assert engine.prompts[0].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")
    asked = [prompt.rpartition("user\n")[2].partition("<|im_end|>")[0] for prompt in engine.prompts[1:4]]
    assert asked == ["/usr/bin?", "/etc", "two\nlines"]
    assert contents(session) == ["again", "e"], "forgotten with /reset; nothing is read after /quit"
    assert terminal.lines == ["more"]
    assert all(f"/{command}" in HELP for command in Talk(session, terminal)._commands)


def test_an_interrupt_stops_the_answer_and_keeps_the_chat() -> None:
    engine, session = turns("ab^cd", "fine", "unread")
    before = signal.getsignal(signal.SIGINT)
    terminal = talk(session, "hello", "and now?")
    assert contents(session) == ["hello", "ab^", "and now?", "fine"]
    assert "assistant\nab^<|im_end|>" in engine.prompts[1]
    assert terminal.remarks[0] == "(3 tokens, 4 tokens/s; stopped)"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_saved_chat_is_read_by_training_and_can_be_continued(tmp_path: Path) -> None:
    engine, session = turns("one", "two", "three", system="be kind")
    file = tmp_path / "chat.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "other"}]}', encoding="utf-8")  # no end of line
    talk(session, "first", f"/save {file}", "second", f"/save {file}")
    source = ConversationsSource(type="conversations", path=str(file))
    _, first, second = iter_conversations([source])
    assert [len(one.messages) for one in (first, second)] == [3, 5]
    assert second.messages == [{"role": "system", "content": "be kind"}, *session.said]

    other_engine, other = turns("three", "four")
    terminal = talk(other, f"/load {file}", "/retry", "more")
    assert "continuing the 5 messages" in terminal.remarks[0] and "> second\ntwo\n" in terminal.answers
    assert other.system == "be kind" and contents(other) == ["first", "one", "second", "three", "more", "four"]
    assert other_engine.prompts[0] == engine.prompts[1]

    base = ChatSession(writing("abcde"), temperature=0, max_tokens=2)
    talk(base, "ab", f"/save {tmp_path / 'base.jsonl'}")
    again = ChatSession(writing("abcde"), temperature=0, max_tokens=2)
    talk(again, f"/load {tmp_path / 'base.jsonl'}", "")
    assert contents(again) == ["ab", "cd", "", "ea"]


def record(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no conversation"), ("{", "not JSON"), ("[1]", "not an object"), ("[" * 100_000, "not JSON"),
        ('{"text": "x"}', "its fields are text"), ('{"messages": [{"role": "user", "content": 3}]}', "not text"),
        (record("user"), "end with an answer"), (record("assistant", "user"), "assistant, user"),
        (record("user", "assistant", "system"), "alternate"), (record("system"), "alternate"),
        (record(*["user"] * 100), r"user, …\."), ("x" * 300_000, "such a file may have 200000"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_conversation_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr(chat_module, "MOST_FILE_BYTES", 200_000)
    file = tmp_path / "chat.jsonl"
    file.write_text(text, encoding="utf-8")
    _, session = turns("one")
    talk(session, "first")
    with pytest.raises(UserError, match=message):
        session.load(file)
    assert contents(session) == ["first", "one"] and session.last_text == "first"


def test_only_files_of_conversations_are_touched(tmp_path: Path) -> None:
    notes, fifo, session = tmp_path / "notes.txt", tmp_path / "fifo.jsonl", turns("one")[1]
    notes.write_text("mine", encoding="utf-8")
    os.mkfifo(fifo)
    terminal = talk(
        session, f"/save {tmp_path / 'empty.jsonl'}", "first", f"/save {notes}", "/save", f"/save {fifo}",
        f"/load {fifo}", f"/load {tmp_path / 'none.jsonl'}", f"/save {tmp_path / 'no' / 'where.jsonl'}",
    )  # fmt: skip
    said = [remark for remark in terminal.remarks if remark.startswith("error:")]
    for remark, words in zip(
        said,
        ("nothing to save", "ends in .jsonl", "/save needs a file", "FIFO", "FIFO", "No such file", "No such file"),
        strict=True,
    ):
        assert words in remark
    assert notes.read_text(encoding="utf-8") == "mine" and sorted(tmp_path.iterdir()) == [fifo, notes]


def test_no_answer_drives_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.write("a\x1b]0;title\x07b\x9b2J\r\n\tc")
    terminal.remark("\x1b[2J")
    shown = capsys.readouterr()
    assert shown.out == "a\ufffd]0;title\ufffdb\ufffd2J\ufffd\n\tc" and shown.err == "\ufffd[2J\n"
