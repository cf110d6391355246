"""Beam search against Hugging Face's `generate`, and against all texts there are."""

import itertools
from typing import Any

import pytest
import torch
import transformers

from gptworks.infer import Engine
from gptworks.infer.beam import BeamSearch
from gptworks.interop.huggingface.exporting import export_huggingface
from gptworks.tokenizer import special_tokens
from hf import make_run
from test_engine import char_tokenizer, random_model

TOKENIZER = char_tokenizer()
EOS = special_tokens(TOKENIZER).eos
CONTEXT = 48


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """One model as an engine and as Hugging Face has it."""
    model = random_model(TOKENIZER, context_length=CONTEXT, position="learned", norm_bias=True, init_std=0.3).eval()
    folder = tmp_path_factory.mktemp("hf") / "model"
    export_huggingface(make_run(folder.parent / "run", model, TOKENIZER), folder, verify=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return Engine(model, TOKENIZER, backend="torch"), theirs


@pytest.mark.parametrize("num_beams", [2, 4, 7])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("prompt", ["abc", "jihgfedcba"])
def test_beams_find_what_hugging_faces_do(pair: Any, num_beams: int, length_penalty: float, prompt: str) -> None:
    ours, theirs = pair
    ids = TOKENIZER.encode(prompt).ids
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), num_beams=num_beams, do_sample=False,
            length_penalty=length_penalty, num_return_sequences=num_beams, max_new_tokens=15, eos_token_id=EOS,
            pad_token_id=0, early_stopping=False,
        )  # fmt: skip
    made = ours.complete(ids, num_beams=num_beams, length_penalty=length_penalty, n_samples=num_beams, max_tokens=15)
    for one, row in zip(made, expected.tolist(), strict=True):
        tokens = row[len(ids) :]
        n = tokens.index(EOS) if EOS in tokens else len(tokens)
        assert one.token_ids == tokens[:n]
        assert one.finish_reason == ("stop" if EOS in tokens else "length")


def test_beams_enough_for_every_text_find_the_most_probable_one(pair: Any) -> None:
    ours, _ = pair
    ids = TOKENIZER.encode("ab").ids
    n = ours.n_ids

    def log_probability(tokens: tuple[int, ...]) -> float:
        with torch.no_grad():
            rows = ours.model(torch.tensor([[*ids, *tokens]]))[0].log_softmax(-1)
        return sum(rows[len(ids) - 1 + i, token].item() for i, token in enumerate(tokens))

    texts = [(EOS,), *((a, EOS) for a in range(n) if a != EOS), *itertools.product(set(range(n)) - {EOS}, range(n))]
    best = max(dict.fromkeys(texts), key=log_probability)
    (made,) = ours.complete(ids, num_beams=n, length_penalty=0.0, max_tokens=2)
    assert made.token_ids == [token for token in best if token != EOS]


def test_one_beam_is_greedy() -> None:
    search = BeamSearch(1, 1.0, 5, None)
    logits = torch.randn(5, 1, 9, generator=torch.Generator().manual_seed(1))
    for row in logits:
        search.advance(row)
    assert search.found[0].tokens == logits.argmax(-1)[:, 0].tolist()


def test_beams_run_beside_other_texts_and_leave_no_slot_behind(pair: Any) -> None:
    model = pair[0].model
    one = Engine(model, TOKENIZER, backend="torch", n_slots=6)
    beams = [one.submit("ab", num_beams=4, max_tokens=12) for _ in range(3)]
    others = [one.submit("cd", seed=i, max_tokens=12) for i in range(5)]
    for _ in range(4):
        one.step()
    one.cancel(beams[1])
    while one.step():
        pass
    expected = pair[0].complete("ab", num_beams=4, max_tokens=12)[0].text
    for request in (beams[0], beams[2]):
        assert "".join(piece.text for piece in request.take()) == expected
    for i, request in enumerate(others):
        assert "".join(piece.text for piece in request.take()) == pair[0].generate("cd", seed=i, max_tokens=12)
    assert one.statistics().slots_used == 0


def test_beams_end_where_the_context_does(pair: Any) -> None:
    ids = TOKENIZER.encode("abcdefghij" * 4 + "abcdef").ids
    (made,) = pair[0].complete(ids, num_beams=3, max_tokens=30, length_penalty=0.0)
    assert len(made.token_ids) <= CONTEXT + 1 - len(ids)
    assert made.finish_reason in ("context", "stop")
