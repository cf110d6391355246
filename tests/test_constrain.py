"""Constrained texts: the output of a random model follows the schema or expression."""

import gc
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from gptworks.config import GPT2Tokenizer, WordTokenizer
from gptworks.errors import UserError
from gptworks.infer import Engine, SamplingSettings, constrain
from gptworks.infer.constrain import Constraint, Constraints
from gptworks.infer.scheduler import QueueFull
from gptworks.infer.speculate import PromptLookup
from gptworks.tokenizer import train_tokenizer
from test_engine import byte_tokenizer, char_tokenizer, random_model

pytest.importorskip("llguidance")

CHARACTERS = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")  # with an end-of-text token
BYTES = byte_tokenizer()  # without

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip


def engine(tokenizer: Tokenizer, **options: Any) -> Engine:
    model = random_model(tokenizer, context_length=256, init_std=0.2).eval()
    return Engine(model, tokenizer, backend="torch", **options)


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES], ids=["characters", "bytes"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_follows_its_schema(tokenizer: Tokenizer, temperature: float) -> None:
    for made in engine(tokenizer).complete(
        "x", json_schema=PERSON, temperature=temperature, n_samples=6, seed=1, max_tokens=200
    ):
        assert made.finish_reason == "stop"
        value = json.loads(made.text)
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 6 and 0 <= value["age"] <= 120 and isinstance(value["age"], int)
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES], ids=["characters", "bytes"])
@pytest.mark.parametrize("regex", [r"[0-9]{3}-[a-f]{2,5}", r"(yes|no|maybe)", r"x*", r"-?[1-9][0-9]{0,4}(\.[0-9]+)?"])
def test_a_text_matches_its_regular_expression(tokenizer: Tokenizer, regex: str) -> None:
    for made in engine(tokenizer).complete("x", regex=regex, n_samples=6, seed=2, max_tokens=60):
        if made.finish_reason == "stop":
            assert re.fullmatch(regex, made.text)
        else:
            assert regex in (r"x*", r"-?[1-9][0-9]{0,4}(\.[0-9]+)?"), "only these have no end"


def test_constrained_and_free_texts_run_side_by_side() -> None:
    """Drafts that the constraint forbids are dropped."""
    one = engine(CHARACTERS, n_slots=4, drafter=PromptLookup(4, 2))
    chance, wanted = random.Random(1), []
    for i in range(8):
        regex = r"(ab|cd|[0-9]){20}" if i % 2 else None
        wanted.append((chr(65 + i) * 3, SamplingSettings(regex=regex, seed=chance.randrange(99), max_tokens=40)))
    requests = [one.submit(*asked) for asked in wanted]
    while one.step():
        pass
    for (prompt, settings), request in zip(wanted, requests, strict=True):
        text = "".join(piece.text for piece in request.take())
        assert text == engine(CHARACTERS).generate(prompt, settings)
        assert settings.regex is None or re.fullmatch(settings.regex, text)


def test_tokens_of_several_characters_and_bytes(shared_data: Path) -> None:
    tokenizer = train_tokenizer(GPT2Tokenizer(type="gpt2", path=shared_data / "r50k_base.tiktoken"), [])
    one = engine(tokenizer)
    for made in one.complete("x", json_schema=PERSON, n_samples=3, seed=1, max_tokens=100):
        assert set(json.loads(made.text)) == {"name", "age", "tags"}
    for text in ('{"a": [1, 2.5e3, "é漢\\n"], "b": {}}', "[]", '"x"'):
        constraint = Constraint(Constraints(tokenizer).grammar(SamplingSettings(json_schema={})))
        for token in tokenizer.encode(text).ids:
            assert constraint.allowed()[token], (text, tokenizer.decode([token]))
            constraint.push(token)


def test_a_token_is_drawn_from_what_the_grammar_allows() -> None:
    (made,) = engine(CHARACTERS).complete("x", regex="a[bcd]{4}e", seed=1, logprobs=1, processed_logprobs=90)
    assert made.processed_logprobs is not None and made.logprobs is not None
    alternatives = ["".join(sorted(CHARACTERS.decode([i]) for i, _ in one.top)) for one in made.processed_logprobs]
    assert alternatives == ["a", "bcd", "bcd", "bcd", "bcd", "e"]
    assert made.processed_logprobs[0].logprob == 0.0 > made.logprobs[0].logprob


def test_exactly_the_allowed_tokens_may_be_pushed() -> None:
    """Compares the mask of allowed tokens with the matcher's answer for each single token."""
    constraint = Constraint(Constraints(CHARACTERS).grammar(SamplingSettings(regex=r"a(b|c)*d")))
    for character, following in (("a", "bcd"), ("b", "bcd"), ("c", "bcd")):
        constraint.push(CHARACTERS.encode(character).ids[0])
        allowed = torch.nonzero(constraint.allowed())[:, 0].tolist()
        assert sorted(CHARACTERS.decode([token]) for token in allowed) == list(following)
        assert [i for i in range(90) if constraint.accepts([i])] == allowed
    assert constraint.push(CHARACTERS.encode("d").ids[0]), "nothing can follow"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"regex": "a("}, "regex='a\\('"), ({"json_schema": "{"}, "is not a JSON schema"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema=.*cannot be followed"),
        ({"json_schema": "[1]"}, "a schema is an object"),
    ],
)  # fmt: skip
def test_constraints_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine(CHARACTERS).pieces("x", **settings)


def test_what_llguidance_gives_up_on_is_said_with_a_fix() -> None:
    patterns = [{"pattern": f"^(.*{character}){{2}}.*$"} for character in "abcdefghi"]
    with pytest.raises(UserError, match=r"too many patterns must hold at once\. Write fewer of them"):
        engine(CHARACTERS).pieces("x", json_schema={"type": "string", "allOf": patterns})
    constraint = Constraint(Constraints(CHARACTERS).grammar(SamplingSettings(regex="(.*a.{0,9000}b){0,9000}")))
    with pytest.raises(UserError, match=r"^the constraint failed: lexer error: [a-z ]*\. Use a simpler one\.$"):
        for character in "ab" * 2000:
            constraint.allowed()
            constraint.push(CHARACTERS.encode(character).ids[0])


def test_words_joined_by_spaces_are_refused() -> None:
    tokenizer = train_tokenizer(WordTokenizer(type="word", vocab_size=20), ["the king said no"])
    with pytest.raises(UserError, match="spell text by themselves"):
        engine(tokenizer).pieces("the", regex="a")


def test_a_grammar_counts_while_a_text_uses_it_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrain, "_MAX_KEPT", 0)
    one = engine(CHARACTERS)
    request = one.submit("x", regex="a[bcd]{40}e", seed=1, n_samples=2)
    one.step()
    live = one.admission.constraints()._live
    (n_bytes,) = [grammar.n_bytes for grammar in live.values()]
    monkeypatch.setattr(constrain, "MAX_LIVE_BYTES", n_bytes)
    with pytest.raises(QueueFull, match="all the memory"):
        one.submit("x", regex="b{3}")
    again = one.submit("x", regex="a[bcd]{40}e", seed=1)
    assert len(live) == 1, "the second text uses the same grammar"
    one.finish([request, again])
    gc.collect()
    assert not live, "finished requests, which their caller may keep, hold no grammar"
    monkeypatch.setattr(constrain, "MAX_LIVE_BYTES", 1 << 29)
    assert one.generate("x", regex="b{3}") == "bbb"
