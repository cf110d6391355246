"""The kinds of tokenizer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Measured, Place, Section, ShortPath


class _Tokenizer(Section):
    added_tokens: Measured[tuple[str, ...]] = Field(
        (),
        description="Special tokens added to it, such as <|im_start|> and <|im_end|>, which chatml writes. A run that "
        "starts from one without them gets embeddings for them, each the mean of the others.",
    )
    chat_template: Measured[Annotated[str | None, Place.TEMPLATE]] = Field(
        None,
        description="chatml, alpaca, plain, or a Jinja file. None: the one that lies beside a tokenizer read from a "
        "folder, if any.",
    )

    @model_validator(mode="after")
    def _check_added(self) -> Self:
        if len(set(self.added_tokens)) != len(self.added_tokens) or not all(self.added_tokens):
            raise ValueError(f"added_tokens={list(self.added_tokens)}: give each name once, and none empty")
        return self


class BPETokenizer(_Tokenizer):
    """Byte-level byte-pair encoding trained on the recipe's own training text. Every byte sequence round-trips."""

    type: Measured[Literal["bpe"]]
    vocab_size: Measured[int] = Field(
        4096, ge=257, le=10_000_000, description="256 bytes, one document separator, the rest merges."
    )
    pattern: Measured[Literal["llama3", "gpt2", "code"]] = Field(
        "llama3",
        description="What one token may span. llama3 and gpt2: as those models have it, which llama.cpp knows (export "
        "to GGUF). code: indentation joins the line break before it; the fewest tokens for code.",
    )


class CharTokenizer(_Tokenizer):
    """One token for each character of the training text."""

    type: Measured[Literal["char"]]


class WordTokenizer(_Tokenizer):
    """Lower-cased words and punctuation, the most frequent first; <pad> <unk> <bos> <eos> are 0 to 3."""

    type: Measured[Literal["word"]]
    vocab_size: Measured[int] = Field(
        16_000, ge=5, le=10_000_000, description="At most this many tokens, the four special ones included."
    )


class GPT2Tokenizer(_Tokenizer):
    """GPT-2's 50,257 tokens."""

    type: Measured[Literal["gpt2"]]
    path: Measured[Annotated[ShortPath | None, Place.PATH]] = Field(
        None, description="The published ranks file (r50k_base.tiktoken) or a Hugging Face folder. None: the hub."
    )


class FileTokenizer(_Tokenizer):
    """Any `tokenizer.json`, or a folder that holds one."""

    type: Measured[Literal["file"]]
    path: Measured[Annotated[ShortPath, Place.PATH]]


class DatasetTokenizer(_Tokenizer):
    """That of the datasets in data.mixture that were built before, which must all have the same."""

    type: Measured[Literal["dataset"]]

    @model_validator(mode="after")
    def _check_nothing_more(self) -> Self:
        if self.added_tokens or self.chat_template is not None:
            raise ValueError(
                "type=dataset with added_tokens or chat_template: the tokens are made already; set these in the recipe "
                "that builds the datasets"
            )
        return self


TokenizerConfig = Annotated[
    BPETokenizer | CharTokenizer | WordTokenizer | GPT2Tokenizer | FileTokenizer | DatasetTokenizer,
    Field(discriminator="type"),
]
