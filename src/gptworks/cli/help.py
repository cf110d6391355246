"""Format help: commands under headings, and values named N, X, TEXT and FILE instead of Python's types."""

import re
from itertools import groupby
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup

_VALUE = re.compile(r"<(?:list\[)?([^\]> ]+)(?: range)?\]?>")
_NAMES = {"int": "N", "float": "X", "str": "TEXT", "path": "FILE"}


def shown_name(name: str) -> str:
    """Return the name of an argument or option, with its value shown as N, X, TEXT or FILE."""
    return _VALUE.sub(lambda match: _NAMES.get(match[1], match[1]), name)


class Command(TyperCommand):
    """A command whose help shows only the names of arguments, without their types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # a prefix that pydantic adds
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                name, text = record
                if parameter.param_type_name == "argument":
                    name = name.partition(" <")[0]
                records[parameter.param_type_name].append((shown_name(name), text))
        for kind, rows in records.items():
            if rows:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """A group of commands, whose help lists each command under a heading."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        order = list(dict.fromkeys(map(_heading, (c for c in self.commands.values() if not isinstance(c, Group)))))
        listed = sorted(self.commands.items(), key=lambda item: order.index(_heading(item[1])))
        for heading, group in groupby(listed, lambda item: _heading(item[1])):
            with formatter.section(heading or "Commands"):
                rows = [(name.ljust(width), one.get_short_help_str(formatter.width - width - 6)) for name, one in group]
                formatter.write_dl(rows)


def _heading(command: Any) -> str | None:
    return getattr(command, "rich_help_panel", None)
