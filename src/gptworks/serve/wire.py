"""The base class of requests and their parts. It refuses unknown fields, unless their values request nothing."""

from typing import Any

from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from gptworks.config import Bounded
from gptworks.errors import did_you_mean

MAX_CHARACTERS = 1 << 24
"""Maximum number of characters of a text field, even if the server's limits on bytes are larger."""

REFUSED = {
    "suffix": "text is only continued, not filled in",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "models here call no tools"),
    **dict.fromkeys(("functions", "function_call"), "models here call no functions"),
    **dict.fromkeys(("audio", "modalities"), "models here read and write only text"),
    "dimensions": "an embedding has the model's width",
    "use_beam_search": "the server samples",
    **dict.fromkeys(("store", "metadata"), "the server stores nothing"),
    "prediction": "the server takes no predicted text; --speculative N drafts tokens",
    "reasoning_effort": "models here do not reason apart from their answer",
    "service_tier": "there is only one",
    "verbosity": "models here write as they were trained",
    "web_search_options": "models here search nothing",
    "safety_identifier": "the server keeps no list of users",
    "prompt_cache_key": "prompts with the same beginning share its computation automatically",
    "include_obfuscation": "the server pads no chunk",
    "continuous_usage_stats": "the usage is in the last chunk",
    "skip_special_tokens": "a text never has special tokens",
    "spaces_between_special_tokens": "a text never has special tokens",
    "include_stop_str_in_output": "a text ends before its stop string",
    "stop_token_ids": "give the texts in `stop`",
    "bad_words": "give their tokens in `logit_bias`",
    **dict.fromkeys(("length_penalty", "early_stopping"), "the server samples"),
    **dict.fromkeys(("typical_p", "mirostat"), "the filters are top_k, top_p and min_p"),
    "dry_penalty_last_n": "the DRY penalty looks for repetitions in the whole text",
    "dry_sequence_breakers": "the DRY penalty has no sequence breakers",
    "cache_prompt": "prompts with the same beginning share its computation automatically",
}
"""Unsupported fields of OpenAI's, vLLM's and llama.cpp's APIs, with the reasons. A request may still contain any
unsupported field with null, or a field of this table with its values in `_REQUESTS_NOTHING`."""

_REQUESTS_NOTHING: dict[str, tuple[Any, ...]] = {
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (False, True),
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "use_beam_search": (False,),
    "include_obfuscation": (False,), "continuous_usage_stats": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False), "include_stop_str_in_output": (False,), "stop_token_ids": ([],),
    "bad_words": ([],), "length_penalty": (1, 1.0), "early_stopping": (False,), "typical_p": (1, 1.0),
    "mirostat": (0,), "cache_prompt": (True,), "dry_penalty_last_n": (-1,),
    "dry_sequence_breakers": ([],), "store": (False,), "metadata": ({},), "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
}  # fmt: skip
"""Values of fields in `REFUSED` that request what the server does anyway; some clients always send them."""


def _requests_nothing(name: str, value: Any) -> bool:
    return any(type(value) is type(one) and value == one for one in (None, *_REQUESTS_NOTHING.get(name, ())))


class Wire(Bounded):
    """A request or a part of a request. An error names only one field, so that the answer to a long body is short."""

    most_number = 2**53
    most_characters = MAX_CHARACTERS
    most_items = 1 << 16
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, regex_engine="rust-regex")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, tree: Any) -> Any:
        if isinstance(tree, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            tree = {name: value for name, value in tree.items() if name in known or not _requests_nothing(name, value)}
            for name in tree:
                if name not in known:
                    short = name[:64]
                    hint = f": {REFUSED[name]}." if name in REFUSED else did_you_mean(short, known)
                    reason = f"`{short}` is not supported{hint}"
                    raise PydanticCustomError("unknown_field", "{reason}", {"name": short, "reason": reason})
        return tree
