"""The server's settings: access, and limits of size and time."""

from dataclasses import dataclass

from gptworks.errors import UserError

MAX_TEXTS = 128
"""Maximum number of texts of one request: prompts times continuations. Each text has its own copy of its prompt."""
MAX_LOGPROB_NUMBERS = 1 << 20
"""Maximum number of log-probabilities in an answer: tokens times (1 + alternatives). In a streamed answer, only unread
tokens count. Each log-probability takes about 220 bytes of memory."""
MAX_WATCHING, MAX_WATCHING_EACH = 64, 32
"""Maximum number of streams that keep open pages up to date: of all clients, and of one client."""
MAX_SCHEMA_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Access to the server, and its limits.

    Raises:
        UserError: a number is not above 0 or is absurdly large, `client_share` is above 1, or an API key is empty or
            has characters that a header cannot have.
    """

    api_keys: tuple[str, ...] = ()
    """API keys; every request needs one, except for the guard's open paths such as /health. Empty: no key is needed."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the server; `*`: all origins."""
    local_names_only: bool = True
    """Answer only requests whose Host is localhost, a subdomain of localhost or a loopback address; /health always
    answers. A web page whose domain name was redirected to this machine after loading (DNS rebinding) sends another
    Host. Use this with a loopback address and no API keys."""
    max_waiting: int = 128
    """Maximum number of texts that wait for a slot of one model; further requests are answered with 429."""
    max_logprob_numbers: int = 1 << 21
    """Maximum log-probabilities in all unfinished answers together; see MAX_LOGPROB_NUMBERS."""
    client_share: float = 0.8
    """Maximum share of the slots, of the queue and of `max_logprob_numbers` that one client may use. A client is an API
    key, or an address if no keys are needed. 1: no limit, for use behind a proxy."""
    max_schemas: int = 16
    """Maximum number of schemas that wait or are being compiled (two at a time); further requests get a 429."""
    max_schemas_each: int = 4
    """Maximum number of one client's schemas that wait or are being compiled."""
    max_body_bytes: int = 1 << 20
    max_prompt_bytes: int = 1 << 18
    """Maximum bytes of a prompt's text, checked before the text is tokenized."""
    max_bodies_bytes: int = 1 << 26
    """Maximum total bytes of the request bodies that are being read."""
    max_header_bytes: int = 1 << 15
    """Maximum bytes of a request's first line and headers."""
    max_discarded_bytes: int = 1 << 24
    """Maximum bytes of a refused body to read and drop. Many clients read the answer only after sending the body."""
    max_connections: int = 1024
    max_pipelined: int = 8
    """Maximum number of requests that a connection may send while an earlier request is being answered."""
    max_unread_pieces: int = 1024
    """Maximum number of a request's unread tokens, per text of the request; with more, the request is cancelled."""
    header_seconds: float = 10.0
    """Maximum time for a request's headers to arrive."""
    body_seconds: float = 20.0
    request_seconds: float = 600.0
    """Maximum time from a request's last byte to the end of its answer."""
    stall_seconds: float = 20.0
    """Maximum time for which a client may leave the connection's buffers full."""
    keep_alive_seconds: int = 15
    drain_seconds: float = 30.0
    """Maximum time for requests to finish after a first signal, such as SIGTERM, or after an engine has failed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = 10**9 if name.endswith("_seconds") else 10**15
            if isinstance(value, int | float) and not isinstance(value, bool) and not 0 < value <= most:
                raise UserError(f"{name}={value}: it must be above 0 and at most {most:,}.")
        if self.client_share > 1:
            raise UserError(f"client_share={self.client_share}: it must be at most 1, which means no limit.")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UserError(
                    "an API key is empty or has characters that a header cannot carry: use letters, digits, - and _"
                )
