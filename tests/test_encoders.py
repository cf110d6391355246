"""Fast encoders always give the same ids as `tokenizers`."""

import functools
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from gptworks.config import BPETokenizer, CharTokenizer, GPT2Tokenizer, Recipe, WordTokenizer
from gptworks.data import encoders, jobs
from gptworks.data.encoders import choose_encoder, compared
from gptworks.data.opened import Prepared
from gptworks.data.prepare import prepare
from gptworks.errors import UserError
from gptworks.tokenizer import BPE_PATTERNS, encodings, tokenizer_from_json, train_tokenizer
from tiny import plain_model

pytest.importorskip("gigatoken")

CODE = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text("utf-8")[:60_000]
PROSE = "It's the cat's mat; they'll say \"we've\" and 'tis so. Naïve café, don't you? I'D GO. 12345 67\r\n\n" * 40
MIXED = (
    "你好，世界。 안녕하세요 здравствуй 👩‍🚀♥️ é è ½ ² ٣ ４ \u00a0\u2003x\t\ty 's 'll\n \n\t'self' d'été “it's”\x0c\n"
    * 40
)
TEXTS = {"code": CODE, "prose": PROSE, "mixed": MIXED, "runs": "aaaa aaa abab " * 50 + " " * 200 + "\n" * 100}


@functools.cache
def trained(pattern: str, text: str) -> Tokenizer:
    config = BPETokenizer(type="bpe", vocab_size=450, pattern=pattern, added_tokens=["<|im_start|>", "Zqx"])
    return train_tokenizer(config, [TEXTS[text], " ".join(TEXTS.values())[:20_000]])


@functools.cache
def fast(pattern: str, text: str) -> Callable[[list[str]], Any]:
    name, _, encode = choose_encoder(trained(pattern, text))
    assert name == "gigatoken"
    return encode


def assert_equal(tokenizer: Tokenizer, encode: Callable[[list[str]], Any], texts: list[str]) -> None:
    for text, expected, found in zip(texts, encodings(tokenizer, texts), encode(texts), strict=True):
        assert found.dtype == np.uint32
        assert found.tolist() == expected.ids, text


TELLING = (
    "' 's 'S 't 're 'RE 'Ve 'll 'LL 'd 'self 'rest 's’ 'sé 'ſ ſ a é é ß ª º µ 你 が ํ 1 ² ½ ٣ Ⅷ 12345 _ - == ."
    " ’ “ — … 。 <|endoftext|> <|im_start|> aaaa abab x 👩‍🚀 🇩🇪 \ue000 \U0001fae8 \U000323b0 \U0010ffff \ufeff \u0301"
    " 'self'd"
)
# Characters that the patterns distinguish, their neighbours in Unicode, and parts of the vocabularies.
PARTS = st.one_of(
    st.sampled_from(TELLING.split(" ")),
    st.sampled_from("\t\n\v\f\r\x1c\x1f\x85\xa0\u1680\u180e\u2000\u2007\u200b\u2028\u2029\u202f\u205f\u3000\0"),
    st.sampled_from([" ", "  ", "\n\n", "\r\n", "\n    ", " \n", " \t \n\t "]),
    st.text(max_size=3),
    st.sampled_from(CODE.split()[:300]),
)
HOSTILE = st.lists(PARTS, max_size=14).map("".join)


@pytest.mark.parametrize("pattern", BPE_PATTERNS)
@given(data=st.data())
def test_hostile_texts_give_equal_ids(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(sorted(TEXTS)))
    assert_equal(trained(pattern, text), fast(pattern, text), data.draw(st.lists(HOSTILE, min_size=1, max_size=6)))


@pytest.mark.parametrize("pattern", BPE_PATTERNS)
@pytest.mark.parametrize("text", TEXTS)
def test_real_texts_give_equal_ids(pattern: str, text: str) -> None:
    assert_equal(trained(pattern, text), fast(pattern, text), [TEXTS[text], TEXTS["mixed"], TEXTS["code"][:5000]])


@functools.cache
def borders() -> list[str]:
    """Return the characters on both sides of each border between letters, numbers, white space and others, as
    `tokenizers` classifies them, and the first character."""
    split = pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}+|\s+"), "isolated")
    everything = "".join(chr(point) for point in range(0x40000) if not 0xD800 <= point < 0xE000)
    places = {place for _, bounds in split.pre_tokenize_str(everything) for place in bounds}
    sides = {everything[at] for place in places for at in (place - 1, place) if 0 <= at < len(everything)}
    return sorted(sides | set(everything[:1024]))


@pytest.mark.parametrize("pattern", BPE_PATTERNS)
def test_every_class_of_characters_gives_equal_ids(pattern: str) -> None:
    texts = [f"a{c}1{c}!{c} {c}{c}\n{c}'s{c}'self {c}" for c in borders()]
    assert_equal(trained(pattern, "mixed"), fast(pattern, "mixed"), texts)


def test_gpt2_gives_equal_ids(shared_data: Path) -> None:
    tokenizer = train_tokenizer(GPT2Tokenizer(type="gpt2", path=shared_data / "r50k_base.tiktoken"), [])
    name, _, encode = compared(choose_encoder(tokenizer), tokenizer, [CODE])
    assert name == "gigatoken"
    shakespeare = (shared_data / "tinyshakespeare.txt").read_text("utf-8")
    assert_equal(tokenizer, encode, [shakespeare[:200_000], *TEXTS.values()])


@pytest.mark.parametrize("pattern", BPE_PATTERNS)
@pytest.mark.parametrize(
    "before", ["", "x", "1", ".", " ", "\n", "\n\t", "\t", "é", "’", "\u3000", "'self", "\n'self", "\r"]
)
def test_apostrophes_give_equal_ids(pattern: str, before: str) -> None:
    words = ["'s", "'self", "'self'dab", "'Rest", "'LLx'llx", "'sé", "'self’", "'self\n'self", "'x", "''self", "'self'"]
    texts = [f"{before}{word}{after}" for word in words for after in ("", " x", "\n", ".", "'tab")]
    assert_equal(trained(pattern, "prose"), fast(pattern, "prose"), texts)


@pytest.mark.parametrize(
    "unit", ["a", " ", "\n", " \n", "ab", "=", "'s", "'self", "7", "你", "\t'self", "\0", "e\u0301"]
)
@pytest.mark.parametrize("pattern", ["llama3", "code"])
def test_long_runs_give_equal_ids(pattern: str, unit: str) -> None:
    assert_equal(trained(pattern, "runs"), fast(pattern, "runs"), [unit * 20_000, unit * 3000 + "x"])


def test_the_words_it_keeps_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_CACHED_CHARACTERS", 5000)
    monkeypatch.setattr(encoders, "_PIECES_KEPT", 10)
    random_ = random.Random(0)
    texts = ["".join(random_.choices("ab'slx \n\t", k=400)) for _ in range(60)]
    for pattern in BPE_PATTERNS:
        tokenizer = trained(pattern, "code")
        assert_equal(tokenizer, choose_encoder(tokenizer).encode, texts)


@pytest.mark.parametrize("pattern", ["llama3", "code"])
def test_a_dataset_has_the_bytes_of_tokenizers(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"type": "text", "path": str(tmp_path / "text")}
    (tmp_path / "text").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "text" / f"{name}.txt").write_text(text, encoding="utf-8", newline="")

    def built(worth_bytes: int) -> tuple[list[str], Prepared]:
        monkeypatch.setattr(jobs, "_WORTH_A_CHOICE_BYTES", worth_bytes)
        recipe = Recipe(
            model=plain_model(context_length=8, n_layers=1, d_model=8, n_heads=1),
            tokenizer={"type": "bpe", "vocab_size": 300, "pattern": pattern},
            data={
                "sources": [source],
                "cache_dir": tmp_path / f"{worth_bytes}",
            },
            train={"max_steps": 1},
        )
        reported: list[str] = []
        prepared = prepare(recipe, report=lambda stage, done_bytes, total_bytes: reported.append(stage))
        return [stage for stage in reported if stage.startswith("encoding with")], prepared

    (no_line, slow), (line, quick) = built(1 << 30), built(0)
    assert no_line == [] and line == ["encoding with gigatoken: its tokens are the same and it is faster"]
    assert quick.manifest == slow.manifest and quick.manifest.round_trips
    for file in sorted(slow.folder.glob("*.tokens")):
        assert (quick.folder / file.name).read_bytes() == file.read_bytes()


# --------------------------------------------------------------------------------------------- what is refused


def changed(change: Callable[[dict[str, Any]], None]) -> Tokenizer:
    as_json = json.loads(trained("llama3", "code").to_str())
    change(as_json)
    return tokenizer_from_json(json.dumps(as_json))


def other_pattern(as_json: dict[str, Any]) -> None:
    as_json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] += "|x"


def unreachable_token(as_json: dict[str, Any]) -> None:  # `Zq` merges first, so the text ZqQ never gives the token ZqQ
    vocabulary, merges = as_json["model"]["vocab"], as_json["model"]["merges"]
    for left, right in (("Z", "q"), ("q", "Q"), ("Z", "qQ")):
        vocabulary.setdefault(left + right, max(vocabulary.values()) + 1000)
        merges.append([left, right])


def two_merges_of_one_token(as_json: dict[str, Any]) -> None:
    as_json["model"]["merges"] += [["Z", "q"], ["Zq", "Q"], ["q", "Q"], ["Z", "qQ"]]
    as_json["model"]["vocab"] |= {"Zq": 90_000, "ZqQ": 90_001, "qQ": 90_002}


REFUSED = {
    "pattern": other_pattern,
    "unreachable": unreachable_token,
    "two merges": two_merges_of_one_token,
    "normalizer": lambda as_json: as_json.update(normalizer={"type": "NFC"}),
    "extra tokens": lambda as_json: as_json["model"].update(ignore_merges=True),
    "found in text": lambda as_json: as_json["added_tokens"][-1].update(special=False),
}


@pytest.mark.parametrize("why", REFUSED)
def test_tokenizers_encodes_if_gigatoken_cannot(why: str) -> None:
    tokenizer = changed(REFUSED[why])
    name, reason, encode = choose_encoder(tokenizer)
    assert name == "tokenizers" and "tokenizer" in reason
    assert_equal(tokenizer, encode, [CODE[:2000], "ZqQ self Zq qQ"])


def test_other_kinds_of_tokenizers_are_left_to_tokenizers() -> None:
    for config in (CharTokenizer(type="char"), WordTokenizer(type="word")):
        tokenizer = train_tokenizer(config, [PROSE])
        assert choose_encoder(tokenizer).name == "tokenizers"
    spoken = Tokenizer.from_str(trained("gpt2", "code").to_str())  # special tokens in a text are found
    assert choose_encoder(spoken).name == "tokenizers"


def test_added_tokens_that_are_words_are_text() -> None:
    special = trained("llama3", "code").get_added_tokens_decoder()
    ids = fast("llama3", "code")(["Zqx <|im_start|> <|endoftext|>"])[0]
    assert len(special) == 3 and not special.keys() & set(ids.tolist())


def test_a_sample_with_other_ids_is_left_to_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = encoders._Gigatoken.__call__
    monkeypatch.setattr(encoders._Gigatoken, "__call__", lambda self, texts: [ids[:-1] for ids in encode(self, texts)])
    tokenizer = trained("llama3", "code")
    name, reason, found = compared(choose_encoder(tokenizer), tokenizer, ["a text"])
    assert name == "tokenizers" and "other ids" in reason
    assert_equal(tokenizer, found, ["a text"])


def test_a_gigatoken_that_refuses_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(json: str) -> None:
        raise ValueError("no such format")

    monkeypatch.setattr("gigatoken.Tokenizer.from_json", refuse)
    name, reason, _ = choose_encoder(trained("llama3", "code"))
    assert name == "tokenizers" and reason.endswith("no such format")


def test_without_gigatoken_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    name, reason, _ = choose_encoder(trained("llama3", "code"))
    assert name == "tokenizers" and "pip install 'gptworks[data]'" in reason
    word = train_tokenizer(WordTokenizer(type="word"), [PROSE])
    assert "pip" not in choose_encoder(word).reason  # it would not help


def test_half_a_surrogate_pair_is_the_users_mistake() -> None:
    for pattern in BPE_PATTERNS:
        with pytest.raises(UserError, match="half of a surrogate pair"):
            fast(pattern, "code")(["a \ud800 b"])
