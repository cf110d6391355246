"""Train, load and save tokenizers. Each is a plain `tokenizers.Tokenizer`, saved as a tokenizer.json.

A tokenizer from this module never reads special tokens from text: `<|endoftext|>` in a document is ordinary text.
Special tokens are added by their ids (`document_frame`, `prompt_ids`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.pre_tokenizers import PreTokenizer

from gptworks.config import BPETokenizer, CharTokenizer, DatasetTokenizer, FileTokenizer, TokenizerConfig, WordTokenizer
from gptworks.confined.tokenizers import check_normalized, check_tokenizer
from gptworks.errors import UserError
from gptworks.files import SUMS_FILE, check_sums, read_text, write_whole
from gptworks.gpt2_vocabulary import BYTE_CHARACTERS, N_RANKS, read_gpt2_vocabulary
from gptworks.special_tokens import (
    GENERATION_CONFIG,
    SEPARATOR,
    TOKENIZER_CONFIG,
    Stated,
    attach,
    our_config,
    read_stated,
    special_tokens,
    stated_of,
)

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 28
"""Size limit of a tokenizer.json; a file with 260,000 tokens and their merges has 35 MB."""

# Patterns of the words within which BPE merges. `code` matches a word with the sign or space before it; up to 3 digits;
# several signs; a line break with the blank lines before it and the indentation after it; other white space. Trained
# on Python's standard library with 4,096 tokens, `code` has 3.64 bytes per held-out token, llama3 3.57 and gpt2 3.55.
BPE_PATTERNS = {
    "code": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*\n[ \t]*|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
_WORD_PATTERN = r"\b\w+\b|[^\w\s]"
_WORD_SPECIALS = ("<pad>", "<unk>", "<bos>", "<eos>")


# ----------------------------------------------------------------------------------------------------- make


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], report: Callable[[str], None] = lambda _: None
) -> Tokenizer:
    """Return the tokenizer that `config` describes: trained on `texts`, or loaded for the types `gpt2` and `file`.

    The same texts give the same tokenizer.

    Args:
        report: called with a message if BPE cuts words that are too long.

    Raises:
        UserError: there is too little text for the vocabulary, or a tokenizer file is missing or broken.
    """
    return add_tokens(_plain_text(_make(config, texts, report)), config.added_tokens)


def _make(config: TokenizerConfig, texts: Iterable[str], report: Callable[[str], None]) -> Tokenizer:
    if isinstance(config, BPETokenizer):
        return _train_bpe(config, texts, report)
    if isinstance(config, CharTokenizer):
        return _train_char(texts)
    if isinstance(config, WordTokenizer):
        return _train_word(config, texts)
    assert not isinstance(config, DatasetTokenizer)  # a dataset's tokenizer is loaded with the dataset
    return load_tokenizer(config.path) if isinstance(config, FileTokenizer) else _load_gpt2(config.path)


def add_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """Add special tokens to the tokenizer and return it; new tokens get the next free ids in the order of `names`."""
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return tokenizer


BPE_WORD_CHARACTERS = 256
"""Maximum number of characters of a word in training. Longer words (base64, DNA, a line of dashes) are cut, because
BPE's training time grows with the square of a word's length."""


def bpe_words(config: BPETokenizer, training: bool = False) -> PreTokenizer:
    """Return the splitter of text into words within which BPE merges; for training, it also cuts overlong words."""
    split = pre_tokenizers.Split(Regex(BPE_PATTERNS[config.pattern]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [pre_tokenizers.FixedLength(BPE_WORD_CHARACTERS)] if training else []
    return pre_tokenizers.Sequence([split, *cut, to_bytes])


_LONG_SPACE = re.compile(rf"\s{{{BPE_WORD_CHARACTERS + 1},}}")
_LONG_RUN = re.compile(rf"\s?\S{{{BPE_WORD_CHARACTERS},}}|\s{{{BPE_WORD_CHARACTERS + 1},}}")


def _train_bpe(config: BPETokenizer, texts: Iterable[str], report: Callable[[str], None]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = bpe_words(config, training=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words, n_long = bpe_words(config), 0

    def counting_long_words() -> Iterator[str]:
        nonlocal n_long
        for text in texts:
            if max(map(len, text.split()), default=0) > BPE_WORD_CHARACTERS or _LONG_SPACE.search(text):
                for run in _LONG_RUN.findall(text):  # a run without spaces may contain several words
                    lengths = [end - start for _, (start, end) in words.pre_tokenize_str(run)]
                    n_long += sum(length > BPE_WORD_CHARACTERS for length in lengths)
            yield text

    tokenizer.train_from_iterator(counting_long_words(), trainer)
    tokenizer.pre_tokenizer = words
    if n_long:
        found = f"{n_long:,} words are" if n_long > 1 else "1 word is"
        report(
            f"tokenizer: {found} longer than {BPE_WORD_CHARACTERS} characters, such as a line of base64 or dashes. BPE "
            f"learns from pieces of them"
        )
    reached = tokenizer.get_vocab_size()
    if reached < config.vocab_size:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size} and the training text yields {reached} tokens: a merge needs a "
            f"pair that occurs twice. Set tokenizer.vocab_size to {reached} or less, or give more text."
        )
    if config.begin_prompts:
        begin_with(tokenizer, [SEPARATOR])
    return tokenizer


def begin_with(tokenizer: Tokenizer, names: Sequence[str]) -> None:
    """Make the tokenizer's post-processor put these special tokens, and no others, before a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*names, "$A"], pair=[*names, "$A", "$B"], special_tokens=[(n, tokenizer.token_to_id(n)) for n in names]
    )


def _train_char(texts: Iterable[str]) -> Tokenizer:
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise UserError("tokenizer.type=char and the training text is empty: give text to take the characters from.")
    vocabulary = {token: index for index, token in enumerate([SEPARATOR, "<unk>", *sorted(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([SEPARATOR, "<unk>"])
    return tokenizer


def _train_word(config: WordTokenizer, texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD_PATTERN), "removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=config.vocab_size, special_tokens=list(_WORD_SPECIALS), show_progress=False
    )  # orders words by frequency, and words of equal frequency alphabetically
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() == len(_WORD_SPECIALS):
        raise UserError("tokenizer.type=word and the training text holds no word: give text to take the words from.")
    return tokenizer


def _load_gpt2(path: Path | None) -> Tokenizer:
    path = path and path.expanduser()
    if path is None:
        try:
            tokenizer = Tokenizer.from_pretrained("openai-community/gpt2")
        except Exception as error:  # the hub client raises its own types, whose module may be missing
            raise UserError(
                f"tokenizer.type=gpt2 without a path is fetched from the Hugging Face hub, which failed: "
                f"{_one_line(error)} Set tokenizer.path to r50k_base.tiktoken, or to a folder with GPT-2's files."
            ) from None
    elif path.is_dir() and not (path / TOKENIZER_FILE).exists() and (path / "merges.txt").exists():
        try:
            vocabulary, merges = models.BPE.read_file(str(path / "vocab.json"), str(path / "merges.txt"))
        except Exception as error:
            raise UserError(f"{path}: vocab.json and merges.txt are not GPT-2's: {_one_line(error)}") from None
        tokenizer = _gpt2_tokenizer(vocabulary, merges)
    elif path.is_dir() or path.suffix == ".json" or not path.exists():
        tokenizer = load_tokenizer(path)
    else:
        tokenizer = _gpt2_tokenizer(*read_gpt2_vocabulary(path))
    if (size := vocabulary_size(tokenizer)) != N_RANKS + 1:
        raise UserError(f"{path} has {size} tokens and GPT-2 has {N_RANKS + 1}. Use tokenizer.type=file.")
    return tokenizer


def _gpt2_tokenizer(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:
        raise UserError(f"GPT-2's vocabulary and merges do not belong together: {_one_line(error)}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


# -------------------------------------------------------------------------------------------- load and save


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json, or from a folder with this file. Other files in the folder may state
    special tokens. Raises a UserError if the tokenizer is missing or broken, a file states a special token wrongly, or
    a file of a run differs from its checksum."""
    path = Path(path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        check_sums(file.parent, MAX_TOKENIZER_BYTES)
        tokenizer = tokenizer_from_json(read_text(file, MAX_TOKENIZER_BYTES, inside=path if file != path else None))
        return attach(tokenizer, read_stated(path, tokenizer) if path.is_dir() else None)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file. Give a {TOKENIZER_FILE}, or a folder that holds one.") from None
    except UserError:
        raise
    except Exception as error:  # the library raises a bare Exception
        raise UserError(
            f"{file} is not a tokenizer of the Hugging Face `tokenizers` format: {_one_line(error)} "
            f"Give a {TOKENIZER_FILE}, or a folder that holds one."
        ) from None


def tokenizer_from_json(text: str) -> Tokenizer:
    """Return the tokenizer from its JSON (`tokenizer.to_str()`), set to read no special tokens from text.

    Raises:
        UserError: the library panics, or the tokenizer could take unlimited time for a text, or lengthen it endlessly.
        Exception: the text is not the JSON of a tokenizer.
    """
    with library_panics("this tokenizer is broken"):
        tokenizer = _plain_text(Tokenizer.from_str(text))
    check_tokenizer(tokenizer)
    return tokenizer


@contextmanager
def library_panics(what: str) -> Iterator[None]:
    """Turn a panic of the `tokenizers` library in the `with` block into a UserError that begins with `what`.

    The library panics if a tokenizer's regular expression exhausts its matcher. A panic is not an `Exception`, so that
    usual error handling misses it.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise UserError(f"{what}: the tokenizers library gave up: {_one_line(error)}") from None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a Rust library; such an error is not an `Exception`."""
    return type(error).__name__ == "PanicException"


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, without adding special tokens. Raises a UserError for the reasons of
    `encodings`."""
    ids: list[int] = encodings(tokenizer, [text])[0].ids
    return ids


def encodings(
    tokenizer: Tokenizer, texts: Sequence[str], *, offsets: bool = False, add_special_tokens: bool = False
) -> list[Encoding]:
    """Return the library's encoding of each text. gptworks encodes only here; other threads can run.

    Args:
        offsets: also return the range of characters of each id, which takes longer.
        add_special_tokens: add the special tokens of the tokenizer's post-processor.

    Raises:
        UserError: a text is not valid Unicode, the tokenizer fails on it, or the normalizer makes it too long.
    """
    read = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        with library_panics("this tokenizer's pattern cannot read the text"):
            check_normalized(tokenizer, texts)
            found: list[Encoding] = read(list(texts), add_special_tokens=add_special_tokens)
    except UserError:
        raise
    except Exception as error:  # the library raises a bare Exception, and a TypeError for half a surrogate pair
        if half := next(filter(None, map(_HALF_A_PAIR.search, texts)), None):
            raise UserError(
                f"the text holds U+{ord(half[0]):04X}, half of a surrogate pair, at character {half.start()}: it was "
                f"not UTF-8. Give valid UTF-8."
            ) from None
        raise UserError(f"this tokenizer cannot read the text: {_one_line(error)}") from None
    return found


_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def _plain_text(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True  # True: a special token's name in a text is ordinary text
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # dropout would encode a text differently each time
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, sampling: Mapping[str, Any] | None = None) -> None:
    """Write tokenizer.json, and tokenizer_config.json so that `transformers.AutoTokenizer` can read the folder; also
    generation_config.json if files stated the special tokens, or `sampling` states sampling settings. Remove old
    checksums, and a generation_config.json of an earlier tokenizer."""
    stated = stated_of(tokenizer)
    tokens = stated if stated is not None and stated.has_tokens else Stated({}, ())
    generation = replace(tokens, generation={**tokens.generation, **(sampling or {})}).generation_config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMS_FILE).unlink(missing_ok=True)
    (folder / GENERATION_CONFIG).unlink(missing_ok=True)
    write_whole(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    files = {TOKENIZER_CONFIG: our_config(special_tokens(tokenizer).names)}
    for name, contents in (files | ({GENERATION_CONFIG: generation} if generation else {})).items():
        write_whole(folder / name, json.dumps(contents, indent=2, ensure_ascii=False) + "\n")


def pack_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a tokenizer and its special tokens as text, which another process reads with `unpack_tokenizer`."""
    stated = stated_of(tokenizer)
    return json.dumps(stated and asdict(stated)) + "\n" + tokenizer.to_str()


def unpack_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer from the text that `pack_tokenizer` returned."""
    stated, _, tokenizer = text.partition("\n")
    tree = json.loads(stated)
    return attach(
        tokenizer_from_json(tokenizer), None if tree is None else Stated(**tree | {"ends": tuple(tree["ends"])})
    )


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest token id plus one, the number of rows that an embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def token_texts(tokenizer: Tokenizer) -> list[bytes] | None:
    """Return the bytes of text of each token, by id; empty for special tokens. None as in `token_spellings`."""
    spellings, added = token_spellings(tokenizer), tokenizer.get_added_tokens_decoder()
    if spellings is None:
        return None
    return [b"" if i in added and added[i].special else spelling for i, spelling in enumerate(spellings)]


def token_bytes(tokenizer: Tokenizer) -> list[int] | None:
    """Return the number of bytes of text of each token, by id; 0 for special tokens. None as in `token_spellings`."""
    texts = token_texts(tokenizer)
    return None if texts is None else [*map(len, texts)]


def token_spellings(tokenizer: Tokenizer) -> list[bytes] | None:
    """Return the bytes of each token, by id; None if the decoder is neither Fuse nor ByteLevel, so that a token's bytes
    may depend on its neighbors."""
    names = {index: name for name, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    in_order = [names.get(index, "") for index in range(vocabulary_size(tokenizer))]
    if isinstance(tokenizer.decoder, decoders.Fuse):
        return [name.encode() for name in in_order]
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    added = tokenizer.get_added_tokens_decoder()
    byte_of = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    return [
        name.encode() if index in added or not byte_of.keys() >= set(name) else bytes(map(byte_of.__getitem__, name))
        for index, name in enumerate(in_order)
    ]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the SHA-256, in hex, of the tokenizer's canonical JSON; saving and loading do not change it."""
    canonical = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


# ------------------------------------------------------------------------------------------- special tokens


def document_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids to put before and after each document: bos and eos, or only a separator before it; empty lists if
    the tokenizer has no such tokens."""
    before, after = special_tokens(tokenizer).document
    return list(before), list(after)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt: the text's ids, with special tokens such as bos around them; "" begins a document."""
    special = special_tokens(tokenizer)
    if not text:
        return list(special.start)
    return [*special.before, *encode_text(tokenizer, text), *special.after]


# --------------------------------------------------------------------------------------------------- stream


class StreamDecoder:
    """Decodes tokens as they arrive. The joined results of push and flush equal `tokenizer.decode` of all the ids.

    The bytes of an incomplete character are held back until it is complete. Each step decodes only a few tokens.

    The methods raise a UserError if the library cannot decode the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # tokens last shown, on which the next token's text may depend (a space between)
        self._held: list[int] = []

    def push(self, *token_ids: int) -> str:
        """Add tokens and return the text that they complete; empty while a character is incomplete."""
        before, self._held = self._held, [*self._held, *token_ids]
        shown, text = self._decode(self._context), self._decode(self._context + self._held)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            return self._show(text[len(shown) :], self._held, [])
        # The text may end with an incomplete character. If the new tokens alone decode to the same text, the tokens
        # held before them are not part of that character, and their text is final.
        final, new = self._decode(self._context + before), self._decode(list(token_ids))
        return self._show(final[len(shown) :], before, list(token_ids)) if new and text == final + new else ""

    def flush(self) -> str:
        """Return the text held back, with U+FFFD for incomplete characters."""
        shown = self._decode(self._context)
        return self._show(self._decode(self._context + self._held)[len(shown) :], self._held, [])

    def _decode(self, ids: list[int]) -> str:
        try:
            text: str = self._tokenizer.decode(ids)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise UserError(f"this tokenizer cannot decode the tokens {ids}: {_one_line(error)}") from None
        return text

    def _show(self, new: str, shown: list[int], held: list[int]) -> str:
        if new:  # special tokens decode to "" and give no context
            self._context = shown
        self._held = held
        return new


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else text + "."
