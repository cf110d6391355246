"""The command that serves the studio: studio."""

import os
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.printing import notice
from gptworks.cli.serve import is_loopback, shown_host
from gptworks.errors import not_installed
from gptworks.files import write_whole

if TYPE_CHECKING:
    from gptworks.serve.sign_in import SignIn


def studio(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUNS",
            help="Run folders, or folders that contain some. Default: ./runs, which the first run makes.",
            callback=options.fetched_paths,
        ),
    ] = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 7860,
    api_key: options.ApiKeys = None,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Open the page in a browser.")] = True,
    read_only: Annotated[bool, Option("--read-only", help="Start nothing and write nothing.")] = False,
    at_once: Annotated[int, Option(min=1, help="Runs that the page may train at once.")] = 1,
    backend: options.Backend = "auto",
    device: options.Device = "auto",
) -> None:
    """Use and inspect your runs on a page in the browser.

    The runs may still be training: the studio loads a checkpoint when you ask for it. The command prints a link that
    signs one browser in, and prints a new link after its use.
    """
    try:
        from gptworks.serve.log import logged_to_stderr
        from gptworks.serve.server import make_server
        from gptworks.serve.settings import ServerSettings
        from gptworks.studio.app import create_studio
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "a package", "studio", "the studio") from None
    local, keys = is_loopback(host), options.without_environment(api_key)
    settings = ServerSettings(api_keys=keys, local_names_only=local and not keys, client_share=1.0)
    app = create_studio(runs or [], settings, device=device, backend=backend, read_only=read_only, runs_at_once=at_once)
    if (missing := app.state.studio.library.missing) is not None:
        notice(f"there is no folder {missing} here yet: the first run that you start on the page makes it.")
    with ExitStack() as stack:

        def started(actual_port: int) -> None:
            address = f"http://{shown_host(host)}:{actual_port}/"
            stack.enter_context(_invitations(app.state.service.sign_in, address, open_browser and has_display()))

        stack.enter_context(logged_to_stderr())
        make_server(app, host, port, started).run()


@contextmanager
def _invitations(sign_in: "SignIn", address: str, opens: bool) -> "Iterator[None]":
    """Give the owner links that each sign one browser in: on the terminal, or in a file that only the owner can read.
    A browser is opened with the file's name, not the link, because every user can read a process's arguments."""
    is_terminal = sys.stderr.isatty()
    with TemporaryDirectory(prefix="gptworks-studio-") as folder:  # the folder has mode 0700
        page = Path(folder) / "open.html"

        def invite(again: bool) -> None:
            if is_terminal:
                shown.add(code := sign_in.code())
                what = "another browser is signed in by" if again else "the studio is at"
                notice(f"{what} {address}#code={code} (for one browser{'' if again else '; Ctrl-C ends'})")
            if not is_terminal or (opens and not again):
                filed.add(code := sign_in.code())
                write_whole(page, _page_of(f"{address}#code={code}"), private=True)
            if not is_terminal and not again:
                notice(f"the studio is at {address} (Ctrl-C ends). Open {page} in a browser to sign in; or enter an "
                       f"API key there: GPTWORKS_API_KEY sets it.")  # fmt: skip

        def exchanged(code: str) -> None:
            if code in filed and is_terminal:
                page.unlink(missing_ok=True)
            if code in shown or (code in filed and not is_terminal):
                invite(again=True)

        shown: set[str] = set()
        filed: set[str] = set()
        sign_in.on_exchange = exchanged
        invite(again=False)
        if opens:
            threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield


def _page_of(link: str) -> str:
    """Return an HTML page that redirects to a link of the studio without sending a referrer."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0; url={link}"><title>gptworks studio</title>'
        f'<a href="{link}">Open the studio</a></html>\n'
    )


def has_display() -> bool:
    """Return whether a browser can open a window; a text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
