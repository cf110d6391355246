"""Create the studio's web app: the app of `gptworks serve` with the studio's routes and page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI

from gptworks.choices import BackendName
from gptworks.errors import UserError
from gptworks.infer.engine import Engine
from gptworks.serve.app import create_app
from gptworks.serve.settings import ServerSettings
from gptworks.serve.sign_in import SignIn
from gptworks.studio import data, home, model, page, play, read, runs, start
from gptworks.studio.feed import Feed
from gptworks.studio.library import Library
from gptworks.studio.loaded import Engines
from gptworks.studio.processes import Processes
from gptworks.studio.state import Served, Studio

ROUTERS = [one.router for one in (home, play, runs, read, data, model, start)]
DEFAULT_RUNS = Path("runs")


def create_studio(
    folders: Sequence[Path],
    settings: ServerSettings | None = None,
    *,
    device: str = "auto",
    backend: BackendName = "auto",
    read_only: bool = False,
    runs_at_once: int = 1,
) -> FastAPI:
    """Create the studio's ASGI app for run folders, or folders that contain runs. The state is `app.state.studio`.

    Without folders, the studio uses the folder `runs` in the working folder. The first run creates it if needed.

    Requests need an API key from `settings`, or a session, for which `app.state.service.sign_in` issues codes. Static
    files and the guard's other open paths need neither.

    Args:
        device, backend: the device and the backend that compute the models.
        read_only: whether starting and stopping runs and writing files is forbidden.
        runs_at_once: maximum number of runs that the page may train at the same time.

    Raises:
        UserError: a folder or the device does not exist, or the folder `runs` cannot be used.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder. Give run folders, or a folder of them: gptworks studio runs.")
    folders = folders or [_default_folder(read_only)]
    app = create_app({}, settings, routers=[page.router, *ROUTERS, home.actions, start.actions], home=page.home)
    service, library = app.state.service, Library(folders)
    engines = Engines(service, library, device, backend)
    service.sign_in, service.load = SignIn(), engines.by_name
    feed, processes = Feed(library), Processes(runs_at_once)
    app.state.studio = Studio(service, library, engines, feed, processes, read_only)
    app.state.tries = runs.Tries(feed)
    return app


def _default_folder(read_only: bool) -> Path:
    """Return the folder `runs` in the working folder. It may not exist yet.

    Raises:
        UserError: `runs` is not a folder; or `runs` does not exist, and the working folder is a run or `read_only` is
            set.
    """
    if DEFAULT_RUNS.is_dir():
        return DEFAULT_RUNS
    if DEFAULT_RUNS.exists() or DEFAULT_RUNS.is_symlink():
        raise UserError(f"{DEFAULT_RUNS} is not a folder: rename it, or name folders of runs: gptworks studio RUNS.")
    if Path("recipe.yaml").is_file():
        raise UserError(
            "this folder is a run, and has no folder runs: name it, gptworks studio . (the dot is this folder)."
        )
    if read_only:
        raise UserError("there is no folder runs here, and with --read-only nothing makes it: name folders of runs.")
    return DEFAULT_RUNS


def create_served(
    engines: Mapping[str, Engine], settings: ServerSettings | None = None, runs: Mapping[str, Path] | None = None
) -> FastAPI:
    """Create the app of `gptworks serve`, which shows browsers the Play page.

    Args:
        runs: run folders by model name.
    """
    app = create_app(engines, settings, routers=[page.router, play.router], home=page.home)
    app.state.studio = Served(app.state.service, runs or {})
    return app
