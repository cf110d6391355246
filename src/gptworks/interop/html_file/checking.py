"""Compare an exported file with the engine. The file's own code computes, in a browser or in Node."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from gptworks.chat_template import ChatTemplate
from gptworks.errors import RunError, UserError
from gptworks.infer.backends.backend import Chunk
from gptworks.infer.backends.native import NativeBackend
from gptworks.infer.text import DECODER_CONTEXT_TOKENS
from gptworks.interop.html_file.browser import Unavailable, opened
from gptworks.interop.steps import CHATS
from gptworks.kernels.build import Unavailable as NoKernels
from gptworks.model.gpt import GPT
from gptworks.tokenizer import StreamDecoder, encode_text

GREEDY_TOKENS = 64
PROMPT_TOKENS = 32
TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "int8": 1e-2, "int4": 1e-2}
"""Format of the weights → largest accepted difference of logits, as a share of the largest logit. Processors round
activations differently."""
SECONDS = 600
_PARTS = (
    "hello", " world", "  two  spaces", "\t\ttabs", "\r\n\r\n  x", "it's", "I'LL we'Ve", "'\u017f", "na\u00efve",
    "\u00c0\u00c9\u01c5", "\u0130stanbul", "\u0391\u03a3 \u03c2", "\u65e5\u672c\u8a9e",
    "\U0001f916\U0001f468\u200d\U0001f469", "a\u0301 e\u0308", "12345 \u0661\u0662 \u2177 \u00bd\u2070",
    "<|endoftext|>", "<unk><bos>", "\ufeff\u0085\u180e\u200b\u2028", "x\u00a0y", "_under-score.x", "\x00\x01",
    "\ufb01 \u24b6",
)  # fmt: skip
TEXTS = ("", *_PARTS, "a" * 300, "-" * 70, *map("".join, product(_PARTS, repeat=2)))
"""Some 550 texts whose token ids are compared: words, spaces, scripts, special tokens and control characters, and pairs
of these."""
_JS = Path(__file__).with_name("js")


@dataclass(frozen=True)
class Check:
    """The result of a comparison in which nothing differed by more than rounding."""

    program: str
    """The browser and its version, or Node."""
    no_browser: str | None
    """The reason why Node was used, which runs the file's code but not the page; None if a browser was used."""
    logit_difference: float
    """Largest difference of logits, as a share of the largest logit."""
    loss: float
    """Mean loss, in nats per token, that the file computes for the prompt (up to `PROMPT_TOKENS` arbitrary tokens) and
    the greedy tokens."""
    loss_difference: float
    """Difference of `loss` from the engine's mean loss."""
    greedy_tokens: int
    """Number of equal greedy tokens: `GREEDY_TOKENS`, or as many as the context holds. A token also counts if its logit
    in the file is below the file's largest logit by at most the tolerance."""
    texts: int
    chats: int
    tokens_per_second: float | None
    """Speed at which the file generated the greedy text on this machine; None if the text has fewer than two tokens."""


def check_file(
    file: Path, split: bool, model: GPT, weights: str, capacity: int, cache: torch.dtype, tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Check | str:  # fmt: skip
    """Compare a file with the engine; return the result, or the reason why this machine cannot compare them. Raises a
    RunError if something differs, or the file does not open. `split`: whether the page reads files next to it."""
    try:
        backend = NativeBackend(model, 1, capacity, dtype=cache)
    except NoKernels as error:
        return str(error)
    n_prompt = max(1, min(PROMPT_TOKENS, capacity // 2))
    tokens, wanted = _greedy(backend, n_prompt, capacity)
    chats = [] if template is None else accepted(template)
    asked = {"tokens": tokens, "n_prompt": n_prompt, "texts": TEXTS, "chats": [messages for messages, _ in chats]}
    answered = f"(async () => {{ {_script()}\nreturn answered(await gptworks.model, {json.dumps(asked)}); }})()"
    expressions = [answered, *(f"gptworks.rowOf({i})" for i in range(len(tokens)))]
    try:
        program, no_browser, (given, *rows) = _values(file, split, expressions)
    except Unavailable as error:
        return str(error)
    found = torch.from_numpy(np.stack([np.frombuffer(base64.b64decode(row), np.float32) for row in rows]))
    near = TOLERANCES[weights] * float(wanted.abs().max())
    difference = float((found - wanted).abs().max())
    if not difference <= near:
        raise RunError(f"{file}: logits differ from the engine's by {difference:.2e}; at most {near:.2e} is rounding.")
    losses = torch.tensor(given["losses"])
    expected = -wanted[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    if not float((losses - expected).abs().max()) <= 2 * near:
        raise RunError(f"{file}: losses differ from the engine's by {float((losses - expected).abs().max()):.2e}.")
    made, n_new = found[n_prompt - 1 : -1], len(tokens) - n_prompt
    behind = made.amax(-1) - made.gather(1, torch.tensor(tokens[n_prompt:])[:, None])[:, 0]
    if (n_equal := int((behind <= near).sum())) < n_new:
        raise RunError(f"{file}: {n_equal} of {n_new} greedy tokens are the engine's.")
    _compare_ids(given, tokenizer, chats, file)
    _compare_texts(given, tokenizer, tokens, n_prompt, wanted, near, file)
    mean = float(losses.mean())
    return Check(
        program, no_browser, difference / float(wanted.abs().max()), mean, abs(mean - float(expected.mean())), n_new,
        len(TEXTS), len(chats), given["tokens_per_second"],
    )  # fmt: skip


@cache
def _script() -> str:
    return re.sub(r"^export ", "", (_JS / "check.js").read_text(encoding="utf-8"), flags=re.MULTILINE)


def _values(file: Path, split: bool, expressions: list[str]) -> tuple[str, str | None, list[Any]]:
    """Evaluate expressions in a page, in a browser or else in Node. Return the program's name, the reason why Node was
    used (None if a browser was used), and the values.

    Raises:
        Unavailable: there is neither a browser nor Node.
        RunError: the page fails, reports a fault, or takes more than `SECONDS`.
    """
    try:
        with opened(file, SECONDS, served=split) as page:
            values = [page.evaluate(one) for one in expressions]
            if faults := page.faults():
                raise RunError(f"{file}: in {page.program} the page reports: {'; '.join(faults)}")
            return page.program, None, values
    except Unavailable as error:
        reason = str(error)
    if (node := shutil.which("node")) is None:
        raise Unavailable(f"{reason}, and no Node")
    try:
        done = subprocess.run(
            [node, _JS / "check.mjs", file], input=json.dumps(expressions), capture_output=True, text=True,
            encoding="utf-8", timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RunError(f"{file}: Node took more than {SECONDS} s to compute; --no-verify skips this.") from None
    if done.returncode:
        raise RunError(f"{file} does not open in Node: {done.stderr.strip()[-800:]}")
    return "Node", reason, json.loads(done.stdout)


def _greedy(backend: NativeBackend, n_prompt: int, capacity: int) -> tuple[list[int], torch.Tensor]:
    """Return an arbitrary prompt with its greedy continuation, and the logits of all these tokens, fp32 [T, V]."""
    n_vocab = backend.vocab_size
    tokens = [(7919 * i + 13) % n_vocab for i in range(n_prompt)]
    rows = [backend.compute([Chunk(0, 0, tokens, n_prompt)])[0]]
    for _ in range(min(GREEDY_TOKENS, capacity - n_prompt)):
        tokens.append(int(rows[-1][-1].argmax()))
        rows.append(backend.compute([Chunk(0, len(tokens) - 1, tokens[-1:], 1)])[0])
    return tokens, torch.cat(rows)


def _compare_texts(
    given: dict[str, Any], tokenizer: Tokenizer, tokens: list[int], n_prompt: int, wanted: torch.Tensor, near: float,
    file: Path,
) -> None:  # fmt: skip
    """Compare the text that the page writes with the engine's, up to the first token that differs because of rounding.
    Raises a RunError if the texts differ by more than rounding."""
    read, decoder = StreamDecoder(tokenizer), StreamDecoder(tokenizer)
    if given["prompt"] != [read.push(one) for one in tokens[:n_prompt]]:
        raise RunError(f"{file}: the texts of the tokens {tokens[:n_prompt]} are not the engine's.")
    for one in tokens[max(0, n_prompt - DECODER_CONTEXT_TOKENS) : n_prompt]:
        decoder.push(one)
    for i, (one, other) in enumerate(zip(tokens[n_prompt:], given["written"], strict=False)):
        row = wanted[n_prompt - 1 + i]
        if one != other and row[one] - row[other] > near:
            raise RunError(f"{file}: greedy token {i + 1} is {other}, and the engine's is {one}.")
        if one != other:
            return
    text = "".join(decoder.push(one) for one in tokens[n_prompt:]) + decoder.flush()
    if len(tokens) > n_prompt and given["text"] != text:
        raise RunError(f"{file}: the greedy text is {given['text']!r}, and the engine's is {text!r}.")


def accepted(template: ChatTemplate) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return those conversations of `CHATS` that the template accepts, each with its token ids."""
    made = []
    for messages in CHATS:
        try:
            made.append((messages, template.encode(messages, add_generation_prompt=True)))
        except UserError:  # for example, the template takes no system message
            continue
    return made


def _compare_ids(given: dict[str, Any], tokenizer: Tokenizer, chats: list[Any], file: Path) -> None:
    for text, ids, read in zip(TEXTS, given["ids"], given["read"], strict=True):
        wanted = encode_text(tokenizer, text)
        if ids != wanted or read != tokenizer.decode(wanted):
            raise RunError(f"{file.name}: token ids of {text!r} are {ids[:40]} and not the tokenizer's, {wanted[:40]}.")
    for (messages, wanted), ids in zip(chats, given["chats"], strict=True):
        if ids != wanted:
            raise RunError(f"{file.name}: the conversation {messages} has other token ids than by the run's template.")
