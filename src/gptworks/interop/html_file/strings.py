"""Texts whose token ids in an exported file are compared with the tokenizer's."""

from itertools import product

_PARTS = (
    "hello", " world", "  two  spaces", "\t\ttabs", "\r\n\r\n  x", "it's", "I'LL we'Ve", "'\u017f", "na\u00efve",
    "\u00c0\u00c9\u01c5", "\u0130stanbul", "\u0391\u03a3 \u03c2", "\u65e5\u672c\u8a9e",
    "\U0001f916\U0001f468\u200d\U0001f469", "a\u0301 e\u0308", "12345 \u0661\u0662 \u2177 \u00bd\u2070",
    "<|endoftext|>", "<unk><bos>", "\ufeff\u0085\u180e\u200b\u2028", "x\u00a0y", "_under-score.x", "\x00\x01",
    "\ufb01 \u24b6",
)  # fmt: skip
TEXTS = ("", *_PARTS, "a" * 300, "-" * 70, *map("".join, product(_PARTS, repeat=2)))
"""Some 550 texts: words, spaces, scripts, special tokens and control characters, alone and in pairs."""
