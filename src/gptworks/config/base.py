"""Base classes and types of settings: bounds, sections, roles and places."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

from gptworks.errors import UserError
from gptworks.files import is_url, mirror_of, shown

MOST_NAME_CHARACTERS = 200
"""Maximum length of a name that becomes a folder's name; file systems allow 255 bytes."""
MOST_PATH_CHARACTERS = 4096


def _short(path: Any) -> Any:
    if isinstance(path, str | Path) and len(str(path)) > MOST_PATH_CHARACTERS:
        raise ValueError(f"a path of {len(str(path)):,} characters; it may have {MOST_PATH_CHARACTERS:,}")
    if isinstance(path, str | Path) and is_url(path):
        raise ValueError(
            f"{path} is a URL, which only run_dir, initialize_from, objective.teacher, the path of a source and the "
            f"dataset of a mixture may be: give a path on this machine"
        )
    return path


def _mirrored(path: Any) -> Any:
    try:
        return mirror_of(path) if isinstance(path, str | Path) and is_url(path) else path
    except UserError as error:
        raise ValueError(str(error)) from None


# The bounds below exceed every real run; they catch typos that would cost hours or all memory.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
ShortPath = Annotated[
    Path,
    BeforeValidator(_short),
    WithJsonSchema({"type": "string", "format": "path", "maxLength": MOST_PATH_CHARACTERS}),
]
RemotePath = Annotated[ShortPath, BeforeValidator(_mirrored), PlainSerializer(shown, when_used="json")]
"""A local folder, or the URL of a folder in an object store. Validation replaces a URL by the path of its local mirror;
JSON has the URL."""
PositiveTime = Annotated[float, Field(gt=0, le=10**9)]
"""Seconds or minutes, at most 10⁹: 10⁹ seconds are 30 years, and systems refuse longer timeouts."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(max_length=MOST_NAME_CHARACTERS, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


_INNER = {"schema", "fields", "choices", "items_schema", "keys_schema", "values_schema", "lax_schema", "strict_schema",
          "json_schema", "python_schema", "steps"}  # fmt: skip
"""Keys of a pydantic core schema whose values contain schemas."""
_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
    "le": min, "lt": min, "max_length": min, "ge": max, "gt": max, "min_length": max
}  # fmt: skip


def _tightest(metadata: list[Any]) -> list[Any]:
    """Return a field's metadata with only the tightest bound of each kind."""
    found: dict[str, Any] = {}
    for one in metadata:
        for name, tighter in _TIGHTER.items():
            if hasattr(one, name):
                best = found.setdefault(name, one)
                found[name] = one if tighter(getattr(one, name), getattr(best, name)) != getattr(best, name) else best
    kept = {id(one) for one in found.values()}
    return [one for one in metadata if id(one) in kept or not any(hasattr(one, name) for name in _TIGHTER)]


class Bounded(BaseModel):
    """A pydantic model in which every number, text and list has a bound, at any depth and in the JSON schema too.

    Types without a bound get the bounds of this class. If a type and its `Field` both declare a bound, the tighter one
    applies; pydantic alone would apply the last one.
    """

    most_number: ClassVar[int] = 10**15
    """Largest absolute value of a number, so that results computed from it stay finite."""
    most_characters: ClassVar[int] = 100_000
    """Largest number of characters in a text."""
    most_items: ClassVar[int] = 10_000
    """Largest number of items in a list or mapping."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for field in cls.__pydantic_fields__.values():
            field.metadata = _tightest(field.metadata)
        schema = handler(source)
        cls._bound(handler.resolve_ref_schema(schema))
        return schema

    @classmethod
    def _bound(cls, part: Any) -> None:
        """Add missing bounds to a part of a pydantic core schema, in place."""
        if isinstance(part, list | tuple):
            for inner in part:
                cls._bound(inner)
        if not isinstance(part, dict):
            return
        kind = part.get("type")
        if kind in ("int", "float"):
            if not {"le", "lt"} & part.keys():
                part["le"] = cls.most_number
            if not {"ge", "gt"} & part.keys():
                part["ge"] = -cls.most_number
        elif kind == "str":
            part.setdefault("max_length", cls.most_characters)
        elif kind in ("list", "dict") or (kind == "tuple" and "variadic_item_index" in part):
            part.setdefault("max_length", cls.most_items)
        for name in _INNER & part.keys():
            by_name = name in ("fields", "choices") and isinstance(part[name], dict)
            cls._bound([*part[name].values()] if by_name else part[name])


class Section(Bounded):
    """A frozen group of settings that accepts only known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    removed: ClassVar[Mapping[str, Any]] = {}
    """Settings that were removed because experiments showed no gain, with the values that turned them off: recipes in
    run folders of earlier versions have these values."""

    @model_validator(mode="before")
    @classmethod
    def _drop_removed(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping) or not (found := cls.removed.keys() & settings.keys()):
            return settings
        for name in found:
            if settings[name] != cls.removed[name]:
                raise ValueError(f"{name} was removed, because experiments showed no gain from it: delete the key")
        return {name: value for name, value in settings.items() if name not in found}

    def _at_most(self, name: str, limit: str, fix: str) -> None:
        """Raise a ValueError, which ends with `fix`, if the setting `name` is more than the setting `limit`."""
        value, most = getattr(self, name), getattr(self, limit)
        if value is not None and value > most:
            raise ValueError(f"{name}={value} is more than {limit}={most}: {fix}")

    def _multiple(self, name: str, divisor: str, fix: str) -> None:
        """Raise a ValueError, which ends with `fix`, if the setting `name` is not a multiple of `divisor`."""
        value, part = getattr(self, name), getattr(self, divisor)
        if value % part:
            raise ValueError(f"{name}={value} is not a multiple of {divisor}={part}: {fix}")


def derived(name: str, function: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a default factory that applies `function` to the value of `name`, a field declared earlier."""
    return lambda data: function(data[name])


# ------------------------------------------------------------------------------------------------ roles and places


class Role(Enum):
    """A setting's role: whether a resumed run may change it, and whether runs that differ in it are comparable.

    Each setting declares its role with its type: `batch_size: Steering[PositiveInt]`. Messages quote the values below.
    """

    MEASURED = "it decides what the validation loss measures"
    """The setting decides the data or unit of the validation loss: runs that differ in it have incomparable losses."""
    FIXED = "the weights, the optimizer's state or the order of the samples depend on it"
    """The setting decides the weights, the optimizer's state or the order of samples from the first step on."""
    STEERING = "the loss curve depends on it"
    """The setting decides the loss curve. A resumed run may change it if asked to (`--change`); the run folder records
    the change."""
    START = "it says where the run started from"
    """The setting decides where the run starts. Changing it after the first step has no effect."""
    REPEAT = "the weights and the order of the samples depend on it"
    """The setting distinguishes repetitions of an experiment, like the seed, or follows from other settings."""
    FREE = "nothing that is learned depends on it"
    """Nothing that is learned depends on the setting, apart from rounding: it decides, for example, where and how fast
    the run computes, what it records, or when it gives up."""

    @property
    def on_resume(self) -> Literal["refused", "recorded", "allowed"]:
        """How a resumed run treats a changed value of the setting. `recorded` means that the change is allowed if
        asked for (`--change`), and that the run folder records it."""
        if self in (Role.MEASURED, Role.FIXED, Role.REPEAT):
            return "refused"
        return "recorded" if self is Role.STEERING else "allowed"

    @property
    def decides_curve(self) -> bool:
        """Whether the loss curve depends on the setting, beyond rounding and noise between seeds."""
        return self not in (Role.REPEAT, Role.FREE)

    @property
    def decides_measure(self) -> bool:
        """Whether runs that differ in the setting have incomparable losses."""
        return self is Role.MEASURED


class Place(Enum):
    """The kind of outside resource that a setting names. Programs that run other people's recipes must check these
    resources.

    A setting declares its place with its type: `path: Free[Annotated[str, Place.PATH]]`.
    """

    PATH = "path"
    """A file, a folder or a glob pattern."""
    URL = "url"
    DATASET = "dataset"
    """The name of a dataset on the Hugging Face hub, or a folder."""
    TEMPLATE = "template"
    """The name of a chat template, or a file."""
    CODE = "code"
    """A Python file, which training executes."""


T = TypeVar("T")
Measured = Annotated[T, Role.MEASURED]
Fixed = Annotated[T, Role.FIXED]
Steering = Annotated[T, Role.STEERING]
Start = Annotated[T, Role.START]
Repeat = Annotated[T, Role.REPEAT]
Free = Annotated[T, Role.FREE]


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe, with its value."""

    path: str
    """Path of the setting as an override names it, such as `train.batch_size` or `data.sources.0.path`."""
    value: Any
    role: Role
    place: Place | None = None


def settings(section: Section, path: str = "") -> Iterator[Setting]:
    """Yield every setting of a section and its inner sections, in order of declaration.

    An optional section that is not set counts as one setting with the value None.
    """
    for name, field in type(section).model_fields.items():
        value, where = getattr(section, name), f"{path}.{name}" if path else name
        if isinstance(value, Section):
            yield from settings(value, where)
        elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
            for index, item in enumerate(value):
                yield from settings(item, f"{where}.{index}")
        else:
            [role] = [item for item in field.metadata if isinstance(item, Role)]
            yield Setting(where, value, role, next((item for item in field.metadata if isinstance(item, Place)), None))


def role_of(section: Section, path: str) -> Role:
    """Return the role of the setting at a path, which may lead into its value, such as `train.betas.0`. Raises KeyError
    if no setting has this path."""
    roles = {setting.path: setting.role for setting in settings(section)}
    place = path
    while place not in roles:
        place = place.rpartition(".")[0]
        if not place:
            raise KeyError(path)
    return roles[place]
