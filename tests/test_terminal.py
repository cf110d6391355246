"""Text of models, files and names: no command lets it control the terminal."""

import ast
import os
import pty
import re
import select
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

import chats
import commands
import gptworks
from gptworks import terminal
from gptworks.recipe import parse_recipe
from gptworks.training.loop import train

HOSTILE = "\x1b]52;c;aGk=\x07\x1b[2J\x1b[31m\x9b5m\x9d0;x\x9c\u202e\u2066\x7f\x08\x00x"
"""OSC 52 (the clipboard), CSI, the same by C1 characters, characters that turn directions."""
NAME = "e\x1b]52;c;aGk=\x07\x1b[2J\x9b5m\u202e[bold][link=x]"
"""Of a folder: no zero byte, no slash."""
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[2K|\x1b\[[0-9]*A|\x1b\[\?25[lh]|\r")
"""What rich writes itself: styles and the lines of its bars. The names and texts of these tests have other ones."""


def test_control_characters_become_visible_and_other_text_stays() -> None:
    for code in [*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066, 0x200F, 0x061C, 0xD800]:
        assert terminal.clean(f"a{chr(code)}b") == "a\ufffdb", hex(code)
    plain = "a\tb\nc é 漢字 👍🏽 \u00a0 – עברית العربية"
    assert terminal.clean(plain) == plain


class Terminal:
    """A stream that is a terminal."""

    def __init__(self) -> None:
        self.text, self.encoding, self.errors = "", "utf-8", "strict"

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("markup", ["[bold]x[/bold]", "[link=https://x.org]y[/link]", "[/]", ":smile:", "[red"])
def test_a_console_cleans_text_and_takes_no_markup(markup: str) -> None:
    stream = Terminal()
    console = terminal.Console(file=stream, force_terminal=True, width=200)
    table = Table(HOSTILE, title=HOSTILE + markup)
    table.add_row(HOSTILE + markup)
    table.add_row(Text(HOSTILE, style="bold"))
    console.print(table, HOSTILE, markup)
    assert markup in stream.text
    assert not set("\x1b\x07\x9b\x9d\x9c\u202e\u2066\x7f\x08\0") & set(
        OURS.sub("", stream.text).replace("\x1b[", "", 0)
    )


def test_the_guard_cleans_what_anyone_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, pipe = Terminal(), Terminal()
    pipe.isatty = lambda: False  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", pipe)
    terminal.guard()
    terminal.guard()  # twice is once
    print(HOSTILE)
    sys.stdout.writelines([HOSTILE])
    print(HOSTILE, file=sys.stderr)
    assert terminal.clean(HOSTILE) in stream.text and not set("\x1b\x9b\x07\u202e") & set(stream.text)
    assert pipe.text == HOSTILE + "\n", "what is no terminal gets the text as it is"
    assert not hasattr(sys.stdout, "buffer")
    terminal.Console().print("x", style="bold")
    assert stream.text.endswith("\x1b[1mx\x1b[0m\n"), "rich's own styles arrive"


def test_no_other_console_is_made() -> None:
    root = Path(gptworks.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
                found |= {path.relative_to(root).as_posix() for one in node.names if one.name == "Console"}
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.__stdout__", "sys.__stderr__"))
    typed = {
        "describe/sheet.py",
        "runs/compare.py",
        "runs/compare_evaluations.py",
        "cli/printing.py",
        "training/record/display.py",
    }
    assert found <= typed, found


# ------------------------------------------------------------------------------------------------- every command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose folder, texts, tokens, prompts and samples are hostile."""
    root = tmp_path_factory.mktemp("terminal")
    texts = root / "texts"
    texts.mkdir()
    text = HOSTILE.replace("\0", "")
    (texts / "text.txt").write_text(f"line {text} and {text}\n" * 400, encoding="utf-8")
    tree = chats.base_tree(texts, max_steps=4, evaluate_every=2, checkpoint_every=4, sample_every=2)
    tree["run_dir"] = str(root / NAME)
    tree["tokenizer"] = {"type": "char"}
    tree["train"]["sample_prompts"] = [text]
    tree["data"] |= {"cache_dir": str(root / "data"), "sources": [{"type": "text", "path": str(texts / "text.txt")}]}
    train(parse_recipe(tree))
    shutil.copytree(root / NAME, root / f"{NAME}2")
    return root


def on_terminal(*arguments: str, cwd: Path, typed: str = "") -> str:
    """Return what a command writes if standard output and error are a terminal."""
    leader, follower = pty.openpty()
    process = commands.start("-m", "gptworks", *arguments, cwd=cwd, stdin=_Of(follower), stdout=_Of(follower),
                             stderr=_Of(follower))  # fmt: skip
    os.close(follower)
    if typed:
        os.write(leader, typed.encode())
    data = b""
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        while True:
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    part = os.read(leader, 65536)
                except OSError:  # the other end is closed
                    break
                if not part:
                    break
                data += part
            elif process.poll() is not None:
                break
            elif typed:  # the end was typed ahead, and the line editor may have dropped it when it began
                os.write(leader, b"\x04")
        process.wait()
    finally:
        timer.cancel()
        os.close(leader)
    return data.decode("utf-8", "surrogateescape")


class _Of:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


RUN, OTHER = NAME, f"{NAME}2"
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", RUN, HOSTILE.replace("\0", "")[:20], "--max-tokens", "60"),
    "generate samples": ("generate", RUN, "line", "--samples", "2", "--max-tokens", "40"),
    "generate json": ("generate", RUN, "line", "--json", "--max-tokens", "40"),
    "chat": ("chat", RUN, "--max-tokens", "40"),
    "compare": ("compare", RUN, OTHER),
    "compare evaluations": ("compare", RUN, OTHER, "--evaluations"),
    "report": ("report", RUN),
    "describe": ("describe", RUN),
    "plan": ("plan", RUN),
    "evaluate": ("evaluate", RUN),
    "inspect": ("inspect", RUN),
    "resume": ("train", RUN, "--resume", "train.max_steps=6"),
    "fork": ("fork", RUN, f"{NAME}3", "--step", "4"),
    "quantize": ("quantize", RUN, f"{NAME}4"),
    "export": ("export", RUN, f"{NAME}5"),
    "import": ("import", RUN, f"{NAME}6"),
    "data show": ("data", "show", RUN, "--step", "1"),
    "data info": ("data", "info", RUN),
    "data search": ("data", "search", RUN, "line"),
    "sweep": ("sweep", RUN),
    "no such run": ("generate", f"{NAME}none", "x"),
    "no such setting": ("train", RUN, f"train.{NAME}=1"),
    "no such option": ("generate", RUN, f"--{NAME}"),
    "too many": ("report", RUN, NAME),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="folders of such names, and a terminal that is read to its end")
@pytest.mark.parametrize("which", COMMANDS)
def test_no_command_passes_on_what_drives_a_terminal(which: str, folder: Path) -> None:
    shown = on_terminal(*COMMANDS[which], cwd=folder, typed="hello\n\x04" if which == "chat" else "")
    assert shown.strip(), "it says something"
    rest = OURS.sub("", shown)
    for sign in "\x1b\x07\x9b\x9c\x9d\u202e\u2066\x7f\0":
        assert sign not in rest, (sign, rest[max(0, rest.find(sign) - 200) : rest.find(sign) + 100])


def test_a_pipe_receives_the_generated_text_unchanged(folder: Path) -> None:
    arguments = ("-m", "gptworks", "generate", NAME, "line \x1b]52;c;aGk=\x07", "--max-tokens", "5")
    for more in ((), ("--samples", "2")):
        done = commands.run(*arguments, *more, cwd=folder)
        assert "line \x1b]52;c;aGk=\x07" in done.stdout, done.stderr


def test_a_traceback_is_cleaned_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"from gptworks import cli; cli.app = lambda: {{}}[{HOSTILE!r}[:9] + 'x']; cli.main()"
    leader, follower = pty.openpty()
    process: Any = commands.start("-c", program, stderr=_Of(follower),
                                  stdout=_Of(follower), stdin=_Of(follower))  # fmt: skip
    os.close(follower)
    process.wait()
    data = os.read(leader, 65536).decode()
    os.close(leader)
    assert "KeyError" in data or "Error" in data
    assert "\x1b" not in OURS.sub("", data)
