"""Draft a recipe for a folder of texts, sized for this machine and the available time by measuring steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import floor, inf, log
from pathlib import Path

from gptworks.config import BPETokenizer, TokenizerConfig
from gptworks.config.defaults import EPOCHS
from gptworks.device import choose_device, this_device
from gptworks.draft.drafted import TRAINING_SHARE, Drafted, Row, Sections, parsed
from gptworks.draft.texts import Texts, listed
from gptworks.errors import UserError
from gptworks.planning.fit import divisors
from gptworks.planning.run import Measured, Plan
from gptworks.planning.run import plan as plan_recipe
from gptworks.planning.steps import DataSize
from gptworks.recipe import with_vocab_size
from gptworks.tokenizer import encode_text, train_tokenizer, vocabulary_size
from gptworks.training.rehearsal.measure import measure_speed
from gptworks.training.rehearsal.trace import Rehearsal
from gptworks.units import readable

SHAPES = (
    (64, 2), (128, 2), (192, 3), (256, 4), (320, 5), (384, 6), (512, 8), (640, 10), (768, 12), (1024, 16), (1280, 20),
    (1536, 24), (2048, 24),
)  # fmt: skip
"""Pairs (model width, number of layers) that the search considers, from the smallest model to the largest."""

FIRST_SHAPE = (256, 4)
"""The first shape to measure, unless text or memory suffices only for a smaller one."""

TOKENS_PER_PARAMETER = 1.5
"""Minimum number of tokens per parameter for which the time must suffice. Runs of minutes do best with fewer tokens
than the 20 per parameter of Hoffmann et al. (2022); docs/decisions.md has the measurements."""

TEXT_TOKENS_PER_PARAMETER = 0.7
"""The text, repeated for all epochs, must have at least this many tokens per parameter."""

MANY_DOCUMENTS = 200
"""Minimum number of documents for holding out whole documents: with fewer, perhaps none would be held out."""

BYTES_PER_VOCABULARY_TOKEN = 1024
"""Minimum bytes of text per token of the vocabulary, so that training sees each token often; a vocabulary of
`LEAST_VOCABULARY` or fewer tokens may have less."""

VOCABULARIES = ((1280, 32_768), (768, 16_384), (384, 8192), (0, 4096))
"""Pairs of a width and the largest vocabulary for models of that width or more. The head's cost grows with both."""

LEAST_VOCABULARY, N_BYTES = 512, 256
"""Minimum size of a vocabulary, unless the text has too few pairs to merge; and number of single-byte tokens in each
vocabulary."""
STEP_TOKENS, LEAST_STEP_TOKENS, MANY_TOKENS = 4096, 1024, 2**23
"""Usual and minimum number of tokens per step; runs of more than MANY_TOKENS tokens have larger steps."""

MANY_EPOCHS = 3
"""Minimum number of epochs for which the recipe sets strong weight decay."""

MOST_CONTEXT, CONTEXT_PER_WIDTH = 1024, 4
"""Maximum context in tokens, a power of 2; maximum ratio of the context to the model's width. With longer contexts,
attention costs more than the matrices."""

GROWING = ((0.35, 0.25), (0.7, 0.5))
"""Stages of `train.shorter_contexts`: pairs of a share of the run, and the share of the context used until then."""

WIDEST_UNTIED = 512
"""Maximum width of a model with an untied head, which learns faster at these widths; wider models were not
compared."""

LEAST_STEPS = 200
"""Minimum number of steps to aim for. A run with fewer steps gets fewer tokens per step, so that it has more steps."""

MOST_MEASURED = 4

N_EVALUATIONS, N_SAMPLES = 8, 4
"""Numbers of evaluations, and of checkpoints and samples, in a run."""

LEAST_EVALUATED_TOKENS = 4096

Shape = tuple[int, int]
Measure = Callable[[Rehearsal], Measured]


@dataclass(frozen=True)
class Draft(Drafted):
    """A recipe that trains a new model on texts, with its plan."""

    texts: Texts

    @property
    def epochs(self) -> float:
        """Number of times that training reads the text."""
        assert self.plan.tokens is not None
        return self.plan.tokens / self.n_train_tokens

    def text(self) -> str:
        size = readable(self.texts.n_bytes, "B")
        about = f"{size} of text in {listed(self.texts.read)}; drafted by `gptworks init` on {self.plan.device.name}."
        rest = "All other settings have their defaults, which the run's recipe.yaml lists."
        return self.file([about, "", *self.texts.lines(), "", *self.lines(), "", rest])

    def lines(self) -> list[str]:
        """Return lines that describe the run's parameters, tokens, time and memory."""
        plan = self.plan
        return [
            f"parameters  {plan.parameters.total:,}",
            f"tokens      {plan.tokens:,} in {plan.steps:,} steps: {self.epochs:.2g} epochs of about "
            f"{self.n_train_tokens:,} tokens",
            *self.time_and_memory(),
        ]


@dataclass(eq=False)
class Search:
    """Searches, by measuring steps, for the largest model shape for which time, text and memory suffice."""

    texts: Texts
    minutes: float
    """Time that the run may take, in minutes."""
    out: Path
    """The recipe's file, which also names the recipe."""
    report: Callable[[str], None] = lambda _: None
    measure: Measure | None = None
    """Function that measures training steps; None for `measure_speed`."""

    def __post_init__(self) -> None:
        self.device = choose_device()
        self.place = this_device(self.device)
        self.seconds = 60 * self.minutes * TRAINING_SHARE
        self.fraction = 0.05 if self.texts.n_bytes > 2**22 else 0.1
        self.tokenizer = cache(self._tokenizer)
        self.measured: dict[Shape, Drafted] = {}

    def run(self) -> Draft:
        """Search, and return the recipe of the best shape. Raise a UserError if the text is too short for the smallest
        vocabulary, or the memory is too small for the model to measure. Raise a RunError if a measured step failed."""
        shape = self._best(FIRST_SHAPE)
        step_tokens = self._step_tokens(self._candidate(shape))
        while shape not in self.measured and len(self.measured) < MOST_MEASURED:
            self.measured[shape] = self._measured(self._candidate(shape, step_tokens))
            shape = self._best()
            step_tokens = self._step_tokens(self._candidate(shape))
        if shape not in self.measured:  # the search did not settle: take the largest measured shape up to this one
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
        return Draft(candidate.sections | {"model": model}, plan, self.texts)

    def _step_tokens(self, candidate: Drafted) -> int:
        """Return the tokens per step, a power of 2, which grows with the square root of the run's tokens and is smaller
        in short runs."""
        tokens, size = self._tokens(candidate), STEP_TOKENS
        while tokens > MANY_TOKENS * (size / STEP_TOKENS) ** 2:
            size *= 2
        while size > LEAST_STEP_TOKENS and tokens < size * LEAST_STEPS:
            size //= 2
        return size

    def _best(self, most: Shape = SHAPES[-1]) -> Shape:
        """Return the largest shape up to `most` for which time (by the rates measured so far), text and memory suffice;
        else the smallest shape."""
        best = SHAPES[0]
        for shape in SHAPES[: SHAPES.index(most) + 1]:
            candidate = self.measured.get(shape) or self._candidate(shape)
            if not self._suits(candidate):
                break
            best = shape
        return best

    def _suits(self, candidate: Drafted) -> bool:
        size, in_time = candidate.plan.parameters.total, self._rate(candidate) * self.seconds
        enough = in_time >= TOKENS_PER_PARAMETER * size
        return enough and candidate.plan.fits and EPOCHS * candidate.n_train_tokens >= TEXT_TOKENS_PER_PARAMETER * size

    def _tokens(self, candidate: Drafted) -> float:
        """Return the number of tokens that training reads: as many as the time allows, up to EPOCHS epochs."""
        return min(self._rate(candidate) * self.seconds, EPOCHS * candidate.n_train_tokens)

    def _rate(self, candidate: Drafted) -> float:
        """Return tokens per second: measured, or scaled by FLOPs from the measured shape nearest in size; infinite
        before anything is measured."""
        if candidate.rate is not None:
            return candidate.rate
        if not self.measured:
            return inf
        flops = candidate.plan.flops_per_token
        near = min(self.measured.values(), key=lambda one: abs(log(one.plan.flops_per_token / flops)))
        assert near.rate is not None
        return near.rate * near.plan.flops_per_token / flops

    def _measured(self, candidate: Drafted) -> Drafted:
        """Return the candidate with the measured time of a step; raise a UserError if it does not fit in memory."""
        plan = candidate.plan
        if not plan.fits:
            raise UserError(
                f"a model of {plan.parameters.total:,} parameters needs {plan.peak.total_bytes / 1e6:,.0f} MB, and "
                f"{plan.device.memory_bytes / 1e6:,.0f} MB are free on {plan.device.name}: end other programs."
            )
        self.report(f"measuring a step of {plan.parameters.total:,} parameters")
        step = Rehearsal.of(plan, self.device.type)
        return replace(candidate, plan=replace(plan, measured=(self.measure or measure_speed)(step)))

    def _candidate(
        self, shape: Shape, step_tokens: int = STEP_TOKENS, steps: int = LEAST_STEPS, rate: float | None = None
    ) -> Drafted:
        """Return the recipe of a shape, planned with micro-batches that fit in memory."""
        vocab_size, bytes_per_token = self.tokenizer(next(size for width, size in VOCABULARIES if shape[0] >= width))
        n_train_tokens = self.n_train_tokens(bytes_per_token)
        context = min(MOST_CONTEXT, 1 << (CONTEXT_PER_WIDTH * shape[0]).bit_length() - 1)
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
            "train": self._train(steps, step_tokens, context, why) + self._decay(steps * step_tokens, n_train_tokens),
        }
        return self.planned(sections, n_train_tokens)

    def planned(self, sections: Sections, n_train_tokens: int, vocab_size: int = 0) -> Drafted:
        """Plan the recipe of these sections. If the plan does not fit in memory, replace the micro-batch by a smaller
        one in `sections`. `vocab_size` is used if the model's settings do not state the vocabulary size."""
        plan = self._plan(sections, n_train_tokens, vocab_size)
        if not plan.fits and (most := plan.largest_micro_batch_size):
            micro = next(size for size in divisors(plan.train.batch_size) if size <= most)
            others = [row for row in sections["train"] if row[0] != "micro_batch_size"]
            sections["train"] = [*others, ("micro_batch_size", micro, "as many at a time as fit in memory")]
            plan = self._plan(sections, n_train_tokens, vocab_size)
        return Drafted(sections, plan)

    def _plan(self, sections: Sections, n_train_tokens: int, vocab_size: int) -> Plan:
        recipe = parsed(sections, self.out)
        if not recipe.model.vocab_size:
            recipe = with_vocab_size(recipe, vocab_size)
        return plan_recipe(recipe, DataSize(n_train_tokens, estimated=True), device=self.place)

    def _model(self, shape: Shape, context: int) -> list[Row]:
        width, n_layers = shape
        d_head = 64 if width >= 128 else 32
        return [
            ("context_length", context, "tokens that the model sees at once"),
            ("n_layers", n_layers, ""),
            ("d_model", width, ""),
            ("n_heads", width // d_head, f"of {d_head}"),
            *([("tie_embeddings", False, "a head of its own learns faster")] if width <= WIDEST_UNTIED else []),
            ("init", "induction", "begins with two heads that copy, and learns faster"),
        ]

    def _data(self) -> list[Row]:
        n = self.texts.n_documents
        is_uneven = self.texts.largest_document_bytes > self.fraction * self.texts.n_bytes
        by = "tail" if is_uneven or (n is not None and n < MANY_DOCUMENTS) else "document"
        why = {"tail": "the end of each document is held out", "document": "documents are held out, none in part"}
        return [
            ("sources", self.texts.sources, ""),
            ("validation", {"fraction": self.fraction, "by": by}, why[by]),
        ]

    def n_train_tokens(self, bytes_per_token: float) -> int:
        """Estimate the number of training tokens."""
        return int(self.texts.n_bytes * (1 - self.fraction) / bytes_per_token)

    def length_reason(self, tokens: int, n_train_tokens: int, rate: float | None) -> str:
        """Return the reason for the length of a run: the text or the time does not allow more."""
        if tokens > 0.95 * EPOCHS * n_train_tokens:
            return f"{EPOCHS} epochs; reading a text more often teaches little (Muennighoff et al., 2023)"
        return f"{self.minutes:g} minutes at {rate or 0:,.0f} tokens/s, as measured here"

    def _train(self, steps: int, step_tokens: int, context: int, length: str) -> list[Row]:
        batch = step_tokens // context
        n_evaluated = max(LEAST_EVALUATED_TOKENS // context, min(512, steps * batch // 100))
        return [
            ("max_steps", steps, length),
            ("batch_size", batch, "sequences a step"),
            ("shorter_contexts", [list(one) for one in GROWING], "short texts first: quicker, and learned as well"),
            ("evaluate_every", max(1, steps // N_EVALUATIONS), ""),
            ("evaluate_sequences", n_evaluated, "all evaluations together take some 3% of the time"),
            ("checkpoint_every", max(1, steps // N_SAMPLES), "the most that a crash can lose"),
            ("keep_every", max(1, steps // N_SAMPLES), "all are kept, to see later what was learned when"),
            ("sample_every", max(1, steps // N_SAMPLES), ""),
            ("sample_held_out", 2, "beginnings of held-out text, chosen before training"),
        ]

    def _decay(self, tokens: int, n_train_tokens: int) -> list[Row]:
        """Return settings of strong weight decay if the run reads its text often enough to memorize it; else none."""
        if tokens < MANY_EPOCHS * n_train_tokens:
            return []
        why = f"as the text is read {tokens / n_train_tokens:.2g} times (Kim et al., 2025)"
        return [("weight_decay", 0.5, why), ("cautious_weight_decay", True, "")]

    def _tokenizer(self, most: int) -> tuple[int, float]:
        """Return the size of a vocabulary of at most `most` tokens for this text, and its bytes per token."""
        while most > LEAST_VOCABULARY and self.texts.n_bytes < most * BYTES_PER_VOCABULARY_TOKEN:
            most //= 2
        while True:
            try:
                return self.bytes_per_token(BPETokenizer(type="bpe", vocab_size=most))
            except UserError:  # a text that repeats itself has few pairs to merge
                most = most // 2 if most > LEAST_VOCABULARY else N_BYTES + (most - N_BYTES) // 2
                if most < N_BYTES + 4:
                    raise

    def bytes_per_token(self, config: TokenizerConfig) -> tuple[int, float]:
        """Train a tokenizer on this text. Return its vocabulary size, and its bytes per token on held-out text."""
        part = max(1024, sum(map(len, self.texts.sample)) // 256)
        parts = [text[at : at + part] for text in self.texts.sample for at in range(0, len(text), part)]
        held_out = parts[::8]
        tokenizer = train_tokenizer(config, (part for n, part in enumerate(parts) if n % 8))
        n_tokens = sum(len(encode_text(tokenizer, text)) for text in held_out)
        return vocabulary_size(tokenizer), sum(len(text.encode("utf-8")) for text in held_out) / max(1, n_tokens)
