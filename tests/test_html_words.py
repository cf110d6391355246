"""A page's tokenizer has the ids and texts of the library `tokenizers`, for each kind of tokenizer.json."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gptworks.errors import UserError
from gptworks.interop.html_file.checking import TEXTS
from gptworks.interop.html_file.words import words_of
from gptworks.tokenizer import StreamDecoder, encode_text, tokenizer_from_json
from test_html_file import JS, in_node

LEARNT = [
    "the quick brown fox jumps over the lazy dog",
    "hello world  two  spaces",
    "it's na\u00efve 12345",
    *TEXTS[:9],
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ADDED = (
    AddedToken("wor", lstrip=True), AddedToken("he", rstrip=True, normalized=False),
    AddedToken("two", single_word=True, normalized=False), AddedToken("a", lstrip=True, rstrip=True),
    AddedToken("x\u00a0", normalized=False), AddedToken("<|end", normalized=False), AddedToken("tabs", rstrip=True),
    AddedToken("fim-/[b]", normalized=False), AddedToken("e\u0301"),
    AddedToken("<|im|>", normalized=False, special=True, lstrip=True, rstrip=True),
)  # fmt: skip
JOINED = (
    "a", "he", " ", "  ", "wor", "two ", "x", "tabs", "<s>", "<unk>", "<|im|>", "\u2581", "<0x41>", "b", "\u00e9",
    "fim-/[b]",
)  # fmt: skip


def changed(tokenizer: Tokenizer, added: Sequence[AddedToken] = (), **model: Any) -> Tokenizer:
    """Return a trained tokenizer with other settings of its model; names of bytes are plain tokens."""
    tree = json.loads(tokenizer.to_str())
    tree["model"] |= model
    tree["added_tokens"] = [one for one in tree["added_tokens"] if not one["content"].startswith("<0x")]
    made = Tokenizer.from_str(json.dumps(tree))
    made.add_tokens(list(added))
    return made


def like_llama(bytes_from: int = 0, added: Sequence[AddedToken] = (), **model: Any) -> Tokenizer:
    """Llama-2's: the text is one piece."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    learn_pairs(tokenizer, ["<unk>", "<s>", "</s>", *BYTES[bytes_from:]])
    return changed(tokenizer, added, **{"byte_fallback": True, "fuse_unk": True} | model)


def like_gemma() -> Tokenizer:
    tokenizer = like_llama()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def like_mistral(scheme: Any, split: bool = True, added: Sequence[AddedToken] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split)
    tokenizer.decoder = decoders.Metaspace("\u2581", scheme, split)
    learn_pairs(tokenizer, ["<unk>", "<s>", "</s>", *BYTES])
    return changed(tokenizer, added, byte_fallback=True, fuse_unk=True)


def learn_pairs(tokenizer: Tokenizer, names: list[str]) -> None:
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=names, limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator(LEARNT * 4, trainer)


def unigram(scheme: Any, byte_fallback: bool, added: Sequence[AddedToken] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("\u2581", scheme)])
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", *(BYTES if byte_fallback else [])], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LEARNT * 4, trainer)
    return changed(tokenizer, added, byte_fallback=byte_fallback)


def in_bytes(*splits: Any, prefix: bool = False, added: Sequence[AddedToken] = (), **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LEARNT, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(list(added))
    return tokenizer


def behaviours(pattern: Any, **options: Any) -> list[Any]:
    return [
        partial(in_bytes, pre_tokenizers.Split(pattern, one, **options))
        for one in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous")
    ]


KINDS: tuple[Callable[[], Tokenizer], ...] = (
    like_llama, partial(like_llama, added=ADDED), partial(like_llama, 250), partial(like_llama, 250, fuse_unk=False),
    partial(like_llama, byte_fallback=False), like_gemma, partial(like_mistral, "first"),
    partial(like_mistral, "always", added=ADDED), partial(like_mistral, "first", False, ADDED),
    partial(like_mistral, "never"), partial(unigram, "always", True), partial(unigram, "first", False, ADDED),
    partial(in_bytes, pre_tokenizers.Digits(individual_digits=True), added=ADDED), partial(in_bytes, prefix=True),
    partial(in_bytes, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), added=ADDED),
    *behaviours(Regex(r"\w+")), *behaviours(" ", invert=True),
)  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_ids_and_texts_are_the_library_s(tmp_path: Path) -> None:
    drawn = random.Random(1)
    joined = ["".join(drawn.choices(JOINED, k=drawn.randint(1, 12))) for _ in range(100)]
    tokenizers = [tokenizer_from_json(make().to_str()) for make in KINDS]
    given = []
    for i, tokenizer in enumerate(tokenizers):
        n, texts = tokenizer.get_vocab_size(), [*TEXTS[i % 4 :: 4], *joined]
        ids = [[drawn.randrange(n) for _ in range(drawn.randint(1, 12))] for _ in range(100)]
        given.append({"words": words_of(tokenizer), "texts": texts, "ids": ids})
    code = f"""
import {{ Decoder, Tokenizer }} from "{JS / "tokenizer.js"}";
console.log(JSON.stringify(given.map(({{ words, texts, ids }}) => {{
  const tokenizer = new Tokenizer(words);
  const encoded = (options) => texts.map((one) => tokenizer.encode(one, options));
  const streamed = ids.map((one) => {{
    const decoder = new Decoder(tokenizer);
    return [...one.map((id) => decoder.push(id)), decoder.flush()];
  }});
  const read = ids.map((one) => tokenizer.decode(one));
  return {{ plain: encoded(), special: encoded({{ special: true }}), read, streamed }};
}})));
"""
    for tokenizer, asked, found in zip(tokenizers, given, in_node(tmp_path, code, given), strict=True):
        reader = Tokenizer.from_str(tokenizer.to_str())
        reader.encode_special_tokens = False
        streamed, texts = [], asked["texts"]
        for ids in asked["ids"]:
            decoder = StreamDecoder(tokenizer)
            streamed.append([*map(decoder.push, ids), decoder.flush()])
        wanted = {
            "plain": [encode_text(tokenizer, one) for one in texts],
            "special": [encode_text(reader, one) for one in texts],
            "read": [tokenizer.decode(one) for one in asked["ids"]],
            "streamed": streamed,
        }
        for name, values in wanted.items():
            differing = [both for both in zip(values, found[name], strict=True) if both[0] != both[1]]
            assert not differing, (name, tokenizer, differing[0])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"normalizer": {"type": "NFKC"}}, "normalizer NFKC"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer Whitespace"),
        ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "decoder BPEDecoder"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": ""}}, "Replace of .*Regex"),
    ],
)  # fmt: skip
def test_a_part_that_the_page_does_not_compute_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    tree = json.loads(Tokenizer(models.BPE({"a": 0}, [])).to_str()) | change
    with pytest.raises(UserError, match=f"the page has no tokenizer with {named}"):
        words_of(Tokenizer.from_str(json.dumps(tree)))


def test_a_model_that_the_page_does_not_compute_is_refused_by_name() -> None:
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    suffixed = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    for tokenizer, named in ((pieces, "model WordPiece"), (suffixed, "end_of_word_suffix=</w>")):
        with pytest.raises(UserError, match=named):
            words_of(tokenizer)
