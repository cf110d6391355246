"""Read the words of subtitles."""

import re
from pathlib import Path

from gptworks.data.sources.encodings import find_encoding, open_text
from gptworks.data.sources.opening import read_bounded
from gptworks.errors import UserError

MOST_BYTES = 1 << 24
"""Maximum bytes of a file of subtitles."""
_TIMES = re.compile(r"(\d+:)?\d+:\d+[.,]\d+ +--> ")
_MARKUP = re.compile(r"<[^<>\n]{0,100}>|\{\\[^{}\n]{0,100}\}")


def spoken_text(file: Path) -> str:
    """Return the words of subtitles (SubRip or WebVTT), without numbers, times and markup. Raises UserError if the file
    is too large, is not text, or has no subtitles."""
    with open_text(file, find_encoding(file).name) as stream:
        data = read_bounded(stream, MOST_BYTES, f"{file}: ", "subtitles")
    spoken: list[str] = []
    for block in re.split(r"\n[ \t]*\n", data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")):
        lines = block.strip("\n").split("\n")
        at = next((n for n, line in enumerate(lines[:2]) if _TIMES.match(line)), None)
        if at is not None:
            spoken += lines[at + 1 :]
    if not spoken:
        raise UserError(f"{file}: no line has the times of subtitles (00:01:02,345 --> …). Get it again.")
    return "\n".join(filter(None, (_MARKUP.sub("", line).strip() for line in spoken)))
