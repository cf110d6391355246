"""A recipe: all settings of a run, and the rules that concern several sections."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gptworks.config.base import MOST_NAME_CHARACTERS, Fixed, Free, Name, Place, RemotePath, Repeat, Section, Start
from gptworks.config.batches import in_whole_numbers, without_shares
from gptworks.config.data import DataConfig
from gptworks.config.defaults import train_defaults
from gptworks.config.model import ModelConfig
from gptworks.config.objective import NextTokenObjective, ObjectiveConfig
from gptworks.config.sampling import SamplingConfig
from gptworks.config.sweep import SweepConfig
from gptworks.config.tokenizer import DatasetTokenizer, TokenizerConfig, TrainedTokenizer
from gptworks.config.train import TrainConfig
from gptworks.config.trained import FreezeConfig, LoRAConfig

TOKENIZER = Field(description="The tokenizer, trained on the text or given.")
DATA = Field(description="The text that is read.")


class DatasetRecipe(Section):
    """Text and its tokenizer: the settings of `gptworks data build`."""

    name: Free[str] = Field("dataset", max_length=MOST_NAME_CHARACTERS, description="The dataset's name.")
    tokenizer: TokenizerConfig = TOKENIZER
    data: DataConfig = DATA

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_tokenizer(self.tokenizer, self.data)
        return self


class Recipe(Section):
    """A model, its tokenizer, its data and its training."""

    name: Free[Name] = Field("run", description="The run's name. Default: the name of the file.")
    run_dir: Free[Annotated[RemotePath, Place.PATH]] = Field(
        default_factory=lambda data: Path("runs") / data["name"],
        description="The run folder, for everything that training writes, or its URL: s3://…, gs://… or "
        "az://…. Default: runs/NAME.",
    )
    seed: Repeat[int] = Field(1337, ge=0, lt=2**32, description="Seed of weights, sample order and dropout.")
    initialize_from: Start[Annotated[RemotePath | None, Place.PATH]] = Field(
        None, description="A run folder or its URL: this run starts from its best weights. None: random, by model.init."
    )
    model: ModelConfig = Field(description="The architecture.")
    tokenizer: TokenizerConfig = TOKENIZER
    data: DataConfig = DATA
    objective: ObjectiveConfig = Field(NextTokenObjective(), description="What is learned.")
    adapter: Fixed[LoRAConfig | None] = Field(None, description="Train a small adapter in place of the weights.")
    freeze: Fixed[FreezeConfig | None] = Field(None, description="Parameters that are not trained.")
    train: TrainConfig = Field(
        default_factory=dict,
        validate_default=True,
        description="Training. Defaults depend on the model and the objective.",
    )
    sampling: SamplingConfig = Field(SamplingConfig(), description="How the model's texts are sampled by default.")
    sweep: Free[SweepConfig | None] = Field(None, description="Search by `gptworks sweep`; training ignores it.")

    @field_validator("train", mode="before")
    @classmethod
    def _fill_in(cls, given: Any, info: ValidationInfo) -> Any:
        rest = info.data
        if not isinstance(given, dict) or not {"model", "objective", "adapter", "initialize_from"} <= rest.keys():
            # validated already, or another section is invalid, which pydantic reports
            return without_shares(given) if isinstance(given, dict) else given
        tunes, adapter = rest["initialize_from"] is not None, rest["adapter"] is not None
        given = given | in_whole_numbers(given, rest["model"].context_length)
        return train_defaults(given, rest["model"], rest["objective"], tunes, adapter) | given

    def _check_future(self) -> None:
        n, given = self.model.n_future_tokens, self.train.future_weights
        if n > 1 and self.adapter is None and not self.objective.trains_future_heads:
            raise ValueError(
                f"model.n_future_tokens={n} and objective.type={self.objective.type}, whose loss covers only the next "
                f"token: set model.n_future_tokens=1, which drops the heads of initialize_from"
            )
        due = 0 if self.adapter is not None else n - 1
        if len(given) != due:
            of = " and an adapter, which trains no heads" if self.adapter is not None else ""
            raise ValueError(
                f"train.future_weights has {len(given)} numbers with model.n_future_tokens={n}{of}: give {due}, one "
                f"for each token beyond the next, or leave it out"
            )

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = "conversations" if self.data.conversations else "preferences" if self.data.preferences else "text"
        if kind not in self.objective.sources:
            raise ValueError(
                f"objective.type={self.objective.type} and data.sources are {kind}: "
                f"give sources of type {' or '.join(self.objective.sources)}"
            )
        check_tokenizer(self.tokenizer, self.data)
        assert self.anneal_from is None or self.anneal_from > 0  # `anneal_from` raises if `data.anneal.share` is wrong
        self._check_groups(self.objective.micro_batch_multiple)
        self._check_adapter()
        self._check_packing()
        self._check_lengths()
        self._check_rows()
        if self.model.tie_embeddings and self.train.rate_factors.head != 1:
            raise ValueError(
                f"train.rate_factors.head={self.train.rate_factors.head:g} and model.tie_embeddings=true: the head is "
                f"the embedding; set train.rate_factors.embeddings, or tie_embeddings=false"
            )
        self._check_future()
        if self.freeze is not None and self.freeze.first_blocks > self.model.n_layers:
            raise ValueError(
                f"freeze.first_blocks={self.freeze.first_blocks} is more than model.n_layers={self.model.n_layers}: "
                f"freeze at most all blocks"
            )
        return self

    @property
    def row_length(self) -> int:
        """Length of a training row in tokens: `train.row_tokens`, by default the context."""
        return self.train.row_length(self.model.context_length)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in `train.batch_size` rows, padding included. A preference pair counts as one row."""
        return self.train.batch_size * self.row_length

    @property
    def several_texts(self) -> bool:
        """Whether a training row may hold several texts. Positions restart at 0 in each, unless the texts are
        joined."""
        return bool(self.data.conversations) and self.objective.several_texts

    @property
    def anneal_from(self) -> int | None:
        """Index of the first sample drawn with the weights of `data.anneal`; None without `data.anneal`."""
        anneal, train = self.data.anneal, self.train
        if anneal is None or anneal.share is None:
            return None if anneal is None else anneal.from_sample
        if train.max_steps is None or train.epochs is not None or train.max_minutes is not None:
            raise ValueError(
                f"data.anneal.share={anneal.share:g} is a share of train.max_steps, which must be the run's only "
                f"length: set max_steps and neither epochs nor max_minutes, or set data.anneal.from_sample"
            )
        steps_before = train.max_steps - max(1, round(anneal.share * train.max_steps))
        if not steps_before:
            raise ValueError(
                f"data.anneal.share={anneal.share:g} of train.max_steps={train.max_steps} is the entire run: set the "
                f"weights in data.mixture instead"
            )
        return train.samples_before(steps_before)

    def _check_groups(self, group_size: int) -> None:
        if self.train.smaller_batches and self.objective.rollouts is not None:
            raise ValueError(
                f"train.smaller_batches and objective.type={self.objective.type}, which needs steps of equal "
                f"size: leave smaller_batches out"
            )
        for name in ("batch_size", "micro_batch_size"):
            if getattr(self.train, name) % group_size:
                raise ValueError(
                    f"train.{name}={getattr(self.train, name)} is not a multiple of objective.group_size={group_size}: "
                    f"all answers to a prompt are in one micro-batch; choose a multiple"
                )

    def _check_packing(self) -> None:
        scaling = self.model.rope_scaling
        if scaling is not None and scaling.by_length and self.objective.packs and self.data.conversations:
            raise ValueError(
                f"model.rope_scaling.type={scaling.type} and conversations packed into rows: each would be scaled as "
                "if it were as long as its row; set rope_scaling.type=yarn, or objective.packing=false if it exists"
            )

    def _check_lengths(self) -> None:
        last = (0, 0)
        for step, length in self.train.shorter_contexts:
            whole = self.model.context_length
            if step <= last[0] or length <= last[1] or whole % length:
                raise ValueError(
                    f"train.shorter_contexts has [{step}, {length}] after [{last[0]}, {last[1]}]: steps and lengths "
                    f"must ascend, and each length must divide model.context_length={whole}"
                )
            last = (step, length)
        if self.train.shorter_contexts and (self.objective.type != "next_token" or self.data.conversations):
            raise ValueError(
                f"train.shorter_contexts cuts windows of text, which objective.type={self.objective.type} with these "
                f"sources does not read: leave it out"
            )

    def _check_rows(self) -> None:
        rows, model = self.train.row_tokens, self.model
        if rows is None:
            return
        if not self.data.records or self.objective.rollouts is not None:
            raise ValueError(
                f"train.row_tokens={rows} is for rows of conversations or preference pairs, which objective.type="
                f"{self.objective.type} with these sources does not read: leave it out"
            )
        if not model.n_future_tokens <= rows <= model.context_length:
            raise ValueError(
                f"train.row_tokens={rows} is not between model.n_future_tokens={model.n_future_tokens} and "
                f"model.context_length={model.context_length}: choose a length between them, or leave it out"
            )

    def _check_adapter(self) -> None:
        if self.adapter is None:
            return
        if self.freeze is not None:
            raise ValueError("adapter and freeze are both set: an adapter freezes the weights; drop one of them")
        if self.train.optimizer != "adamw":
            raise ValueError(
                f"train.optimizer={self.train.optimizer} with an adapter: it is made for whole matrices, not for the "
                f"factors A and B; set train.optimizer=adamw"
            )
        if self.train.parallel.tensor_parallel > 1:
            raise ValueError(
                f"train.parallel.tensor_parallel={self.train.parallel.tensor_parallel} with an adapter: A and B are "
                f"not sharded; set tensor_parallel=1"
            )
        if self.adapter.base != "full" and self.train.compile == "block":
            raise ValueError(
                f"adapter.base={self.adapter.base} and train.compile=block: a compiled block may keep unpacked "
                f"matrices until the backward pass; set train.compile=none"
            )
        if set(self.adapter.targets) == {"gate"} and not self.model.gated:
            raise ValueError(f"adapter.targets=gate and model.mlp={self.model.mlp} has no gate: choose others")


def check_tokenizer(tokenizer: TokenizerConfig, data: DataConfig) -> None:
    """Raise a ValueError if the tokenizer has type=dataset and no dataset is built, or if the tokenizer would be
    trained although a dataset is built."""
    built = [member.name for member in data.mixture if member.dataset is not None]
    if isinstance(tokenizer, DatasetTokenizer) and not built:
        raise ValueError("tokenizer.type=dataset needs a built dataset: set `dataset` of a member of data.mixture")
    if built and isinstance(tokenizer, TrainedTokenizer):
        raise ValueError(
            f"tokenizer.type={tokenizer.type} would be trained, but the dataset {built[0]} is tokenized already: "
            f"set tokenizer.type=dataset"
        )


AnyRecipe = Recipe | DatasetRecipe
