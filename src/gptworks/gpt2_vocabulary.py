"""Reader of GPT-2's vocabulary as OpenAI publishes it: r50k_base.tiktoken, with tokens in base64 and their ranks."""

import base64
from itertools import pairwise
from pathlib import Path

from gptworks.errors import UserError
from gptworks.files import read_regular

N_RANKS = 50_256
MAX_FILE_BYTES = 1 << 24
"""Size limit of the file; the published file has 836 kB."""


def read_gpt2_vocabulary(path: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the id of each token of GPT-2's byte-level BPE, and the merges in order; all tokens by printable names.

    Raises:
        UserError: the file is truncated, or not GPT-2's vocabulary.
        OSError: the file cannot be opened; FileNotFoundError if it does not exist.
    """
    ranks = _read_ranks(path)
    vocabulary = {_printable(token): rank for token, rank in ranks.items()}
    pairs = (_merge_of(token, ranks) for token in ranks if len(token) > 1)
    return vocabulary, [(_printable(left), _printable(right)) for left, right in pairs]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return each token's rank. A line of the file has a token in base64 and its rank; ranks ascend."""
    ranks: dict[bytes, int] = {}
    fault = ""
    try:
        for line in read_regular(path, MAX_FILE_BYTES).splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError:
        fault = f"line {len(ranks) + 1}: not `base64-token rank`"
    if not fault and list(ranks.values()) != list(range(N_RANKS)):
        fault = f"it holds {len(ranks)} ranks and GPT-2 has {N_RANKS}, in order: it is cut short, or another file"
    elif not fault and any(bytes([byte]) not in ranks for byte in range(256)):
        fault = "it lacks some of the 256 bytes"
    if fault:
        raise UserError(f"{path}: {fault}. tokenizer.path takes r50k_base.tiktoken as published.")
    return ranks


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts whose merge makes `token`: merge its bytes in order of rank until two parts are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, N_RANKS) for left, right in pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


def _byte_characters() -> list[str]:
    """Return GPT-2's character for each byte: the byte's own if printable, otherwise the next free one from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = iter(range(256, 512))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
"""The character that represents each byte in the names of byte-level tokens."""


def _printable(token: bytes) -> str:
    return "".join(BYTE_CHARACTERS[byte] for byte in token)
