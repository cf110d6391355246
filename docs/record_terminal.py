"""Record commands in a terminal, and draw the recording as an animated SVG.

    pip install pyte    # a terminal emulator
    python docs/record_terminal.py record demo.cast "gptworks train demo" "gptworks generate runs/demo …"
    python docs/record_terminal.py draw demo.cast docs/images/demo.svg

The recording is an asciinema v2 cast, which asciinema can play too; its markers show where a command starts and ends.
The drawing has no script: CSS shows each line of text from the moment it was written until it changed. A command that
takes much longer than --most seconds is played faster, with a caption that states the speed. A pause without output is
cut to a second.
"""

import argparse
import codecs
import json
import os
import pty
import shlex
import subprocess
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import pyte

COLUMNS, ROWS = 100, 28
PROMPT = "\x1b[1m$\x1b[0m "
KEY_SECONDS, PAUSE_SECONDS = 0.04, 1.0
"""Pauses between two typed characters, and before a command is typed."""

FRAME_SECONDS, LAST_SECONDS = 0.125, 6.0
"""Minimum time between two states of the drawing, and time for which the last state stays."""

WAIT_SECONDS = 1.0
"""The longest pause between two outputs that the drawing keeps."""

CELL, LINE, MARGIN, BAR = 8.4, 18, 18, 36
"""Width and height of a character, margin around the text, and height of the bar above the text, in pixels."""

GROUND, INK, MUTED = "#16181d", "#e9eaec", "#9aa1ac"
COLOURS = {
    "black": "5c6370",
    "red": "e8796c",
    "green": "9ac46b",
    "brown": "dca74f",
    "blue": "97a7f0",
    "magenta": "e786b2",
    "cyan": "5cc0af",
    "white": "e9eaec",
}
"""Hex values of the colours that pyte gives by name; it gives other colours as hex values."""


class Event(NamedTuple):
    """One line of a cast. A marker's text is the command that starts there; it is empty where a command ends."""

    seconds: float
    kind: str  # o for output, m for a marker
    text: str


class Moment(NamedTuple):
    """An event, the time at which the drawing shows it, and the speed at which the drawing plays what follows."""

    seconds: float
    event: Event
    faster: float


@dataclass(frozen=True)
class Line:
    """One state of a line of the whole output, numbered from its first line. It is visible until `end`; None: it
    stays."""

    number: int
    svg: str
    start: float
    end: float | None


class Roll(pyte.Screen):
    """A screen that counts the lines that have left it at the top."""

    n_left = 0

    def index(self) -> None:
        self.n_left += self.cursor.y == self.lines - 1
        super().index()


def record(commands: list[str]) -> Iterator[Event]:
    """Type each command at a prompt and run it; yield the events."""
    started = time.monotonic()

    def event(kind: str, text: str) -> Event:
        return Event(round(time.monotonic() - started, 3), kind, text)

    for command in commands:
        yield event("o", PROMPT)
        time.sleep(PAUSE_SECONDS)
        for key in command:
            yield event("o", key)
            time.sleep(KEY_SECONDS)
        yield event("o", "\r\n")
        yield event("m", command)
        for text in output(command):
            yield event("o", text)
        yield event("m", "")
    yield event("o", PROMPT)


def output(command: str) -> Iterator[str]:
    """Yield the text that a command writes to its own pseudo-terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process = subprocess.Popen(
        shlex.split(command), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux raises this when no process has the other end open
            break
        if not data:
            break
        yield decoder.decode(data)
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command!r} ended with status {process.returncode}; the end of the recording shows why")


def timed(events: list[Event], most: float) -> list[Moment]:
    """Return the moment at which each event is shown; no command is shown for much longer than `most` seconds."""
    ends = iter([event.seconds for event in events if event.kind == "m" and not event.text])
    moments = []
    now, last, faster = 0.0, 0.0, 1.0
    for event in events:
        now, last = now + min((event.seconds - last) / faster, WAIT_SECONDS), event.seconds
        if event.kind == "m":
            ratio = (next(ends) - event.seconds) / most if event.text else 0.0
            faster = ratio if ratio > 1.5 else 1.0
        moments.append(Moment(now, event, faster))
    return moments


def shown(moments: list[Moment]) -> tuple[list[Line], list[tuple[float, int]]]:
    """Return all states of lines ever shown, and each time at which lines left the screen, with their number so far."""
    screen = Roll(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    current: dict[int, tuple[str, float]] = {}
    gone, left = [], [(0.0, 0)]
    for moment, following in pairwise([*moments, Moment(float("inf"), moments[-1].event, 1.0)]):
        if moment.event.kind == "o":
            stream.feed(moment.event.text)
        if following.seconds // FRAME_SECONDS == moment.seconds // FRAME_SECONDS:
            continue
        if screen.n_left != left[-1][1]:
            left.append((moment.seconds, screen.n_left))
        for y in range(ROWS):
            number, svg = screen.n_left + y, line_svg([screen.buffer[y][x] for x in range(COLUMNS)])
            before, since = current.get(number, ("", 0.0))
            if svg != before:
                gone.append(Line(number, before, since, moment.seconds))
                current[number] = (svg, moment.seconds)
    stay = [Line(number, svg, since, None) for number, (svg, since) in current.items()]
    return [line for line in gone + stay if line.svg], left


def line_svg(characters: list[pyte.screens.Char]) -> str:
    """Return a line's text with its colours and width, as the end of a <text> element; empty for an empty line."""
    length = len("".join(c.data for c in characters).rstrip())
    if not length:
        return ""
    spans = []
    for (name, bold), run in groupby(characters[:length], lambda c: (c.fg, c.bold)):
        text = escape("".join(c.data for c in run), quote=False)
        fill = "" if name == "default" else f' fill="#{COLOURS.get(name.removeprefix("bright"), name)}"'
        weight = ' class="b"' if bold else ""
        spans.append(f"<tspan{fill}{weight}>{text}</tspan>" if fill or weight else text)
    return f'textLength="{length * CELL:.1f}">{"".join(spans)}</text>'


def to_svg(moments: list[Moment]) -> str:
    """Return the recording as an SVG that CSS animates; with prefers-reduced-motion, it shows the last state."""
    total = moments[-1].seconds + LAST_SECONDS
    lines, left = shown(moments)
    names: dict[tuple[float, float | None], str] = {}

    def visible(start: float, end: float | None) -> str:
        name = names.setdefault((start, end), f"k{len(names)}")
        return f'class="{name}"' if end is None else f'class="{name}" visibility="hidden"'

    def keyframe(seconds: float, rule: str) -> str:
        return f"{100 * seconds / total:.2f}%{{{rule}}}"

    captions = [
        f'<text x="{MARGIN + COLUMNS * CELL}" y="24" text-anchor="end" fill="{MUTED}" '
        f"{visible(start.seconds, end.seconds)}>played {start.faster:.0f} × as fast</text>"
        for start, end in pairwise(moment for moment in moments if moment.event.kind == "m")
        if start.faster > 1
    ]
    texts = [f'<text y="{line.number * LINE + 14}" {visible(line.start, line.end)} {line.svg}' for line in lines]
    rules = [
        f"text,g{{animation:{total:.2f}s step-end infinite;white-space:pre}}.b{{font-weight:bold}}",
        f".roll{{animation-name:roll;transform:translateY({-left[-1][1] * LINE}px)}}",
        "@keyframes roll{" + "".join(keyframe(at, f"transform:translateY({-n * LINE}px)") for at, n in left) + "}",
        "@media (prefers-reduced-motion:reduce){text,g{animation:none!important}}",
    ]
    for (start, end), name in names.items():
        before = "0%{visibility:hidden}" if start else ""
        after = "" if end is None else keyframe(end, "visibility:hidden")
        rules.append(f".{name}{{animation-name:{name}}}@keyframes {name}{{{before}")
        rules[-1] += keyframe(start, "visibility:visible") + after + "}"
    width, height = COLUMNS * CELL + 2 * MARGIN, ROWS * LINE + BAR + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"',
        f'height="{height}" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"',
        f'font-size="14" fill="{INK}">',
        f'<style>{"".join(rules)}</style><rect width="100%" height="100%" rx="10" fill="{GROUND}"/>',
        *captions,
        f'<svg x="{MARGIN}" y="{BAR}" width="{COLUMNS * CELL}" height="{ROWS * LINE}"><g class="roll">',
        *texts,
        "</g></svg></svg>\n",
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(required=True, dest="action")
    recording = actions.add_parser("record", help="run commands and keep what they write")
    recording.add_argument("cast", type=Path)
    recording.add_argument("commands", nargs="+")
    drawing = actions.add_parser("draw", help="draw a recording")
    drawing.add_argument("cast", type=Path)
    drawing.add_argument("svg", type=Path)
    drawing.add_argument("--most", type=float, default=12.0, help="seconds for which a command is shown, about")
    arguments = parser.parse_args()
    if arguments.action == "record":
        with arguments.cast.open("w", encoding="utf-8") as file:
            header = {"version": 2, "width": COLUMNS, "height": ROWS, "timestamp": int(time.time())}
            for row in chain([header], record(arguments.commands)):
                print(json.dumps(row), file=file, flush=True)
    else:
        rows = arguments.cast.read_text(encoding="utf-8").splitlines()[1:]
        events = [Event(*json.loads(row)) for row in rows]
        arguments.svg.write_text(to_svg(timed(events, arguments.most)), encoding="utf-8")


if __name__ == "__main__":
    main()
