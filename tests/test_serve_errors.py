"""Refused requests: OpenAI's error shape, the status, and the name of the field."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from typer.testing import CliRunner

from gptworks.cli import app
from gptworks.errors import UserError
from gptworks.serve import errors
from gptworks.serve.app import ERRORS
from gptworks.serve.settings import ServerSettings
from serving import CONTEXT, KEY, Running, running, tiny_engine

MESSAGES = [{"role": "user", "content": "Hi"}]
COMPLETION = {"model": "base", "prompt": "a", "max_tokens": 1}
CHAT = {"model": "talk", "messages": MESSAGES, "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engines = {"base": tiny_engine(n_slots=2), "talk": tiny_engine(chat=True, n_slots=2)}
    with running(engines, max_body_bytes=25_000, max_prompt_bytes=20_000) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as one:
        yield one


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error of a response that has OpenAI's shape."""
    assert response.status_code == status, response.text
    tree = response.json()
    assert tree.keys() == {"error"} and tree["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(tree["error"]["message"], str) and isinstance(tree["error"]["type"], str)
    return tree["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 33), ("n", "2"), ("n", 1.5), ("n", True), ("best_of", 100), ("max_tokens", -1),
        ("max_tokens", 10**30), ("temperature", 2.1), ("temperature", -1), ("temperature", "hot"), ("top_p", -0.1),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 1), ("logprobs", 21), ("logprobs", True), ("seed", 2**63),
        ("seed", 0.5), ("frequency_penalty", 2.5), ("presence_penalty", -3), ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [1]), ("stop", [""]), ("stop", ["a"] * 17), ("stop", "a" * 300), ("stop", 1), ("stream", "yes"),
        ("stream_options", {"include_usage": 1}), ("prompt", []), ("prompt", ["a", 1]), ("prompt", [[]]),
        ("prompt", [1.5]), ("prompt", [-1]), ("prompt", None), ("prompt", ["a"] * 65), ("prompt", "a" * 19_000),
        ("prompt", [1] * (CONTEXT + 1)), ("prompt", [100_000]), ("prompt", "a" * (CONTEXT + 1)), ("min_tokens", -1),
        ("dry_multiplier", -1), ("dry_base", 0), ("dry_allowed_length", 1.5), ("dry_penalty_last_n", 64),
    ],
)  # fmt: skip
def test_a_field_out_of_bounds_is_named(http: httpx.Client, field: str, value: Any) -> None:
    body = COMPLETION | ({"stream": True} if field == "stream_options" else {}) | {field: value}
    told = error(http.post("/v1/completions", json=body), 400)
    assert told["type"] == "invalid_request_error" and len(told["message"]) < 300
    assert (told["param"] or "").startswith(field) and field in told["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", COMPLETION | {"suffix": "z"}, "suffix"),
        ("/v1/completions", COMPLETION | {"tempreature": 1}, "tempreature"),
        ("/v1/completions", COMPLETION | {"x" * 10_000: 1}, "x" * 64),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", CHAT | {"messages": [MESSAGES[0] | {"naem": "b"}]}, "messages.0.naem"),
        ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks"),
        ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        ("/v1/embeddings", {"model": "base", "input": "a", "dimensions": 8}, "dimensions"),
        ("/tokenize", {"text": "a"}, "text"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_supported_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    told = error(http.post(path, json=body), 400)
    assert told["param"] == field and field.rpartition(".")[2] in told["message"] and len(told["message"]) < 300


@pytest.mark.parametrize(
    ("nothing", "something"),
    [
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": "yes"}),
        ({"tool_choice": "none"}, {"tool_choice": "required"}),
        ({"tool_choice": "auto", "tools": []}, {"tool_choice": {"type": "function"}}),
        ({"functions": [], "function_call": "auto"}, {"function_call": {"name": "f"}}),
        ({"service_tier": "auto"}, {"service_tier": "flex"}),
        ({"modalities": ["text"]}, {"modalities": ["text", "audio"]}),
        ({"top_logprobs": 0, "logprobs": False}, {"top_logprobs": 1, "logprobs": False}),
        ({"store": False, "metadata": {}}, {"store": True}),
        ({"messages": [MESSAGES[0] | {"id": "msg_1"}]}, {"messages": [MESSAGES[0] | {"id": 1}]}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
        # vllm#10463: fields of other servers, which benchmarks and chat clients always send.
        ({"skip_special_tokens": True, "include_stop_str_in_output": False}, {"skip_special_tokens": False}),
        ({"length_penalty": 1.0, "early_stopping": False}, {"length_penalty": 2.0}),
        ({"stop_token_ids": [], "bad_words": []}, {"stop_token_ids": [3]}),
        ({"typical_p": 1, "mirostat": 0, "cache_prompt": True}, {"mirostat": 2}),
        ({"guided_json": None, "a_field_of_tomorrow": None}, {"guided_json": {}}),
        ({"add_generation_prompt": True, "continue_final_message": False}, {"add_generation_prompt": False}),
        ({"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        # PocketLLM#244: both names of one limit.
        ({"max_completion_tokens": 2}, {"max_completion_tokens": 1}),
    ],
    ids=str,
)
def test_a_field_that_requests_nothing_is_accepted(
    http: httpx.Client, nothing: dict[str, Any], something: dict[str, Any]
) -> None:
    asked = CHAT | {"messages": MESSAGES[:1], "temperature": 0, "max_tokens": 2}
    plain, answer = (http.post("/v1/chat/completions", json=body) for body in (asked, asked | nothing))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain.json()["choices"]
    named = error(http.post("/v1/chat/completions", json=asked | something), 400)
    assert any(field in named["message"] for field in something)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", COMPLETION | {"best_of": 2, "n": 3}, "best_of"),
        ("/v1/completions", COMPLETION | {"best_of": 2, "stream": True}, "best_of"),
        ("/v1/completions", COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", COMPLETION | {"min_tokens": 5}, "min_tokens"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 5, "n": 30}, "n: 5 prompts"),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 65}, "prompt: List should have at most 64 items"),
        ("/v1/completions", COMPLETION | {"prompt": [[1], []]}, "prompt.1: List should have at least 1 item"),
        ("/v1/completions", COMPLETION | {"prompt": 5}, "a list of token ids"),
        ("/v1/completions", {"model": "base"}, "prompt"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/completions", [], "object"),
        ("/v1/chat/completions", CHAT | {"model": "base"}, "no chat template"),
        ("/v1/chat/completions", CHAT | {"messages": []}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}, "content: it is missing"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": None}]}, "content: it is missing"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input"),
        ("/v1/chat/completions", CHAT | {"continue_final_message": True}, "the final message must be an assistant's"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": "a"}}, "has no variable `messages`"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a" * 19_000}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a" * 200}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type"),
        ("/v1/chat/completions", CHAT | {"messages": [MESSAGES[0] | {"tool_calls": [1]}]}, "tool_calls"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "logprobs"),
        ("/v1/chat/completions",
         CHAT | {"messages": [{"role": "user", "content": "".join(map(chr, range(0xE000, 0xF900)))}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 2}, "max_tokens"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, "json_schema"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, "response_format"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "no such"}}}}, "json_schema"),
        ("/v1/embeddings", {"model": "base", "input": []}, "input"),
        ("/v1/embeddings", {"model": "base", "input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_go_together_is_told(http: httpx.Client, path: str, body: Any, words: str) -> None:
    assert words in error(http.post(path, json=body), 400)["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"), (b"{", "invalid_json"), (b"\xff", "invalid_json"), (b"[" * 9_000, "invalid_json"),
        (b'{"model": "base", "prompt": "\\ud800"}', "invalid_json"),
        (b'{"model": "base", "prompt": "a", "temperature": NaN}', "invalid_value"),
        (b'{"model": "base", "prompt": "a", "seed": 1' + b"0" * 500 + b"}", "invalid_value"),
        (b"{" + b",".join(b'"%d": 1' % i for i in range(1_500)) + b"}", "unknown_parameter"),
        (b'{"model": "base", "prompt": [' + b"1," * 9_000 + b'"a"]}', "invalid_value"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes, code: str) -> None:
    told = error(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)
    assert told["code"] == code and len(told["message"]) < 300


def test_what_is_not_there(http: httpx.Client) -> None:
    assert error(http.get("/v1/nothing"), 404)["type"] == "not_found_error"
    told = error(http.post("/v1/completions", json=COMPLETION | {"model": "../../etc/passwd"}), 404)
    assert (told["param"], told["code"]) == ("model", "model_not_found") and "base, talk" in told["message"]
    error(http.get("/v1/models/none"), 404)
    error(http.get("/v1/models/..%2F..%2Fetc"), 404)
    error(http.get("/v1/models/"), 404)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions/", "/v1/chat/completions"), ("/v1/completions/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"), ("/v1/models/", "/v1/models"), ("/api/chat", None), ("/v1/messages", None),
    ],
)  # fmt: skip
def test_a_base_url_with_too_little_or_too_much_is_named(http: httpx.Client, path: str, nearest: str | None) -> None:
    """OpenHands#485, llama-cpp-python#1032, MoneyPrinterTurbo#57: the base URL lacks /v1, or is a whole path."""
    told = error(http.post(path, json={}), 404)["message"]
    assert (f"did you mean {nearest}?" in told) == (nearest is not None)
    assert ("base URL" in told) == (nearest or "").startswith("/v1/")


def test_a_monitor_that_asks_with_head_sees_what_get_answers(server: Running, http: httpx.Client) -> None:
    """parbaked#564, macprovider#521: uptime monitors and `curl -I` send HEAD, and were answered with 405."""
    for path in ("/health", "/v1/models", "/", "/v1/nothing"):
        asked, expected = http.head(path), http.get(path)
        assert (asked.status_code, asked.content) == (expected.status_code, b"")
        assert asked.headers["content-length"] == expected.headers["content-length"]
    with server.http(headers={}) as stranger:
        assert stranger.head("/v1/models").status_code == 401
    assert http.head("/v1/completions").status_code == 405


def test_other_methods_and_media(http: httpx.Client) -> None:
    response = http.get("/v1/completions")
    error(response, 405)
    assert response.headers["allow"] == "POST"
    error(http.delete("/v1/models/base"), 405)
    error(http.options("/v1/completions"), 405)
    for media in ("text/plain", "application/x-www-form-urlencoded", ""):
        error(http.post("/v1/completions", content=b"{}", headers={"content-type": media}), 415)


def test_the_size_of_bodies(http: httpx.Client) -> None:
    """Too large by the declared length or by the actual length; the sender can read the reason."""
    assert error(http.post("/v1/completions", content=b"x" * 25_001), 413)["code"] == "body_too_large"
    error(http.post("/v1/completions", content=b"x" * 8_000_000), 413)
    error(http.post("/v1/completions", content=(b"x" * 1000 for _ in range(50))), 413)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_keys(server: Running) -> None:
    """Every route but /health and /openapi.json requires a key, before any other check."""
    wrong: tuple[dict[str, str], ...] = (
        {}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"},
        {"authorization": "Bearer"}, {"authorization": f"Bearer {KEY[:-1]}"}, {"x-api-key": KEY},
    )  # fmt: skip
    for headers in wrong:
        with httpx.Client(base_url=server.url, headers=headers) as nobody:
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
                assert error(nobody.post(path, json={}), 401)["type"] == "authentication_error"
            for path in ("/v1/models", "/v1/models/base", "/metrics", "/v1/nothing"):
                response = nobody.get(path)
                error(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
            assert nobody.get("/health").status_code == nobody.get("/openapi.json").status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key=KEY).completions.create(model="x", prompt="a")
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.with_options(api_key=KEY).completions.create(model="base", prompt="a", suffix="b")


def test_other_hosts_names_and_pages() -> None:
    """Without keys, only requests that name this machine are answered; pages of other origins cannot read answers
    unless listed."""
    engines = {"base": tiny_engine()}
    with running(engines, api_keys=()) as server, httpx.Client(base_url=server.url) as http:
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
        assert http.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200
        for name in ("evil.example", "localhost.evil.example", "10.0.0.1:80", ""):
            error(http.get("/v1/models", headers={"host": name}), 403)
        response = http.get("/v1/models", headers={"origin": "http://a.example"})
        assert "access-control-allow-origin" not in response.headers
    with running({"base": tiny_engine()}, cors_origins=("http://a.example",)) as server, server.http() as http:
        asked = {"origin": "http://a.example", "access-control-request-method": "POST"}
        assert (
            http.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == "http://a.example"
        )
        other = http.options("/v1/completions", headers=asked | {"origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers
        response = http.get("/v1/none", headers={"origin": "http://a.example"})
        assert response.status_code == 404 and response.headers["access-control-allow-origin"] == "http://a.example"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run is given"), (["--model", "x"], "NAME=RUN"), (["a", "--model", "a=b"], "two models are named a"),
        (["--model", "a/b=c"], "cannot be a model's name"), (["runs/none"], "runs/none"),
        (["runs/none", "--request-seconds", "0"], "request_seconds"),
        (["runs/none", "--api-key", "two words"], "API key"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(result.exception, UserError) and words in str(result.exception)


def test_settings_are_above_zero() -> None:
    with pytest.raises(UserError, match="max_waiting=0"):
        ServerSettings(max_waiting=0)


def test_every_status_that_the_server_answers_with_is_in_its_description() -> None:
    sent = {status for _, status, _ in errors._FORESEEN}
    for file in Path(errors.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "APIError":
                sent |= {part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)}
    assert {400, 429, 431, 501, 503, 504} < sent
    assert sent <= ERRORS.keys()


def test_the_description_of_health_has_its_own_body_also_if_it_fails(server: Running) -> None:
    with httpx.Client(base_url=server.url) as nobody:
        answers = nobody.get("/openapi.json").json()["paths"]["/health"]["get"]["responses"]
    for status in ("200", "503"):
        assert answers[status]["content"]["application/json"]["schema"]["$ref"].endswith("/Health")
