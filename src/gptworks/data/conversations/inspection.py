"""Statistics of conversations and preference pairs before training, and faults that would silently ruin a run.

A fault stops a run unless `objective.allow` names it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from gptworks.config import DataFault, Recipe
from gptworks.data.conversations.keys import meaning
from gptworks.data.conversations.packing import Pairs, training_examples
from gptworks.data.opened import Prepared
from gptworks.data.permutation import Int64s
from gptworks.data.shards import ALTERED, EMPTY, NO_END, SPLITS, SWAPPED, UNANSWERED, Manifest, Split, TokenShards
from gptworks.errors import UserError
from gptworks.files import read_text
from gptworks.units import counted

_CHUNK_TOKENS = 1 << 22
_N_PLACES, _N_LONGEST = 3, 3
_MOST_ALIKE = 0.5
"""A run stops if a larger fraction of its pairs has no learning signal."""


@dataclass(frozen=True)
class Finding:
    """A fault in the data, with a text that describes it and gives advice."""

    name: DataFault
    text: str


_CAUSED_BY_TOKENS = ("no-end-token", "answers-altered")
"""Faults that `tokens-not-special` causes. Messages do not explain them until their cause is fixed."""


def refuse_faults(findings: Sequence[Finding], allowed: Sequence[str]) -> None:
    """Raise a UserError if there are faults that the recipe does not allow. The message names each fault, and gives
    advice for faults that no other fault causes."""
    stops = {finding.name: finding for finding in findings if finding.name not in allowed}
    if stops:
        caused = _CAUSED_BY_TOKENS if "tokens-not-special" in stops else ()
        listed = "\n".join(f"  {name}: {finding.text}" for name, finding in stops.items() if name not in caused)
        raise UserError(
            f"the examples would not teach what you want:\n{listed}\n"
            f"`gptworks inspect` shows examples. To train anyway, set objective.allow=[{', '.join(stops)}]."
        )


class _Examples:
    """The examples of a split, and findings that name the records of faulty examples."""

    def __init__(self, prepared: Prepared, split: Split, context: int, noun: str = "examples") -> None:
        self.shards, self.noun, self._manifest = TokenShards(prepared.folder, split), noun, prepared.manifest
        self.columns = self.shards.examples()
        self.records: npt.NDArray[np.uint64] = self.columns["record"]
        self.learned, self.kept = _learned_counts(self.shards, context)

    def place(self, example: int) -> str:
        return self._manifest.where(int(self.records[example]))

    def fault(self, name: DataFault, found: npt.NDArray[np.bool_], above: float, what: str, fix: str) -> list[Finding]:
        """Return one finding if more than the fraction `above` of the examples has the fault, else an empty list."""
        count, total = int(found.sum()), len(found)
        if count <= above * total:
            return []
        first = np.flatnonzero(found)[:_N_PLACES].tolist()
        more = ", …" if count > len(first) else ""
        where = "; ".join(self.place(i) for i in first)
        return [Finding(name, f"{count:,} of {total:,} {self.noun} ({count / total:.1%}) {what}: {where}{more}. {fix}")]


@dataclass(frozen=True)
class Inspection:
    """Statistics and faults of a recipe's conversations or preference pairs."""

    figures: dict[str, Any]
    """The statistics by name, for JSON."""
    lines: list[str]
    """The statistics as text."""
    findings: list[Finding]


def inspect_conversations(recipe: Recipe, prepared: Prepared) -> Inspection:
    """Return statistics and faults of a recipe's conversations. (`check_records` raises an error for faults.)"""
    context = recipe.row_length
    train, held_out = (_Examples(prepared, split, context) for split in SPLITS)
    examples = training_examples(train.shards, recipe)
    n_inputs = np.minimum(examples.n_tokens - 1, context)
    order = np.argsort(-examples.n_tokens, kind="stable")[:_N_LONGEST]
    findings = [*_about_tokens(recipe, prepared)]
    for name, flag, what, fix in _FLAGS:
        findings += train.fault(name, (train.columns["flags"] & flag) > 0, 0.01, what, fix)
    findings += _about_length(train, int(n_inputs.sum()), context)
    if train.kept.any():
        findings += _about_held_out(held_out.kept > 0, context, "examples")
    findings += _about_repetition(train, held_out)
    n_tokens, n_learned, n_rows = int(n_inputs.sum()), int(train.kept.sum()), len(examples.rows)
    f: dict[str, Any] = {
        "files": _files(prepared),
        "n_examples": len(examples.n_tokens),
        "n_validation": len(held_out.records),
        "n_tokens": n_tokens,  # inputs of the training examples (all tokens but the last) within the context
        "n_learned": n_learned,  # learned tokens of the training examples within the context
        "n_cut": int((examples.n_tokens - 1 > context).sum()),
        "n_rows": n_rows,
        "fill": n_tokens / (n_rows * context),  # the rest is padding or tokens between examples
        "median_tokens": int(np.median(examples.n_tokens)),
        "longest": [(int(examples.n_tokens[i]), train.place(i)) for i in order.tolist()],
        "end_tokens": _end_tokens(prepared),
        "learned_share": n_learned / max(1, n_tokens),
    }
    files = ", ".join(f"{one['name']} ({one['shape']}, {one['records']:,} records)" for one in f["files"])
    ends = " or ".join(f["end_tokens"]) or "nothing"
    lines = [
        f"conversations: {files}",
        f"{f['n_examples']:,} examples to learn from, {f['n_validation']:,} held out; an answer ends with {ends}",
        f"{n_tokens:,} tokens in {n_rows:,} rows, {f['fill']:.0%} full; {f['learned_share']:.1%} learned",
        f"tokens an example: median {f['median_tokens']:,}, longest "
        + ", ".join(f"{n:,} ({where})" for n, where in f["longest"]),
        f"{f['n_cut']:,} examples are longer than the context and lose their end",
    ]
    return Inspection(f, lines, findings)


def _files(prepared: Prepared) -> list[dict[str, Any]]:
    """Return the name, the shape (such as alpaca) and the number of records of each file."""
    return [origin.model_dump(exclude={"unread"}) for origin in prepared.manifest.origins]


def _end_tokens(prepared: Prepared) -> list[str]:
    template = prepared.chat_template
    assert template is not None
    return [template.tokenizer.id_to_token(i) or "" for i in template.end_token_ids]


def inspect_pairs(recipe: Recipe, prepared: Prepared) -> Inspection:
    """Return statistics and faults of a recipe's preference pairs. (`check_records` raises an error for faults.)"""
    context = recipe.row_length
    train, held_out = (_Examples(prepared, split, context, "pairs") for split in SPLITS)
    pairs = Pairs(train.shards, context)
    train.records = train.records[::2]
    learned, kept, n_tokens, no_end = (
        one.reshape(-1, 2) for one in (train.learned, train.kept, pairs.n_tokens, train.columns["flags"] & NO_END)
    )  # [pairs, 2], chosen first
    lengths = pairs.lengths
    maybe = np.flatnonzero((lengths[:, 0] == lengths[:, 1]) | (kept <= 1).any(axis=1))  # only these may lack a signal
    alike = np.zeros(len(pairs), dtype=np.bool_)
    alike[maybe] = [pairs.says_nothing(i) for i in maybe.tolist()]
    longer = "Raise model.context_length, or leave these pairs out."
    findings = [
        *_about_tokens(recipe, prepared),
        *train.fault("answers-alike", alike, _MOST_ALIKE, "teach nothing: their answers are equal, or begin beyond the "
                    f"context of {context:,} tokens", "Give pairs that differ, or a longer model.context_length."),
        *train.fault("answers-cut-away", (kept == 0).any(1), 0.1, "have an answer that begins beyond the "
                    f"context of {context:,} tokens", longer),
        *train.fault("no-end-token", no_end.max(1) > 0, 0.01, "have an answer without an end token",
                    "Let the template write eos_token or a special token after each answer."),
        *_about_held_out(held_out.kept.reshape(-1, 2).min(1) > 0, context, "pairs"),
    ]  # fmt: skip
    f: dict[str, Any] = {
        "files": _files(prepared),
        "n_pairs": len(pairs),
        "n_validation": len(held_out.records) // 2,
        "median_prompt": _median(np.minimum(n_tokens - learned, context)[:, 0]),  # tokens within the context
        "median_chosen": _median(kept[:, 0]),  # learned tokens within the context
        "median_rejected": _median(kept[:, 1]),
        "n_chosen_longer": int((learned[:, 0] > learned[:, 1]).sum()),  # if high, a model may learn length, not quality
        "n_cut": int((kept < learned).any(1).sum()),  # pairs in which the context cuts off the end of an answer
        "n_alike": int(alike.sum()),  # pairs without a learning signal within the context, such as two equal answers
        "end_tokens": _end_tokens(prepared),
    }
    ends = " or ".join(f["end_tokens"]) or "nothing"
    lines = [
        "pairs: " + ", ".join(f"{file['name']} ({file['records']:,} records)" for file in f["files"]),
        f"{len(pairs):,} pairs to learn from, {f['n_validation']:,} held out; an answer ends with {ends}",
        f"median tokens: prompt {f['median_prompt']:,}, chosen answer {f['median_chosen']:,}, rejected "
        f"{f['median_rejected']:,}; the chosen one is longer in {f['n_chosen_longer'] / max(1, len(pairs)):.0%}",
        f"{f['n_cut']:,} pairs lose the end of an answer beyond the context; {f['n_alike']:,} teach nothing",
    ]
    return Inspection(f, lines, findings)


def _median(counts: Int64s) -> int:
    return int(np.median(counts)) if len(counts) else 0


def inspect_records(recipe: Recipe, prepared: Prepared) -> Inspection:
    """Call `inspect_pairs` or `inspect_conversations`, depending on the recipe's sources."""
    return inspect_pairs(recipe, prepared) if recipe.data.preferences else inspect_conversations(recipe, prepared)


def check_records(recipe: Recipe, prepared: Prepared, report: Callable[[str], None]) -> None:
    """Report statistics of a recipe's conversations or pairs, and stop at faults that the recipe does not allow; see
    `refuse_faults`."""
    if not recipe.data.records:
        return
    inspection = inspect_records(recipe, prepared)
    for line in inspection.lines:
        report(line)
    refuse_faults(inspection.findings, recipe.objective.allow)
    for finding in inspection.findings:
        report(f"allowed: {finding.name}: {finding.text}")


# ----------------------------------------------------------------------------------------- faults in the data


_FLAGS: tuple[tuple[DataFault, int, str, str], ...] = (
    ("unanswered", UNANSWERED, "have no assistant's turn that is learned", "Nothing of them is learned: remove them."),
    ("empty-answers", EMPTY, "have an empty answer", "It teaches silence: remove them."),
    ("swapped-roles", SWAPPED, "begin with the assistant and end with the user",
     "The questions would be learned: exchange the roles."),
    ("no-end-token", NO_END, "have an answer without an end token",
     "A model that never sees one does not stop: let the template write eos_token or a special token after each "
     "answer."),
    ("answers-altered", ALTERED, "have an answer whose text the chat template changes or adds to",
     "The model would learn other text than the answer: check the template."),
)  # fmt: skip
"""Faults of conversations that a flag marks: the fault's name, its flag, a description and advice."""


def _about_length(train: _Examples, n_tokens: int, context: int) -> list[Finding]:
    learned, kept = train.learned, train.kept
    share = kept.sum() / max(1, n_tokens)
    if not kept.any():
        return [Finding("nothing-learned", f"no token within the context of {context:,} belongs to an answer.")]
    longer = "Raise model.context_length, or shorten or leave out these examples."
    little = f"only {share:.2%} of the tokens are learned. Shorten the text before the answers."
    return [
        *([Finding("little-learned", little)] if share < 0.01 else []),
        *train.fault(
            "answers-cut-away", (learned > 0) & (kept == 0), 0.01,
            f"have no answer within the context of {context:,} tokens", longer,
        ),
        *train.fault(
            "answers-cut-short", (kept > 0) & (kept < learned), 0.1,
            f"lose the end of an answer, and its end token, beyond {context:,} tokens", longer,
        ),
    ]  # fmt: skip


def _about_held_out(answered: npt.NDArray[np.bool_], context: int, noun: str) -> list[Finding]:
    """Return a finding if no held-out example has an answer within the context, so that no evaluation is possible.
    `answered`: whether each example has an answer there, [n]; `noun`: the word for the examples."""
    if answered.any():
        return []
    text = (
        f"none of the {len(answered):,} held-out {noun} has its answer within the context of {context:,} tokens, so "
        f"there is no validation loss. Raise model.context_length or data.validation.fraction."
    )
    return [Finding("nothing-learned", text)]


def _about_repetition(train: _Examples, held_out: _Examples) -> list[Finding]:
    texts, answers = train.columns["text"], train.columns["answer"]
    repeated = np.ones(len(texts), dtype=np.bool_)
    repeated[np.unique(texts, return_index=True)[1]] = False
    findings = train.fault("duplicates", repeated, 0.2, "repeat an earlier one", "Leave repetitions out.")
    findings += held_out.fault(
        "validation-overlap", np.isin(held_out.columns["text"], texts), 0.01, "held out are also trained on",
        "The validation loss would be meaningless: leave repetitions out.",
    )  # fmt: skip
    _, first, counts = np.unique(answers, return_index=True, return_counts=True)
    most = int(counts.argmax())
    if len(answers) >= 20 and counts[most] > 0.5 * len(answers):
        findings += train.fault(
            "one-answer", answers == answers[first[most]], 0.5, "have the same answer",
            "A model learns to say it to anything. Is it the right field?",
        )  # fmt: skip
    return findings


def _about_tokens(recipe: Recipe, prepared: Prepared) -> Iterator[Finding]:
    """Yield findings about the records' keys, the chat template, the tokenizer, the base run and the objective."""
    manifest, template, base = prepared.manifest, prepared.chat_template, recipe.initialize_from
    assert template is not None
    yield from _about_keys(manifest)
    if missing := template.missing_tokens():
        names = ", ".join(f'"{name}"' for name in missing)
        yield Finding(
            "tokens-not-special",
            f"the chat template writes {' and '.join(missing)}, which this tokenizer reads as plain text that anyone "
            f"can type. Set tokenizer.added_tokens=[{names}].",
        )
    if base is None and "text" not in recipe.objective.sources and recipe.objective.rollouts is None:
        text = "the model starts from random weights, and answers cannot teach it a language. Set initialize_from."
        yield Finding("no-base-run", text)
    there = base and base / "tokenizer" / TEMPLATE_FILE
    if there and there.exists() and template.source != read_text(there, MAX_TEMPLATE_BYTES, inside=base):
        yield Finding(
            "template-changed",
            f"{base} was trained with another chat template. Leave tokenizer.chat_template out, or set it to {there}, "
            f"to continue with that one.",
        )
    if recipe.objective.learns_prompts:
        text = "every token is learned, including the users' questions. Set objective.type=instruction."
        yield Finding("prompts-learned", text)
    train = manifest.splits["train"]
    if train.unknown_tokens > 0.05 * train.tokens:
        yield Finding(
            "unknown-tokens",
            f"{train.unknown_tokens / train.tokens:.1%} of the tokens are unknown: the tokenizer was made for other "
            f"text. Use one of type bpe or gpt2.",
        )


def _about_keys(manifest: Manifest) -> Iterator[Finding]:
    """Yield one finding if records have known keys that gptworks does not read."""
    places: dict[str, list[tuple[int, str]]] = {}
    for origin in manifest.origins:
        for name, (n_records, first) in origin.unread.items():
            places.setdefault(name, []).append((n_records, f"{origin.name}, record {first}"))
    listed = []
    for name, found in places.items():
        key, of_turn = name.removeprefix("turn."), name.startswith("turn.")
        where = f"{counted(sum(n_records for n_records, _ in found), 'record')}, first {found[0][1]}"
        listed.append(f"`{key}`{' of a turn' * of_turn}: {meaning(key, of_turn)} ({where})")
    if listed:
        yield Finding(
            "keys-not-read",
            f"records have keys that are not read: {'; '.join(listed)}. Nothing of them is learned. Move them into the "
            f"text of the turns, or remove them.",
        )


def _learned_counts(shards: TokenShards, context: int) -> tuple[Int64s, Int64s]:
    """Return each example's number of learned tokens, [n], and its number of learned tokens in the context, [n]."""
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
