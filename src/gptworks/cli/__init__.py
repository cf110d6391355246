"""The command line. Each command is a function that imports its dependencies when it runs."""

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer
from typer import Option

from gptworks import __version__
from gptworks.cli import compare, convert, data, design, draft, evaluate, generate, inspect, judge, serve, train
from gptworks.cli.help import Command, Group
from gptworks.cli.options import expanded
from gptworks.cli.printing import notice, say
from gptworks.errors import RunError, UserError
from gptworks.terminal import guard

app = typer.Typer(
    name="gptworks",
    cls=Group,
    help="Design, plan, train, evaluate and run your own GPT-family language models.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Design": (
        *(design.presets, design.recipes, design.devices, draft.init),
        *(design.describe, design.plan, design.schema),
    ),
    "Train": (draft.tune, inspect.inspect, design.rehearse, train.train, train.launch, train.fork, compare.sweep),
    "Measure and compare": (evaluate.evaluate, compare.report, compare.compare, compare.try_, judge.judge),
    "Use": (generate.generate, generate.chat, serve.serve, serve.studio),
    "Convert": (convert.export, convert.quantize, convert.import_),
}
"""Commands by their heading in the help."""

for heading, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__.strip("_"), cls=Command, rich_help_panel=heading)(expanded(command))
app.add_typer(data.app, name="data", rich_help_panel="Train")


class _Notices(logging.Handler):
    """Prints log messages on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        notice(record.getMessage())


def main() -> None:
    """Run a command. For a user's mistake or a failure, print a message and exit with an error code."""
    _open_standard_streams()
    _print_any_text()
    if sys.stderr.isatty():
        log = logging.getLogger("gptworks.kernels")
        log.setLevel(logging.INFO)
        log.addHandler(_Notices())
    guard()
    warnings.showwarning = lambda message, *_: notice(f"warning: {message}")
    try:
        app()
    except (UserError, RunError) as error:
        _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader of the output closed the pipe
        sys.stderr.close()
        sys.exit(1)
    except UnicodeDecodeError as error:  # in standard input: for files, other code reports this error
        _fail(f"the input is not {sys.stdin.encoding} text ({error.reason}): convert it, or set PYTHONIOENCODING.", 2)
    except OSError as error:
        _fail(f"{error.filename or 'input/output'}: {error.strerror or error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream. Otherwise the next opened file would get the stream's descriptor,
    and with it all text that a library prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: `number`
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def _print_any_text() -> None:
    """Make stdout and stderr print ? for characters that their encoding lacks, instead of failing. On Windows, let
    files and pipes use UTF-8 instead of a code page, unless PYTHONIOENCODING is set."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_windows_file = sys.platform == "win32" and not stream.isatty()
            stream.reconfigure(
                encoding="utf-8" if is_windows_file and "PYTHONIOENCODING" not in os.environ else None,
                errors="replace",
            )


def _fail(message: str, code: int) -> None:
    for line in message.splitlines():
        notice(f"error: {line}")
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, Option("--version", help="Print the version.")] = False) -> None:
    if version:
        say(__version__)
        raise typer.Exit
