"""The bytes that tokens spell. A phrase of the text is a sequence of these bytes, however the text was tokenized."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders

from gptworks.errors import UserError
from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import encode_text, token_spellings, vocabulary_size

BORDER = b"\xff"
"""The byte that special tokens, and tokens without bytes, spell. It also separates documents between which there is no
special token. UTF-8 never contains it."""
MAX_PHRASE_BYTES = 1 << 16
_FRAME = b"\xfe"
_MAX_TOKEN_BYTES = 1 << 16


class Spelling:
    """The bytes that each token spells, and the bytes to search for a phrase. Raises UserError if a token has more than
    65,536 bytes.

    If tokens do not spell bytes of the text, as in a word tokenizer, each token spells its name between two marks. Then
    the search finds a phrase only where the phrase consists of whole tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spellings = token_spellings(tokenizer)
        self.by_text = spellings is not None
        """Whether phrases are searched as text; False: as tokens."""
        if spellings is None:
            names = {index: name for name, index in tokenizer.get_vocab(with_added_tokens=True).items()}
            framed = (_FRAME + names.get(index, "").encode() + _FRAME for index in range(vocabulary_size(tokenizer)))
            spellings = list(framed)
        added = tokenizer.get_added_tokens_decoder()
        special = {index for index, token in added.items() if token.special}
        self.table = [BORDER if i in special or not one else one for i, one in enumerate(spellings)]
        """The bytes that each token spells, at least one."""
        self.sizes: npt.NDArray[np.int64] = np.array([len(one) for one in self.table], dtype=np.int64)
        self.is_border: npt.NDArray[np.bool_] = np.array([one == BORDER for one in self.table], dtype=np.bool_)
        self.max_token_bytes = int(self.sizes.max(initial=1))
        if self.max_token_bytes > _MAX_TOKEN_BYTES:
            raise UserError(
                f"the tokenizer has a token of {self.max_token_bytes} bytes, and search supports at most "
                f"{_MAX_TOKEN_BYTES}."
            )

    def spell(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.table.__getitem__, ids))

    def of_phrase(self, phrase: str) -> bytes:
        """Return the bytes that tokens spell where a phrase occurs in text. The phrase is normalized like the text.
        Raises UserError if the phrase is empty (perhaps only after normalization) or too long, is not Unicode text, or
        has words that the tokenizer does not know."""
        try:
            size = len(phrase.encode("utf-8"))
        except UnicodeEncodeError:
            raise UserError("the phrase is not Unicode text: it holds half of a surrogate pair.") from None
        if not 0 < size <= MAX_PHRASE_BYTES:
            raise UserError(f"the phrase has {size} bytes: give 1 to {MAX_PHRASE_BYTES}.")
        if self.by_text:
            normalizer = self._tokenizer.normalizer
            found = (phrase if normalizer is None else normalizer.normalize_str(phrase)).encode("utf-8")
        else:
            ids = encode_text(self._tokenizer, phrase)
            if special_tokens(self._tokenizer).unk in ids:
                raise UserError(
                    f"the tokenizer does not know all of {phrase!r}, and its tokens do not preserve the text: only "
                    f"phrases of known words can be found."
                )
            found = self.spell(ids)
        if not found:
            raise UserError(f"the tokenizer removes all of {phrase!r}: give a phrase of the text.")
        return found


class Speller:
    """Spells single tokens for display."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._spellings = tokenizer, token_spellings(tokenizer)

    def spell(self, token: int) -> tuple[str, list[int] | None]:
        """Return the text to show for a token, and the token's bytes (None if tokens do not spell bytes)."""
        if self._spellings is None:
            name = self._tokenizer.id_to_token(token) or ""  # SentencePiece writes a space as ▁
            return name.replace("▁", " ") if isinstance(self._tokenizer.decoder, decoders.Sequence) else name, None
        spelled = self._spellings[token]
        try:
            return spelled.decode(), list(spelled)
        except UnicodeDecodeError:  # the token is part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled), list(spelled)
