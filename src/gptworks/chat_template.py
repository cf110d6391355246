"""Chat templates, which turn messages into the text and tokens that a model reads.

A template is a Jinja template, as in `transformers`. A run's template is in `tokenizer/chat_template.jinja`; training,
`chat`, the server and exports use it. Any template that is not built in is untrusted: it is compiled and rendered in
Jinja's sandbox, in a separate process with limits of time and memory (`gptworks.confined`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from gptworks.config import FileTokenizer, GPT2Tokenizer, TokenizerConfig
from gptworks.confined import Confined, Exceeded, Limits, Refused, Task
from gptworks.confined.template import environment
from gptworks.errors import UserError, did_you_mean
from gptworks.files import read_text, write_whole
from gptworks.json_files import read_json
from gptworks.special_tokens import ROLES, TOKENIZER_CONFIG, special_tokens
from gptworks.tokenizer import encode_text

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_OTHERS_FILE, _ORIGINAL_FILE = "other_templates.json", "original.json"
MAX_TEMPLATE_BYTES = 1 << 20
LIMITS = Limits(seconds=2, n_bytes=1 << 28)
"""Limits for compiling an untrusted template, and for rendering a conversation with it."""

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant", "content": str}, sometimes with a "name"."""

BUILT_IN = {
    "chatml": """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "alpaca": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- else %}
{{- message['content'] + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}
""",
    "plain": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- 'Assistant: ' + message['content'] + eos_token + '\\n' }}
{%- elif message['role'] == 'user' %}
{{- 'User: ' + message['content'] + '\\n' }}
{%- else %}
{{- message['content'] + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- 'Assistant:' }}
{%- endif %}
""",
}
"""Built-in templates by name. `chatml` needs the special tokens <|im_start|> and <|im_end|>; others use bos and eos."""

_PROBE = ({"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"})


_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")

MOST_KEPT = 4
"""Maximum number of tokenizers that `_rest` caches. Clients' texts determine the keys, so there may be many."""


class ChatTemplate:
    """A chat template in Jinja, with the tokenizer whose special tokens it writes."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Compile the template. Raises a UserError if it does not compile within the limits."""
        self.source, self.tokenizer = source, tokenizer
        self._names: dict[str, Any] = dict(special_tokens(tokenizer).names)
        self._after: dict[tuple[bool, str], Tokenizer] = {}
        self._render: _Render = _in_process(source) if source in BUILT_IN.values() else _confined(source)

    def using(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """Return this template with further variables, such as enable_thinking=False. Raises a UserError if a name does
        not occur in the template or is a variable that `render` sets, or if a value contains a special token's name."""
        for name in variables:
            if name in (*_OWN_VARIABLES, *ROLES) or not re.search(rf"\b{re.escape(name)}\b", self.source):
                raise UserError(f"the chat template of this model has no variable `{name[:64]}` to set: leave it out.")
            value = variables[name]
            if isinstance(value, str) and self._special.search(value):
                raise UserError(f"`{name[:64]}` holds the name of a special token, which only the template may write.")
        made = copy(self)
        made._names = self._names | dict(variables)
        return made

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, task: Task | None = None
    ) -> str:
        """Return the conversation as text, the same bytes as `transformers`' `apply_chat_template(tokenize=False)`.

        Args:
            messages: the turns, oldest first.
            add_generation_prompt: end with the text that precedes an assistant's answer.
            task: allows another thread to abandon the rendering.

        Raises:
            UserError: the template refuses these messages, fails on them, or exceeds the limits.
            Abandoned: the task was abandoned.
        """
        plain = json.loads(json.dumps(list(messages)))  # the template receives only plain data
        variables = {
            "messages": plain, "tools": None, "documents": None, "add_generation_prompt": add_generation_prompt,
        } | self._names  # fmt: skip
        return self._render(variables, task)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        continues: bool = False,
        task: Task | None = None,
    ) -> list[int]:
        """Return the token ids of `render`'s text. Special tokens come only from the template, never from a message.

        Args:
            continues: end with the text of the final message, for the model to continue; `add_generation_prompt` then
                has no effect.

        Raises:
            UserError: for the reasons of `render`; or the template changes the text of the message to continue.
            Abandoned: the task was abandoned.
        """
        guarded, guard = self.guarded(messages)
        if not continues:
            return self.encode_text(self.render(guarded, add_generation_prompt=add_generation_prompt, task=task), guard)
        final = guarded[-1]["content"]
        if not final.strip():
            return self.encode_text(self.render(guarded[:-1], add_generation_prompt=True, task=task) + final, guard)
        written = final if final in self.render(guarded, task=task) else final.strip()
        # The guard marks where the message ends: the template may write the same text again after it.
        marked = [*guarded[:-1], guarded[-1] | {"content": written + guard}]
        before, found, _ = self.render(marked, task=task).rpartition(written + guard)
        if not found:
            raise UserError("the chat template changes the final message, so that it cannot be continued.")
        return self.encode_text(before + written, guard)

    def encode_text(self, text: str, guard: str, continues: bool = False) -> list[int]:
        """Return the token ids of rendered text. A special token's name with `guard` inside it is plain text.

        Args:
            continues: other text precedes this one; tokenizers may encode the first word of a text differently.
        """
        if guard not in text:
            return self._rest(self._reader, text, guard) if continues else encode_text(self._reader, text)
        parts = self._special.split(text)
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids += [token_id for token_id in (self.tokenizer.token_to_id(part),) if token_id is not None]
            elif part:
                plain = part.replace(guard, "")
                begins = i == 0 and not continues
                ids += encode_text(self.tokenizer, plain) if begins else self._rest(self.tokenizer, plain, guard)
        return ids

    def _rest(self, tokenizer: Tokenizer, text: str, guard: str) -> list[int]:
        """Return the token ids of a text that follows another one. Metaspace with the scheme `first` would put a space
        before it, so the text is encoded after a token for `guard`, a character that the text does not contain."""
        if tokenizer.pre_tokenizer is None or b'"prepend_scheme":"first"' not in tokenizer.pre_tokenizer.__getstate__():
            return encode_text(tokenizer, text)
        key = tokenizer.encode_special_tokens, guard
        if (after := self._after.get(key)) is None:
            after = Tokenizer.from_str(tokenizer.to_str())
            after.encode_special_tokens = tokenizer.encode_special_tokens
            after.add_tokens([AddedToken(guard, normalized=False)])
            if len(self._after) >= MOST_KEPT:
                self._after.clear()
            self._after[key] = after
        return encode_text(after, guard + text)[1:]

    def before_special(self, text: str) -> str:
        """Return the part of a rendered text before its first special token."""
        return self._special.split(text, maxsplit=1)[0]

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an assistant's turn: the special token that the template writes after an answer,
        and the tokens that end any text."""
        written = [] if (found := self.written_end()) is None else [found]
        return tuple(dict.fromkeys([*written, *special_tokens(self.tokenizer).ends]))

    def written_end(self) -> int | None:
        """Return the id of the first special token that the template writes after an assistant's answer; None if it
        writes none, or refuses a question with an answer."""
        special = self.special_ids
        try:
            answered = self.render(_PROBE)
        except UserError:  # the template does not accept this order of turns
            return None
        after = answered[answered.rindex(_PROBE[1]["content"]) :] if _PROBE[1]["content"] in answered else ""
        return next((i for i in encode_text(self._reader, after) if i in special), None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special)

    def missing_tokens(self) -> tuple[str, ...]:
        """Return the names like <|this|> in a rendered question and answer that are not added tokens of the tokenizer.
        Raises a UserError if the template refuses a question with an answer."""
        known = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        written = _NAMES.findall(self.render(_PROBE, add_generation_prompt=False))
        return tuple(name for name in dict.fromkeys(written) if name not in known)

    @cached_property
    def _reader(self) -> Tokenizer:
        """A copy of the tokenizer that encodes a special token's name in a text as that token."""
        reader = Tokenizer.from_str(self.tokenizer.to_str())
        reader.encode_special_tokens = False
        return reader

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches the name of a special token; without special tokens, nothing."""
        names = (token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special)
        longest_first = sorted(names, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def guarded(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """Return the messages with a guard character inserted into each special token's name, and that character."""
        guard = _unused_character(messages)

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.sub(lambda found: found[0][0] + guard + found[0][1:], value)
            if isinstance(value, dict):
                return {key: mark(item) for key, item in value.items()}
            return [mark(item) for item in value] if isinstance(value, list | tuple) else value

        return [mark(message) for message in messages], guard


_NAMES = re.compile(r"<\|[^|<>\s]+\|>")


def _unused_character(messages: Sequence[Message]) -> str:
    """Return a private-use character that no message contains. Raises a UserError if the messages contain all 6,400
    private-use characters."""
    held = set(json.dumps(list(messages), ensure_ascii=False))
    free = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in held), None)
    if free is None:
        raise UserError("the conversation holds every private-use character from U+E000 on: take one of them out.")
    return free


# -------------------------------------------------------------------------------------------------- rendering

_Render = Callable[[dict[str, Any], Task | None], str]


def _in_process(source: str) -> _Render:
    """Return a function that renders a built-in template, in time and memory proportional to the conversation."""
    template = environment().from_string(source)

    def render(variables: dict[str, Any], task: Task | None) -> str:
        try:
            return template.render(variables)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from None

    return render


def _confined(source: str) -> _Render:
    """Return a function that renders an untrusted template in a child process with limits."""
    children = Confined("gptworks.confined.template", source, LIMITS)
    try:
        children.start()
    except Refused as error:
        raise UserError(f"the chat template does not compile: {error}.") from None
    except Exceeded as error:
        raise UserError(f"the chat template does not compile: {error} Use a simpler template.") from None

    def render(variables: dict[str, Any], task: Task | None) -> str:
        try:
            text: str = children.ask(variables, task)
            return text
        except Refused as error:
            raise UserError(f"the chat template refuses this conversation: {error}") from None
        except Exceeded as error:
            raise UserError(f"the chat template cannot render this conversation: {error}") from None

    return render


# ----------------------------------------------------------------------------------------------- load and save


def load_chat_template(tokenizer_folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Load the chat template in a run's tokenizer folder; None if the folder has none. Raises a UserError if the file
    is not a regular UTF-8 file or is too large, or the template does not compile."""
    file = tokenizer_folder / TEMPLATE_FILE
    if not file.exists():
        return None
    return ChatTemplate(read_text(file, MAX_TEMPLATE_BYTES, inside=tokenizer_folder), tokenizer)


@dataclass(frozen=True)
class FolderTemplates:
    """The chat templates in a folder written by `transformers`."""

    named: Mapping[str, str]
    """Templates by name. A single template is `default`; `tool_use` is for conversations with tools."""
    source: str
    """Name of the file or folder that contains the templates, for messages; empty if there are none."""

    @property
    def default(self) -> str | None:
        """The template for conversations without tools; None if the folder has none."""
        return self.named.get("default")

    @property
    def others(self) -> dict[str, str]:
        """The templates other than `default`, by name."""
        return {name: source for name, source in self.named.items() if name != "default"}


def read_templates(folder: Path) -> FolderTemplates:
    """Read the chat templates of a folder, with the precedence of transformers 5.

    chat_template.jinja and additional_chat_templates/NAME.jinja come first, then tokenizer_config.json, with one
    template or a list of `name` and `template`. The last is chat_template.json, which transformers reads only for
    processors.

    Raises:
        UserError: a file is not readable, is too large, or does not contain templates.
    """
    files = {"default": folder / TEMPLATE_FILE}
    files |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    named = {name: read_text(file, MAX_TEMPLATE_BYTES, inside=folder) for name, file in files.items() if file.exists()}
    if named:
        return FolderTemplates(named, TEMPLATE_FILE if "default" in named else TEMPLATE_FOLDER)
    for name in (TOKENIZER_CONFIG, "chat_template.json"):
        given = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if given is not None:
            return FolderTemplates(_named(given, name), name)
    return FolderTemplates({}, "")


def _named(given: Any, file: str) -> dict[str, str]:
    """Return the templates by name in a value of `chat_template`: one template, or a list of `name` and `template`."""
    listed = [{"name": "default", "template": given}] if isinstance(given, str) else given
    rule = "one template, or a list of `name` and `template`, is expected."
    if not isinstance(listed, list):
        raise UserError(f"{file} has `chat_template` of a wrong type, {type(given).__name__}: {rule}")
    named: dict[str, str] = {}
    for entry in listed:
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str) or not _FILE_NAME.fullmatch(name):
            raise UserError(f"{file} has `chat_template` with the entry {str(entry)[:100]}: {rule}")
        if name in named:
            raise UserError(f"{file} has two chat templates of the name `{name}`: keep the right one.")
        if len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise UserError(f"{file} has a chat template `{name}` of more than {MAX_TEMPLATE_BYTES} bytes.")
        named[name] = template
    return named


def other_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a `transformers` or tokenizer folder by name, without the default one. An imported run
    keeps them in `original.json`, and a run tuned from it in `other_templates.json`. Raises a UserError if a file is
    not readable, or does not contain templates."""
    named = read_templates(folder).others
    for file in (_ORIGINAL_FILE, _OTHERS_FILE):
        kept = read_json(folder / file).get("templates") if (folder / file).exists() else None
        if kept is not None and not isinstance(kept, dict):
            raise UserError(
                f"{folder / file} has `templates` of a wrong type, {type(kept).__name__}: names are expected."
            )
        named |= _named([{"name": name, "template": source} for name, source in (kept or {}).items()], file)
    named.pop("default", None)
    return named


def find_other_templates(config: TokenizerConfig) -> dict[str, str]:
    """Return the templates, except the default one, of the folder in `config.path`; an empty mapping if `config` names
    a template, or its path is not a folder. Raises a UserError for the reasons of `other_templates`."""
    folder = _template_folder(config)
    return {} if folder is None or config.chat_template is not None else other_templates(folder)


def save_other_templates(named: Mapping[str, str], tokenizer_folder: Path) -> None:
    """Write a run's templates other than the default, if any, to its tokenizer folder; exports write them again."""
    if named:
        write_whole(tokenizer_folder / _OTHERS_FILE, json.dumps({"templates": named}, indent=1) + "\n")


_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Pattern of a valid template name, which exports use as a file name."""


def find_chat_template(config: TokenizerConfig) -> str | None:
    """Return the source of the chat template that a recipe's tokenizer section names, or else of the template in the
    tokenizer's folder; None if there is none. Raises a UserError if neither a built-in template nor a file has the name
    given, or for the reasons of `read_templates`."""
    if config.chat_template is None:
        return None if (folder := _template_folder(config)) is None else read_templates(folder).default
    if config.chat_template in BUILT_IN:
        return BUILT_IN[config.chat_template]
    file = Path(config.chat_template).expanduser()
    if not file.exists():
        hint = did_you_mean(config.chat_template, BUILT_IN)
        raise UserError(
            f"tokenizer.chat_template={config.chat_template}: neither a file nor one of {', '.join(BUILT_IN)}{hint}"
        )
    return read_text(file, MAX_TEMPLATE_BYTES)


def _template_folder(config: TokenizerConfig) -> Path | None:
    """Return the folder of the tokenizer that a recipe names; None if the recipe names no folder."""
    path = config.path if isinstance(config, FileTokenizer | GPT2Tokenizer) else None
    return path.expanduser() if path is not None and path.expanduser().is_dir() else None


def save_chat_template(template: ChatTemplate, tokenizer_folder: Path) -> None:
    write_whole(tokenizer_folder / TEMPLATE_FILE, template.source)
