"""`gptworks chat` at a terminal: read lines and commands, and print answers."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from gptworks.errors import RunError, UserError, nearest
from gptworks.files import replacing_by_name
from gptworks.infer.chat import ChatSession
from gptworks.infer.sampling import SamplingSettings
from gptworks.terminal import clean
from gptworks.training.signals import stop_signals
from gptworks.units import counted

HELP = """\
/retry            another answer to your last text
/edit [TEXT]      your last text again: on its own line to be changed, or TEXT instead of it
/system [TEXT]    another system message from now on; without TEXT, none
/temperature [X]  0 takes the likeliest token; without X, say what it is
/save FILE.jsonl  add the conversation to a file of conversations, which training reads too
/load FILE.jsonl  continue the last conversation of such a file
/reset            forget the conversation
/help             this list
/quit             end, as Ctrl-D does
Several lines: begin with three double quotes, end with three. Arrow keys bring back what you have typed.
A text that begins with / is a command; begin with a space to send it. Ctrl-C stops an answer and keeps the chat."""

BLOCK = '"""'
MOST_HISTORY_LINES, MOST_HISTORY_BYTES = 1000, 1 << 20


class Terminal:
    """Input and output of a chat. At a terminal, typed lines can be edited with arrow keys and have a history."""

    def __init__(self) -> None:
        self._readline: Any = None
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):  # Windows has no readline
                import readline

                self._readline = readline

    def __enter__(self) -> Self:
        """Load the lines typed in earlier chats."""
        if self._readline is not None and (file := history_file()) is not None:
            with contextlib.suppress(OSError):
                if file.is_file() and file.stat().st_size <= MOST_HISTORY_BYTES:
                    self._readline.read_history_file(file)
        return self

    def __exit__(self, *_: object) -> None:
        """Save the newest lines in a file that only its owner can read."""
        if self._readline is not None and (file := history_file()) is not None:
            self._readline.set_history_length(MOST_HISTORY_LINES)
            with contextlib.suppress(OSError, RunError, UserError), replacing_by_name(file, private=True) as aside:
                self._readline.write_history_file(aside)

    def read(self, prompt: str, prefilled: str = "") -> str:
        """Return a line that the user types, starting from `prefilled`.

        Raises:
            EOFError: the input has ended.
        """
        readline = self._readline
        if readline is not None and prefilled:
            readline.set_startup_hook(lambda: readline.insert_text(prefilled))
        try:
            return input(prompt)
        finally:
            if readline is not None:
                readline.set_startup_hook()

    def write(self, text: str) -> None:
        """Print part of an answer."""
        sys.stdout.write(clean(text))
        sys.stdout.flush()

    def remark(self, text: str) -> None:
        """Print a message of the program on stderr."""
        sys.stderr.write(f"{clean(text)}\n")
        sys.stderr.flush()


def history_file() -> Path | None:
    """Return the path gptworks/chat_history in $XDG_STATE_HOME or ~/.local/state; None without a home folder."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not Path(base).is_absolute():  # the XDG specification requires absolute paths
        try:
            base = str(Path.home() / ".local" / "state")
        except RuntimeError:
            return None
    return Path(base) / "gptworks" / "chat_history"


class Talk:
    """A conversation at a terminal, which runs until the user ends it."""

    def __init__(self, session: ChatSession, terminal: Terminal) -> None:
        self.session, self.terminal = session, terminal
        self._commands: dict[str, Callable[[str], object]] = {
            "retry": self._retry, "edit": self._edit, "system": self._system, "temperature": self._temperature,
            "save": self._save, "load": self._load, "reset": lambda _: session.reset(),
            "help": lambda _: terminal.remark(HELP),
        }  # fmt: skip

    def run(self) -> None:
        """Read texts and answer them until /quit or the end of the input."""
        while True:
            try:
                if not self.take(self._read()):
                    return
            except EOFError:
                self.terminal.write("\n")
                return
            except KeyboardInterrupt:  # Ctrl-C at the prompt drops the line
                self.terminal.write("\n")

    def take(self, typed: str) -> bool:
        """Execute a command, or send a text; return whether the conversation continues."""
        command = re.fullmatch(r"/(\w+)(?:\s+(.*))?\s*", typed)
        try:
            if command is None:
                self._answer(self.session.send(typed[1:] if typed.startswith(" /") else typed))
            elif command[1] in ("quit", "exit"):
                return False
            elif command[1] in self._commands:
                self._commands[command[1]]((command[2] or "").strip())
            else:
                near = nearest(command[1], self._commands)
                hint = f"did you mean /{near}?" if near else "/help lists them."
                self.terminal.remark(f"there is no /{command[1]}: {hint}")
        except UserError as error:
            self.terminal.remark(f"error: {error}")
        return True

    def _read(self) -> str:
        """Return a line that the user typed, or the lines between two marks of three double quotes."""
        line = self.terminal.read("> ")
        if not line.startswith(BLOCK):
            return line
        lines = [line.removeprefix(BLOCK)]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self.terminal.read("… "))
        text = "\n".join([*lines[:-1], lines[-1].rstrip().removesuffix(BLOCK)]).strip("\n")
        return f" {text}" if text.startswith("/") else text

    def _answer(self, parts: Iterator[str]) -> None:
        """Print an answer as it is generated, until it ends or Ctrl-C is pressed; then print its length and speed.

        The first Ctrl-C only sets a flag, so that the engine finishes its step. A second Ctrl-C interrupts the step.
        """
        session = self.session
        with stop_signals([signal.SIGINT]) as interrupted:
            for part in parts:
                self.terminal.write(part)
                if interrupted():
                    break
        self.terminal.write("\n")
        pace = session.pace
        rate = "" if pace.tokens_per_second is None else f", {pace.tokens_per_second:.3g} tokens/s"
        why = {"length": f"; --max-tokens {session.settings.max_tokens}", "context": "; the context is full"}
        end = "; stopped" if interrupted() else why.get(session.finish_reason or "", "")
        full = f"; no longer read: the first {session.forgotten}" if session.forgotten else ""
        self.terminal.remark(f"({counted(pace.n_tokens, 'token')}{rate}{end}{full})")

    def _retry(self, _: str) -> None:
        self._answer(self.session.send(self.session.take_back()))

    def _edit(self, text: str) -> None:
        if text := text or self.terminal.read("> ", self.session.last_text):
            self.session.take_back()
            self._answer(self.session.send(text))

    def _system(self, text: str) -> None:
        self.session.set_system(text)
        self.terminal.remark("the system message is changed" if text else "there is no system message now")

    def _temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                raise UserError(f"/temperature {text}: give a number, such as 0.7.") from None
            self.session.settings = SamplingSettings.of(self.session.settings, temperature=value)
        self.terminal.remark(f"temperature {self.session.settings.temperature:g}")

    def _save(self, name: str) -> None:
        n = self.session.save(_file("save", name))
        self.terminal.remark(f"added {n} messages to {name}")

    def _load(self, name: str) -> None:
        n = self.session.load(_file("load", name))
        question, answer = (message["content"][-2000:] for message in self.session.said[-2:])
        self.terminal.remark(f"continuing the {n} messages of {name}, which end with:")
        self.terminal.write(f"> {question}\n{answer}\n")


def _file(command: str, name: str) -> Path:
    if not name:
        raise UserError(f"/{command} needs a file, such as /{command} chat.jsonl.")
    return Path(name).expanduser()
