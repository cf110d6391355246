"""Token healing: a text is continued wherever its prompt was cut."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import tiny
from gptworks.config import BPETokenizer, WordTokenizer
from gptworks.infer import Engine
from gptworks.infer.speculate import PromptLookup
from gptworks.tokenizer import encode_text, train_tokenizer
from test_engine import random_model

TEXT = "def first(one):\n    return one\n\n\ndef second(two):\n    return two\n\n\n# naïve café — ünder\n" * 30


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(BPETokenizer(type="bpe", vocab_size=300), [TEXT])


def engine(tokenizer: Tokenizer, **options: object) -> Engine:
    model = random_model(tokenizer, context_length=64, init_std=0.2).eval()
    return Engine(model, tokenizer, backend="torch", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "goes_on"),
    [("def ", True), ("def first(", True), ("    ret", True), ("# ü", True), ("# naïve café —", False)],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_spell_the_prompt_again_and_the_text_goes_on_after_it(
    tokenizer: Tokenizer, prompt: str, goes_on: bool, temperature: float
) -> None:
    """goes_on: whether the vocabulary has a token that goes on after the prompt's last one."""
    ids = encode_text(tokenizer, prompt)
    for made in engine(tokenizer).complete(
        prompt, heal=True, temperature=temperature, seed=1, n_samples=5, max_tokens=12, ignore_eos=True
    ):
        assert tokenizer.decode([*ids[: made.prompt_tokens], *made.token_ids]) == prompt + made.text
        assert (made.prompt_tokens < len(ids)) == goes_on


def test_the_first_token_is_the_likeliest_of_all_that_begin_with_the_end_of_the_prompt(tokenizer: Tokenizer) -> None:
    made = engine(tokenizer)
    *before, last = encode_text(tokenizer, "def ")
    assert tokenizer.decode([last]) == " "
    with torch.no_grad():
        logits = made.model(torch.tensor([before]))[0, -1].float()
    begins = [i for i in range(len(logits)) if tokenizer.decode([i]).startswith(" ")]
    assert len(begins) > 3
    expected = max(begins, key=lambda i: logits[i].item())
    (healed,) = made.complete("def ", heal=True, temperature=0, max_tokens=1)
    assert healed.token_ids == [expected] and healed.text == tokenizer.decode([expected])[1:]


def test_drafts_and_stop_strings_give_the_same_text(tokenizer: Tokenizer) -> None:
    prompt, settings = TEXT[:60] + "def ", {"heal": True, "seed": 3, "max_tokens": 30, "temperature": 0.5}
    (plain,) = engine(tokenizer).complete(prompt, **settings)
    (drafted,) = engine(tokenizer, drafter=PromptLookup(4)).complete(prompt, **settings)
    assert drafted == plain
    stop = plain.text[4:6]
    (stopped,) = engine(tokenizer).complete(prompt, **settings, stop=(stop,))
    assert stopped.text == plain.text[: plain.text.index(stop)]


def test_nothing_is_drawn_again_where_it_would_not_help(tokenizer: Tokenizer) -> None:
    """Ids, a single token, an expression, and tokenizers of words are continued as they are."""
    ids = encode_text(tokenizer, "def first")
    words = train_tokenizer(WordTokenizer(type="word"), [TEXT])
    for made, prompt, extra in (
        (engine(tokenizer), ids, {}),
        (engine(tokenizer), "d", {}),
        (engine(words), "def first", {}),
    ):
        settings = {"temperature": 0, "max_tokens": 5, **extra}
        assert made.complete(prompt, heal=True, **settings) == made.complete(prompt, **settings)


def test_the_command_heals_unless_told_not_to(tmp_path: Path) -> None:
    run = tiny.trained(tmp_path, steps=12)
    lengths = []
    for option in ("--heal", "--no-heal"):
        done = tiny.gptworks("generate", run, "def ", "--max-tokens", "6", "--json", option)
        lengths.append(json.loads(done.stdout)["completions"][0]["prompt_tokens"])
    assert lengths[0] == lengths[1] - 1
