"""Token healing: draw the end of a prompt again, so that it does not matter where the prompt was cut.

A tokenizer may spell the prompt `def ` with a separate token for the space. In training texts, the space usually
belongs to the token of the following name, so the model rarely saw the prompt's last token there. Healing therefore
removes the last token, or several tokens if the last token begins inside a character. The first tokens drawn must spell
the removed text again, and may continue beyond its end (Lundberg, 2023: "The art of prompt design: prompt boundaries
and token healing").
"""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.special_tokens import special_tokens
from gptworks.tokenizer import token_spellings

MOST_REMOVED = 4
"""Maximum number of tokens removed: a character has up to four bytes, each of which may be a token."""


class Spellings:
    """The bytes of a tokenizer's tokens. V: size of its vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added, found = tokenizer.get_added_tokens_decoder(), token_spellings(tokenizer)
        self._of = [b"" if index in added else one for index, one in enumerate(found or ())]
        self._fewest_left = max(1, len(special_tokens(tokenizer).before))

    def split(self, ids: list[int]) -> tuple[list[int], bytes]:
        """Return a prompt without its last tokens, and the text of the removed tokens, which is drawn again.

        Remove the fewest last tokens that begin with a whole character. Remove no token if no other would be left, if a
        token to remove is an added token, if no token of the vocabulary continues the text, or if the tokenizer's
        tokens do not spell text by themselves.
        """
        for n in range(1, min(MOST_REMOVED, len(ids) - self._fewest_left) + 1 if self._of else 1):
            kept, text = ids[:-n], self.text(ids[-n:])
            if not self._of[ids[-n]]:
                break
            if text[0] & 0xC0 != 0x80:  # the first byte of a character
                goes_on = any(len(one) > len(text) and one.startswith(text) for one in self._of)
                return (kept, text) if goes_on else (ids, b"")
        return ids, b""

    def text(self, ids: Sequence[int]) -> bytes:
        """Return the text of tokens, in UTF-8."""
        return b"".join(self._of[one] for one in ids)

    def allowed(self, text: bytes) -> Tensor:
        """Return a mask, bool [V], of the tokens whose bytes begin with `text` or are a prefix of it."""
        return torch.tensor([bool(one) and (one.startswith(text) or text.startswith(one)) for one in self._of])


class Healing:
    """Follows one text until its tokens have spelled the end of the prompt again."""

    def __init__(self, spellings: Spellings, text: bytes) -> None:
        self._spellings, self._left = spellings, text
        self.n_characters = len(text.decode())
        """Number of characters at the beginning of the generated text that the prompt has already."""

    def allowed(self) -> Tensor | None:
        """Return a mask of the tokens that may come next, bool [V]; None: all."""
        return self._spellings.allowed(self._left) if self._left else None

    def push(self, token: int) -> bool:
        """Add a token; return False, because healing never completes a text."""
        self._left = self._left[len(self._spellings.text([token])) :]
        return False

    def accepts(self, tokens: list[int]) -> int:
        """Return the length of the longest prefix of `tokens` that may come next."""
        left = self._left
        for n, token in enumerate(tokens):
            if not left:
                break
            if not self._spellings.allowed(left)[token]:
                return n
            left = left[len(self._spellings.text([token])) :]
        return len(tokens)
