"""Compare a Hugging Face folder with our model: logits, greedy tokens from a cache, token ids and rendered chats.

Stock transformers loads the folder in fp32, without remote code.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gptworks.chat_template import ChatTemplate
from gptworks.checkpoint import Report, load_run
from gptworks.config import ModelConfig
from gptworks.errors import RunError, UserError, not_installed
from gptworks.files import check_tree
from gptworks.infer.backends.cache import SlotCache
from gptworks.interop.huggingface.original import Original, sha256
from gptworks.interop.steps import CHATS
from gptworks.model.gpt import GPT
from gptworks.tokenizer import load_tokenizer, prompt_ids

TOLERANCE = 1e-4
"""Largest accepted difference between two logits, relative to the largest logit or to 1, whichever is larger."""

GREEDY_TOKENS = 64

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def area(radius):\n    return 3.14159 * radius**2  # in m²\n",
    "Zoë naïvely paid 1,234.50 € for 東京 🗼 — twice!\n\n\tWhy?",
)
"""Texts on which token ids and logits are compared: words, code with indentation, and multi-byte characters."""


@dataclass(frozen=True)
class Verification:
    """The result of comparing a Hugging Face folder with our model."""

    transformers_version: str
    logit_difference: float
    """Largest difference between our logits and transformers', over all positions of all sequences."""
    largest_logit: float
    tokens: int
    """Number of positions compared."""
    greedy_tokens: int
    """Number of greedy tokens compared."""
    ties: int
    """Number of greedy tokens where the models chose differently between logits that are equal up to rounding."""
    texts: int


def require(library: str) -> Any:
    """Import and return the library for a comparison: transformers or peft. Raises a UserError if the library is not
    installed."""
    try:
        with quiet():
            return importlib.import_module(library)
    except ImportError:
        raise not_installed(
            library, "interop", "the comparison of the model", "--no-verify skips the comparison."
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, messages and progress bars of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging: Any = importlib.import_module("transformers.utils.logging")
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@torch.no_grad()
def verify_folder(
    folder: Path,
    model: GPT,
    tokenizer: Tokenizer,
    texts: Sequence[str] = (),
    template: ChatTemplate | None = None,
    original: Original | None = None,
) -> Verification:
    """Compare a folder with our model and tokenizer.

    Args:
        model: our model in fp32 and eval mode, with the folder's weights.
        texts: texts to compare in addition to `TEXTS`.
        template: the run's chat template, whose rendering is compared.
        original: facts of the folder that the run was imported from.

    Raises:
        RunError: a result differs; the message names it.
        UserError: transformers is not installed.
    """
    transformers = require("transformers")
    # transformers reads these names as special tokens, so texts that contain one are left out
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    texts = [text for text in dict.fromkeys((*TEXTS, *texts)) if text and not any(name in text for name in special)]
    with quiet():
        their_tokenizer = load_their_tokenizer(folder)
        theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        for problem, names in loading.items():
            if names:
                raise RunError(f"transformers finds {problem.replace('_', ' ')} in the export: {sorted(names)[0]}.")
        theirs.eval()
        _compare_texts(tokenizer, their_tokenizer, texts)
        _compare_chats(template, their_tokenizer)
        if original is not None:
            _compare_original(original, their_tokenizer, theirs.generation_config)
        sequences = sequences_for(model, tokenizer, texts)
        difference, largest = compare_logits(model, theirs, sequences)
        n_greedy, n_ties = _compare_greedy(model, theirs, _prompt(sequences[-1], model.config))
    n_tokens = sum(len(ids) for ids in sequences)
    return Verification(transformers.__version__, difference, largest, n_tokens, n_greedy, n_ties, len(texts))


def load_theirs(folder: Path) -> Any:
    """Load the model of a Hugging Face folder in transformers, in fp32, from safetensors and without remote code.
    Raises a UserError if a link leads out of the folder, the folder contains anything but regular files, or
    transformers is not installed."""
    check_tree(folder)
    return require("transformers").AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )


def load_their_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a Hugging Face folder in transformers, without remote code."""
    return require("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def verify_import(run_dir: Path, library: str, load: Callable[[], Any], report: Report) -> float | None:
    """Return the largest difference between the logits of an imported run and of the original in its library; None if
    the library is not installed.

    Args:
        library: transformers or peft.
        load: function that loads the original with the library.

    Raises:
        RunError: the difference is above the bound (`logit_bound`).
        UserError: the library cannot load the original.
    """
    try:
        require(library)
    except UserError:
        report(f"not compared with the original: {library} is not installed")
        return None
    report(f"comparing it with the original in {library}")
    run = load_run(run_dir)
    with quiet():
        try:
            theirs = load().eval()
        except Exception as error:
            raise UserError(
                f"gptworks reads this but {library} does not, so the import cannot be compared: "
                f"{type(error).__name__}: {str(error)[:300]}. Give --no-verify to import without a comparison."
            ) from error
        sequences = sequences_for(run.model, load_tokenizer(run.tokenizer_folder))
        return compare_logits(run.model, theirs, sequences, "the import", "the original")[0]


def logit_bound(largest_logit: float) -> float:
    """Return the largest accepted difference between two models' logits, given the largest absolute logit."""
    return TOLERANCE * max(1.0, largest_logit)


def _compare_texts(ours: Tokenizer, theirs: Any, texts: Sequence[str]) -> None:
    for text in texts:
        our_ids, their_ids = prompt_ids(ours, text), theirs(text)["input_ids"]
        if our_ids != their_ids:
            raise RunError(f"the exported tokenizer encodes {text!r} as {their_ids[:12]} and ours as {our_ids[:12]}.")
        if ours.decode(our_ids) != theirs.decode(their_ids, skip_special_tokens=True):
            raise RunError(f"the exported tokenizer decodes the ids of {text!r} differently from ours.")


def _compare_chats(ours: ChatTemplate | None, theirs: Any) -> None:
    if ours is None:
        return
    for chat in CHATS:
        try:
            expected = ours.render(chat, add_generation_prompt=True)
        except UserError:  # the template does not accept this order of turns
            continue
        try:
            written = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise RunError(f"the exported chat template fails in transformers: {str(error)[:300]}.") from None
        if written != expected:
            raise RunError(f"the exported chat template renders {written[:200]!r} and ours {expected[:200]!r}.")


def _compare_original(original: Original, tokenizer: Any, generation: Any) -> None:
    """Compare an export in stock transformers with the folder that the run was imported from. Raises a RunError if
    token ids, end tokens, special tokens or chat template differ."""
    for text, ids in original.texts.items():
        if (read := tokenizer(text)["input_ids"]) != ids:
            raise RunError(f"the export encodes {text!r} as {read[:12]}, and the imported folder as {ids[:12]}.")
    ends = generation.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if ends != original.ends:
        raise RunError(f"generation of the export ends at {ends}, and that of the imported folder at {original.ends}.")
    for role, name in original.names.items():
        if (written := getattr(tokenizer, role)) != name:
            raise RunError(f"the export has `{role}`={written!r}, and the imported folder {name!r}.")
    written = tokenizer.chat_template
    source = written.get("default") if isinstance(written, dict) else written
    if sha256(source) != original.template:
        raise RunError("the export has another chat template than the imported folder.")


def sequences_for(model: GPT, tokenizer: Tokenizer, texts: Sequence[str] = ()) -> list[list[int]]:
    """Return sequences of token ids to compare, shortest first: `TEXTS`, `texts`, and three sequences of random ids.

    If the context allows, one random sequence is longer than the attention window, and than the original context of
    a rotary scaling that depends on the text's length.
    """
    config = model.config
    context, beyond = config.context_length, 96
    if config.window is not None:
        beyond = max(beyond, config.window + 32)
    if config.rope_scaling is not None and config.rope_scaling.by_length:
        beyond = max(beyond, config.original_context_length + 32)
    generator = torch.Generator().manual_seed(0)
    lengths = (min(n, context) for n in (8, 40, beyond))
    random = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    read = [prompt_ids(tokenizer, text)[:context] for text in dict.fromkeys((*TEXTS, *texts))]
    return sorted((ids for ids in (*random, *read) if ids), key=len)


def _prompt(sequence: list[int], config: ModelConfig) -> list[int]:
    """Return a sequence's start as a prompt for greedy decoding, long enough for the new tokens to pass the window."""
    length = max(8, (config.window or 0) - GREEDY_TOKENS // 2)
    return sequence[: max(1, min(length, config.context_length - GREEDY_TOKENS))]


@torch.no_grad()
def compare_logits(
    model: GPT, theirs: Any, sequences: Sequence[list[int]], what: str = "the export", original: str = "the model"
) -> tuple[float, float]:
    """Return the largest difference between the logits of our model and of a transformers model, and the largest logit.
    Raises a RunError if the difference is above the bound."""
    difference = largest = 0.0
    for ids in sequences:
        tokens = torch.tensor([ids])
        ours, their_logits = model(tokens), theirs(tokens, use_cache=False).logits
        apart, size = (ours - their_logits).abs().max().item(), ours.abs().max().item()
        difference, largest = max(difference, apart), max(largest, size)
        if not apart <= logit_bound(size):
            raise RunError(
                f"{what} does not compute what {original} does: over {len(ids)} tokens a logit differs by "
                f"{apart:.2e}, more than {logit_bound(size):.2e}."
            )
    return difference, largest


def _compare_greedy(model: GPT, theirs: Any, prompt: list[int]) -> tuple[int, int]:
    """Compare greedy decoding from a prompt in both models, each with its cache.

    If the models choose different tokens that are equally likely up to rounding, both continue with our choice.

    Returns:
        The number of new tokens, and the number of such ties.

    Raises:
        RunError: the models' choices differ by more than rounding.
    """
    config = model.config
    by_length = config.rope_scaling is not None and config.rope_scaling.by_length
    # Beyond the original context, transformers' cache has keys rotated for shorter texts; in gptworks, all keys agree.
    room = config.original_context_length if by_length else config.context_length
    n_new, n_ties = max(0, min(GREEDY_TOKENS, room - len(prompt))), 0
    cache, n_held, past = SlotCache(config, 1, len(prompt) + n_new), 0, None
    tokens = torch.tensor([prompt])
    for step in range(n_new):
        ours: Tensor = model(tokens, cache.rows([(0, n_held, tokens.size(1))]))[0, -1]
        n_held += tokens.size(1)
        given = theirs(tokens, past_key_values=past, use_cache=True)
        their_logits, past = given.logits[0, -1], given.past_key_values
        chosen = int(ours.argmax())
        behind = (their_logits.max() - their_logits[chosen]).item()
        if not behind <= 2 * logit_bound(ours.abs().max().item()):
            raise RunError(
                f"greedy token {step + 1} after a prompt of {len(prompt)} is {chosen} here and "
                f"{int(their_logits.argmax())} in transformers, {behind:.2e} ahead."
            )
        n_ties += int(their_logits.argmax()) != chosen
        tokens = torch.tensor([[chosen]])
    return n_new, n_ties
