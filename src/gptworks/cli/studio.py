"""gptworks studio."""

import os
import secrets
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from gptworks.cli.common import ApiKeys, Backend, Device, Host, Port, notice
from gptworks.cli.serve import is_loopback, shown_host
from gptworks.errors import UserError, not_installed

DEFAULT_RUNS = Path("runs")


def studio(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUNS", help="Run folders, or folders of them. Default: runs in this folder."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 7860,
    api_key: ApiKeys = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    read_only: Annotated[bool, typer.Option("--read-only", help="Start nothing and write nothing.")] = False,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Runs that the page may train at once.")] = 1,
    backend: Backend = "auto",
    device: Device = "auto",
) -> None:
    """Use your runs, and look into them, on a page in the browser.

    The runs may still be training: a checkpoint is loaded when it is asked for. Where other machines can reach the
    page and no --api-key is given, the address carries a random one.
    """
    if not runs and not DEFAULT_RUNS.is_dir():
        raise UserError("there is no folder runs here: name run folders, or folders of them: gptworks studio RUNS.")
    try:
        from gptworks.serve.log import logged_to_stderr
        from gptworks.serve.server import make_server
        from gptworks.serve.settings import ServerSettings
        from gptworks.studio.app import create_studio
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "a package", "studio", "the studio") from None
    local = is_loopback(host)
    keys = tuple(api_key or ([] if local else [secrets.token_urlsafe(18)]))
    settings = ServerSettings(api_keys=keys, local_names_only=local and not keys, client_share=1.0)
    app = create_studio(
        runs or [DEFAULT_RUNS], settings, device=device, backend=backend, read_only=read_only, runs_at_once=at_once
    )

    def started(actual_port: int) -> None:
        address = f"http://{shown_host(host)}:{actual_port}/" + (f"#token={quote(keys[0], safe='')}" if keys else "")
        notice(f"the studio is at {address} (Ctrl-C ends)")
        if open_browser and has_display():
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    with logged_to_stderr():
        make_server(app, host, port, started).run()


def has_display() -> bool:
    """Whether a browser would have a window; one of text would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
