"""What settings are made of, and what each one decides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

MOST_NAME_CHARACTERS = 200
"""Of a name that becomes a folder: systems allow 255 bytes."""
MOST_PATH_CHARACTERS = 4096


def _short(path: Any) -> Any:
    if isinstance(path, str | Path) and len(str(path)) > MOST_PATH_CHARACTERS:
        raise ValueError(f"a path of {len(str(path)):,} characters; it may have {MOST_PATH_CHARACTERS:,}")
    return path


# Bounds that no real run reaches: they keep a slip of the keyboard from costing hours or all memory.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
ShortPath = Annotated[
    Path,
    BeforeValidator(_short),
    WithJsonSchema({"type": "string", "format": "path", "maxLength": MOST_PATH_CHARACTERS}),
]
PositiveTime = Annotated[float, Field(gt=0, le=10**9)]
"""30 years in seconds; what waits for longer cannot be asked of the system."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


_INNER = {"schema", "fields", "choices", "items_schema", "keys_schema", "values_schema", "lax_schema", "strict_schema",
          "json_schema", "python_schema", "steps"}  # fmt: skip
"""Where a part of a core schema holds further ones."""
_TIGHTER: dict[str, Callable[[Any, Any], Any]] = {
    "le": min, "lt": min, "max_length": min, "ge": max, "gt": max, "min_length": max
}  # fmt: skip


def _tightest(metadata: list[Any]) -> list[Any]:
    """A field's metadata with one bound of each kind."""
    found: dict[str, Any] = {}
    for one in metadata:
        for name, tighter in _TIGHTER.items():
            if hasattr(one, name):
                best = found.setdefault(name, one)
                found[name] = one if tighter(getattr(one, name), getattr(best, name)) != getattr(best, name) else best
    kept = {id(one) for one in found.values()}
    return [one for one in metadata if id(one) in kept or not any(hasattr(one, name) for name in _TIGHTER)]


class Bounded(BaseModel):
    """A model whose every number, text and list is bounded, at any depth, and whose JSON schema states the bounds.

    What declares no bound gets the class's. Of a bound that is declared twice, in a type and in `Field`, the tighter
    counts; pydantic would take the last.
    """

    most_number: ClassVar[int] = 10**15
    """In size, of a number: what is computed from one stays a finite number."""
    most_characters: ClassVar[int] = 100_000
    """Of a text."""
    most_items: ClassVar[int] = 10_000
    """Of a list or a mapping."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        for field in cls.__pydantic_fields__.values():
            field.metadata = _tightest(field.metadata)
        schema = handler(source)
        cls._bound(handler.resolve_ref_schema(schema))
        return schema

    @classmethod
    def _bound(cls, part: Any) -> None:
        """Bound what is not bounded yet, in a part of a core schema."""
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
    """A frozen group of settings that accepts only the keys it knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def derived(name: str, function: Callable[[Any], Any] = lambda value: value) -> Any:
    """A default computed from a field declared earlier."""
    return lambda data: function(data[name])


# --------------------------------------------------------------------------------------------- what a setting decides


class Role(Enum):
    """What a setting decides: whether a resumed run may change it, and which runs may be compared.

    Each setting declares its role beside its type: `batch_size: Steering[PositiveInt]`.
    """

    MEASURED = "measured"
    """What the validation loss is measured on, or in: losses of runs that differ here are not comparable."""
    FIXED = "fixed"
    """The weights, the optimizer's state or the order of the samples, from the first step on."""
    STEERING = "steering"
    """The loss curve from here on. A resumed run may change it, and the run folder records the change."""
    START = "start"
    """Where the run started from. Changing the path of a run that has started changes nothing."""
    REPEAT = "repeat"
    """What tells repeats of an experiment apart, or follows from other settings."""
    FREE = "free"
    """Nothing but rounding, place, time and what is written down."""

    @property
    def on_resume(self) -> Literal["refused", "recorded", "allowed"]:
        """What happens when a resumed run changes the setting. `recorded`: the loss curve depends on the change."""
        if self in (Role.MEASURED, Role.FIXED, Role.REPEAT):
            return "refused"
        return "recorded" if self is Role.STEERING else "allowed"

    @property
    def words(self) -> str:
        """What the setting decides, in words."""
        return {
            Role.MEASURED: "it decides what the validation loss measures",
            Role.FIXED: "the weights, the optimizer's state or the order of the samples depend on it",
            Role.STEERING: "the loss curve depends on it",
            Role.START: "it says where the run started from",
            Role.REPEAT: "the weights and the order of the samples depend on it",
            Role.FREE: "nothing that is learned depends on it",
        }[self]

    @property
    def decides_curve(self) -> bool:
        """Whether the loss curve depends on the setting, beyond rounding and the noise between seeds."""
        return self not in (Role.REPEAT, Role.FREE)

    @property
    def decides_measure(self) -> bool:
        """Whether runs that differ in the setting measure different things, so that their losses cannot be compared."""
        return self is Role.MEASURED


class Place(Enum):
    """What a setting names outside of its recipe: who takes recipes of others asks for each whether it may be read.

    Each setting that names a place says so: `path: Free[Annotated[str, Place.PATH]]`.
    """

    PATH = "path"
    """A file or a folder; a pattern of such names."""
    URL = "url"
    DATASET = "dataset"
    """A dataset of the Hugging Face hub, or a folder."""
    TEMPLATE = "template"
    """The name of a chat template, or a file."""
    CODE = "code"
    """A file of Python, which is run."""


T = TypeVar("T")
Measured = Annotated[T, Role.MEASURED]
Fixed = Annotated[T, Role.FIXED]
Steering = Annotated[T, Role.STEERING]
Start = Annotated[T, Role.START]
Repeat = Annotated[T, Role.REPEAT]
Free = Annotated[T, Role.FREE]


@dataclass(frozen=True)
class Setting:
    """One setting of a recipe."""

    path: str
    """As an override names it, such as `train.batch_size` or `data.sources.0.path`."""
    value: Any
    role: Role
    place: Place | None = None


def settings(section: Section, path: str = "") -> Iterator[Setting]:
    """Every setting of a section and of the sections inside it, in the order of declaration.

    An optional section that is absent is one setting whose value is None.
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
    """The role of the setting at a path, or of the one that a path such as `train.betas.0` lies within.

    Raises:
        KeyError: the section has no such setting.
    """
    roles = {setting.path: setting.role for setting in settings(section)}
    place = path
    while place not in roles:
        place = place.rpartition(".")[0]
        if not place:
            raise KeyError(path)
    return roles[place]
