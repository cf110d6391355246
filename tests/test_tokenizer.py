import ast
import base64
import json
import random
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

import gptworks
from gptworks.config import BPETokenizer, CharTokenizer, FileTokenizer, GPT2Tokenizer, WordTokenizer
from gptworks.errors import UserError
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import (
    BPE_WORD_CHARACTERS,
    SEPARATOR,
    StreamDecoder,
    bpe_words,
    document_frame,
    encode_text,
    encodings,
    fingerprint,
    load_tokenizer,
    prompt_ids,
    save_tokenizer,
    token_bytes,
    train_tokenizer,
    vocabulary_size,
)

TEXT = "The cat sat on the mat. The dog sat on the cat!\n    def cat(self):\n        return 'naïve 你好'\n" * 5
MIXED = "héllo 你好 👩‍🚀 ♥ naïve\n\tdef f(x):\n\n\n        return 12345  # ½ <|endoftext|>\r\n"


def bpe(vocab_size: int = 300, **settings: Any) -> Tokenizer:
    return train_tokenizer(BPETokenizer(type="bpe", vocab_size=vocab_size, **settings), [TEXT])


BPE = bpe()
CHAR = train_tokenizer(CharTokenizer(type="char"), [TEXT, MIXED])
WORD = train_tokenizer(WordTokenizer(type="word"), [TEXT])


# ----------------------------------------------------------------------------------------------------- byte BPE


@given(st.text())
def test_bpe_gives_back_every_text(text: str) -> None:
    assert BPE.decode(BPE.encode(text).ids) == text


def test_bpe_gives_back_long_runs() -> None:
    for unit in ("a", " ", "=", "\n", "\n ", "7", "\t\r", "你"):
        assert BPE.decode(BPE.encode(unit * 5000).ids) == unit * 5000


def test_bpe_vocabulary_is_the_separator_256_bytes_and_merges() -> None:
    assert vocabulary_size(BPE) == BPE.get_vocab_size() == 300
    assert BPE.token_to_id(SEPARATOR) == 0
    assert {len(BPE.encode(chr(byte)).ids) for byte in range(128)} == {1}


def test_bpe_splits_numbers_into_groups_of_three() -> None:
    tokenizer = train_tokenizer(BPETokenizer(type="bpe", vocab_size=259), ["12345 12345 12345 12345"])
    assert max(len(token) for token in tokenizer.get_vocab() if token.isdigit()) <= 3


def test_the_code_pattern_joins_a_line_break_with_the_indentation_that_follows() -> None:
    assert "ĊĠĠĠĠ" in bpe(302, pattern="code").encode("x:\n    y").tokens


def test_training_is_deterministic() -> None:
    assert fingerprint(bpe()) == fingerprint(BPE)
    assert fingerprint(bpe(299)) != fingerprint(BPE)


def test_too_little_text_for_the_vocabulary_says_what_was_reached() -> None:
    with pytest.raises(UserError, match=r"vocab_size=5000.*yields (\d+) tokens.*to \1 or less"):
        bpe(5000)


def test_the_number_named_in_that_message_works() -> None:
    with pytest.raises(UserError) as caught:
        bpe(5000)
    reached = int(re.findall(r"yields (\d+)", str(caught.value))[0])
    assert vocabulary_size(bpe(reached)) == reached


# ------------------------------------------------------------------------------------------------ char and word


def test_char_has_one_token_for_each_character_sorted() -> None:
    characters = sorted(set(TEXT + MIXED))
    assert [CHAR.id_to_token(i) for i in range(vocabulary_size(CHAR))] == [SEPARATOR, "<unk>", *characters]
    assert len(CHAR.encode(MIXED).ids) == len(MIXED)
    assert CHAR.decode(CHAR.encode(MIXED).ids) == MIXED


def test_char_maps_the_unseen_to_unk() -> None:
    assert CHAR.encode("aЖ").tokens == ["a", "<unk>"]


def test_word_follows_its_definition() -> None:
    tokenizer = train_tokenizer(WordTokenizer(type="word"), ["The end, the END: b a the end."])
    assert [tokenizer.id_to_token(i) for i in range(8)] == ["<pad>", "<unk>", "<bos>", "<eos>", "end", "the", ",", "."]
    assert tokenizer.encode("The b... XYZ").tokens == ["the", "b", ".", ".", ".", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("THE end.").ids) == "the end ."
    assert document_frame(tokenizer) == ([2], [3])


def test_word_splits_as_the_published_expression(shared_data: Path) -> None:
    text = (shared_data / "tinyshakespeare.txt").read_text()[:50_000]
    tokenizer = train_tokenizer(WordTokenizer(type="word", vocab_size=20_000), [text])
    assert tokenizer.encode(text).tokens == re.findall(r"\b\w+\b|[^\w\s]", text.lower())


def test_word_vocabulary_is_cut_at_the_most_frequent() -> None:
    tokenizer = train_tokenizer(WordTokenizer(type="word", vocab_size=6), ["a a a b b c"])
    assert tokenizer.encode("a b c").tokens == ["a", "b", "<unk>"]


# ------------------------------------------------------------------------------------------------------ special


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, WORD], ids=["bpe", "char", "word"])
def test_the_name_of_a_special_token_in_a_text_is_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        special = {index for index, token in each.get_added_tokens_decoder().items() if token.content != "<unk>"}
        text = "<|endoftext|> <pad> <bos> <eos> cat"
        assert special and not special & set(each.encode(text).ids)
        assert not special & set(each.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@pytest.mark.parametrize(
    ("names", "frame", "prompt"),
    [
        (["<|endoftext|>"], ([0], []), [1]),
        (["<s>", "</s>"], ([0], [1]), [0, 2]),
        (["<bos>", "<eos>"], ([0], [1]), [0, 2]),
        (["<|begin_of_text|>", "<|end_of_text|>"], ([0], [1]), [0, 2]),
        (["</s>"], ([], [0]), [1]),
        ([], ([], []), [0]),
    ],
)
def test_frames_and_prompts(names: list[str], frame: tuple[list[int], list[int]], prompt: list[int]) -> None:
    vocabulary = {name: index for index, name in enumerate([*names, "a"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.add_special_tokens(names)
    assert document_frame(tokenizer) == frame
    assert prompt_ids(tokenizer, "a") == prompt
    assert prompt_ids(tokenizer, "") == frame[0]


def test_prompts_of_a_recipe_begin_documents_and_documents_stay_as_they_are(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(bpe(begin_prompts=True), tmp_path)
    tokenizer, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = prompt_ids(BPE, "the cat")
    assert prompt_ids(tokenizer, "the cat") == theirs("the cat")["input_ids"] == [0, *plain]
    assert prompt_ids(tokenizer, "") == [0] and encode_text(tokenizer, "the cat") == plain
    assert document_frame(tokenizer) == document_frame(BPE) == ([0], [])


def test_a_special_name_in_the_plain_vocabulary_does_not_count() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    assert special_tokens(tokenizer).bos is None


# ------------------------------------------------------------------------------------------------ save and load


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, WORD], ids=["bpe", "char", "word"])
def test_transformers_reads_a_saved_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    import transformers

    save_tokenizer(tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "The cat's  mat,\n    def 你好 naïve"
    ids = tokenizer.encode(text).ids
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    special = special_tokens(tokenizer)
    assert (theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id) == (special.eos, special.unk, special.pad)


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, WORD], ids=["bpe", "char", "word"])
def test_loading_gives_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(tokenizer)
    assert fingerprint(train_tokenizer(FileTokenizer(type="file", path=tmp_path), [])) == fingerprint(tokenizer)


def test_truncation_padding_and_dropout_of_a_foreign_file_are_dropped(tmp_path: Path) -> None:
    tokenizer = bpe()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.model.dropout = 0.9
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT).ids == BPE.encode(TEXT).ids


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


# -------------------------------------------------------------------------------------------------------- GPT-2


@pytest.fixture(scope="module")
def gpt2(request: pytest.FixtureRequest) -> tuple[Tokenizer, Path]:
    file = request.getfixturevalue("shared_data") / "r50k_base.tiktoken"
    return train_tokenizer(GPT2Tokenizer(type="gpt2", path=file), []), file


def random_texts(rng: random.Random) -> list[str]:
    alphabet = string.printable + "éüß你好世界🙂👩‍🚀½٣\u00a0\u2028\u0301'"
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(1500)]


def test_gpt2_ids_equal_tiktoken(gpt2: tuple[Tokenizer, Path]) -> None:
    import tiktoken

    tokenizer, file = gpt2
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file.read_bytes().splitlines())}
    reference = tiktoken.Encoding(
        "gpt2",
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
        mergeable_ranks=ranks,
        special_tokens={SEPARATOR: 50_256},
    )
    real = [(file.parent / "tinyshakespeare.txt").read_text(), Path(random.__file__).read_text(encoding="utf-8"), MIXED]
    for text in [*real, *random_texts(random.Random(0))]:
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
    assert vocabulary_size(tokenizer) == 50_257
    assert document_frame(tokenizer) == ([50_256], [])


def test_gpt2_from_a_hugging_face_folder(gpt2: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    tokenizer, _ = gpt2
    tokenizer.model.save(str(tmp_path))  # vocab.json and merges.txt
    from_merges = train_tokenizer(GPT2Tokenizer(type="gpt2", path=tmp_path), [])
    save_tokenizer(tokenizer, tmp_path)
    from_json = train_tokenizer(GPT2Tokenizer(type="gpt2", path=tmp_path), [])
    assert from_merges.encode(MIXED).ids == from_json.encode(MIXED).ids == tokenizer.encode(MIXED).ids


def test_gpt2_refuses_a_damaged_ranks_file(gpt2: tuple[Tokenizer, Path], tmp_path: Path) -> None:
    lines = gpt2[1].read_bytes().splitlines(keepends=True)
    broken = tmp_path / "r50k_base.tiktoken"
    config = GPT2Tokenizer(type="gpt2", path=broken)
    with pytest.raises(UserError, match="no such file"):
        train_tokenizer(config, [])
    broken.write_bytes(b"".join(lines[:40_000]))
    with pytest.raises(UserError, match="holds 40000 ranks and GPT-2 has 50256"):
        train_tokenizer(config, [])
    broken.write_bytes(b"".join(lines[:5]) + b"<html>not found</html>\n")
    with pytest.raises(UserError, match="line 6: not `base64-token rank`"):
        train_tokenizer(config, [])


def test_gpt2_refuses_another_vocabulary(tmp_path: Path) -> None:
    save_tokenizer(BPE, tmp_path)
    with pytest.raises(UserError, match=r"has 300 tokens and GPT-2 has 50257.*type=file"):
        train_tokenizer(GPT2Tokenizer(type="gpt2", path=tmp_path), [])


def test_gpt2_without_the_hub_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        @staticmethod
        def from_pretrained(name: str) -> Tokenizer:
            raise OSError(f"cannot reach the hub for {name}")

    monkeypatch.setattr("gptworks.tokenizer.Tokenizer", Unreachable)
    with pytest.raises(UserError, match=r"openai-community/gpt2.*Set tokenizer\.path"):
        train_tokenizer(GPT2Tokenizer(type="gpt2"), [])


# ------------------------------------------------------------------------------------------------------- stream


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("tokenizer", [BPE, CHAR, WORD], ids=["bpe", "char", "word"])
def test_streamed_text_equals_the_decoded(tokenizer: Tokenizer) -> None:
    @given(st.lists(st.integers(0, vocabulary_size(tokenizer) - 1)))
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    check()


def test_bytes_in_any_order_stream_as_they_decode() -> None:
    ids = {BPE.id_to_token(i): i for i in range(300)}
    tricky = [ids[c] for c in "ðŁĺĢäâĤ¬Ãÿ"] + [0, ids["a"]]  # bytes of 😀, €, unfinished characters, an invalid byte

    @given(st.lists(st.sampled_from(tricky), max_size=12))
    def check(chosen: list[int]) -> None:
        assert "".join(stream(BPE, chosen)) == BPE.decode(chosen)

    check()


def test_a_split_character_is_never_shown_broken() -> None:
    ids = BPE.encode("héllo 你好 👩‍🚀 end").ids
    parts = stream(BPE, ids)
    assert "".join(parts) == "héllo 你好 👩‍🚀 end"
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert parts.count("") > 5  # tokens that were only a part of a character


def test_a_special_token_inside_a_character_breaks_nothing() -> None:
    first, *rest = BPE.encode("你").ids
    assert "".join(stream(BPE, [first, 0, *rest])) == BPE.decode([first, 0, *rest]) == "你"


def test_each_step_decodes_few_tokens_however_long_the_text() -> None:
    class Counting:
        most = 0

        def decode(self, ids: list[int]) -> str:
            self.most = max(self.most, len(ids))
            return BPE.decode(ids)

    invalid = next(i for i in range(300) if BPE.id_to_token(i) == "ÿ")
    counting = Counting()
    decoder = StreamDecoder(counting)  # type: ignore[arg-type]
    for token_id in BPE.encode(TEXT).ids + [invalid] * 500:
        decoder.push(token_id)
    assert counting.most < 12


def test_tokenizer_module_needs_no_torch() -> None:
    code = "import sys, gptworks.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_token_bytes_add_up_to_the_text(kind: str) -> None:
    text = "def f(x):\n    return 'größer 🎲'  # ½\n" * 3
    config = BPETokenizer(type="bpe", vocab_size=270) if kind == "bpe" else CharTokenizer(type="char")
    tokenizer = train_tokenizer(config, [text])
    sizes = token_bytes(tokenizer)
    assert sizes is not None and len(sizes) == vocabulary_size(tokenizer)
    assert sum(sizes[i] for i in tokenizer.encode(text).ids) == len(text.encode())
    assert sizes[tokenizer.token_to_id("<|endoftext|>")] == 0


def test_words_have_no_fixed_bytes() -> None:
    assert token_bytes(train_tokenizer(WordTokenizer(type="word"), ["some words, and a comma"])) is None


# ------------------------------------------------------------------------------------------- hostile texts and files


def gives_up() -> Tokenizer:
    """Return a tokenizer whose pattern backtracks endlessly on a run of a's."""
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a|a|aa)+$"), "isolated")
    return tokenizer


@pytest.mark.parametrize("offsets", [False, True], ids=["ids", "offsets"])
@pytest.mark.parametrize(
    ("tokenizer", "text", "words"),
    [
        (gives_up(), "a" * 60 + "!", "pattern cannot read the text"),
        (Tokenizer(models.WordLevel({"a": 0})), "b", "cannot read the text: .*UNK"),
        (BPE, "caf\udce9", "U\\+DCE9, half of a surrogate pair, at character 3"),  # a byte of Latin-1 on a command line
    ],
    ids=["pattern", "no unk", "half a pair"],
)
def test_a_text_that_cannot_be_read_is_the_users_mistake(
    tokenizer: Tokenizer, text: str, words: str, offsets: bool
) -> None:
    with pytest.raises(UserError, match=words):
        encodings(tokenizer, ["a", text], offsets=offsets)


def test_ids_are_the_same_with_and_without_offsets() -> None:
    for tokenizer in (BPE, CHAR, WORD):
        (plain,), (whole,) = encodings(tokenizer, [MIXED]), encodings(tokenizer, [MIXED], offsets=True)
        assert plain.ids == whole.ids == encode_text(tokenizer, MIXED) == tokenizer.encode(MIXED).ids
        assert whole.offsets == tokenizer.encode(MIXED).offsets


OUR_ENCODERS = ("self", "template", "_template", "chat_template", "tokens", "plain", "encoder", "probe")
"""Names of objects whose `encode` is our own: those of `ChatTemplate`, of the server's `Tokens`, and of an `Encoder`;
and of gigatoken where it reads characters that we list."""


def test_only_one_function_gives_texts_to_the_library() -> None:
    """Untrusted text gives a clear error everywhere, since nothing else calls a tokenizer's `encode`."""
    root = Path(gptworks.__file__).parent
    found = [
        (file.relative_to(root).as_posix(), ast.unparse(node))
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if _is_of_a_tokenizer(node)
    ]
    of_merges = ("data/encoders.py", "Tokenizer(models.BPE(vocabulary, merges)).encode_batch_fast")  # its own tokens
    assert [one[0] for one in found if one != of_merges] == ["tokenizer.py"] * 2, found


def _is_of_a_tokenizer(node: ast.AST) -> bool:
    """Whether it is `x.encode_batch…`, or a call `x.encode(text)`, which is no `x.encode("the name of a codec")`."""
    if isinstance(node, ast.Attribute):
        return node.attr.startswith("encode_batch")
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "encode":
        return False
    named = all(isinstance(argument, ast.Constant) for argument in node.args) and not node.keywords
    return not named and ast.unparse(node.func.value).split(".")[-1] not in OUR_ENCODERS


LONG_WORDS = {
    "one word": "a" * 400_000,
    "base64": "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo" * 4_000,
    "dna": "ACGTTGCAAC" * 30_000,
    "a rule": "=" * 100_000,
    "spaces": "x" + " " * 100_000,
    "unlike digits": "1234567890" * 10_000,
    "letters of several bytes": "éß" * 50_000,
}


@pytest.mark.parametrize("pattern", ["code", "llama3", "gpt2"])
@pytest.mark.parametrize("kind", LONG_WORDS)
def test_bpe_learns_from_pieces_of_long_words_but_does_not_cut_them_in_encoding(pattern: str, kind: str) -> None:
    config = BPETokenizer(type="bpe", vocab_size=270, pattern=pattern)
    text = f"the cat and the hat {LONG_WORDS[kind]} and the end "
    learned_from = bpe_words(config, training=True).pre_tokenize_str(text)
    assert max(end - start for _, (start, end) in learned_from) <= BPE_WORD_CHARACTERS  # the work grows with its square
    whole = bpe_words(config).pre_tokenize_str(text)
    lines: list[str] = []
    tokenizer = train_tokenizer(config, [text * 2], lines.append)
    assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == whole
    longest = max(end - start for _, (start, end) in whole)
    if longest > BPE_WORD_CHARACTERS:
        assert [line.split(" longer than ")[0] for line in lines] == ["tokenizer: 2 words are"]
    else:
        assert lines == [] and kind in ("unlike digits", "base64")  # digits divide them
    part = text[:3000]
    assert tokenizer.decode(tokenizer.encode(part, add_special_tokens=False).ids) == part


def test_words_of_ordinary_text_give_the_merges_that_the_library_gives() -> None:
    config = BPETokenizer(type="bpe", vocab_size=600)
    texts = [Path(json.__file__).read_text(encoding="utf-8")]
    reference = Tokenizer(models.BPE())
    reference.pre_tokenizer = bpe_words(config)
    trainer = trainers.BpeTrainer(
        vocab_size=600, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    reference.train_from_iterator(texts, trainer)
    lines: list[str] = []
    assert train_tokenizer(config, texts, lines.append).get_vocab() == reference.get_vocab()
    assert lines == []
