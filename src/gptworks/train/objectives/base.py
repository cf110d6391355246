"""What a run learns, and from what: the one place where objectives differ. The loop knows only `Task`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from gptworks.config import Recipe
from gptworks.data.batches import Batches, evaluation_windows
from gptworks.data.shards import TokenShards
from gptworks.device import Precision
from gptworks.evaluate.loss import LossReport, Shares, evaluate_loss
from gptworks.infer.engine import Engine
from gptworks.model import GPT
from gptworks.plan.run import planned_steps
from gptworks.train.distributed.ranks import ALONE, Ranks
from gptworks.train.objectives.next_token import Batch, Losses, count_targets, next_token, routing_weights


class Task:
    """Predicting every next token of the text. Other objectives override what differs.

    Batches are a function of (shards, seed, position) alone: that is what exact resume rests on. A position counts
    samples from the start of the run, those that rollbacks have passed included.
    """

    def __init__(self, recipe: Recipe, data_folder: Path, verify: bool = False) -> None:
        """
        Args:
            data_folder: what `prepare` made.
            verify: compare every byte of it with its sha256.

        Raises:
            UserError: files are missing or changed, or there is too little text.
        """
        self.recipe, self.context_length = recipe, recipe.model.context_length
        self.train_shards = TokenShards(data_folder, "train", verify=verify)
        self.validation_shards = TokenShards(data_folder, "validation", verify=verify)
        self._routing = routing_weights(recipe.train)
        self._open()

    def _open(self) -> None:
        """Make what batches are read from."""
        recipe = self.recipe
        self._windows = Batches(self.train_shards, self.context_length, recipe.seed)

    ranks: Ranks = ALONE
    """The processes that train together; the run sets it."""

    rolls_out = False
    """Whether a step's batches are made with the model as it is then (`roll_out`)."""

    def begin(
        self,
        model: GPT,
        engine: Engine,
        precision: Precision,
        fresh: bool,
        writes: bool,
        report: Callable[[str], None],
        shares: Shares,
    ) -> None:
        """What is done once, before the first step of a sitting.

        Args:
            model: has the weights that training starts from, or goes on from.
            fresh: whether the run begins, so that these are the weights of its start.
            writes: whether this process writes the run folder.
            shares: how the run's processes divide work.

        Raises:
            UserError: something that the objective needs is missing or cannot be used.
        """

    def roll_out(self, position: int, micro_steps: Sequence[int], batches: list[Batch]) -> tuple[list[Batch], int, int]:
        """The micro-batches of the step at a position from what `batch` made, their count and their tokens.

        Called where `rolls_out`.
        """
        raise NotImplementedError

    @property
    def data_fingerprint(self) -> str:
        """What must be equal when a run goes on."""
        return self.train_shards.manifest.fingerprint

    @property
    def samples_per_epoch(self) -> int:
        """What a step's batch_size counts, in the whole training split."""
        return self._windows.windows_per_epoch

    @property
    def n_validation(self) -> int:
        """Sequences in the whole validation split: windows, rows, pairs or prompts."""
        return max(1, -(-(self.validation_shards.n_tokens - 1) // self.context_length))

    @property
    def n_evaluated(self) -> int:
        """How many of them an evaluation reads, evenly spaced. 0: all."""
        return self.recipe.train.n_evaluated(self.n_validation, self.context_length)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run, where that is known beforehand."""
        train, samples = self.recipe.train, self.samples_per_epoch
        return planned_steps(train, self.context_length, None, windows_per_epoch=samples)[0]

    @property
    def tokens_per_epoch(self) -> int:
        return self.train_shards.n_tokens

    def batch(self, position: int, micro_step: int, size: int) -> Batch:
        """Micro-batch number `micro_step`, of `size` rows, of the step that begins at a position, on the CPU."""
        return self._windows.batch(position + micro_step * size, size)

    def count(self, batch: Batch) -> int:
        """What the sum of a batch's losses is divided by: its targets."""
        return count_targets(batch)

    def loss(self, model: GPT, batch: Batch) -> Losses:
        """The objective: sums over the batch."""
        return next_token(model, batch, **self._routing)

    def evaluate(self, model: GPT, shares: Shares, precision: Precision) -> tuple[LossReport, dict[str, float]]:
        """The loss on held-out text, and other figures for the metrics, by name."""
        shards, n_sequences = self.validation_shards, self.n_evaluated
        report = evaluate_loss(
            model,
            evaluation_windows(shards, self.context_length, n_sequences),
            text_bytes=shards.text_bytes if n_sequences == 0 and shards.manifest.round_trips else None,
            shares=shares,
            autocast=precision.autocast,
        )
        return report, {}
