"""A conversation that outgrows the context: what is dropped, and the same answers at every door."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest
from typer.main import get_command

from gptworks.chat_template import BUILT_IN, ChatTemplate
from gptworks.choices import SAMPLING
from gptworks.cli import app
from gptworks.cli.chat_terminal import Talk
from gptworks.infer import Engine, SamplingSettings, TurnSession
from gptworks.infer.fitting import ContextExceeded, fit_conversation
from gptworks.serve.settings import ServerSettings
from gptworks.special_tokens import Stated, attach
from gptworks.studio.app import create_served
from serving import CONTEXT, KEY, Running, posted, running_app, tiny_engine
from test_chat import Typed
from test_serve import events

SYSTEM = {"role": "system", "content": "be kind"}
N_CONVERSATIONS, N_TURNS = 10, 10


def engine() -> Engine:
    made = tiny_engine(seed=1)
    made.chat_template = ChatTemplate(BUILT_IN["chatml"], made.tokenizer)
    return made


@pytest.fixture(scope="module")
def talk() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """`gptworks serve` with its page, which answers as the studio does."""
    served = create_served({"talk": engine()}, ServerSettings(api_keys=(KEY,)), {})
    with running_app(served) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


def conversation(n_turns: int, *first: dict[str, str]) -> list[dict[str, str]]:
    """Return turns of different lengths that end with a question."""
    said = [{"role": role, "content": f"{role} {i} {'x' * (7 * i % 11)}"} for i in range(n_turns)
            for role in ("user", "assistant")]  # fmt: skip
    return [*first, *said[:-1]]


def expected(engine: Engine, messages: list[dict[str, str]], room: int) -> tuple[list[int], int]:
    """Drop one exchange after the other until the rest fits or only the last question is left."""
    assert engine.chat_template is not None
    system, said = [m for m in messages if m["role"] == "system"], [m for m in messages if m["role"] != "system"]
    n_dropped = 0
    while True:
        ids = engine.chat_template.encode([*system, *said[n_dropped:]], add_generation_prompt=True)
        if len(ids) <= room or n_dropped >= len(said) - 1:
            return ids, n_dropped
        n_dropped += 2


@pytest.mark.parametrize("system", [(), (SYSTEM,)])
def test_as_few_of_the_oldest_exchanges_as_needed_are_dropped(talk: Engine, system: Any) -> None:
    found = set()
    for n_turns in range(1, 12, 2):
        messages = conversation(n_turns, *system)
        for context in range(80, 700, 88):
            for answer in (1, 30, 10**9):
                fitted = fit_conversation(talk.chat_template, messages, context, answer)
                assert fitted == expected(talk, messages, context - min(answer, context // 2))
                assert len(fitted.ids) <= context
                found.add(fitted.n_dropped)
    assert found == set(range(0, 21, 2))


def test_system_messages_stay_wherever_they_are_and_an_answer_never_comes_first(talk: Engine) -> None:
    later = {"role": "system", "content": "be brief"}
    greeting = {"role": "assistant", "content": "hello, what can I do for you? " * 3}
    first, answer, last = conversation(2)
    said = [SYSTEM, greeting, first, later, answer, last]
    for room, kept in ((300, said), (200, [SYSTEM, first, later, answer, last]), (100, [SYSTEM, later, last])):
        ids, n_dropped = fit_conversation(talk.chat_template, said, 2 * room, 10**9)
        assert talk.tokenizer.decode(ids, skip_special_tokens=False) == talk.chat_template.render(
            kept, add_generation_prompt=True
        ), room
        assert n_dropped == len(said) - len(kept)


def test_a_question_that_exceeds_the_context_alone_is_refused_unread_if_its_bytes_show_it(talk: Engine) -> None:
    with pytest.raises(ContextExceeded, match=r"the newest question alone has 2\d\d tokens; .* context is 128 tokens"):
        fit_conversation(talk.chat_template, [*conversation(3)[:-1], {"role": "user", "content": "a" * 200}], 128, 10)
    long = {"role": "system", "content": "be brief " * 30}
    with pytest.raises(ContextExceeded, match=r"the newest question with the system messages has \d+ tokens"):
        fit_conversation(talk.chat_template, [long, *conversation(3)], 128, 10)

    read: list[int] = []

    class Read:
        def encode(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
            read.append(sum(len(message["content"]) for message in messages))
            return talk.chat_template.encode(messages, **options)

    long = [{"role": "user", "content": "a" * 10**6}]
    with pytest.raises(ContextExceeded, match="the conversation has 1,000,000 bytes of text"):
        fit_conversation(Read(), long, 128, 10, most_bytes=1000)
    assert not read
    answered = [*long, {"role": "assistant", "content": "b" * 10**6}, *conversation(1)]
    assert fit_conversation(Read(), answered, 128, 10, most_bytes=1000).n_dropped == 2
    assert max(read) <= 1000


def test_ten_conversations_of_ten_turns_are_the_same_at_every_door(talk: Engine, http: httpx.Client) -> None:
    """Settings other than the length and the seed are each door's own defaults."""
    most, n_unread = 6, 0
    for number in range(N_CONVERSATIONS):
        session = TurnSession(talk, max_tokens=most, seed=100 * number, system="be kind" * (number % 2))
        questions = [f"{number} and {turn}?" for turn in range(N_TURNS)]
        terminal = Typed(*questions)
        Talk(session, terminal).run()
        messages = session.messages
        assert terminal.answers == "".join(f"{one['content']}\n" for one in session.said[1::2]) + "\n"
        for turn, remark in enumerate(terminal.remarks):
            at = len(messages) - 2 * (N_TURNS - turn) + 1
            asked = {"model": "talk", "messages": messages[:at]}
            seed = 100 * number + turn
            whole = posted(http, "/v1/chat/completions", 200, **asked, seed=seed, max_tokens=most, truncation="auto")
            assert whole["choices"][0]["message"] == messages[at] | {"refusal": None}, (number, turn)
            body = asked | {"n_top": 0, "settings": {"seed": seed, "max_tokens": most}}
            page = http.post("/studio/generate", json=body)
            start, *tokens, end = [_event(line) for line in page.text.split("\n\n") if line.startswith("data: {")]
            assert "".join(token["text"] for token in tokens) + end["text"] == messages[at]["content"]
            n_dropped = whole["dropped_messages"]
            assert start["dropped"] == n_dropped
            assert remark.endswith(f"; no longer read: the first {n_dropped} messages)") == (n_dropped > 0)
            n_unread += n_dropped > 0
    assert n_unread > N_CONVERSATIONS * N_TURNS // 2


def _event(line: str) -> Any:
    return json.loads(line.removeprefix("data: "))


def test_the_server_refuses_unless_it_may_truncate(http: httpx.Client) -> None:
    asked = {"model": "talk", "messages": conversation(8, SYSTEM), "max_tokens": 3, "temperature": 0}
    for given in ({}, {"truncation": None}, {"truncation": "disabled"}):
        error = posted(http, "/v1/chat/completions", 400, **asked, **given)["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "context is 128 tokens" in error["message"] and "`truncation: auto` drops the oldest" in error["message"]
    whole = posted(http, "/v1/chat/completions", 200, **asked, truncation="auto")
    assert whole["dropped_messages"] > 0 and whole["usage"]["prompt_tokens"] <= CONTEXT
    chunks = events(http.post("/v1/chat/completions", json=asked | {"truncation": "auto", "stream": True}))
    assert {chunk["dropped_messages"] for chunk in chunks} == {whole["dropped_messages"]}
    short = asked | {"messages": conversation(1)}
    assert posted(http, "/v1/chat/completions", 200, **short, truncation="auto")["dropped_messages"] == 0
    assert "dropped_messages" not in posted(http, "/v1/chat/completions", 200, **short)
    alone = asked | {"messages": [*conversation(3)[:-1], {"role": "user", "content": "a" * 200}]}
    for path, body in (("/v1/chat/completions", alone | {"truncation": "auto"}),
                       ("/studio/generate", {"model": "talk", "messages": alone["messages"]})):  # fmt: skip
        error = posted(http, path, 400, **body)["error"]
        assert error["code"] == "context_length_exceeded" and "newest question alone" in error["message"]
    error = posted(http, "/v1/chat/completions", 400, **asked, truncation="oldest")["error"]
    assert error["param"] == "truncation"


def test_every_door_has_the_same_default_settings(server: Running, http: httpx.Client) -> None:
    assert SamplingSettings(**SAMPLING._asdict()) == SamplingSettings() == engine().defaults
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for command in ("generate", "chat"):
        parameters = {one.name: one for one in commands[command].params if one.name in SAMPLING._fields}
        for name, one in parameters.items():
            shown = f"the model's own, else {getattr(SAMPLING, name):g}"
            assert (one.default, one.show_default) == (None, shown) or one.default == getattr(SAMPLING, name)
        assert len(parameters) >= len(SAMPLING) - 1
    state = http.get("/studio/state").json()
    assert state["sampling"] == state["models"][0]["sampling"] == SAMPLING._asdict()
    with taken(server.engine("talk")) as settings:
        posted(http, "/v1/completions", 200, model="talk", prompt="a", max_tokens=SAMPLING.max_tokens)
    assert settings == [SamplingSettings()]


@contextmanager
def taken(engine: Engine) -> Iterator[list[SamplingSettings]]:
    """Collect the sampling settings of the requests inside the `with`."""
    found: list[SamplingSettings] = []
    submit = engine.admission.request

    def seen(prompt: Any, settings: SamplingSettings, **options: Any) -> Any:
        found.append(settings)
        return submit(prompt, settings, **options)

    engine.admission.request = seen  # type: ignore[method-assign]
    try:
        yield found
    finally:
        engine.admission.request = submit  # type: ignore[method-assign]


def test_a_model_that_states_its_sampling_settings_has_them_at_every_door() -> None:
    own = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.25, "frequency_penalty": 0.5}
    made = engine()
    stated = Stated({"eos_token": "<|endoftext|>"}, (256,), generation=own)
    made = Engine(made.model, attach(made.tokenizer, stated), chat_template=made.chat_template, backend="torch")
    expected = SamplingSettings(**own, seed=4, max_tokens=5)
    messages = conversation(1)
    with (
        running_app(create_served({"own": made}, ServerSettings(api_keys=(KEY,)), {})) as server,
        server.http() as http,
    ):
        state = http.get("/studio/state").json()
        assert state["sampling"] == SAMPLING._asdict() and state["models"][0]["sampling"] == SAMPLING._asdict() | own
        asked = {"model": "own", "messages": messages}
        with taken(made) as settings:
            posted(http, "/v1/completions", 200, model="own", prompt="a", seed=4, max_tokens=5)
            posted(http, "/v1/completions", 200, model="own", prompt="a", seed=4, max_tokens=5, temperature=0, top_p=0)
            posted(http, "/v1/chat/completions", 200, **asked, seed=4, max_tokens=5, top_k=-1)
            http.post("/studio/generate", json=asked | {"n_top": 0, "settings": {"seed": 4, "max_tokens": 5}}).read()
            made.chat(messages, seed=4, max_tokens=5)
            "".join(TurnSession(made, seed=4, max_tokens=5).send("a"))
    greedy = replace(expected, temperature=0, top_p=1.0, top_k=1)
    bare = [replace(one, stop_token_ids=(), logprobs=None, processed_logprobs=None) for one in settings]
    assert bare[:4] == [expected, greedy, replace(expected, top_k=0), expected]
    assert [{name: getattr(one, name) for name in own} for one in bare[4:]] == [own] * 2


def test_python_reads_a_conversation_that_is_too_long_without_its_oldest_turns(talk: Engine) -> None:
    messages = conversation(8, SYSTEM)
    ids, n_dropped = expected(talk, messages, CONTEXT - 6)
    assert n_dropped > 0
    with pytest.warns(UserWarning, match=f"does not read the first {n_dropped} messages: its context has 128 tokens"):
        answer = talk.chat(messages, seed=5, max_tokens=6)
    assert answer == talk.generate(ids, seed=5, max_tokens=6, stop_token_ids=talk.chat_template.end_token_ids)
    with pytest.raises(ContextExceeded, match="the conversation has"):
        talk.chat("a" * 200)


def test_a_chat_ends_with_its_turn_unless_a_keyword_says_otherwise(talk: Engine) -> None:
    *_, end = talk.chat_template.end_token_ids

    def n_generated(**settings: Any) -> int:
        before = talk.statistics().generated_tokens
        talk.chat("a", max_tokens=4, logit_bias={end: 1000}, **settings)
        return talk.statistics().generated_tokens - before

    assert (n_generated(), n_generated(stop_token_ids=(1,)), n_generated(ignore_eos=True)) == (0, 0, 4)
