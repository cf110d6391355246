"""The engine against a naive loop without a cache, and its features for users: text, stops, seeds, errors, chat."""

import math
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptworks.config import CharTokenizer, WordTokenizer
from gptworks.errors import UserError
from gptworks.infer import ChatSession, Engine, SamplingSettings, load
from gptworks.infer.sampling import Sampler, sample
from gptworks.infer.text import StopStrings
from gptworks.model.gpt import GPT
from gptworks.recipe import parse_recipe, save_recipe
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import save_tokenizer, train_tokenizer, vocabulary_size
from gptworks.training.checkpoint_files import save_checkpoint
from tiny import plain_model

LETTERS = "abcdefghij"
CONTEXT = 16


def char_tokenizer(text: str = LETTERS) -> Tokenizer:
    return train_tokenizer(CharTokenizer(type="char"), [text])


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_model(tokenizer: Tokenizer, seed: int = 0, **settings: Any) -> GPT:
    torch.manual_seed(seed)
    config = {"context_length": CONTEXT, "n_layers": 2, "d_model": 16, "n_heads": 2, "init_std": 0.3} | settings
    return GPT(plain_model(**{"vocab_size": vocabulary_size(tokenizer)} | config))


def chain_model(tokenizer: Tokenizer, chain: Sequence[int]) -> GPT:
    """Return a model that greedily writes `chain` again and again: blocks without effect between a one-hot embedding
    and a shifted head."""
    size = vocabulary_size(tokenizer)
    model = GPT(
        plain_model(
            vocab_size=size, context_length=CONTEXT, n_layers=1, d_model=size, n_heads=1, position="none",
            tie_embeddings=False, zero_init_projections=True,
        )
    )  # fmt: skip
    assert model.untied_head is not None
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(size))
        model.untied_head.weight.zero_()
        for token, following in zip(chain, [*chain[1:], chain[0]], strict=True):
            model.untied_head.weight[following, token] = 1.0
    return model


def writing(text: str, tokenizer: Tokenizer | None = None) -> Engine:
    """Return an engine that greedily repeats `text`, in which no token may occur twice."""
    tokenizer = tokenizer or char_tokenizer()
    return Engine(chain_model(tokenizer, tokenizer.encode(text).ids), tokenizer)


@torch.no_grad()
def naive(
    model: GPT, prompt: list[int], settings: SamplingSettings, index: int = 0, eos: int | None = None
) -> list[int]:
    """Generate by the literal rule of `slide`: compute the whole window again for each token, without a cache."""
    sampler, window, ids = Sampler(settings, prompt, index), list(prompt), list(prompt)
    context = model.config.context_length
    while len(ids) - len(prompt) < settings.max_tokens:
        if len(window) > context:
            window = window[-(context // 2) :]
        (token,) = sample(model(torch.tensor([window]))[:, -1], [sampler])
        if token == eos:
            break
        sampler.push(token)
        window.append(token)
        ids.append(token)
    return ids[len(prompt) :]


# -------------------------------------------------------------------------------------------- against the naive loop


@pytest.mark.parametrize("settings", [{"position": "learned"}, {"position": "rope", "window": 5}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_prompt", [1, CONTEXT, 3 * CONTEXT])
def test_tokens_equal_those_of_the_naive_loop_over_several_windows(
    settings: dict[str, Any], temperature: float, n_prompt: int
) -> None:
    tokenizer = char_tokenizer()
    model = random_model(tokenizer, **settings).double().eval()
    prompt = torch.randint(2, 12, (n_prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    sampling = SamplingSettings(temperature=temperature, repetition_penalty=1.2, seed=3, max_tokens=3 * CONTEXT)
    (completion,) = Engine(model, tokenizer).complete(prompt, sampling, overflow="slide")
    expected = naive(model, prompt, sampling, eos=special_tokens(tokenizer).eos)
    assert completion.token_ids == expected
    assert completion.prompt_tokens == n_prompt


def test_samples_that_end_at_different_times_do_not_disturb_one_another() -> None:
    tokenizer = char_tokenizer()
    model = random_model(tokenizer, position="learned", init_std=0.15).double().eval()
    prompt, eos = tokenizer.encode("abc").ids, special_tokens(tokenizer).eos
    sampling = SamplingSettings(temperature=1.0, seed=5, max_tokens=40)
    completions = Engine(model, tokenizer).complete(prompt, sampling, n_samples=8, overflow="slide")
    assert [c.token_ids for c in completions] == [naive(model, prompt, sampling, i, eos) for i in range(8)]
    lengths = {len(c.token_ids) for c in completions}
    assert len(lengths) > 4 and max(lengths) > CONTEXT, "the test needs samples of many lengths"
    for completion in completions:
        assert completion.finish_reason == ("length" if len(completion.token_ids) == 40 else "stop")


def test_a_long_prompt_is_computed_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = char_tokenizer()
    model = random_model(tokenizer)
    whole = Engine(model, tokenizer).generate("abcdefghij", temperature=0, max_tokens=6)
    lengths: list[int] = []
    features = model.features
    monkeypatch.setattr(model, "features", lambda t, cache: lengths.append(t.size(1)) or features(t, cache))
    one = Engine(model, tokenizer, prefill_tokens=4)
    assert one.generate("abcdefghij", temperature=0, max_tokens=6) == whole
    assert lengths == [4, 4, 2, 1, 1, 1, 1, 1]


def test_the_prompt_is_computed_once_for_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    one = writing("abcd")
    shapes: list[tuple[int, ...]] = []
    features = one.model.features
    monkeypatch.setattr(one.model, "features", lambda t, cache: shapes.append(tuple(t.shape)) or features(t, cache))
    one.complete("abcd", n_samples=5, max_tokens=2, temperature=0)
    assert shapes == [(1, 4), (1, 5)]


# ------------------------------------------------------------------------------------------------- how a text ends


def test_max_tokens_ends_a_text() -> None:
    (completion,) = writing("abcde").complete("ab", temperature=0, max_tokens=7)
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("cdeabcd", "length", 7)


def test_a_full_context_ends_a_text_that_may_not_slide() -> None:
    """The prompt and the generated tokens fill the context; the token after the last position is still generated."""
    one = writing("abcde")
    for n_prompt in (2, CONTEXT):
        (completion,) = one.complete(("abcde" * 4)[:n_prompt], temperature=0, max_tokens=100)
        assert completion.finish_reason == "context"
        assert completion.text == ("abcde" * 10)[n_prompt : CONTEXT + 1]
    (completion,) = one.complete("ab", temperature=0, max_tokens=100, overflow="slide")
    assert completion.text == ("abcde" * 30)[2:102]


def test_the_end_of_text_token_ends_a_text_and_is_not_in_it() -> None:
    tokenizer = char_tokenizer()
    eos = special_tokens(tokenizer).eos
    assert eos is not None
    one = Engine(chain_model(tokenizer, [*tokenizer.encode("abc").ids, eos]), tokenizer)
    (completion,) = one.complete("a", temperature=0)
    assert (completion.text, completion.finish_reason) == ("bc", "stop")
    assert eos not in completion.token_ids


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("d", "bc", "stop"), ("cd", "b", "stop"), (("ea", "cx"), "bcd", "stop"), (("de", "d"), "bc", "stop"),
        ("ex", "bcdeabc", "length"), ("cx", "bcdeabc", "length"), ("b", "", "stop"),
    ],
)  # fmt: skip
def test_a_stop_string_ends_a_text_before_it_even_when_it_spans_tokens(stop: Any, text: str, reason: str) -> None:
    (completion,) = writing("abcde").complete("a", temperature=0, max_tokens=7, stop=stop)
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_a_text_ends_before_a_stop_token() -> None:
    one = writing("abcde")
    ends = [one.tokenizer.token_to_id("d")]
    (completion,) = one.complete("a", temperature=0, max_tokens=7, stop_token_ids=ends)
    assert (completion.text, completion.finish_reason) == ("bc", "stop")
    (longer,) = one.complete("a", temperature=0, max_tokens=7, min_tokens=4, stop_token_ids=ends)
    assert len(longer.token_ids) >= 4 and ends[0] not in longer.token_ids


def test_a_stop_string_may_be_part_of_a_token() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "x": 1, "one\nUser: two": 2}, unk_token="<unk>"))
    one = Engine(chain_model(tokenizer, [1, 2]), tokenizer)
    assert one.generate([1], temperature=0, max_tokens=1, stop="\nUser:") == " one"


@given(
    parts=st.lists(st.text("ab", max_size=5), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    stream, shown = StopStrings(tuple(stops)), ""
    for part in parts:
        shown += stream.push(part)
        if stream.found:
            break
    shown += stream.flush()
    text = "".join(parts)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    longest = max((len(stop) for stop in stops if ends and text[: ends[0]].endswith(stop)), default=0)
    assert shown == (text[: ends[0] - longest] if ends else text)
    assert stream.found == bool(ends)


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stop: str) -> None:
    stream = StopStrings((stop,))
    stream.push(text)
    assert stream.found or stop.startswith(stream.held)


# ----------------------------------------------------------------------------------------------------- the text


def test_a_character_split_over_tokens_is_not_cut() -> None:
    one = writing("é漢🙂", byte_tokenizer())  # 2, 3 and 4 tokens
    parts = list(one.stream("é漢🙂", temperature=0, max_tokens=9, overflow="slide"))
    assert parts == ["é", "漢", "🙂"]


def test_a_text_cut_within_a_character_says_so_at_its_end() -> None:
    assert (
        writing("é漢🙂", byte_tokenizer()).generate("é漢🙂", temperature=0, max_tokens=3)
        == "é\N{REPLACEMENT CHARACTER}"
    )


def test_pieces_joined_are_the_completion_of_each_sample() -> None:
    tokenizer = byte_tokenizer()
    one = Engine(random_model(tokenizer), tokenizer)
    sampling = SamplingSettings(temperature=1.5, seed=1, max_tokens=60)
    pieces = list(one.pieces("xyz", sampling, n_samples=3, overflow="slide"))
    completions = one.complete("xyz", sampling, n_samples=3, overflow="slide")
    for i, completion in enumerate(completions):
        assert "".join(piece.text for piece in pieces if piece.sample == i) == completion.text
        assert completion.text == tokenizer.decode(completion.token_ids)
        reasons = [piece.finish_reason for piece in pieces if piece.sample == i]
        assert reasons == [None] * 59 + ["length"]


def test_the_text_continues_the_prompt_with_the_space_between_words() -> None:
    tokenizer = train_tokenizer(WordTokenizer(type="word", vocab_size=20), ["the king said no"])
    assert writing("the king said no", tokenizer).generate("the king", temperature=0, max_tokens=2) == " said no"


def test_rows_of_a_padded_vocabulary_are_never_chosen() -> None:
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, vocab_size=2000)
    (completion,) = Engine(model, tokenizer).complete("abc", temperature=5.0, seed=1, max_tokens=200, overflow="slide")
    assert max(completion.token_ids) < vocabulary_size(tokenizer)


# ---------------------------------------------------------------------------------------------------- the seeds


def test_a_seed_repeats_a_text_and_its_samples_differ() -> None:
    tokenizer = char_tokenizer()
    one = Engine(random_model(tokenizer), tokenizer)
    settings = SamplingSettings(seed=1, max_tokens=12, ignore_eos=True)
    texts = [c.text for c in one.complete("ab", settings, n_samples=4)]
    assert texts == [c.text for c in one.complete("ab", settings, n_samples=4)]
    assert texts[0] == one.generate("ab", settings)
    assert len(set(texts)) == 4


def test_without_a_seed_each_text_has_its_own_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known numbers replace the system's entropy."""
    tokenizer, known, made = char_tokenizer(), random.Random, iter(("first", "second"))
    one = Engine(random_model(tokenizer), tokenizer)
    monkeypatch.setattr(random, "Random", lambda *seed: known(*seed) if seed else known(next(made)))
    texts = [one.generate("ab", max_tokens=12, ignore_eos=True) for _ in range(2)]
    assert texts[0] != texts[1]
    assert next(made, None) is None, "each took one"


# -------------------------------------------------------------------------------------------- the model's own state


def test_dropout_is_off_while_generating_and_on_again_between_pieces() -> None:
    tokenizer = char_tokenizer()
    model = random_model(tokenizer, dropout_residual=0.5, dropout_embedding=0.5)
    model.blocks[0].eval()  # someone froze this block
    one = Engine(model, tokenizer)
    texts = set()
    for _ in range(3):
        text = ""
        for part in one.stream("abc", temperature=0, max_tokens=8):
            text += part
            assert model.training and not model.blocks[0].training
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        texts.add(text)
    assert len(texts) == 1


def test_a_half_read_stream_leaves_nothing_behind() -> None:
    one = writing("abcde")
    assert next(one.stream("a", temperature=0)) == "b"
    assert one.model.training
    assert one.generate("a", temperature=0, max_tokens=3) == "bcd"


# --------------------------------------------------------------------------------------------------- the prompt


def test_an_empty_prompt_starts_a_document_if_the_tokenizer_can() -> None:
    tokenizer = char_tokenizer()
    (completion,) = Engine(random_model(tokenizer), tokenizer).complete("", max_tokens=3)
    assert completion.prompt_tokens == 1
    with pytest.raises(UserError, match="the prompt is empty"):
        writing("abc", byte_tokenizer()).stream("")


def test_a_prompt_longer_than_the_context_states_both_lengths_and_the_way_out() -> None:
    with pytest.raises(UserError) as error:
        writing("abcde").stream("abcde" * 4)  # raised now, not when the first text is asked for
    for part in ("20 tokens", f"context {CONTEXT}", "shorten", 'overflow="slide"', "last 8"):
        assert part in str(error.value)


def test_unknown_characters_are_named_in_a_warning() -> None:
    one = writing("abcde")
    with pytest.warns(UserWarning, match="'§', 'é'"):
        one.generate("a§ébé", max_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.generate("abc", max_tokens=1)


def test_a_prompt_that_encodes_to_nothing_is_refused() -> None:
    tokenizer = train_tokenizer(WordTokenizer(type="word", vocab_size=20), ["the king said no"])
    one = Engine(random_model(tokenizer), tokenizer)
    with pytest.raises(UserError, match="has no token this tokenizer knows"):
        one.generate(" \n")


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        ("a", {"temprature": 1}, "did you mean `temperature`"), ("a", {"n_samples": 0}, "n_samples=0"),
        ("a", {"overflow": "wrap"}, 'overflow="wrap"'), ([], {}, "no tokens"), ([99], {}, "token id 99"),
        ([-1], {}, "token id -1"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_met_are_refused(prompt: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        writing("abcde").pieces(prompt, **arguments)


def test_a_bias_that_leaves_no_token_is_refused() -> None:
    """The step failed with an IndexError, and with it all requests of the engine."""
    one = writing("abcde")
    n = vocabulary_size(one.tokenizer)
    with pytest.raises(UserError, match="forbids every token"):
        one.pieces("a", logit_bias=dict.fromkeys(range(n), -math.inf))
    [token] = one.complete("a", max_tokens=1, logit_bias=dict.fromkeys(range(n - 1), -math.inf))[0].token_ids
    assert token == n - 1


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(UserError, match="12 tokens and the model's vocabulary 5"):
        Engine(random_model(char_tokenizer(), vocab_size=5), char_tokenizer())


# --------------------------------------------------------------------------------------------------------- chat


def test_a_chat_continues_one_transcript() -> None:
    one = writing("abcde")
    chat = ChatSession(one, temperature=0, max_tokens=3)
    assert "".join(chat.send("ab")) == "cde"
    assert "".join(chat.send("a")) == "bcd"
    assert one.tokenizer.decode(chat.token_ids, skip_special_tokens=False) == "abcdeabcd"
    assert "".join(chat.send("")) == "eab", "nothing sent: the model goes on"
    chat.reset()
    assert "".join(chat.send("d")) == "eab"
    assert chat.n_forgotten == 0


def test_a_chat_that_outgrows_the_context_forgets_its_oldest_text() -> None:
    chat, written = ChatSession(writing("abcde"), temperature=0, max_tokens=4), ""
    for text in ("abc", "abc", "de", "abcde" * 8 + "abc"):
        written += text + "".join(chat.send(text))
        assert len(chat.token_ids) <= CONTEXT
        assert chat.n_forgotten == len(written) - len(chat.token_ids)
        assert written.endswith(chat.engine.tokenizer.decode(chat.token_ids))
        assert (chat.n_forgotten > 0) == (len(written) > CONTEXT)
    assert len(written) > 3 * CONTEXT


def test_a_chat_reads_what_a_single_text_would_leave_in_the_window() -> None:
    tokenizer = byte_tokenizer()
    one = Engine(random_model(tokenizer, position="learned"), tokenizer)
    chat = ChatSession(one, temperature=0, max_tokens=30)
    for text in ("abc", ""):
        list(chat.send(text))
    (completion,) = one.complete("abc", temperature=0, max_tokens=60, overflow="slide")
    assert chat.token_ids == completion.token_ids[-len(chat.token_ids) :]
    assert len(chat.token_ids) + chat.n_forgotten == 63


def test_a_chat_keeps_what_was_generated_before_it_was_interrupted() -> None:
    chat = ChatSession(writing("abcde"), temperature=0)
    stream = chat.send("a")
    assert [next(stream), next(stream)] == ["b", "c"]
    stream.close()
    chat.settings = SamplingSettings(temperature=0, max_tokens=2)
    assert "".join(chat.send("")) == "de"


def test_a_chat_continues_after_a_text_that_it_cannot_read() -> None:
    chat = ChatSession(writing("abcde"), temperature=0, max_tokens=3)
    assert "".join(chat.send("ab")) == "cde"
    with pytest.raises(UserError, match="half of a surrogate pair"):
        chat.send("a\udce9")
    assert "".join(chat.send("a")) == "bcd"


def test_a_seeded_chat_repeats_and_its_turns_differ() -> None:
    tokenizer = char_tokenizer()
    one = Engine(chain_model(tokenizer, [2]), tokenizer)  # every token is as likely as the others, nearly
    first, second = (ChatSession(one, temperature=5.0, seed=7, max_tokens=10) for _ in range(2))
    turns = ["".join(first.send("bbb")) for _ in range(3)]
    assert turns == ["".join(second.send("bbb")) for _ in range(3)]
    assert len(set(turns)) == 3


# ------------------------------------------------------------------------------------------------- a run folder


def test_a_run_folder_becomes_an_engine(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    model = random_model(tokenizer)
    recipe = parse_recipe(
        {
            "model": model.config.model_dump(), "tokenizer": {"type": "char"},
            "data": {"sources": [{"type": "python-stdlib"}]}, "train": {"max_steps": 1},
        }
    )  # fmt: skip
    save_recipe(recipe, tmp_path / "recipe.yaml")
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    save_checkpoint(tmp_path, 3, model.state_dict(), {}, {})
    expected = Engine(model, tokenizer).generate("abc", temperature=0, max_tokens=10)
    for checkpoint in ("best", "last", 3):
        assert load(tmp_path, checkpoint, device="cpu").generate("abc", temperature=0, max_tokens=10) == expected
    with pytest.raises(UserError, match="checkpoint `4`"):
        load(tmp_path, 4)
