"""Statistics of conversations and preference pairs before training, and faults that would silently ruin a run.

A fault stops a run unless `objective.allow` names it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gptworks.chat_template import MAX_TEMPLATE_BYTES, TEMPLATE_FILE
from gptworks.config import DataFault, Recipe
from gptworks.data.conversations.keys import meaning
from gptworks.data.conversations.packing import Pairs, training_examples
from gptworks.data.opened import Prepared
from gptworks.data.permutation import Int64s
from gptworks.data.shards import ALTERED, EMPTY, NO_END, SWAPPED, UNANSWERED, Manifest, TokenShards
from gptworks.errors import UserError
from gptworks.files import read_text

_CHUNK_TOKENS = 1 << 22
_N_PLACES, _N_LONGEST = 3, 3
_MOST_ALIKE = 0.5
"""A run stops if a larger fraction of its pairs has no learning signal."""


@dataclass(frozen=True)
class Finding:
    """A fault in the data, with a text that describes it and gives advice."""

    name: DataFault
    text: str


_CONSEQUENCES: dict[DataFault, frozenset[DataFault]] = {
    "tokens-not-special": frozenset({"no-end-token", "answers-altered"}),
}
"""Maps a fault to the faults that it causes. Messages do not explain caused faults until the cause is fixed."""


def refuse_faults(findings: Sequence[Finding], allowed: Sequence[str]) -> None:
    """Stop with an error if there are faults that the recipe does not allow.

    Raises:
        UserError: there are such faults. The message names each fault, with advice unless another fault causes it.
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
    """Makes findings, which name the records of faulty examples."""

    manifest: Manifest
    records: Int64s
    noun: str = "examples"

    def place(self, example: int) -> str:
        return self.manifest.where(int(self.records[example]))

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
    """Statistics and faults of a recipe's conversations."""

    files: list[dict[str, object]]
    """Name, shape (such as alpaca) and number of records of each file."""
    n_examples: int
    n_validation: int
    n_tokens: int
    """Number of inputs of the training examples: all tokens of each but the last, up to the context length."""
    n_learned: int
    """Number of learned tokens in the training examples, each counted up to the context length."""
    n_cut: int
    n_rows: int
    fill: float
    """Fraction of the rows that the examples' inputs fill, 0 to 1; the rest is padding or tokens between examples."""
    median_tokens: int
    longest: list[tuple[int, str]]
    """(number of tokens, record) of the longest examples."""
    end_tokens: list[str]
    findings: list[Finding]

    @property
    def learned_share(self) -> float:
        return self.n_learned / max(1, self.n_tokens)

    def lines(self) -> list[str]:
        files = ", ".join(f"{file['name']} ({file['shape']}, {file['records']:,} records)" for file in self.files)
        longest = ", ".join(f"{n:,} ({where})" for n, where in self.longest)
        ends = " or ".join(self.end_tokens) or "nothing"
        return [
            f"conversations: {files}",
            f"{self.n_examples:,} examples to learn from, {self.n_validation:,} held out; an answer ends with {ends}",
            f"{self.n_tokens:,} tokens in {self.n_rows:,} rows, {self.fill:.0%} full; {self.learned_share:.1%} learned",
            f"tokens an example: median {self.median_tokens:,}, longest {longest}",
            f"{self.n_cut:,} examples are longer than the context and lose their end",
        ]


def inspect_conversations(recipe: Recipe, prepared: Prepared) -> Inspection:
    """Return statistics and faults of a recipe's conversations. (`check_records` raises an error for faults.)"""
    context = recipe.row_length
    shards, held_out = TokenShards(prepared.folder, "train"), TokenShards(prepared.folder, "validation")
    columns, validation = shards.examples(), held_out.examples()
    examples = training_examples(shards, recipe)
    learned, kept = learned_counts(shards, context)
    n_inputs = np.minimum(examples.n_tokens - 1, context)
    order = np.argsort(-examples.n_tokens, kind="stable")[:_N_LONGEST]
    look = Look(prepared.manifest, columns["record"].astype(np.int64))
    findings = [
        *about_tokens(recipe, prepared),
        *_about_answers(columns["flags"], look),
        *_about_length(learned, kept, int(n_inputs.sum()), context, look),
        *_about_held_out(learned_counts(held_out, context)[1] > 0, context, "examples" if kept.any() else ""),
        *_about_repetition(columns, validation, look),
    ]
    return Inspection(
        files=_files(prepared),
        n_examples=shards.n_documents,
        n_validation=held_out.n_documents,
        n_tokens=int(n_inputs.sum()),
        n_learned=int(kept.sum()),
        n_cut=int((examples.n_tokens - 1 > context).sum()),
        n_rows=len(examples.rows),
        fill=float(n_inputs.sum()) / (len(examples.rows) * context),
        median_tokens=int(np.median(examples.n_tokens)),
        longest=[(int(examples.n_tokens[i]), look.place(i)) for i in order.tolist()],
        end_tokens=_end_tokens(prepared),
        findings=findings,
    )


def _files(prepared: Prepared) -> list[dict[str, object]]:
    return [origin.model_dump(exclude={"unread"}) for origin in prepared.manifest.origins]


def _end_tokens(prepared: Prepared) -> list[str]:
    template = prepared.chat_template
    assert template is not None
    return [template.tokenizer.id_to_token(i) or "" for i in template.end_token_ids]


@dataclass(frozen=True)
class PairInspection:
    """Statistics and faults of a recipe's preference pairs."""

    files: list[dict[str, object]]
    n_pairs: int
    n_validation: int
    median_prompt: int
    """Median length of the training pairs' prompts within the context, in tokens."""
    median_chosen: int
    """Median number of learned tokens in the chosen answers, within the context."""
    median_rejected: int
    n_chosen_longer: int
    """Number of pairs whose chosen answer is longer; if it is high, a model may learn length instead of quality."""
    n_cut: int
    """Number of pairs in which the context cuts off the end of an answer."""
    n_alike: int
    """Number of pairs without a learning signal within the context, such as two equal answers."""
    end_tokens: list[str]
    findings: list[Finding]

    def lines(self) -> list[str]:
        files = ", ".join(f"{file['name']} ({file['records']:,} records)" for file in self.files)
        ends = " or ".join(self.end_tokens) or "nothing"
        return [
            f"pairs: {files}",
            f"{self.n_pairs:,} pairs to learn from, {self.n_validation:,} held out; an answer ends with {ends}",
            f"median tokens: prompt {self.median_prompt:,}, chosen answer {self.median_chosen:,}, rejected "
            f"{self.median_rejected:,}; the chosen one is longer in {self.n_chosen_longer / max(1, self.n_pairs):.0%}",
            f"{self.n_cut:,} pairs lose the end of an answer beyond the context; {self.n_alike:,} teach nothing",
        ]


def inspect_pairs(recipe: Recipe, prepared: Prepared) -> PairInspection:
    """Return statistics and faults of a recipe's preference pairs. (`check_records` raises an error for faults.)"""
    context = recipe.row_length
    shards, held_out = TokenShards(prepared.folder, "train"), TokenShards(prepared.folder, "validation")
    pairs = Pairs(shards, context)
    columns = shards.examples()
    learned, kept = (counts.reshape(-1, 2) for counts in learned_counts(shards, context))  # [pairs, 2], chosen first
    n_tokens, lengths = pairs.n_tokens.reshape(-1, 2), pairs.lengths
    maybe = np.flatnonzero((lengths[:, 0] == lengths[:, 1]) | (kept <= 1).any(axis=1))  # only these may lack a signal
    alike = np.zeros(len(pairs), dtype=np.bool_)
    alike[maybe] = [pairs.says_nothing(i) for i in maybe.tolist()]
    no_end = (columns["flags"] & NO_END) > 0  # for each answer of each pair: True if it lacks an end token
    look = Look(prepared.manifest, columns["record"].astype(np.int64)[::2], "pairs")
    longer = "Raise model.context_length, or leave these pairs out."
    findings = [
        *about_tokens(recipe, prepared),
        *look.fault("answers-alike", alike, _MOST_ALIKE, "teach nothing: their answers are equal, or begin beyond the "
                    f"context of {context:,} tokens", "Give pairs that differ, or a longer model.context_length."),
        *look.fault("answers-cut-away", (kept == 0).any(1), 0.1, "have an answer that begins beyond the "
                    f"context of {context:,} tokens", longer),
        *look.fault("no-end-token", no_end[::2] | no_end[1::2], 0.01, "have an answer without an end token",
                    "Let the template write eos_token or a special token after each answer."),
        *_about_held_out(learned_counts(held_out, context)[1].reshape(-1, 2).min(1) > 0, context, "pairs"),
    ]  # fmt: skip
    return PairInspection(
        files=_files(prepared),
        n_pairs=len(pairs),
        n_validation=held_out.n_documents // 2,
        median_prompt=_median(np.minimum(n_tokens - learned, context)[:, 0]),
        median_chosen=_median(kept[:, 0]),
        median_rejected=_median(kept[:, 1]),
        n_chosen_longer=int((learned[:, 0] > learned[:, 1]).sum()),
        n_cut=int((kept < learned).any(1).sum()),
        n_alike=int(alike.sum()),
        end_tokens=_end_tokens(prepared),
        findings=findings,
    )


def _median(counts: Int64s) -> int:
    return int(np.median(counts)) if len(counts) else 0


def inspect_records(recipe: Recipe, prepared: Prepared) -> Inspection | PairInspection:
    """Call `inspect_pairs` or `inspect_conversations`, depending on the recipe's sources."""
    return inspect_pairs(recipe, prepared) if recipe.data.preferences else inspect_conversations(recipe, prepared)


def check_records(recipe: Recipe, prepared: Prepared, report: Callable[[str], None]) -> None:
    """Report statistics of a recipe's conversations or pairs, and stop at faults that the recipe does not allow.

    Raises:
        UserError: see `refuse_faults`.
    """
    if not recipe.data.records:
        return
    inspection = inspect_records(recipe, prepared)
    for line in inspection.lines():
        report(line)
    refuse_faults(inspection.findings, recipe.objective.allow)
    for finding in inspection.findings:
        report(f"allowed: {finding.name}: {finding.text}")


# ----------------------------------------------------------------------------------------- faults in the data


def _about_answers(flags: npt.NDArray[np.uint64], look: Look) -> list[Finding]:
    def fault(name: DataFault, flag: int, what: str, fix: str) -> list[Finding]:
        return look.fault(name, (flags & flag) > 0, 0.01, what, fix)

    return [
        *fault(
            "unanswered", UNANSWERED, "have no assistant's turn that is learned",
            "Nothing of them is learned: remove them.",
        ),
        *fault("empty-answers", EMPTY, "have an empty answer", "It teaches silence: remove them."),
        *fault(
            "swapped-roles", SWAPPED, "begin with the assistant and end with the user",
            "The questions would be learned: exchange the roles.",
        ),
        *fault(
            "no-end-token", NO_END, "have an answer without an end token",
            "A model that never sees one does not stop: let the template write eos_token or a special token after "
            "each answer.",
        ),
        *fault(
            "answers-altered", ALTERED, "have an answer whose text the chat template changes or adds to",
            "The model would learn other text than the answer: check the template.",
        ),
    ]  # fmt: skip


def _about_length(learned: Int64s, kept: Int64s, n_tokens: int, context: int, look: Look) -> list[Finding]:
    share = kept.sum() / max(1, n_tokens)
    if not kept.any():
        return [Finding("nothing-learned", f"no token within the context of {context:,} belongs to an answer.")]
    longer = "Raise model.context_length, or shorten or leave out these examples."
    little = f"only {share:.2%} of the tokens are learned. Shorten the text before the answers."
    return [
        *([Finding("little-learned", little)] if share < 0.01 else []),
        *look.fault(
            "answers-cut-away", (learned > 0) & (kept == 0), 0.01,
            f"have no answer within the context of {context:,} tokens", longer,
        ),
        *look.fault(
            "answers-cut-short", (kept > 0) & (kept < learned), 0.1,
            f"lose the end of an answer, and its end token, beyond {context:,} tokens", longer,
        ),
    ]  # fmt: skip


def _about_held_out(answered: npt.NDArray[np.bool_], context: int, noun: str) -> list[Finding]:
    """Return a finding if no held-out example has an answer within the context, so that no evaluation is possible.

    Args:
        answered: whether each held-out example has an answer within the context, [n].
        noun: the word for the examples in the message; empty: no finding.
    """
    if answered.any() or not noun:
        return []
    text = (
        f"none of the {len(answered):,} held-out {noun} has its answer within the context of {context:,} tokens, so "
        f"there is no validation loss. Raise model.context_length or data.validation.fraction."
    )
    return [Finding("nothing-learned", text)]


def _about_repetition(
    train: dict[str, npt.NDArray[np.uint64]], validation: dict[str, npt.NDArray[np.uint64]], look: Look
) -> list[Finding]:
    _, first_seen = np.unique(train["text"], return_index=True)
    repeated = np.ones(len(train["text"]), dtype=np.bool_)
    repeated[first_seen] = False
    findings = look.fault("duplicates", repeated, 0.2, "repeat an earlier one", "Leave repetitions out.")
    findings += Look(look.manifest, validation["record"].astype(np.int64)).fault(
        "validation-overlap", np.isin(validation["text"], train["text"]), 0.01, "held out are also trained on",
        "The validation loss would be meaningless: leave repetitions out.",
    )  # fmt: skip
    _, first, counts = np.unique(train["answer"], return_index=True, return_counts=True)
    most = int(counts.argmax())
    if len(train["answer"]) >= 20 and counts[most] > 0.5 * len(train["answer"]):
        findings += look.fault(
            "one-answer", train["answer"] == train["answer"][first[most]], 0.5, "have the same answer",
            "A model learns to say it to anything. Is it the right field?",
        )  # fmt: skip
    return findings


def about_tokens(recipe: Recipe, prepared: Prepared) -> list[Finding]:
    """Return faults in the records' keys, the chat template, the tokenizer, the run to start from and the objective."""
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
    """Return one finding if records have known keys that gptworks does not read, else an empty list."""
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


def learned_counts(shards: TokenShards, context: int) -> tuple[Int64s, Int64s]:
    """Return the number of learned tokens of each example, [n], and the number of those within the context, [n]."""
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
