"""The command that serves models: serve."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from gptworks.cli import options
from gptworks.cli.generate import drafter_of, load_engine
from gptworks.cli.printing import notice
from gptworks.errors import UserError, not_installed

if TYPE_CHECKING:
    from gptworks.infer.engine import Engine


def serve(
    run: Annotated[Path | None, Argument(metavar="RUN", help="A run folder, whose name the model gets.")] = None,
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
    weights: options.KeptWeights = "auto",
    backend: options.Backend = "auto",
    cache: options.Cache = "auto",
    checkpoint: options.WhichCheckpoint = "best",
    device: options.Device = "auto",
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
        engine = load_engine(
            folder, checkpoint, device, n_slots=slots, slot_tokens=context, backend=backend, cache=cache,
            drafter=drafter_of(folder, speculative, None, device, backend), weights=weights,
        )  # fmt: skip
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
