"""A recipe for a folder of texts, sized by a measured step for this machine and the time there is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import floor, inf, log
from pathlib import Path
from typing import Any

from gptworks.config import BPETokenizer, TokenizerConfig
from gptworks.config.defaults import EPOCHS
from gptworks.device import choose_device
from gptworks.draft.texts import Texts, listed
from gptworks.draft.writing import Row, written
from gptworks.errors import UserError
from gptworks.planning.fit import divisors
from gptworks.planning.run import Measured, Plan
from gptworks.planning.run import plan as plan_recipe
from gptworks.recipe import parse_recipe, with_vocab_size
from gptworks.tokenizer import encode_text, train_tokenizer, vocabulary_size
from gptworks.training.rehearsal.measure import measure_speed
from gptworks.training.rehearsal.preflight import this_device
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.units import readable

SHAPES = (
    (64, 2), (128, 2), (192, 3), (256, 4), (320, 5), (384, 6), (512, 8), (640, 10), (768, 12), (1024, 16), (1280, 20),
    (1536, 24), (2048, 24),
)  # fmt: skip
"""Width and depth, each with up to three times the parameters of the one before."""

FIRST_SHAPE = (256, 4)
"""What is measured first, or a smaller one that the text suffices for."""

TOKENS_PER_PARAMETER = 1.5
"""That the time is enough for, at least. Runs of minutes do best with fewer than the 20 of Hoffmann et al. (2022); the
figures are in docs/decisions.md."""

TEXT_TOKENS_PER_PARAMETER = 0.7
"""That all epochs of the text have, at least."""

MANY_DOCUMENTS = 200
"""From so many on, the share that is held out has some of them for certain."""

TRAINING_SHARE = 0.9
"""Of the time; the rest goes to evaluations, samples and checkpoints."""

BYTES_PER_VOCABULARY_TOKEN = 1024
"""Of text, at least, so that training sees each token of the vocabulary often."""

VOCABULARIES = ((1280, 32_768), (768, 16_384), (384, 8192), (0, 4096))
"""The largest vocabulary from a width on: the head's product grows with both."""

LEAST_VOCABULARY = 512
STEP_TOKENS, LEAST_STEP_TOKENS, MANY_TOKENS = 4096, 1024, 2**23
"""Tokens of a step, the least of them, and tokens of the run beyond which a step has more."""

LEAST_STEPS = 200
"""A short run has smaller steps rather than fewer."""

MOST_MEASURED = 4
"""Shapes of which a step is measured."""

N_EVALUATIONS, N_SAMPLES = 8, 4

Shape = tuple[int, int]
Measure = Callable[[Rehearsal], Measured]


@dataclass(frozen=True)
class Draft:
    """A recipe, and what to expect of it."""

    texts: Texts
    sections: dict[str, list[Row]]
    plan: Plan
    """With the measured step."""

    @property
    def minutes(self) -> float:
        """That the run takes, evaluations and samples included."""
        assert self.plan.seconds is not None
        return self.plan.seconds / TRAINING_SHARE / 60

    @property
    def epochs(self) -> float:
        """How often the text is read."""
        assert self.plan.tokens is not None and self.plan.n_train_tokens is not None
        return self.plan.tokens / self.plan.n_train_tokens

    def text(self) -> str:
        """The recipe's file."""
        size = readable(self.texts.n_bytes, "B")
        about = (
            f"{size} of text in {listed(self.texts.endings)}; drafted by `gptworks init` on {self.plan.device.name}."
        )
        rest = "The rest of model and training is as gptworks has it by default; the run's recipe.yaml will say it all."
        return written([about, "", *self.lines(), "", rest], self.sections)

    def lines(self) -> list[str]:
        """What to expect."""
        plan, rate = self.plan, self.plan.tokens_per_second
        peak, free = (readable(n_bytes, "B") for n_bytes in (plan.peak.total_bytes, plan.device.memory_bytes))
        return [
            f"parameters  {plan.parameters.total:,}",
            f"tokens      {plan.tokens:,} in {plan.steps:,} steps: {self.epochs:.2g} epochs of about "
            f"{plan.n_train_tokens:,} tokens",
            f"time        about {self.minutes:.2g} minutes: {rate:,.0f} tokens/s measured, and a tenth for evaluations",
            f"memory      {peak} at the peak, of {free} free",
        ]


@dataclass(frozen=True)
class Candidate:
    """A shape with all that follows from it."""

    sections: dict[str, list[Row]]
    plan: Plan
    """Of the recipe; with a measured step once there is one."""

    @property
    def n_train_tokens(self) -> int:
        assert self.plan.n_train_tokens is not None
        return self.plan.n_train_tokens

    @property
    def rate(self) -> float | None:
        """Tokens a second, if measured."""
        return None if self.plan.measured is None else self.plan.measured.tokens_per_second


class Search:
    """Measures shapes until it has the largest that time and text are enough for."""

    def __init__(
        self,
        texts: Texts,
        minutes: float,
        out: Path,
        report: Callable[[str], None] = lambda _: None,
        measure: Measure | None = None,
    ) -> None:
        """
        Args:
            minutes: how long training may take.
            out: the file that the recipe is for, whose name it gets.
            measure: takes training steps. None: `measure_speed`.
        """
        self.texts, self.minutes, self.out, self.report = texts, minutes, out, report
        self.measure = measure or measure_speed
        self.device = choose_device()
        self.place = this_device(self.device)
        self.seconds = 60 * minutes * TRAINING_SHARE
        self.fraction = 0.05 if texts.n_bytes > 2**22 else 0.1
        self.tokenizer = cache(self._tokenizer)
        self.measured: dict[Shape, Candidate] = {}

    def run(self) -> Draft:
        """The recipe.

        Raises:
            UserError: too little text for the smallest vocabulary, or too little memory for the smallest model.
            RunError: a measured step failed.
        """
        shape = self._best(FIRST_SHAPE)
        step_tokens = self._step_tokens(self._candidate(shape))
        while shape not in self.measured and len(self.measured) < MOST_MEASURED:
            self.measured[shape] = self._measured(self._candidate(shape, step_tokens))
            shape = self._best()
            step_tokens = self._step_tokens(self._candidate(shape))
        if shape not in self.measured:  # not settled: the largest that was measured and is no larger
            shape = max((one for one in self.measured if one <= shape), default=min(self.measured))
        settled = self.measured[shape]
        step_tokens = self._step_tokens(settled)
        if step_tokens != settled.plan.tokens_per_step:
            settled = self._measured(self._candidate(shape, step_tokens))
        steps = max(2, floor(self._tokens(settled) / step_tokens))
        candidate = self._candidate(shape, step_tokens, steps, settled.rate)
        plan = replace(candidate.plan, measured=settled.plan.measured)
        each = f"{plan.tokens_per_parameter:.2g} tokens of training for each of {plan.parameters.total:,} parameters"
        model = [
            (key, value, why or (each if key == "d_model" else "")) for key, value, why in candidate.sections["model"]
        ]
        return Draft(self.texts, candidate.sections | {"model": model}, plan)

    def _step_tokens(self, candidate: Candidate) -> int:
        """Of a step, for all the tokens of the run: a power of 2 that grows with their square root, and with fewer
        tokens in a short run."""
        tokens, size = self._tokens(candidate), STEP_TOKENS
        while tokens > MANY_TOKENS * (size / STEP_TOKENS) ** 2:
            size *= 2
        while size > LEAST_STEP_TOKENS and tokens < size * LEAST_STEPS:
            size //= 2
        return size

    def _best(self, most: Shape = SHAPES[-1]) -> Shape:
        """The largest shape up to `most` for which time, by the rates that are known, text and memory are enough; else
        the smallest."""
        best = SHAPES[0]
        for shape in SHAPES[: SHAPES.index(most) + 1]:
            candidate = self.measured.get(shape) or self._candidate(shape)
            if not self._suits(candidate):
                break
            best = shape
        return best

    def _suits(self, candidate: Candidate) -> bool:
        size, in_time = candidate.plan.parameters.total, self._rate(candidate) * self.seconds
        enough = in_time >= TOKENS_PER_PARAMETER * size
        return enough and candidate.plan.fits and EPOCHS * candidate.n_train_tokens >= TEXT_TOKENS_PER_PARAMETER * size

    def _tokens(self, candidate: Candidate) -> float:
        """That training reads: as many as the time allows, in no more epochs than are worth it."""
        return min(self._rate(candidate) * self.seconds, EPOCHS * candidate.n_train_tokens)

    def _rate(self, candidate: Candidate) -> float:
        """Tokens a second: measured, or by the FLOPs of the measured shape that is nearest in size; without bounds
        while nothing is measured."""
        if candidate.rate is not None:
            return candidate.rate
        if not self.measured:
            return inf
        flops = candidate.plan.flops_per_token
        near = min(self.measured.values(), key=lambda one: abs(log(one.plan.flops_per_token / flops)))
        assert near.rate is not None
        return near.rate * near.plan.flops_per_token / flops

    def _measured(self, candidate: Candidate) -> Candidate:
        """The candidate with a measured step.

        Raises:
            UserError: it does not fit in memory.
        """
        plan = candidate.plan
        if not plan.fits:
            raise UserError(
                f"a model of {plan.parameters.total:,} parameters needs {plan.peak.total_bytes / 1e6:,.0f} MB, and "
                f"{plan.device.memory_bytes / 1e6:,.0f} MB are free on {plan.device.name}: end other programs."
            )
        self.report(f"measuring a step of {plan.parameters.total:,} parameters")
        step = Rehearsal(plan.recipe.model, plan.one_step, self.device.type, plan.setting.precision)
        return replace(candidate, plan=replace(plan, measured=self.measure(step)))

    # ------------------------------------------------------------------------------------------- settings

    def _candidate(
        self, shape: Shape, step_tokens: int = STEP_TOKENS, steps: int = LEAST_STEPS, rate: float | None = None
    ) -> Candidate:
        """The recipe of a shape, planned, in micro-batches that fit."""
        vocab_size, bytes_per_token = self.tokenizer(next(size for width, size in VOCABULARIES if shape[0] >= width))
        n_train_tokens = self.n_train_tokens(bytes_per_token)
        context = 1024 if shape[0] >= 1280 else 512 if shape[0] >= 768 else 256
        while context > 32 and 4 * context > n_train_tokens * self.fraction:
            context //= 2
        why = self.length_reason(steps * step_tokens, n_train_tokens, rate)
        sections = {
            "model": self._model(shape, context),
            "tokenizer": [
                ("type", "bpe", "of bytes: it can read any text"),
                ("vocab_size", vocab_size, f"{bytes_per_token:.2f} bytes a token, measured on this text"),
            ],
            "data": self._data(),
            "train": self._train(steps, step_tokens // context, why),
        }
        return self.planned(sections, n_train_tokens)

    def planned(self, sections: dict[str, list[Row]], n_train_tokens: int, vocab_size: int = 0) -> Candidate:
        """The recipe of such sections, planned, in micro-batches that fit.

        Args:
            vocab_size: where the tokenizer's settings leave it open.
        """
        plan = self._plan(sections, n_train_tokens, vocab_size)
        if not plan.fits and (most := plan.largest_micro_batch_size):
            micro = next(size for size in divisors(plan.train.batch_size) if size <= most)
            sections["train"].append(("micro_batch_size", micro, "as many at a time as fit in memory"))
            plan = self._plan(sections, n_train_tokens, vocab_size)
        return Candidate(sections, plan)

    def _plan(self, sections: Mapping[str, list[Row]], n_train_tokens: int, vocab_size: int) -> Plan:
        tree: dict[str, Any] = {name: {key: value for key, value, _ in rows} for name, rows in sections.items()}
        recipe = parse_recipe({"name": self.out.stem, **tree.pop("", {}), **tree}, str(self.out))
        if not recipe.model.vocab_size:
            recipe = with_vocab_size(recipe, vocab_size)
        return plan_recipe(recipe, n_train_tokens, tokens_estimated=True, device=self.place)

    def _model(self, shape: Shape, context: int) -> list[Row]:
        width, n_layers = shape
        d_head = 64 if width >= 128 else 32
        return [
            ("context_length", context, "tokens that it sees at once"),
            ("n_layers", n_layers, ""),
            ("d_model", width, ""),
            ("n_heads", width // d_head, f"of {d_head}"),
            ("init", "induction", "begins with two heads that copy, and learns faster"),
        ]

    def _data(self) -> list[Row]:
        n = self.texts.n_documents
        by = "tail" if n is not None and n < MANY_DOCUMENTS else "document"
        why = {"tail": "the end of each document is held out", "document": "whole documents are held out"}
        return [
            ("sources", self.texts.sources, ""),
            ("validation", {"fraction": self.fraction, "by": by}, why[by]),
        ]

    def n_train_tokens(self, bytes_per_token: float) -> int:
        """About so many tokens to train on."""
        return int(self.texts.n_bytes * (1 - self.fraction) / bytes_per_token)

    def length_reason(self, tokens: int, n_train_tokens: int, rate: float | None) -> str:
        """What bounds a run of so many tokens: the text or the time."""
        if tokens > 0.95 * EPOCHS * n_train_tokens:
            return f"{EPOCHS} epochs; reading a text more often teaches little (Muennighoff et al., 2023)"
        return f"{self.minutes:g} minutes at {rate or 0:,.0f} tokens/s, as measured here"

    def _train(self, steps: int, batch: int, length: str) -> list[Row]:
        n_evaluated = max(16, min(512, steps * batch // 100))
        return [
            ("max_steps", steps, length),
            ("batch_size", batch, "sequences a step"),
            ("evaluate_every", max(1, steps // N_EVALUATIONS), ""),
            ("evaluate_sequences", n_evaluated, "all evaluations together take some 3% of the time"),
            ("checkpoint_every", max(1, steps // N_SAMPLES), "what Ctrl-C or a crash can lose"),
            ("keep_every", max(1, steps // N_SAMPLES), "all of them stay, to see later what was learned when"),
            ("sample_every", max(1, steps // N_SAMPLES), ""),
            ("sample_prompts", self._prompts(), "the beginnings of lines of the text"),
        ]

    def _prompts(self) -> list[str]:
        """The beginnings of two different lines, after a third and two thirds of the text."""
        lines = [line.split() for text in self.texts.sample for line in text.splitlines()]
        found: list[str] = []
        for first in (len(lines) // 3, 2 * len(lines) // 3):
            beginnings = (" ".join(words[:3]) for words in lines[first:] if len(words) > 3 and len(words[0]) < 20)
            found.append(next((one for one in beginnings if one not in found), ""))
        return found

    def _tokenizer(self, most: int) -> tuple[int, float]:
        """The size of a vocabulary for this text, of at most so many tokens, and its bytes a token."""
        while most > LEAST_VOCABULARY and self.texts.n_bytes < most * BYTES_PER_VOCABULARY_TOKEN:
            most //= 2
        while True:
            try:
                return self.bytes_per_token(BPETokenizer(type="bpe", vocab_size=most))
            except UserError:  # a text that repeats itself has few pairs to merge
                most //= 2
                if most < LEAST_VOCABULARY:
                    raise

    def bytes_per_token(self, config: TokenizerConfig) -> tuple[int, float]:
        """The vocabulary of a tokenizer for this text, and its bytes a token on text that it was not trained on."""
        part = max(1024, sum(map(len, self.texts.sample)) // 256)
        parts = [text[at : at + part] for text in self.texts.sample for at in range(0, len(text), part)]
        held_out = parts[::8]
        tokenizer = train_tokenizer(config, (part for n, part in enumerate(parts) if n % 8))
        n_tokens = sum(len(encode_text(tokenizer, text)) for text in held_out)
        return vocabulary_size(tokenizer), sum(len(text.encode("utf-8")) for text in held_out) / max(1, n_tokens)
