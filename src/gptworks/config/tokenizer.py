"""Settings of each kind of tokenizer."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gptworks.config.base import Free, Measured, Place, Section, ShortPath


class _Tokenizer(Section):
    added_tokens: Measured[tuple[str, ...]] = Field(
        (),
        description="Special tokens to add, such as chatml's <|im_start|> and <|im_end|>. A run that starts from one "
        "without them initializes their embeddings to the mean of the others.",
    )
    chat_template: Measured[Annotated[str | None, Place.TEMPLATE]] = Field(
        None,
        description="chatml, alpaca, plain, or a Jinja file. None: the template in the tokenizer's folder, if any.",
    )

    @model_validator(mode="after")
    def _check_added(self) -> Self:
        if len(set(self.added_tokens)) != len(self.added_tokens) or not all(self.added_tokens):
            raise ValueError(f"added_tokens={list(self.added_tokens)}: remove duplicates and empty names")
        return self


class BPETokenizer(_Tokenizer):
    """Byte-level byte-pair encoding, trained on the recipe's training text. It encodes any bytes without loss."""

    type: Measured[Literal["bpe"]]
    vocab_size: Measured[int] = Field(
        4096, ge=257, le=10_000_000, description="256 bytes, one document separator, the rest merges."
    )
    pattern: Measured[Literal["llama3", "gpt2", "code"]] = Field(
        "llama3",
        description="How text is split before merging. llama3, gpt2: the patterns of those models, which GGUF exports "
        "support. code: indentation joins the preceding line break, which gives the fewest tokens for code.",
    )
    begin_prompts: Free[bool] = Field(
        False,
        description="Put the separator before prompts too, so that a prompt begins a document, as a text that someone "
        "types does. For data of many documents: the model must have seen how they begin.",
    )


class CharTokenizer(_Tokenizer):
    """One token for each distinct character of the training text, after <|endoftext|> and <unk>, ids 0 and 1."""

    type: Measured[Literal["char"]]


class WordTokenizer(_Tokenizer):
    """Lower-case words and punctuation marks, by frequency; <pad>, <unk>, <bos> and <eos> have the ids 0 to 3."""

    type: Measured[Literal["word"]]
    vocab_size: Measured[int] = Field(
        16_000, ge=5, le=10_000_000, description="Most tokens, including the four special ones."
    )


class GPT2Tokenizer(_Tokenizer):
    """GPT-2's tokenizer, with 50,257 tokens."""

    type: Measured[Literal["gpt2"]]
    path: Measured[Annotated[ShortPath | None, Place.PATH]] = Field(
        None, description="The published ranks file (r50k_base.tiktoken) or a Hugging Face folder. None: from the hub."
    )


class FileTokenizer(_Tokenizer):
    """An existing `tokenizer.json` file."""

    type: Measured[Literal["file"]]
    path: Measured[Annotated[ShortPath, Place.PATH]] = Field(description="A `tokenizer.json`, or its folder.")


class DatasetTokenizer(_Tokenizer):
    """The tokenizer of the built datasets in data.mixture, which must all have the same one."""

    type: Measured[Literal["dataset"]]

    @model_validator(mode="after")
    def _check_nothing_more(self) -> Self:
        if self.added_tokens or self.chat_template is not None:
            raise ValueError(
                "type=dataset with added_tokens or chat_template: the datasets are tokenized already; set these in the "
                "recipe that builds them"
            )
        return self


TrainedTokenizer = BPETokenizer | CharTokenizer | WordTokenizer
TokenizerConfig = Annotated[
    TrainedTokenizer | GPT2Tokenizer | FileTokenizer | DatasetTokenizer, Field(discriminator="type")
]
