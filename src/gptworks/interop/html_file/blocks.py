"""Blocks of bytes for a page: as files next to it, or as text in it.

The text has one character for seven bits. In UTF-8 it takes 16 to 18 % more space than the bytes (base64: 33 %),
because most characters are ASCII. Two-byte characters replace NUL, CR and <, which a script element cannot contain. An
XOR mask turns seven zero bits, the most frequent value, into a letter. Two checksums follow the bytes, so that the page
detects a file that was truncated or changed.
"""

from collections.abc import Iterable, Iterator

import numpy as np

BLOCK_BYTES = 7 << 21
"""Size of a block in bytes. Browsers limit the length of a string, and static hosts limit files (some to 25 MiB)."""
_AT_ONCE = 7 << 15
_MASK = 0x55
_REPLACED = (0x00, 0x0D, 0x3C)
_CHARACTERS = np.arange(128, dtype=np.uint8) ^ _MASK
"""The character for each value of seven bits, in Latin-1."""
for _i, _code in enumerate(_REPLACED):
    _CHARACTERS[_code ^ _MASK] = 0xC0 + _i


def as_text(content: bytes) -> str:
    """Return bytes, padded to a multiple of four, and their checksums as text, which js/blocks.js decodes."""
    content += bytes(-len(content) % 4)
    content += _sums(content)
    return "".join(_as_text(content[at : at + _AT_ONCE]) for at in range(0, len(content), _AT_ONCE))


def _sums(content: bytes) -> bytes:
    """Return Fletcher's two checksums of the content, read as 32-bit numbers, modulo 2^32."""
    numbers = np.frombuffer(content, "<u4")
    rest = np.arange(len(numbers), 0, -1, dtype=np.uint32)
    return np.array([numbers.sum(dtype=np.uint32), (numbers * rest).sum(dtype=np.uint32)], "<u4").tobytes()


def _as_text(content: bytes) -> str:
    n_rows = -(-len(content) // 7)
    padded, rows = np.zeros(7 * n_rows, np.uint8), np.zeros((n_rows, 8), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    rows[:, 1:] = padded.reshape(-1, 7)
    numbers = rows.view(">u8")[:, 0].astype(np.uint64)
    for i in range(8):
        rows[:, i] = _CHARACTERS[(numbers >> np.uint64(49 - 7 * i)).astype(np.uint8) & 127]
    return rows.tobytes()[: -(-8 * len(content) // 7)].decode("latin-1")


def blocks(content: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield a content, given in pieces, in blocks of `BLOCK_BYTES`; the last block may be shorter."""
    held = bytearray()
    for piece in content:
        for at in range(0, len(piece), BLOCK_BYTES):
            held += piece[at : at + BLOCK_BYTES]
            if len(held) >= BLOCK_BYTES:
                yield bytes(held[:BLOCK_BYTES])
                del held[:BLOCK_BYTES]
    if held:
        yield bytes(held)
