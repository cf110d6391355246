"""The official client against the server: each feature gives the engine's results, with the types of the API."""

import asyncio
import base64
import json
import math
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from openai import types
from openai.types import chat as chat_types
from pydantic import BaseModel, TypeAdapter

from gptworks.chat_template import ChatTemplate
from gptworks.infer import Engine, SamplingSettings
from serving import CONTEXT, KEY, Running, running, tiny_engine

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engines = {"base": tiny_engine(n_slots=8), "talk": tiny_engine(chat=True, seed=1, n_slots=8)}
    with running(engines) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def base() -> Engine:
    """An engine with the same model, without a server."""
    return tiny_engine()


@pytest.fixture(scope="module")
def talk() -> Engine:
    return tiny_engine(chat=True, seed=1)


def check(kind: Any, raw: bytes | str | dict[str, Any]) -> Any:
    """Validate a raw body as one of OpenAI's types, without unknown keys, and return it."""
    tree = raw if isinstance(raw, dict) else json.loads(raw)
    made = TypeAdapter(kind).validate_python(tree)
    refuse_unknown(made)
    return made


def refuse_unknown(value: Any) -> None:
    if isinstance(value, BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            refuse_unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            refuse_unknown(item)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def of(engine: Engine, prompt: str | list[int], **settings: Any) -> list[str]:
    n = settings.pop("n", 1)
    ends = engine.chat_template.end_token_ids if engine.chat_template else ()
    settings = {"max_tokens": 16, "stop_token_ids": ends} | settings
    return [made.text for made in engine.complete(prompt, SamplingSettings(**settings), n_samples=n)]


# -------------------------------------------------------------------------------------------------- completions


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0}, {"seed": 3}, {"seed": 3, "n": 3, "max_tokens": 9}, {"seed": 1, "top_p": 0.7},
        {"temperature": 0, "stop": "e"}, {"seed": 4, "stop": ["a", "zz"], "max_tokens": 60},
        {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5}, {"temperature": 0, "max_tokens": 500},
        {"temperature": 0, "logit_bias": {"70": 90}},
        {"seed": 1, "extra_body": {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 3}},
        {"temperature": 0, "max_tokens": 60, "extra_body": {"dry_multiplier": 1.5, "dry_allowed_length": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_completions_are_the_engines_own(client: openai.OpenAI, base: Engine, asked: dict[str, Any]) -> None:
    raw = client.completions.with_raw_response.create(model="base", prompt=PROMPT, **asked)
    made = check(types.Completion, raw.http_response.text)
    settings = {**asked, **asked.get("extra_body", {})}
    settings.pop("extra_body", None)
    settings["logit_bias"] = {int(key): value for key, value in settings.get("logit_bias", {}).items()}
    assert [choice.text for choice in made.choices] == of(base, PROMPT, **settings)
    assert [choice.index for choice in made.choices] == list(range(settings.get("n", 1)))
    assert made.usage.prompt_tokens == len(PROMPT) and made.usage.total_tokens == made.usage.completion_tokens + 19


def test_why_a_text_ended(client: openai.OpenAI) -> None:
    def ended(**asked: Any) -> str:
        return client.completions.create(model="base", prompt=PROMPT, temperature=0, **asked).choices[0].finish_reason

    assert ended(max_tokens=3) == "length"
    assert ended(max_tokens=1000) == "length", "the context is full"
    assert ended(max_tokens=1000, logit_bias={"256": 100}) == "stop", "the end-of-text token"
    text = client.completions.create(model="base", prompt=PROMPT, temperature=0, max_tokens=30).choices[0].text
    assert ended(max_tokens=30, stop=text[5:7]) == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_prompt(client: openai.OpenAI, base: Engine, stream: bool) -> None:
    ids = [list(b"abc"), [70, 71], [72]]
    forms: list[tuple[Any, list[Any]]] = [
        ("abc", ["abc"]), (["abc", "d"], ["abc", "d"]), ([70, 71], [[70, 71]]), (ids, ids), ("", [[256]]),
    ]  # fmt: skip
    for prompt, alone in forms:
        asked: dict[str, Any] = {"model": "base", "prompt": prompt, "temperature": 0.8, "seed": 1, "n": 2}
        expected = [text for one in alone for text in of(base, one, temperature=0.8, seed=1, n=2)]
        if not stream:
            assert [choice.text for choice in client.completions.create(**asked).choices] == expected
            continue
        texts = [""] * len(expected)
        for chunk in client.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected


def test_log_probabilities_are_the_models_own(client: openai.OpenAI, base: Engine) -> None:
    asked: dict[str, Any] = {"model": "base", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 3}
    (choice,) = check(types.Completion, client.completions.with_raw_response.create(**asked).http_response.text).choices
    settings = SamplingSettings(temperature=0, max_tokens=8, logprobs=3)
    (alone,) = base.complete(PROMPT, settings)
    assert choice.logprobs.token_logprobs == pytest.approx([p.logprob for p in alone.logprobs], abs=1e-5)
    for given, expected in zip(choice.logprobs.top_logprobs, alone.logprobs, strict=True):
        assert sorted(given.values()) == pytest.approx(sorted(p for _, p in expected.top), abs=1e-5)
    for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert max(top, key=top.get) == token, "greedy, the likeliest token"


def test_echo_scores_the_prompt(client: openai.OpenAI, base: Engine) -> None:
    """As evaluation harnesses request it: the prompt's own log-probabilities, and no generated token or one."""
    expected = base.score(PROMPT)
    for max_tokens in (0, 1):
        made = client.completions.create(
            model="base", prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        (choice,) = made.choices
        assert choice.text.startswith(PROMPT) and choice.logprobs is not None
        given = choice.logprobs.token_logprobs
        assert given is not None and given[0] is None and len(given) == len(PROMPT) + max_tokens
        assert given[1 : len(PROMPT)] == pytest.approx([one.logprob for one in expected[1:]], abs=1e-5)
        assert choice.logprobs.tokens[: len(PROMPT)] == list(PROMPT)
        assert choice.logprobs.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("stop", [None, "oo"])
def test_tokens_and_their_places_spell_the_text(client: openai.OpenAI, stop: str | None) -> None:
    """Also when characters are split over tokens, and when the last tokens belong to a stop string."""
    bias = {"78": 30, "156": 20, "163": 20} if stop is None else {"78": 8}
    asked: dict[str, Any] = {
        "model": "base", "prompt": "é", "seed": 5, "max_tokens": 40, "logprobs": 0, "echo": True, "stop": stop,
        "logit_bias": bias,
    }  # fmt: skip
    whole = client.completions.create(**asked).choices[0]
    assert whole.logprobs is not None and whole.finish_reason == ("length" if stop is None else "stop")
    places = [*whole.logprobs.text_offset, len(whole.text)]
    assert places[0] == 0 and places == sorted(places)
    for token, (start, end) in zip(whole.logprobs.tokens, pairwise(places), strict=True):
        assert token.startswith("bytes:") or whole.text[start:end].replace("�", "") in (token, ""), (token, start, end)
    streamed = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert "".join(choice.text for choice in streamed) == whole.text
    tokens = [token for choice in streamed if choice.logprobs for token in choice.logprobs.tokens]
    assert tokens == whole.logprobs.tokens


def test_best_of_keeps_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "base", "prompt": PROMPT, "seed": 2, "max_tokens": 6}
    all_of_them = client.completions.create(n=5, logprobs=0, **asked).choices
    by_mean = sorted(all_of_them, key=lambda choice: -math.fsum(choice.logprobs.token_logprobs))
    best = client.completions.create(n=2, best_of=5, **asked)
    assert [choice.text for choice in best.choices] == [choice.text for choice in by_mean[:2]]
    assert [choice.index for choice in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 30, "all five were made"


def test_a_stream_of_completions_and_its_usage(server: Running) -> None:
    asked = {"model": "base", "prompt": PROMPT, "seed": 1, "max_tokens": 12, "stream": True}
    with server.http() as http:
        plain = events(http.post("/v1/completions", json=asked))
        counted = events(http.post("/v1/completions", json=asked | {"stream_options": {"include_usage": True}}))
    for chunk in plain + counted:
        assert all(choice.pop("finish_reason") in (None, "length") for choice in chunk["choices"])
        for choice in chunk["choices"]:
            choice["finish_reason"] = "length"  # OpenAI's type has no null there, its server does
        check(types.Completion, chunk)
    assert all("usage" not in chunk for chunk in plain)
    assert all(chunk["usage"] is None for chunk in counted[:-1]) and counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 12
    assert len({chunk["id"] for chunk in plain}) == 1


# --------------------------------------------------------------------------------------------------------- chat


def chat_ids(engine: Engine) -> list[int]:
    assert engine.chat_template is not None
    return engine.chat_template.encode(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize("asked", [{"temperature": 0}, {"seed": 3, "n": 3}, {"seed": 1, "stop": ["e", "o"]}], ids=str)
def test_chat_is_the_engine_on_what_the_template_makes(
    client: openai.OpenAI, talk: Engine, asked: dict[str, Any]
) -> None:
    expected = of(talk, chat_ids(talk), max_tokens=30, **asked)
    raw = client.chat.completions.with_raw_response.create(
        model="talk", messages=MESSAGES, max_completion_tokens=30, **asked
    )
    made = check(chat_types.ChatCompletion, raw.http_response.text)
    assert [choice.message.content for choice in made.choices] == expected
    assert made.usage.prompt_tokens == len(chat_ids(talk))
    texts = [""] * len(expected)
    for chunk in client.chat.completions.create(model="talk", messages=MESSAGES, max_tokens=30, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_the_end_of_a_turn_ends_an_answer(client: openai.OpenAI) -> None:
    end = "258"  # <|im_end|>
    made = client.chat.completions.create(model="talk", messages=MESSAGES, logit_bias={end: 100}, temperature=0)
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("", "stop")
    assert made.usage is not None and made.usage.completion_tokens == 0


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="talk", messages=MESSAGES, max_tokens=4, temperature=0)
    answer: Any = first.choices[0].message.model_dump()
    parts: Any = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "then?"}]}
    whole: Any = {"role": "user", "content": "And then?"}
    texts = [
        client.chat.completions.create(
            model="talk", messages=[*MESSAGES, answer, last], max_tokens=9, temperature=0
        ).choices[0].message.content
        for last in (parts, whole)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_what_other_servers_take_is_taken(client: openai.OpenAI, talk: Engine) -> None:
    """`developer` is OpenAI's newer word for `system`; null counts as missing; top_k=-1 is vLLM's, top_p=0 OpenAI's."""

    def answer(messages: list[Any], **asked: Any) -> str | None:
        made = client.chat.completions.create(model="talk", messages=messages, max_tokens=9, **asked)
        return made.choices[0].message.content

    developer = [MESSAGES[0] | {"role": "developer"}, MESSAGES[1] | {"name": "Ada"}]
    greedy = answer(MESSAGES, temperature=0)
    assert answer(developer, temperature=0) == greedy, "this template does not write names"
    nothing: dict[str, Any] = {"tools": None, "metadata": None, "service_tier": None, "store": False}
    assert answer(MESSAGES, temperature=0, extra_body=nothing) == greedy
    assert answer(MESSAGES, top_p=0, seed=3) == greedy, "the likeliest token alone"
    assert answer(MESSAGES, seed=3, extra_body={"top_k": -1}) == answer(MESSAGES, seed=3)
    with pytest.raises(openai.BadRequestError, match="stores nothing"):
        answer(MESSAGES, extra_body={"store": True})


def test_a_seed_of_minus_one_is_random(client: openai.OpenAI) -> None:
    """llama-cpp-python#386, textgen#1847: other servers' value for a random seed gave the same text each time."""
    asked: dict[str, Any] = {"model": "base", "prompt": PROMPT, "max_tokens": 30, "temperature": 1}
    texts = {client.completions.create(**asked, seed=-1).choices[0].text for _ in range(3)}
    assert len(texts) == 3
    assert len({client.completions.create(**asked, seed=-2).choices[0].text for _ in range(2)}) == 1


def test_an_answer_without_content_is_an_empty_one(server: Running) -> None:
    """open-webui#12441, vllm#21089: clients send back an empty answer as null."""
    with server.http() as http:
        counts = [
            http.post(
                "/tokenize", json={"model": "talk", "messages": [MESSAGES[1], empty, MESSAGES[1]]}
            ).json()["tokens"]
            for empty in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None},
                          {"role": "assistant"})
        ]  # fmt: skip
    assert counts[0] == counts[1] == counts[2]


def test_an_answer_is_continued_where_the_final_message_ends(client: openai.OpenAI, talk: Engine) -> None:
    """vllm#6772, llama.cpp#11755, sglang#3971: the beginning of an answer was closed, and another one begun."""
    begun = [*MESSAGES, {"role": "assistant", "content": "Well <|im_end|> then"}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    for more in ({}, {"truncation": "auto"}):
        made = client.chat.completions.create(
            model="talk", messages=begun, temperature=0, max_tokens=9, extra_body=options | more
        )
        before = talk.chat_template.encode(MESSAGES, add_generation_prompt=True)
        ids = before + talk.tokenizer.encode("Well <|im_end|> then").ids
        assert made.usage is not None and made.usage.prompt_tokens == len(ids)
        assert made.choices[0].message.content == talk.generate(ids, temperature=0, max_tokens=9)


def test_variables_of_the_template_are_set_by_the_request(server: Running, client: openai.OpenAI) -> None:
    """llama.cpp#13160, maclocal-api#34: `enable_thinking` was ignored."""
    engine = server.engine("talk")
    kept, source = engine.chat_template, "{{ 'think ' if enable_thinking }}{{ mood }}{{ messages[-1].content }}"
    try:
        engine.chat_template = ChatTemplate(source, engine.tokenizer)
        n_tokens = []
        for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}, {"mood": "sad"}):
            made = client.chat.completions.create(
                model="talk", messages=MESSAGES, max_tokens=1, extra_body={"chat_template_kwargs": variables}
            )
            assert made.usage is not None
            n_tokens.append(made.usage.prompt_tokens)
        with pytest.raises(openai.BadRequestError, match="has no variable `thinking`"):
            client.chat.completions.create(
                model="talk", messages=MESSAGES, extra_body={"chat_template_kwargs": {"thinking": True}}
            )
    finally:
        engine.chat_template = kept
    n = len(MESSAGES[-1]["content"])
    assert n_tokens == [n, n, n + len("think "), n + len("sad")]


def test_a_name_reaches_templates_that_write_it(server: Running) -> None:
    engine = server.engine("talk")
    kept = engine.chat_template
    try:
        engine.chat_template = ChatTemplate("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}",
                                            engine.tokenizer)  # fmt: skip
        with server.http() as http:
            made = http.post("/tokenize", json={"model": "talk", "messages": [MESSAGES[1] | {"name": "Ada"}]}).json()
            text = http.post("/detokenize", json={"model": "talk", "tokens": made["tokens"]}).json()["prompt"]
    finally:
        engine.chat_template = kept
    assert text == "Ada: Hello?"


def test_chunks_of_a_chat(server: Running) -> None:
    asked = {"model": "talk", "messages": MESSAGES, "seed": 1, "max_tokens": 12, "stream": True, "n": 2,
             "logprobs": True, "top_logprobs": 2,
             "stream_options": {"include_usage": True, "include_obfuscation": False}}  # fmt: skip
    with server.http() as http:
        chunks = [
            check(chat_types.ChatCompletionChunk, one) for one in events(http.post("/v1/chat/completions", json=asked))
        ]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    for index in (0, 1):
        of_one = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert of_one[0].delta.role == "assistant" and all(choice.delta.role is None for choice in of_one[1:])
        assert [choice.finish_reason for choice in of_one[:-1]] == [None] * (len(of_one) - 1)
        assert of_one[-1].finish_reason == "length"
        told = [token for choice in of_one if choice.logprobs for token in choice.logprobs.content]
        assert len(told) == 12 and all(len(token.top_logprobs) == 2 for token in told)
        spelled = b"".join(bytes(token.bytes) for token in told).decode("utf-8", "replace")
        assert spelled == "".join(choice.delta.content or "" for choice in of_one)


def test_log_probabilities_of_a_chat(client: openai.OpenAI, talk: Engine) -> None:
    asked: dict[str, Any] = {"model": "talk", "messages": MESSAGES, "temperature": 0, "max_tokens": 6}
    raw = client.chat.completions.with_raw_response.create(logprobs=True, top_logprobs=4, **asked)
    content = check(chat_types.ChatCompletion, raw.http_response.text).choices[0].logprobs.content
    (alone,) = talk.complete(chat_ids(talk), SamplingSettings(temperature=0, max_tokens=6, logprobs=4))
    assert [token.logprob for token in content] == pytest.approx([p.logprob for p in alone.logprobs], abs=1e-5)
    assert [len(token.top_logprobs) for token in content] == [4] * 6
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def test_answers_in_json(client: openai.OpenAI) -> None:
    schema = {
        "type": "object", "additionalProperties": False, "required": ["ok", "level"],
        "properties": {"ok": {"type": "boolean"}, "level": {"enum": ["low", "high"]}},
    }  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "report", "schema": schema, "strict": True}}
    for seed in (1, 2):
        made = client.chat.completions.create(model="talk", messages=MESSAGES, response_format=wanted, seed=seed)
        tree = json.loads(made.choices[0].message.content or "")
        assert (
            tree.keys() == {"ok", "level"}
            and tree["level"] in ("low", "high")
            and made.choices[0].finish_reason == "stop"
        )
    made = client.chat.completions.create(
        model="talk", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=20
    )
    assert (made.choices[0].message.content or "").startswith("{")

    class Report(BaseModel):
        ok: bool

    parsed = client.chat.completions.parse(model="talk", messages=MESSAGES, response_format=Report, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, Report)


# ---------------------------------------------------------------------------------- embeddings, models, tokens


def test_embeddings_are_means_of_the_last_hidden_states_of_length_one(client: openai.OpenAI, base: Engine) -> None:
    texts = ["one", "another text"]

    def expected(text: str) -> list[float]:
        with torch.inference_mode():
            mean = base.model.features(torch.tensor([base.encode_prompt(text)]))[0].mean(0)
            return (mean / mean.square().sum().sqrt()).tolist()

    raw = client.embeddings.with_raw_response.create(model="base", input=texts, encoding_format="float")
    made = check(types.CreateEmbeddingResponse, raw.http_response.text)
    for one, text in zip(made.data, texts, strict=True):
        assert one.embedding == pytest.approx(expected(text), abs=1e-6)
    assert made.usage.prompt_tokens == made.usage.total_tokens == len("".join(texts))
    raw = client.embeddings.with_raw_response.create(
        model="base", input=base.encode_prompt("one"), encoding_format="base64"
    )
    coded = json.loads(raw.http_response.text)["data"][0]["embedding"]
    assert struct.unpack("<32f", base64.b64decode(coded)) == pytest.approx(expected("one"), abs=1e-6)
    assert client.embeddings.create(model="base", input="one").data[0].embedding == pytest.approx(
        expected("one"), abs=1e-6
    )


def test_models_by_name(client: openai.OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["base", "talk"]
    assert client.models.retrieve("talk").id == "talk"
    with server.http() as http:
        listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0].pop("max_model_len") == CONTEXT
    check(types.Model, listed["data"][0])


def test_tokens_there_and_back(server: Running, base: Engine, talk: Engine) -> None:
    with server.http() as http:
        made = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
        assert made["tokens"] == base.encode_prompt("héllo") and made["count"] == 6 and made["max_model_len"] == CONTEXT
        assert made["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o"]
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "héllo"}
        chat = http.post("/tokenize", json={"model": "talk", "messages": MESSAGES}).json()
        assert chat["tokens"] == chat_ids(talk) and "token_strs" not in chat


def test_what_the_server_says_of_itself(server: Running, client: openai.OpenAI) -> None:
    client.completions.create(model="base", prompt=PROMPT, max_tokens=2)
    with httpx.Client(base_url=server.url) as nobody:
        assert nobody.get("/health").json() == {"status": "ok"}
        about = nobody.get("/").json()
        assert about["name"] == "gptworks" and about["base_url"] == f"{server.url}/v1"
        assert nobody.get(about["interface"]).status_code == nobody.get(about["health"]).status_code == 200
        tree = nobody.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models"} <= tree["paths"].keys()
    assert "422" not in json.dumps(tree["paths"])
    with server.http() as http:
        text = http.get("/metrics").text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    statistics = server.engine("base").statistics()
    assert values['gptworks:generation_tokens_total{model_name="base"}'] == statistics.generated_tokens > 0
    assert values['gptworks:num_requests_running{model_name="base"}'] == 0
    assert values['gptworks:request_success_total{finished_reason="length",model_name="base"}'] > 0
    assert values['gptworks:time_to_first_token_seconds_count{model_name="base"}'] > 0


# ---------------------------------------------------------------------------------------------------- all at once


def test_thirty_two_at_once_get_what_each_gets_alone(server: Running, base: Engine, talk: Engine) -> None:
    """With the asynchronous client, streams and whole answers, and both models."""

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        asked: dict[str, Any] = {"seed": i, "max_tokens": 5 + i, "temperature": 0.9}
        if i % 4 == 0:
            made = await client.chat.completions.create(model="talk", messages=MESSAGES, **asked)
            return made.choices[0].message.content or ""
        if i % 4 == 1:
            chunks = await client.chat.completions.create(model="talk", messages=MESSAGES, stream=True, **asked)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        if i % 4 == 2:
            return (await client.completions.create(model="base", prompt=PROMPT[i % 7 :], **asked)).choices[0].text
        parts = await client.completions.create(model="base", prompt=PROMPT[i % 7 :], stream=True, **asked)
        return "".join([chunk.choices[0].text async for chunk in parts])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    texts = asyncio.run(all_of_them())
    for i, text in enumerate(texts):
        engine, prompt = (talk, chat_ids(talk)) if i % 4 < 2 else (base, PROMPT[i % 7 :])
        assert [text] == of(engine, prompt, seed=i, max_tokens=5 + i, temperature=0.9), i
    for name in ("base", "talk"):
        statistics = server.engine(name).statistics()
        assert (statistics.running, statistics.waiting, statistics.slots_used) == (0, 0, 0)
