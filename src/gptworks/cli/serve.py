"""Commands that serve models and the studio: serve, studio."""

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
from gptworks.cli.generate import drafter_of, load_engine
from gptworks.cli.printing import notice
from gptworks.errors import UserError, not_installed
from gptworks.files import write_whole

if TYPE_CHECKING:
    from gptworks.infer.engine import Engine
    from gptworks.serve.sign_in import SignIn


def serve(
    run: Annotated[Path | None, Argument(metavar="RUN", help="A run folder, whose name the model gets.")] = None,
    *,
    model: Annotated[list[str] | None, Option(metavar="NAME=RUN", help="A further model; repeatable.")] = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    api_key: options.ApiKeys = None,
    cors_origin: Annotated[
        list[str] | None,
        Option(
            metavar="ORIGIN",
            help="Let web pages of this origin call the server, such as http://localhost:3000; repeatable.",
        ),
    ] = None,
    slots: Annotated[int, Option(min=1, max=1024, help="Texts generated at once, for each model.")] = 32,
    context: options.Context = None,
    max_waiting: Annotated[int, Option(min=1, help="Texts that may wait for a slot; more get 429.")] = 128,
    client_share: Annotated[float, Option(help="Most slots for one client, as a share; 1 behind a proxy.")] = 0.8,
    max_body_bytes: Annotated[int, Option(min=1, help="Most bytes of a request.")] = 1 << 20,
    max_prompt_bytes: Annotated[int, Option(min=1, help="Most bytes of a prompt's text.")] = 1 << 18,
    request_seconds: Annotated[float, Option(help="Time limit of a request.")] = 600,
    drain_seconds: Annotated[float, Option(help="Time to finish requests after SIGTERM.")] = 30,
    speculative: options.Speculative = 0,
    loading: options.EngineOptions,
) -> None:
    """Serve models through an OpenAI-compatible API.

    Offers completions, chat and embeddings.
    """
    runs = _runs(run, model or [])
    from gptworks.units import readable

    try:
        from gptworks.serve.log import logged_to_stderr
        from gptworks.serve.models import check_name
        from gptworks.serve.server import make_server
        from gptworks.serve.settings import ServerSettings
        from gptworks.studio.app import create_served
    except ModuleNotFoundError as error:
        raise not_installed(error.name or "a package", "serve", "serving") from None
    keys, local = options.without_environment(api_key), is_loopback(host)
    settings = ServerSettings(
        api_keys=keys, cors_origins=tuple(cors_origin or ()), local_names_only=local and not keys,
        max_waiting=max_waiting, max_body_bytes=max_body_bytes, max_prompt_bytes=max_prompt_bytes,
        request_seconds=request_seconds, drain_seconds=drain_seconds, client_share=client_share,
    )  # fmt: skip
    for name in runs:
        check_name(name)
    engines: dict[str, Engine] = {}
    promised_bytes = 0
    for name, folder in runs.items():
        notice(f"loading {name} from {folder}")
        drafter = drafter_of(folder, speculative, None, loading)
        engine = load_engine(folder, loading, n_slots=slots, slot_tokens=context, drafter=drafter)
        cache_bytes = engine.warm_up(promised_bytes=promised_bytes)
        notice(f"{slots} slots of {engine.context:,} tokens: {readable(cache_bytes, 'B')} of keys and values when full")
        notice(f"computed by {engine.backend_description}; weights in {engine.weights}")
        engines[name], promised_bytes = engine, promised_bytes + cache_bytes
    if not local and not keys:
        notice(f"warning: anyone who reaches {host} can use this server; --api-key asks for a key.")

    def started(actual_port: int) -> None:
        notice(f"serving {', '.join(engines)} at http://{shown_host(host)}:{actual_port}/v1 (Ctrl-C ends)")

    app = create_served(engines, settings, runs)
    try:
        with logged_to_stderr():
            make_server(app, host, port, started).run()
    finally:
        notice(app.state.service.summary())


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


def _runs(run: Path | None, named: list[str]) -> dict[str, Path]:
    """Return the run folders by the names of their models."""
    runs: dict[str, Path] = {}
    pairs = [] if run is None else [(run.resolve().name, run)]
    for pair in named:
        name, equals, folder = pair.partition("=")
        if not equals or not folder:
            raise UserError(f"--model {pair}: it must be NAME=RUN, such as small=runs/demo.")
        pairs.append((name, Path(folder)))
    for name, path in pairs:
        if name in runs:
            raise UserError(f"two models are named {name}: give one another name with --model NAME=RUN.")
        runs[name] = path
    if not runs:
        raise UserError("no run is given: gptworks serve RUN, or --model NAME=RUN.")
    return runs


def shown_host(host: str) -> str:
    """Return a host in the form that URLs require: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at the host."""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ------------------------------------------------------------------------------------ the link that signs a browser in


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
    """Return whether a browser can open a window. Otherwise, a text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
