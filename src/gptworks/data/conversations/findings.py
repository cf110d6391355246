"""Faults in training examples, with advice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from gptworks.config import DataFault, Recipe
from gptworks.data.conversations.keys import meaning
from gptworks.data.opened import Prepared
from gptworks.data.permutation import Int64s
from gptworks.data.shards import EXAMPLE, Manifest, TokenShards
from gptworks.errors import UserError
from gptworks.files import read_text

_CHUNK_TOKENS = 1 << 22
_N_PLACES = 3


@dataclass(frozen=True)
class Finding:
    """A fault, and a text that describes it and gives advice."""

    name: DataFault
    text: str


_CONSEQUENCES: dict[DataFault, frozenset[DataFault]] = {
    "tokens-not-special": frozenset({"no-end-token", "answers-altered"}),
}
"""The faults that each fault causes. They are explained only after it is fixed."""


def refuse_faults(findings: Sequence[Finding], allowed: Sequence[str]) -> None:
    """Refuse faults that the recipe does not allow.

    Raises:
        UserError: there are such faults. The message names each, with advice unless another fault causes it.
    """
    stops = [finding for finding in findings if finding.name not in allowed]
    if stops:
        names = ", ".join(finding.name for finding in stops)
        follow = frozenset[DataFault]().union(*(_CONSEQUENCES.get(finding.name, ()) for finding in stops))
        listed = "\n".join(f"  {finding.name}: {finding.text}" for finding in stops if finding.name not in follow)
        raise UserError(
            f"the examples would not teach what you want:\n{listed}\n"
            f"`gptworks inspect` shows examples. To train anyway, set objective.allow=[{names}]."
        )


@dataclass(frozen=True)
class Look:
    """Makes findings that name the places of examples."""

    manifest: Manifest
    records: Int64s
    noun: str = "examples"

    def place(self, example: int) -> str:
        return self.manifest.where(int(self.records[example]))

    def fault(self, name: DataFault, found: npt.NDArray[np.bool_], above: float, what: str, fix: str) -> list[Finding]:
        """One finding if more than the fraction `above` of the examples has the fault, else none."""
        count, total = int(found.sum()), len(found)
        if count <= above * total:
            return []
        first = np.flatnonzero(found)[:_N_PLACES].tolist()
        more = ", …" if count > len(first) else ""
        where = "; ".join(self.place(i) for i in first)
        return [Finding(name, f"{count:,} of {total:,} {self.noun} ({count / total:.1%}) {what}: {where}{more}. {fix}")]


def about_tokens(recipe: Recipe, prepared: Prepared) -> list[Finding]:
    """Faults of the records' keys, the chat template, the tokenizer and the run to start from."""
    manifest, template = prepared.manifest, prepared.chat_template
    assert template is not None
    findings = about_keys(manifest)
    if missing := template.missing_tokens():
        names = ", ".join(f'"{name}"' for name in missing)
        text = (
            f"the chat template writes {' and '.join(missing)}, which this tokenizer reads as plain text that anyone "
            f"can type. Set tokenizer.added_tokens=[{names}]."
        )
        findings.append(Finding("tokens-not-special", text))
    base = recipe.initialize_from
    if base is None:
        if "text" not in recipe.objective.sources and recipe.objective.rollouts is None:
            text = "the model starts from random weights, and answers cannot teach it a language. Set initialize_from."
            findings.append(Finding("no-base-run", text))
    elif (there := base / "tokenizer" / TEMPLATE_FILE).exists() and template.source != read_text(
        there, MAX_TEMPLATE_BYTES, inside=base
    ):
        text = (
            f"{base} was trained with another chat template. Leave tokenizer.chat_template out, "
            f"or set it to {there}, to continue with that one."
        )
        findings.append(Finding("template-changed", text))
    if recipe.objective.learns_prompts:
        text = "every token is learned, including the users' questions. Set objective.type=instruction."
        findings.append(Finding("prompts-learned", text))
    train = manifest.splits["train"]
    if train.unknown_tokens > 0.05 * train.tokens:
        text = (
            f"{train.unknown_tokens / train.tokens:.1%} of the tokens are unknown: the tokenizer was made for "
            f"other text. Use one of type bpe or gpt2."
        )
        findings.append(Finding("unknown-tokens", text))
    return findings


def about_keys(manifest: Manifest) -> list[Finding]:
    """One finding if records have keys with a known meaning that are not read, else none."""
    places: dict[str, list[tuple[int, str]]] = {}
    for origin in manifest.origins:
        for name, (n_records, first) in origin.unread.items():
            places.setdefault(name, []).append((n_records, f"{origin.name}, record {first}"))
    if not places:
        return []
    listed = []
    for name, found in places.items():
        key, of_turn = name.removeprefix("turn."), name.startswith("turn.")
        total = sum(n_records for n_records, _ in found)
        where = f"{total:,} record{'s' * (total > 1)}, first {found[0][1]}"
        listed.append(f"`{key}`{' of a turn' * of_turn}: {meaning(key, of_turn)} ({where})")
    text = (
        f"records have keys that are not read: {'; '.join(listed)}. Nothing of them is learned. Move them into the "
        f"text of the turns, or remove them."
    )
    return [Finding("keys-not-read", text)]


def example_columns(shards: TokenShards) -> dict[str, npt.NDArray[np.uint64]]:
    """The columns of `EXAMPLE` by name, [n] each."""
    return dict(zip(EXAMPLE, shards.examples().T, strict=True))


def learned_counts(shards: TokenShards, context: int) -> tuple[Int64s, Int64s]:
    """Number of learned tokens of each example [n], and the number of those within the context [n]."""
    starts = shards.document_starts()
    n = len(starts)
    learned, kept = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    for at in range(0, shards.n_tokens, _CHUNK_TOKENS):
        part = shards.read_learned(at, min(_CHUNK_TOKENS, shards.n_tokens - at))
        places = at + np.flatnonzero(part)
        example = np.searchsorted(starts, places, side="right") - 1
        learned += np.bincount(example, minlength=n)
        kept += np.bincount(example[places - starts[example] <= context], minlength=n)
    return learned, kept
