"""Requests and responses of OpenAI's API, with some fields of vLLM's API, and llama.cpp's fields for DRY.

Unknown fields are refused, not ignored, unless their values request nothing (wire.py). Every number and list of a
request is bounded. Answers leave out fields that were not set, so constants such as `object` are set explicitly.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from gptworks.config.sampling import sampling
from gptworks.serve.wire import MAX_CHARACTERS, Wire

MAX_TOKENS = 1 << 20
"""Maximum number of tokens of one prompt or of one generated text. Token ids are below this number too."""
MAX_MESSAGES = 1024
MAX_STOPS = 16

# ------------------------------------------------------------------------------------------------------- parts


Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
_SEVERAL = Field(min_length=1, max_length=64, fail_fast=True)
_Texts = Annotated[list[Text], _SEVERAL]
_Lists = Annotated[list[TokenIds], _SEVERAL]


def _as_prompts(value: Any) -> Any:
    """Return prompts as a list: a single prompt, given as text or token ids, becomes a list with one element."""
    is_ids = isinstance(value, list) and value and type(value[0]) is int
    prompts = [value] if is_ids or isinstance(value, str) else value
    if _kind(prompts) is None:
        raise ValueError("it must be a text, a list of texts, a list of token ids, or several of these, not empty")
    return prompts


def _kind(value: Any) -> str | None:
    """Return the type of a list of prompts, judged by its first element; None: not a list of texts or of lists."""
    first = value[0] if isinstance(value, list) and value else None
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else None


# With tags, an error names the rule for the type of the request's prompt; a plain union may name the other type's rule.
Prompts = Annotated[
    Annotated[_Texts, Tag("list[str]")] | Annotated[_Lists, Tag("list[list[int]]")],
    Discriminator(_kind),
    BeforeValidator(_as_prompts, json_schema_input_type=Text | TokenIds | _Texts | _Lists),
]
"""One or several prompts, each as a text or as token ids."""


def _as_stops(value: Any) -> Any:
    return tuple(value or ()) if value is None or isinstance(value, list) else (value,)


Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[
    tuple[Stop, ...],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_stops, json_schema_input_type=Stop | _Stops | None),
]


TokenKey = Annotated[str, Field(pattern="^[0-9]{1,7}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenKey, Bias], Field(max_length=1024, json_schema_extra={"additionalProperties": False})]
Count = Annotated[int, Field(ge=1, le=32)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
FinishReason = Literal["stop", "length"]


class StreamOptions(Wire):
    include_usage: bool = False


class SamplingFields(Wire):
    """The fields that completion and chat requests share. Fields after `user` are from vLLM's API, except that the
    `dry_` fields are from llama.cpp's."""

    model: ModelName
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Count | None = None
    stop: Stops = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: Biases | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    dry_multiplier: Annotated[float | None, sampling("dry_multiplier")] = None
    dry_base: Annotated[float | None, sampling("dry_base")] = None
    dry_allowed_length: Annotated[int | None, sampling("dry_allowed_length")] = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream: true")
        return self


# -------------------------------------------------------------------------------------------------- completions


class CompletionRequest(SamplingFields):
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    logprobs: Alternatives | None = None

    @model_validator(mode="after")
    def _samples(self) -> Self:
        n = self.n or 1
        best_of = self.best_of or n
        if best_of < n:
            raise ValueError(f"best_of: {best_of} is below n={n}")
        if self.stream and best_of > n:
            raise ValueError("best_of: not with stream: the best texts are known only at the end")
        return self


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Frame(BaseModel):
    """The fields that completions, chat answers and their chunks share."""

    id: str
    object: str
    created: int
    model: str


class Completion(Frame):
    """A completion, or a chunk of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


# --------------------------------------------------------------------------------------------------------- chat


class TextPart(Wire):
    type: Literal["text"]
    text: str


def _nothing(value: Any) -> None:
    if value:
        raise ValueError("it is not supported: models here call nothing and write only text")


Nothing = Annotated[Any, AfterValidator(_nothing), WithJsonSchema({"type": "null"})]


class ChatMessage(Wire):
    """A turn of a conversation. Clients that send an answer back include the fields after `name`: `id` is not read, and
    the others must be empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    tool_calls: Nothing = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: it is missing; only an assistant's message may have none")
        return self

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def turn(self) -> dict[str, str]:
        """Return the turn for a chat template; the role `developer`, OpenAI's newer name, becomes `system`."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.text} | ({"name": self.name} if self.name is not None else {})


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


TemplateVariables = Annotated[
    dict[Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")], bool | int | Text],
    Field(max_length=16),
]


class JSONSchema(Wire):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: required with the type json_schema, and allowed only with it")
        return self


class ChatRequest(SamplingFields):
    """A conversation to continue. Three fields are from vLLM's API. `chat_template_kwargs` sets variables of the chat
    template. With `continue_final_message`, the answer continues the final message, which must be an assistant's. If
    `add_generation_prompt` is given, it must be the opposite of `continue_final_message`."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs: true")
        if None not in (one := self.max_tokens, other := self.max_completion_tokens) and one != other:
            raise ValueError(
                f"max_tokens: it is the old name of max_completion_tokens, which is {other}; give only one"
            )
        continues = bool(self.continue_final_message)
        if self.add_generation_prompt is not None and self.add_generation_prompt == continues:
            raise ValueError("add_generation_prompt: false with continue_final_message: true, else true")
        if continues and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message: the final message must be an assistant's")
        return self


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Frame):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    dropped_messages: int | None = None
    """With truncation=auto: number of oldest messages that the model did not read, system messages not counted."""


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Frame):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    dropped_messages: int | None = None


# ------------------------------------------------------------------------------------------- embeddings, tokens


class EmbeddingRequest(Wire):
    model: ModelName
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenizeRequest(Wire):
    """A text or a conversation to tokenize."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Wire):
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    prompt: str


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]
