"""Hostile requests and chat templates: each is refused quickly with a message, and costs the server almost nothing.

The limits are a quarter of the real ones, so that what passes them does so sooner.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from gptworks import chat_template
from gptworks.chat_template import ChatTemplate, load_chat_template
from gptworks.confined import Limits
from gptworks.errors import UserError
from gptworks.files import read_regular
from gptworks.infer import admission, constrain
from gptworks.tokenizer import load_tokenizer
from serving import Running, byte_tokenizer, request, running, tiny_engine, until

pytest.importorskip("llguidance")

SHORT = Limits(seconds=0.5, n_bytes=1 << 26)
MOST_GROWTH_BYTES = 100 << 20
"""Of the server's process over all of the requests below; one of them alone took gigabytes."""
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "talk", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constrain, "COMPILE_LIMITS", SHORT)
        patch.setattr(chat_template, "LIMITS", SHORT)
        engines = {"base": tiny_engine(n_slots=4), "talk": tiny_engine(chat=True, n_slots=4)}
        with running(engines) as one:
            yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


def asking_for(schema: Any) -> dict[str, Any]:
    return CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def patterns(n: int) -> list[dict[str, str]]:
    return [{"pattern": f".*a{i}.*"} for i in range(n)]


def all_by_reference(n: int, first: int = 0) -> dict[str, Any]:
    """Return a schema with n patterns at once, none written inside the allOf; its compile time grows fast with n."""
    names = {f"p{i}": pattern for i, pattern in enumerate(patterns(first + n)[first:])}
    return {"type": "string", "$defs": names, "allOf": [{"$ref": f"#/$defs/{name}"} for name in names]}


def doubling(n: int) -> dict[str, Any]:
    """Return a schema that expands to 2 to the n copies of a pattern; its compilation needs memory."""
    names: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": names | {f"d{n}": {"type": "string", "pattern": "a"}}, "$ref": "#/$defs/d0"}


def nested(n: int) -> Any:
    return json.loads('{"type":"array","items":' * n + "{}" + "}" * n)


SCHEMAS: list[tuple[str, Any, str]] = [
    ("patterns at once", {"type": "string", "allOf": patterns(20)}, "more than"),
    ("patterns by reference", all_by_reference(14), "more than"),
    ("copies of copies", doubling(22), "more than"),
    ("a large prime", {"type": "integer", "multipleOf": 999983}, "more than"),
    ("two primes", {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "more than"),
    ("another machine's schema", {"$ref": "http://169.254.169.254/latest"}, "does not fetch"),
    ("a file's schema", {"$ref": "file:///etc/passwd"}, "does not fetch"),
    ("a circle", {"$ref": "#"}, "no text satisfies it"),
    ("a circle of two", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
     "no text satisfies it"),
    ("nothing to choose from", {"enum": []}, "Unsatisfiable"),
    ("a length that cannot be", {"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
    ("a length beyond numbers", {"type": "string", "maxLength": 2**63}, "cannot be followed"),
    ("a bound beyond numbers", {"type": "integer", "minimum": 10**30}, "cannot be followed"),
    ("a division by nothing", {"type": "integer", "multipleOf": 0}, "multiple"),
    ("a negative count", {"type": "array", "maxItems": -1}, "maxItems"),
    ("an open group", {"type": "string", "pattern": "a("}, "unclosed group"),
    ("a look ahead", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ("a reference back", {"type": "string", "pattern": r"(a+)+\1"}, "backreferences"),
    ("a type that is none", {"type": "nonsense"}, "Invalid type"),
    ("a format that is none", {"type": "string", "format": "nonsense"}, "Unknown format"),
    ("what is not understood", {"not": {"type": "string"}}, "Unimplemented"),
    ("too deep", nested(150), ""),
    ("too long", {"enum": ["x" * 100] * 700}, "65536 bytes"),
]  # fmt: skip


def test_schemas_that_would_take_all_time_or_memory_are_refused_in_words(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions", json=asking_for({"type": "boolean"})).status_code == 200
    before = resident_bytes()
    for name, schema, words in SCHEMAS:
        response = http.post("/v1/chat/completions", json=asking_for(schema))
        assert response.status_code == 400, (name, response.text[:300])
        message = response.json()["error"]["message"]
        assert words in message and len(message) < 1000, (name, message)
    assert resident_bytes() - before < MOST_GROWTH_BYTES
    assert http.post("/v1/chat/completions", json=asking_for({"type": "boolean"})).status_code == 200


COUNTED: list[Any] = [
    {"type": "string", "pattern": "x{0,40}(abc){100000}"},
    {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
    {"type": "string", "pattern": "(.{0,1000}a){1000}"},
    {"type": "object", "patternProperties": {"(ab){50000}": {}}},
    {"x-guidance": {"whitespace_pattern": "(ab){100000}"}},
]


@pytest.mark.parametrize("schema", COUNTED, ids=str)
def test_large_counts_in_patterns_take_little(http: httpx.Client, schema: Any) -> None:
    before = resident_bytes()
    response = http.post("/v1/chat/completions", json=asking_for(schema) | {"max_tokens": 40})
    assert response.status_code in (200, 400), response.text[:300]
    assert resident_bytes() - before < MOST_GROWTH_BYTES


def test_a_schema_that_was_refused_for_its_cost_is_refused_again_at_once(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asking_for(all_by_reference(14, first=20))
    first = http.post("/v1/chat/completions", json=asked)
    children = server.engine("talk").admission.constraints()._children

    def compiles(*_: Any) -> None:
        raise AssertionError("it is compiled again")

    monkeypatch.setattr(children, "ask", compiles)
    again = http.post("/v1/chat/completions", json=asked)
    assert (again.status_code, again.json()) == (first.status_code, first.json()) == (400, again.json())


def test_a_schema_is_compiled_once_for_all_samples_and_requests(
    server: Running, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_compiled, real = [], constrain.compile_grammar

    def counted(*arguments: Any) -> Any:
        n_compiled.append(1)
        return real(*arguments)

    monkeypatch.setattr(constrain, "compile_grammar", counted)
    asked = asking_for({"enum": ["counted", "once"]}) | {"n": 4, "max_tokens": 20}
    for _ in range(3):
        choices = http.post("/v1/chat/completions", json=asked).json()["choices"]
        assert {json.loads(choice["message"]["content"]) for choice in choices} <= {"counted", "once"}
    assert len(n_compiled) == 1


def children_of(server: Running) -> list[int]:
    """Return the processes that compile grammars for the server's engine, busy or not."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process may end at any time
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "gptworks.confined.grammar" in status.with_name("cmdline").read_text():
                found.append(int(status.parent.name))
    return found


@pytest.fixture
def patient() -> Iterator[Running]:
    """A server that allows a compilation to take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constrain, "COMPILE_LIMITS", Limits(seconds=300, n_bytes=1 << 30))
        with running({"talk": tiny_engine(chat=True, n_slots=4)}, drain_seconds=0.3) as one, one.http() as http:
            assert http.post("/v1/chat/completions", json=asking_for({"type": "boolean"})).status_code == 200
            yield one


def sent(server: Running, body: dict[str, Any]) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    one = socket.create_connection((host, int(port)), timeout=60)
    one.sendall(request(body, "/v1/chat/completions"))
    return one


def test_others_are_served_while_schemas_are_compiled_which_end_with_their_clients(patient: Running) -> None:
    before = set(children_of(patient))  # idle ones, of this server and of other tests
    evil = [sent(patient, asking_for(all_by_reference(16, first=20 * i))) for i in range(4)]
    until(lambda: patient.service.held("", lambda one: one.compiles)[1] == 4)
    with patient.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert http.post("/v1/chat/completions", json=asking_for({"type": "boolean"})).status_code == 200, "it is known"
        fifth = http.post("/v1/chat/completions", json=asking_for({"type": "null"}))
        assert (fifth.status_code, fifth.json()["error"]["code"]) == (429, "too_many_schemas"), "of the same client"
        for one in evil:
            one.close()
        until(lambda: patient.service.held("", lambda one: one.compiles)[1] == 0)
        if Path("/proc/self/stat").exists():
            until(lambda: not set(children_of(patient)) - before)
        assert http.post("/v1/chat/completions", json=asking_for({"type": "null"})).status_code == 200


def test_the_end_waits_for_no_compilation(patient: Running) -> None:
    with ThreadPoolExecutor(1) as threads, patient.http() as http:
        answer = threads.submit(http.post, "/v1/chat/completions", json=asking_for(all_by_reference(16)))
        until(lambda: patient.service.held("", lambda one: one.compiles)[1] == 1)
        began = time.monotonic()
        patient.server.handle_exit(signal.SIGTERM, None)
        assert answer.result().status_code == 503
        assert time.monotonic() - began < 60, "of the 300 that it might take"


# ------------------------------------------------------------------------------------------------ chat templates

TEMPLATES: list[tuple[str, str]] = [
    ("{{ 'a' * 10**9 }}", "more than"),
    ("{{ [0] * 10**9 }}", "more than"),
    ("{{ 9 ** 99999999 }}", "more than"),
    ("{{ 'a'|center(10**9) }}", "more than 64 MiB"),
    ("{{ '%0999999999d' % 1 }}", "more than"),
    ("{{ '{:999999999}'.format(1) }}", "more than"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.5 seconds"),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
     "more than 0.5 seconds"),
    ("{% set n = namespace(x=['aaaa']) %}{% for i in range(90) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
     "more than"),
    ("{% set n = namespace(x='a') %}{% for i in range(90) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "more than 64 MiB"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{{ range(10**9) }}", "Range too big"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ messages[0].content.nothing.at_all }}", "has no attribute"),
    ("{{ messages | nonsense }}", "No filter named"),
    ("{% include '/etc/passwd' %}", "no loader"),
    ("{{ messages[9].role }}", "has no element"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute"),
    ("{{ cycler.__init__.__globals__.os.environ }}", "access to attribute"),
    ("{{ messages.append(1) }}", "access to attribute"),
    ("{{ 'a' + 1 }}", "can only concatenate"),
    ("{% for %}", "does not compile: line 1"),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "does not compile"),
]  # fmt: skip


def test_templates_that_would_take_all_time_or_memory_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMITS", SHORT)
    tokenizer, before = byte_tokenizer(), resident_bytes()
    for source, words in TEMPLATES:
        with pytest.raises(UserError, match="the chat template") as refused:
            ChatTemplate(source, tokenizer).render(MESSAGES)
        assert words in str(refused.value), (source[:60], str(refused.value)[:300])
    assert resident_bytes() - before < MOST_GROWTH_BYTES


def test_a_template_works_after_a_conversation_that_it_could_not_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LIMITS", SHORT)
    template = ChatTemplate("{{ 'ab' * (messages[0].content | int) }}", byte_tokenizer())
    for _ in range(2):
        with pytest.raises(UserError, match="more than 64 MiB"):
            template.render([{"role": "user", "content": "1000000000"}])
        assert template.render([{"role": "user", "content": "3"}]) == "ababab"


def test_a_conversation_that_the_template_cannot_render_is_a_400(http: httpx.Client, server: Running) -> None:
    engine = server.engine("talk")
    kept = engine.chat_template
    assert kept is not None
    try:
        for source in ("{{ 1 / 0 }}", "{{ 'a' * 10**9 ~ messages[0].content }}", "{{ raise_exception('no') }}"):
            engine.chat_template = ChatTemplate(source, engine.tokenizer)
            for path in ("/v1/chat/completions", "/tokenize"):
                body = CHAT if path != "/tokenize" else {"model": "talk", "messages": MESSAGES}
                response = http.post(path, json=body)
                assert response.status_code == 400 and response.json()["error"]["param"] == "messages", response.text
    finally:
        engine.chat_template = kept
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


# --------------------------------------------------------------------------------------------- tokenizers and files


def catastrophic_tokenizer() -> Tokenizer:
    """Return a tokenizer whose pattern backtracks endlessly on a run of a's: the library's matcher gives up and
    panics."""
    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex(r"(a|a|aa)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def test_a_tokenizer_whose_pattern_gives_up_is_an_error_in_words(http: httpx.Client, server: Running) -> None:
    text = "a" * 60 + "!"
    inner = server.service.get("base").engine.admission
    kept, inner._tokenizer = inner._tokenizer, catastrophic_tokenizer()
    try:
        response = http.post("/v1/completions", json={"model": "base", "prompt": text, "max_tokens": 1})
        assert response.status_code == 400 and "pattern cannot read" in response.json()["error"]["message"]
    finally:
        inner._tokenizer = kept


class Panic(BaseException):
    """A panic as a Rust library raises it: not an `Exception`."""


def test_an_error_that_is_not_an_exception_is_answered_in_json(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*_: Any) -> list[int]:
        raise Panic("/a/path/nobody/should/see")

    with monkeypatch.context() as patch:
        patch.setattr(admission, "prompt_ids", panics)
        response = http.post("/v1/completions", json={"model": "base", "prompt": "a", "max_tokens": 1})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert "path" not in response.text
    assert http.post("/v1/completions", json={"model": "base", "prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    fifo, folder = tmp_path / "tokenizer.json", tmp_path / "folder"
    os.mkfifo(fifo)
    os.mkfifo(tmp_path / "chat_template.jinja")
    folder.mkdir()
    for path, words in ((fifo, "FIFO"), (folder, "folder"), (Path("/dev/zero"), "device")):
        with pytest.raises(UserError, match=words):
            read_regular(path, 1000)
    with pytest.raises(UserError, match="FIFO"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="FIFO"):
        load_chat_template(tmp_path, byte_tokenizer())
    large = tmp_path / "large"
    large.write_bytes(b"x" * 1001)
    with pytest.raises(UserError, match="1001 bytes; such a file may have 1000"):
        read_regular(large, 1000)
    assert read_regular(large, 1001) == b"x" * 1001


def test_a_template_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match="byte 2 cannot be read"):
        load_chat_template(tmp_path, byte_tokenizer())
