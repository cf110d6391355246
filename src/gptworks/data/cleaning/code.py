"""Filters for code: drop files that teach a model little, and remove licences from the beginning of files."""

import re
from collections.abc import Iterator

from gptworks.config.cleaning import CodeTables, GeneratedCode, LicenceHeaders, MinifiedCode
from gptworks.data.cleaning.base import Filter, RuleFilter, ratio

_HEAD_CHARACTERS = 4096
_GENERATED = re.compile(
    r"do not (?:edit|modify)|\bauto-? ?generated|automatically generated|generated automatically|@generated"
    r"|\b(?:file|code|module|parser|source|codec \S{1,80}) (?:(?:is|was|has been) )?generated\b",
    re.IGNORECASE,
)


class GeneratedFilter(RuleFilter):
    """Drops files whose first lines say that a program generated the file, as in the data of Codex (Chen et al. 2021)
    and StarCoder (Li et al. 2023)."""

    settings: GeneratedCode

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        lines = text[:_HEAD_CHARACTERS].split("\n", self.settings.lines)[: self.settings.lines]
        yield "generated", _GENERATED.search("\n".join(lines)) is not None


# The pattern matches in linear time: no branch backtracks, and at most two begin with the same character.
_DATA_LINE = re.compile(
    r"""
    [ \t]*+ (?![rRbBuU]?(?:\"\"\"|'''))
    (?:
        [rRbBuU]?(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')
      | 0[xX][0-9a-fA-F_]++ [uUlL]*+
      | [0-9][0-9_.]*+ (?:[eE][+-]?[0-9]++)?+ [jJfFlLuU]*+
      | (?:None|True|False|null|NULL|true|false)\b
      | [][(){},:;+*.|&~^<>=/%\s-]
    )++
    (?: \#.* )?+
    """,
    re.VERBOSE,
)
_LITERAL = re.compile(r"[\"'0-9]")


class TableFilter(RuleFilter):
    """Drops files in which at least `min_lines` lines are data, and these lines have more than the share `max_data` of
    all characters. A line of data has only literals (numbers, strings and their separators), perhaps with a comment; a
    line of only brackets is not data. White space at the ends of lines does not count."""

    settings: CodeTables

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        data = total = data_lines = 0
        for raw in text.split("\n"):
            line = raw.strip()
            total += len(line)
            if line and _DATA_LINE.fullmatch(line) and _LITERAL.search(line):
                data += len(line)
                data_lines += 1
        yield "table", data_lines >= self.settings.min_lines and ratio(data, total) > self.settings.max_data


class MinifiedFilter(RuleFilter):
    """Drops files with a line of more than 1,000 characters, with more than 100 characters per line, or with less than
    a quarter letters and digits (Chen et al. 2021; Kocetkov et al. 2022); these limits are settings. Bytes outside
    ASCII count as letters."""

    settings: MinifiedCode

    def rules(self, text: str) -> Iterator[tuple[str, bool]]:
        rules, lengths = self.settings, [*map(len, text.split("\n"))]
        yield "long line", max(lengths) > rules.max_line_characters
        yield "long lines on average", sum(lengths) / len(lengths) > rules.max_mean_line_characters
        data = text.encode("utf-8", "surrogatepass")
        letters = data.translate(None, _NOT_ALPHANUMERIC)
        yield "few letters", ratio(len(letters), len(data)) < rules.min_alphanumeric


_NOT_ALPHANUMERIC = bytes(code for code in range(128) if not chr(code).isalnum())

_FIRST_LINE = re.compile(r"(?:#!.*\n)?(?:#.{0,100}coding[:=].*\n)?")
_COMMENT = re.compile(
    r"""\s*+(?:
        (?: [ \t]*+ (?:\#(?![A-Za-z])|//|--|;|%) .*+ (?:\n|\Z) )++
      | /\* (?:[^*]|\*(?!/))*+ \*/
      | <!-- (?:[^-]|-(?!->))*+ -->
    )""",
    re.VERBOSE,
)
_LICENCE = re.compile(
    r"copyright|licen[sc]e|all rights reserved|spdx-|permission is hereby granted|redistribution and use", re.IGNORECASE
)


class LicenceFilter(Filter):
    """Removes licence and copyright comments from the beginning of a file. Keeps a `#!` line, a line that states the
    encoding, and other comments."""

    settings: LicenceHeaders

    def apply(self, text: str) -> str:
        first = _FIRST_LINE.match(text)
        assert first is not None  # the pattern matches any text, even an empty one
        kept, at, removed = [text[: first.end()]], first.end(), False
        while comment := _COMMENT.match(text, at):
            if _LICENCE.search(comment[0]):
                removed = True
            else:
                kept.append(comment[0])
            at = comment.end()
        return "".join(kept) + text[at:].lstrip("\n") if removed else text
