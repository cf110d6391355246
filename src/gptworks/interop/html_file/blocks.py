"""Bytes as text of a page: eight characters for seven bytes, 16 to 18 % more than the bytes in UTF-8 (base64: 33 %).

Seven bits make a character of ASCII. Three of them cannot stand in a script element: NUL, CR and <. Two-byte characters
replace them. A mask moves zeros, the most frequent bits, to a letter.
"""

from collections.abc import Iterable, Iterator

import numpy as np

BLOCK_BYTES = 7 << 21
"""Bytes of a block: browsers limit the length of a string."""
_MASK = 0x55
_REPLACED = (0x00, 0x0D, 0x3C)
_TABLE = str.maketrans({code: 0xC0 + i for i, code in enumerate(_REPLACED)})


def as_text(content: bytes) -> str:
    """Return the text of some bytes (js/blocks.js reads it)."""
    bits = np.unpackbits(np.frombuffer(content, np.uint8))
    rows = np.zeros((-(-len(bits) // 7), 8), np.uint8)
    padded = np.zeros(rows.shape[0] * 7, np.uint8)
    padded[: len(bits)] = bits
    rows[:, 1:] = padded.reshape(-1, 7)
    codes = np.packbits(rows, axis=1)[:, 0] ^ _MASK
    return codes.tobytes().decode("ascii").translate(_TABLE)


def texts(content: Iterable[bytes]) -> Iterator[str]:
    """Yield the texts of the blocks into which a content in pieces is divided."""
    held = bytearray()
    for piece in content:
        held += piece
        while len(held) >= BLOCK_BYTES:
            yield as_text(bytes(held[:BLOCK_BYTES]))
            del held[:BLOCK_BYTES]
    if held:
        yield as_text(bytes(held))
