"""Task files: a YAML file with the settings of a task, and a JSONL file with its items.

    type: multiple_choice          # or exact_match, generation, code
    data: capitals.jsonl           # next to this file
    prompt: "Question: {{question}}\\nAnswer:"
    choices: options               # a field's name, a template, or a list of templates
    answer: answer
    shots: 3

A setting whose value differs by item, such as `answer`, is the name of a field or a Jinja template of the item's
fields.
"""

import hashlib
import json
import random
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from gptworks.config import PositiveInt, PositiveTime, Section, ShortPath
from gptworks.config.sampling import sampling
from gptworks.confined import expressions
from gptworks.data.sources.records import read_jsonl
from gptworks.errors import UserError, did_you_mean, shortened
from gptworks.files import read_given
from gptworks.recipe import parse_section
from gptworks.units import whole_number
from gptworks.yaml_files import MAX_BYTES, parse_yaml

Item = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=10**9)]
TextMetric = Literal["bleu", "chrf", "rouge1", "rouge2", "rougeL"]


class TaskFile(Section):
    """Settings common to all tasks."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="What results are called. Default: the file's name.")
    data: ShortPath = Field(description="A JSONL file, an item a line.")
    prompt: str = Field(
        description="The text that the model continues. Empty, for multiple_choice: the choices are whole texts."
    )
    description: str = Field("", description="Text before everything else.")
    delimiter: str = Field(" ", description="Between a prompt and its answer.")
    shots: Count = Field(0, description="Solved items shown before each one.")
    shots_data: ShortPath | None = Field(None, description="JSONL that the shots are from. None: the other items.")
    shots_separator: str = Field("\n\n", description="After each shot.")
    seed: int = Field(0, ge=0, lt=2**32, description="Decides which items are the shots.")
    limit: PositiveInt | None = Field(None, description="Ask only this many items, from the first. None: all.")


class Sampled(Section):
    """Settings for generating a task's answers."""

    max_tokens: PositiveInt = Field(64, description="Most tokens of an answer.")
    stop: tuple[str, ...] = Field(("\n",), description="An answer ends before the first of these.")
    temperature: Annotated[float, sampling("temperature")] = 0.0
    top_p: Annotated[float, sampling("top_p")] = 1.0


class MultipleChoice(TaskFile):
    """Multiple choice: score whether the right choice is the most probable choice, in total, per token and per byte. In
    a tie of n choices, the right choice counts 1/n."""

    type: Literal["multiple_choice"]
    choices: str | tuple[str, ...] = Field(
        description="The field with an item's choices, or a template, or a list of templates."
    )
    answer: str = Field("answer", description="The right choice: its index from 0, or its text.")


class ExactMatch(TaskFile):
    """Exact match: score whether the model's text equals one of the answers, ignoring white space at the ends."""

    type: Literal["exact_match"]
    answer: str = Field("answer", description="A text, or a list of them of which any is right.")
    generation: Sampled = Field(Sampled(), description="How answers are generated.")
    extract: str | None = Field(
        None,
        max_length=expressions.MAX_EXPRESSION_CHARACTERS,
        description="A regular expression: its first group, where found, is the answer.",
    )
    ignore_case: bool = Field(False, description="Compare without regard to case.")
    ignore_punctuation: bool = Field(False, description="Compare without ASCII punctuation.")

    @model_validator(mode="after")
    def _compiles(self) -> "ExactMatch":
        try:
            if self.extract is not None and re.compile(self.extract).groups < 1:
                raise ValueError(f"extract={self.extract!r} has no group: put the answer's part in parentheses.")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"extract={self.extract!r} is not a regular expression: {error}.") from None
        return self


class Generation(TaskFile):
    """Generation: score the similarity of the model's text to reference texts."""

    type: Literal["generation"]
    references: str = Field("reference", description="A text, or a list of them.")
    generation: Sampled = Field(Sampled(), description="How texts are generated.")
    metrics: tuple[TextMetric, ...] = Field(
        ("bleu", "chrf", "rouge1", "rouge2", "rougeL"), description="Measures of similarity."
    )


class Code(TaskFile):
    """Code: score whether the model's programs pass their tests, as pass@k (Chen et al., 2021)."""

    type: Literal["code"]
    tests: str = Field(description="Python that fails where the program is wrong.")
    solution: str = Field("solution", description="A right program, for shots.")
    prompt_is_code: bool = Field(True, description="The prompt is the program's beginning.")
    generation: Sampled = Field(
        Sampled(max_tokens=256, stop=("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint"), temperature=0.2, top_p=0.95),
        description="How programs are generated.",
    )
    samples: PositiveInt = Field(1, description="Programs written for each item.")
    k: tuple[PositiveInt, ...] = Field((1,), description="Values of k in pass@k; at most `samples`.")
    timeout_seconds: PositiveTime = Field(5.0, description="Seconds that a program may take.")
    memory_mib: PositiveInt = Field(512, description="MiB of memory that a program may use.")

    @model_validator(mode="after")
    def _enough_samples(self) -> "Code":
        if max(self.k) > self.samples:
            raise ValueError(f"k={max(self.k)} needs as many samples, and samples={self.samples}.")
        return self


AnyTask = MultipleChoice | ExactMatch | Generation | Code
_TYPES: dict[str, type[AnyTask]] = {
    get_args(section.model_fields["type"].annotation)[0]: section for section in get_args(AnyTask)
}


class Task:
    """A task's settings and items."""

    def __init__(
        self, settings: AnyTask, items: Sequence[Item], shot_items: Sequence[Item] | None, origin: str
    ) -> None:
        """Make a task whose shots (solved examples) come from `shot_items`, or, if None, from the task's other items.
        Raise a UserError if there are fewer items for this than `shots`."""
        self.settings, self.items, self.origin = settings, list(items), origin
        self._own_shots = shot_items is None
        pool = list(items if shot_items is None else shot_items)
        if settings.shots > len(pool) - self._own_shots:
            raise UserError(
                f"{origin}: shots={settings.shots}, and there are {len(pool)} items to take them from"
                f"{', the one that is asked among them' if self._own_shots else ''}. Ask for fewer."
            )
        random.Random(f"shots {settings.seed}").shuffle(pool)
        self._pool = pool
        self._places = {id(item): i for i, item in enumerate(self.items)}
        self._rendered: dict[tuple[int, str], tuple[Item, str | expressions.Fault]] = {}

    def shots_for(self, item: Item) -> list[Item]:
        """Return the shots (solved examples) for an item: the first items of the shuffled pool that differ from the
        item, so that nearly all items have the same shots. There are fewer than `shots` if too many items of the pool
        equal the item.
        """
        return [self._pool[i] for i in self._shot_places(item)]

    def _shot_places(self, item: Item) -> list[int]:
        """Return the indices in the pool of an item's shots."""
        return list(islice((i for i, one in enumerate(self._pool) if one != item), self.settings.shots))

    @property
    def items_asked(self) -> list[Item]:
        return self.items[: self.settings.limit]

    @property
    def fingerprint(self) -> str:
        """A sha256 of everything that determines the questions. Results with equal fingerprints are comparable item by
        item."""
        settings = self.settings.model_dump(mode="json", exclude={"name", "data", "shots_data"})
        n_read = self.settings.shots + 1 if self.settings.shots else 0
        for item in self.items_asked:
            n_read = max([n_read, *(place + 1 for place in self._shot_places(item))])
        tree = [settings, self.items_asked, self._pool[:n_read]]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode("utf-8")).hexdigest()

    def text(self, item: Item, key: str) -> str:
        """Return the value of the setting `key` for an item, as text; see `value`."""
        return str(self.value(item, key))

    def value(self, item: Item, key: str, wanted: str | None = None) -> Any:
        """Return the value of a setting for an item: the field that the setting names, or its template filled in. An
        empty `prompt` stays empty.

        Args:
            wanted: the field name or template. Default: the value of the setting `key`.

        Raises:
            UserError: the item lacks the field, the field is null or a list that holds null, or the template is wrong
                or fails.
        """
        wanted = getattr(self.settings, key) if wanted is None else wanted
        assert isinstance(wanted, str)
        if key == "prompt" and not wanted:
            return ""
        if _is_template(wanted):
            text = self._render(wanted, item)
            if isinstance(text, str):
                return text
            if text.syntax:
                raise UserError(f"{self.origin}: `{key}` is not a template: {text}.")
            raise UserError(f"{self._where(item, key, wanted)}: {text}; its fields are {', '.join(item)}.")
        if wanted not in item:
            hint = did_you_mean(wanted, item, f"; its fields are {', '.join(item)}.")
            raise UserError(f"{self._where(item, key, wanted)}: there is no such field{hint}")
        value = item[wanted]
        if value is None or (isinstance(value, list) and None in value):
            raise UserError(f"{self._where(item, key, wanted)} is null, or holds null. Give a text.")
        return value

    def _render(self, template: str, item: Item) -> str | expressions.Fault:
        """Return a template's text for an item. Render the template for the next items too, and cache all texts."""
        if (id(item), template) not in self._rendered:
            place = self._places.get(id(item))
            near = [item] if place is None else self.items_asked[place : place + expressions.PER_QUESTION] or [item]
            for one, text in zip(near, expressions.render(template, near), strict=True):
                self._rendered[id(one), template] = (one, text)
        return self._rendered[id(item), template][1]

    def texts(self, item: Item, key: str) -> list[str]:
        """Return the value of the setting `key` for an item, as a list of texts; see `value`. Raise a UserError if the
        list is empty."""
        value = self.value(item, key)
        found = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        if not found:
            raise UserError(f"{self._where(item, key, getattr(self.settings, key))}: the list is empty.")
        return found

    def _where(self, item: Item, key: str, wanted: str) -> str:
        return f"{self.origin}: `{key}: {shortened(wanted)!r}`, item {self._number(item)}"

    def choices(self, item: Item) -> list[str]:
        """Return the choices of a multiple-choice item; see `value`. Raise a UserError if there are fewer than two
        choices, or a choice is empty."""
        assert isinstance(self.settings, MultipleChoice)
        wanted = self.settings.choices
        if isinstance(wanted, str):
            found = self.value(item, "choices")
            found = found if isinstance(found, list) else str(found).splitlines()
        else:
            found = [self.value(item, "choices", one) if _is_template(one) else one for one in wanted]
        texts = [str(one) for one in found]
        if len(texts) < 2 or not all(texts):
            raise UserError(
                f"{self.origin}: item {self._number(item)} has the choices {texts}: give two or more texts."
            )
        return texts

    def right_choice(self, item: Item) -> int:
        """Return the index of an item's right choice; see `choices`. Raise a UserError if the answer is neither a
        choice nor the index of a choice."""
        assert isinstance(self.settings, MultipleChoice)
        choices, answer = self.choices(item), self.value(item, "answer")
        if isinstance(answer, str) and answer in choices:
            return choices.index(answer)
        if (index := whole_number(str(answer))) is not None and index < len(choices):
            return index
        raise UserError(
            f"{self.origin}: item {self._number(item)} has the answer {answer!r}: it must be one of the choices "
            f"{choices}, or its index from 0 to {len(choices) - 1}."
        )

    def answer(self, item: Item) -> str:
        """Return the answer that a shot shows after its prompt and the delimiter."""
        if isinstance(self.settings, MultipleChoice):
            return self.choices(item)[self.right_choice(item)]
        if isinstance(self.settings, Code):
            return self.text(item, "solution")
        return self.texts(item, "answer" if isinstance(self.settings, ExactMatch) else "references")[0]

    def turns(self, item: Item, n_shots: int) -> list[tuple[str, str]]:
        """Return pairs of prompt and answer: the last `n_shots` shots (all shots if there are fewer), then the item
        with an empty answer."""
        solved = [(self.text(one, "prompt"), self.answer(one)) for one in self.shots_for(item)]
        return [*solved[max(0, len(solved) - n_shots) :], (self.text(item, "prompt"), "")]

    def prompt(self, item: Item, n_shots: int) -> str:
        """Return the text that the model continues: description, shots, and the item's own prompt."""
        delimiter, separator = self.settings.delimiter, self.settings.shots_separator
        *solved, (question, _) = self.turns(item, n_shots)
        shown = "".join(prompt + delimiter + answer + separator for prompt, answer in solved)
        return self.settings.description + shown + question

    def check(self) -> None:
        """Raise a UserError if the prompt or the answer (or a code task's tests) of an item cannot be rendered."""
        for item in self.items_asked:
            if isinstance(self.settings, Code):
                self.text(item, "tests")
            else:
                self.answer(item)
            self.prompt(item, self.settings.shots)

    def _number(self, item: Item) -> int:
        return self.items.index(item) + 1 if item in self.items else 0


def _is_template(wanted: str) -> bool:
    """Return whether a setting's value is a Jinja template."""
    return "{{" in wanted or "{%" in wanted


def load_task(path: Path, *, shots: int | None = None, limit: int | None = None) -> Task:
    """Load and check the task of a file; `shots` and `limit` override the file's settings. Raise a UserError if a file
    is missing or unreadable, a setting is unknown or wrong, or an item or the number of items does not fit the
    settings."""
    try:
        tree = parse_yaml(read_given(path, MAX_BYTES), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such task file.") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds {type(tree).__name__}, not a mapping with `type`, `data` and `prompt`.")
    kind = str(tree.get("type"))
    if kind not in _TYPES:
        hint = did_you_mean(kind, _TYPES)
        raise UserError(f"{path}: `type` is {tree.get('type')!r}: one of {', '.join(_TYPES)}{hint}")
    changes = {key: value for key, value in (("shots", shots), ("limit", limit)) if value is not None}
    settings = parse_section({"name": path.stem, **tree, **changes}, _TYPES[kind], str(path))
    items = read_items(path.parent / settings.data.expanduser())
    pool = None if settings.shots_data is None else read_items(path.parent / settings.shots_data.expanduser())
    task = Task(settings, items, pool, str(path))
    task.check()
    return task


def read_items(path: Path) -> list[Item]:
    """Read the objects in a JSONL file; raise a UserError if the file is missing or empty, or a line is not a JSON
    object."""
    try:
        items = [dict(item) for _, item in read_jsonl(path)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a task's `data` is a JSONL file, relative to the task's own.") from None
    if not items:
        raise UserError(f"{path} holds no items.")
    return items
