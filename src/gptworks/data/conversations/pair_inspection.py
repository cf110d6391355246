"""Figures about pairs of answers before training, and faults, as for conversations."""

from dataclasses import dataclass

import numpy as np

from gptworks.config import Recipe
from gptworks.data.conversations.findings import Finding, Int64s, Look, about_tokens, example_columns, learned_counts
from gptworks.data.conversations.preferences import Pairs
from gptworks.data.opened import Prepared
from gptworks.data.shards import NO_END, TokenShards

_MOST_ALIKE = 0.5
"""Share of pairs that may say nothing before the run is stopped."""


@dataclass(frozen=True)
class PairInspection:
    """Figures and faults of a recipe's pairs."""

    files: list[dict[str, object]]
    """Each with its shape and its records."""
    n_pairs: int
    n_validation: int
    median_prompt: int
    """Tokens of the training pairs, as far as the context reaches."""
    median_chosen: int
    median_rejected: int
    n_chosen_longer: int
    """Pairs whose chosen answer is the longer one: what a model may learn instead of what makes it better."""
    n_cut: int
    """Pairs of which an answer loses its end beyond the context."""
    n_alike: int
    """Pairs that say nothing within the context."""
    end_tokens: list[str]
    findings: list[Finding]

    def lines(self) -> list[str]:
        """The figures, for people."""
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
    """Count, and look for faults. Nothing is refused here."""
    manifest, template = prepared.manifest, prepared.chat_template
    assert template is not None
    context = recipe.model.context_length
    shards, held_out = TokenShards(prepared.folder, "train"), TokenShards(prepared.folder, "validation")
    pairs = Pairs(shards, context)
    columns = example_columns(shards)
    learned, kept = (counts.reshape(-1, 2) for counts in learned_counts(shards, context))  # P 2, chosen first
    n_tokens = np.diff(np.append(shards.document_starts(), shards.n_tokens)).reshape(-1, 2)
    lengths = np.minimum(n_tokens, context + 1)
    maybe = np.flatnonzero((lengths[:, 0] == lengths[:, 1]) | (kept <= 1).any(axis=1))  # only these can be alike
    alike = np.zeros(len(pairs), dtype=np.bool_)
    alike[maybe] = [pairs.says_nothing(i) for i in maybe.tolist()]
    no_end = (columns["flags"] & NO_END) > 0  # of each answer
    look = Look(manifest, columns["record"].astype(np.int64)[::2], "pairs")
    longer = "Raise model.context_length, or leave these pairs out."
    findings = [
        *about_tokens(recipe, manifest, template),
        *look.fault("answers-alike", alike, _MOST_ALIKE, "teach nothing: their answers are equal, or begin beyond the "
                    f"context of {context:,} tokens", "Give pairs that differ, or a longer model.context_length."),
        *look.fault("answers-cut-away", (kept == 0).any(1), 0.1, "have an answer that begins beyond the "
                    f"context of {context:,} tokens", longer),
        *look.fault("no-end-token", no_end[::2] | no_end[1::2], 0.01, "have an answer without an end token",
                    "Let the template write eos_token or a special token after each answer."),
    ]  # fmt: skip
    return PairInspection(
        files=[origin.model_dump(exclude={"unread"}) for origin in manifest.origins],
        n_pairs=len(pairs),
        n_validation=held_out.n_documents // 2,
        median_prompt=_median(np.minimum(n_tokens - learned, context)[:, 0]),
        median_chosen=_median(kept[:, 0]),
        median_rejected=_median(kept[:, 1]),
        n_chosen_longer=int((learned[:, 0] > learned[:, 1]).sum()),
        n_cut=int((kept < learned).any(1).sum()),
        n_alike=int(alike.sum()),
        end_tokens=[template.tokenizer.id_to_token(i) or "" for i in template.end_token_ids],
        findings=findings,
    )


def _median(counts: Int64s) -> int:
    return int(np.median(counts)) if len(counts) else 0
