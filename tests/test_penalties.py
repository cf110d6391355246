"""The DRY penalty against a literal computation of its definition, in Python and in the page's JavaScript."""

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.infer.penalties import LONGEST_REPEAT, Repeats, adjust
from gptworks.infer.sampling import Sampler, SamplingSettings, sample
from test_html_file import JS, in_node

SMALL = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 2}


def literal(text: list[int], settings: dict[str, Any], ends: list[int]) -> dict[int, float]:
    """Return the penalty of each token by the definition: compare the text's end with the end of every earlier part."""
    longest: dict[int, int] = {}
    for end in range(1, len(text)):
        n = 0
        while n < min(end, LONGEST_REPEAT) and text[end - 1 - n] == text[-1 - n]:
            n += 1
        if n >= settings["dry_allowed_length"] and text[end] not in ends:
            longest[text[end]] = max(n, longest.get(text[end], 0))
    over = {token: n - settings["dry_allowed_length"] for token, n in longest.items()}
    return {token: settings["dry_multiplier"] * settings["dry_base"] ** n for token, n in over.items()}


def cases() -> list[tuple[list[int], list[int], dict[str, Any]]]:
    """Prompts, generated tokens and settings: texts of few different tokens, so that much is repeated."""
    chance, found = random.Random(1), []
    for case in range(60):
        tokens = [chance.randrange(chance.choice((1, 2, 4))) for _ in range(chance.choice((0, 1, 2, 9, 90, 200)))]
        cut = chance.randint(0, len(tokens))
        settings = {"dry_multiplier": (0.5, 2)[case % 2], "dry_base": (1.0, 1.3)[case % 3 % 2],
                    "dry_allowed_length": (1, 2, 5)[case % 3]}  # fmt: skip
        found.append((tokens[:cut], tokens[cut:], settings))
    return found


def penalties(prompt: list[int], generated: list[int], settings: dict[str, Any], ends: list[int]) -> dict[int, float]:
    """Return what the engine subtracts from the logits of a vocabulary of 5 tokens, by token; nothing for 0."""
    sampler = Sampler(SamplingSettings(**settings), prompt, ends=tuple(ends))
    for token in generated:
        sampler.push(token)
    (row,) = -adjust(torch.zeros(1, 5), [sampler])
    return {token: amount for token, amount in enumerate(row.tolist()) if amount}


def test_the_penalty_is_its_definition() -> None:
    for prompt, generated, settings in cases():
        expected = literal(prompt + generated, settings, [3])
        assert penalties(prompt, generated, settings, [3]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_subtracts_the_same(tmp_path: Path) -> None:
    code = f"""
import {{ NEUTRAL, Sampler }} from "{JS / "sampling.js"}";
console.log(JSON.stringify(given.map(([prompt, generated, settings]) => {{
  const sampler = new Sampler({{ ...NEUTRAL, seed: 1, ...settings }}, prompt, [3]);
  for (const id of generated) sampler.push(id);
  return [...sampler.adjusted(new Float32Array(5))].map((x) => -x);
}})));
"""
    for (prompt, generated, settings), row in zip(cases(), in_node(tmp_path, code, cases()), strict=True):
        expected = literal(prompt + generated, settings, [3])
        assert {token: amount for token, amount in enumerate(row) if amount} == pytest.approx(expected, rel=1e-6)


def test_a_repetition_is_penalized_once_it_is_long_enough() -> None:
    assert penalties([1, 2, 0, 2], [], SMALL, []) == {}, "one token repeats, and two may"
    assert penalties([1, 2, 0, 1, 2], [], SMALL, []) == {0: pytest.approx(0.8)}
    assert penalties([4, 1, 2, 0], [4, 1, 2], SMALL, []) == {0: pytest.approx(0.8 * 1.5)}, "of the prompt, too"
    assert penalties([1, 2, 0, 1, 2], [], SMALL, [0]) == {}, "a token that ends the text is not penalized"


def test_a_loop_ends() -> None:
    """A model that always prefers to go on with 1, 2, 3, 1, 2, 3 says something else before the fourth time."""
    sampler, text = Sampler(SamplingSettings(temperature=0, dry_multiplier=1), [1, 2, 3]), [1, 2, 3]
    for _ in range(9):
        logits = torch.zeros(1, 5)
        logits[0, text[-1] % 3 + 1] = 3.0
        (token,) = sample(logits, [sampler])
        sampler.push(token)
        text.append(token)
    assert text[:6] == [1, 2, 3, 1, 2, 3] and text[6:12] != [1, 2, 3, 1, 2, 3]


def test_a_long_text_of_one_token_has_a_finite_penalty() -> None:
    settings = SamplingSettings(dry_multiplier=100, dry_base=10, dry_allowed_length=1)
    ids, amounts = Repeats([7] * 100_000).penalties(settings, ())
    assert ids.tolist() == [7] and math.isfinite(amounts[0])
    assert sample(torch.zeros(1, 1), [Sampler(settings, [0] * 300)]) == [0], "the only token there is"
