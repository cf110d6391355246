"""Compare an exported file with the engine: Node runs the file's own code, as a browser does."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate
from gptworks.errors import RunError, UserError
from gptworks.infer.backends.backend import Chunk
from gptworks.infer.backends.native import NativeBackend
from gptworks.interop.html_file.strings import TEXTS
from gptworks.model.gpt import GPT
from gptworks.tokenizer import encode_text

GREEDY_TOKENS = 64
PROMPT_TOKENS = 32
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "int8": 1e-2, "int4": 1e-2}
"""Largest difference of logits, as a share of the largest logit: processors round activations differently."""
SECONDS = 600
_CHECK = Path(__file__).with_name("js") / "check.mjs"


@dataclass(frozen=True)
class Check:
    """What was found equal."""

    program: str
    logit_difference: float
    greedy_tokens: int
    """Number of most likely tokens that are equal, out of `GREEDY_TOKENS` or as many as the context holds; where two
    logits differ by less than the tolerance, either counts."""
    texts: int
    chats: int
    tokens_per_second: float | None


def check_file(
    file: Path, model: GPT, weights: str, capacity: int, cache: torch.dtype, tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Check | None:  # fmt: skip
    """Return what is equal in a file and in the engine; None if there is no Node to open the file.

    Raises:
        RunError: something differs, or the file does not open.
    """
    node = shutil.which("node")
    if node is None:
        return None
    backend = NativeBackend(model, 1, capacity, dtype=cache)
    n_prompt = max(1, min(PROMPT_TOKENS, capacity // 2))
    tokens, wanted = _greedy(backend, n_prompt, capacity)
    chats = [] if template is None else _accepted(template)
    with tempfile.TemporaryDirectory(prefix="gptworks-html-") as temporary:
        asked, answers, logits = (Path(temporary, name) for name in ("asked.json", "answers.json", "logits"))
        tree = {"tokens": tokens, "texts": TEXTS, "chats": [messages for messages, _ in chats]}
        asked.write_text(json.dumps(tree), encoding="utf-8")
        try:
            done = subprocess.run(
                [node, _CHECK, file, asked, answers, logits],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RunError(f"{file.name}: Node takes more than {SECONDS} s; --no-verify skips the check.") from None
        if done.returncode:
            raise RunError(f"{file.name} does not open in Node: {done.stderr.strip()[-800:]}")
        found = torch.from_numpy(np.fromfile(logits, np.float32).reshape(len(tokens), -1))
        given = json.loads(answers.read_text(encoding="utf-8"))
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCES[weights]:
        raise RunError(f"{file.name}: logits differ from the engine's by {difference:.2e} of the largest.")
    n_equal = _equal_greedy(found, tokens, n_prompt, TOLERANCES[weights] * float(wanted.abs().max()))
    _compare(given, tokenizer, chats, file)
    return Check("Node", difference, n_equal, len(TEXTS), len(chats), given["tokens_per_second"])


def _greedy(backend: NativeBackend, n_prompt: int, capacity: int) -> tuple[list[int], torch.Tensor]:
    """Return a text that the model continues greedily, and the logits of all its tokens, fp32 [T, V]."""
    n_vocab = backend.vocab_size
    tokens = [(7919 * i + 13) % n_vocab for i in range(n_prompt)]
    rows = [backend.compute([Chunk(0, 0, tokens, n_prompt)])[0]]
    for _ in range(min(GREEDY_TOKENS, capacity - n_prompt)):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(backend.compute([Chunk(0, len(tokens) - 1, tokens[-1:], 1)])[0])
    return tokens, torch.cat(rows)


def _equal_greedy(found: torch.Tensor, tokens: Sequence[int], n_prompt: int, near: float) -> int:
    chosen = torch.tensor(tokens[n_prompt:])
    rows = found[n_prompt - 1 : -1]
    behind = rows.amax(-1) - rows.gather(1, chosen[:, None])[:, 0]
    return int((behind <= near).sum())


def _accepted(template: ChatTemplate) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return conversations that the template accepts, and their token ids."""
    made = []
    for messages in _CHATS:
        try:
            made.append((messages, template.encode(messages, add_generation_prompt=True)))
        except UserError:  # such as one that takes no system message
            continue
    return made


_CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  What is <|im_end|> <|endoftext|>?\n"}],
    [
        {"role": "user", "content": "é 日本 🤖"},
        {"role": "assistant", "content": "<b>yes</b> & 'no' {{ x }}"},
        {"role": "user", "content": "\n"},
    ],
)


def _compare(given: dict[str, Any], tokenizer: Tokenizer, chats: list[Any], file: Path) -> None:
    for text, ids, read in zip(TEXTS, given["ids"], given["read"], strict=True):
        wanted = encode_text(tokenizer, text)
        if ids != wanted or read != tokenizer.decode(wanted):
            raise RunError(f"{file.name}: token ids of {text!r} are {ids[:40]} and not the tokenizer's, {wanted[:40]}.")
    for (messages, wanted), ids in zip(chats, given["chats"], strict=True):
        if ids != wanted:
            raise RunError(f"{file.name}: the conversation {messages} has other token ids than by the run's template.")
