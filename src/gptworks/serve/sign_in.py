"""Access to the page: a one-time code, which only its owner sees, is exchanged for a session.

A session has two random values, and a request needs both. The cookie is hidden from scripts, but browsers send it to
every port of the host, so also to servers of other users of this machine. The page's own scripts keep the key, for this
address and port only.
"""

import secrets
from collections.abc import Callable
from hashlib import sha256
from hmac import compare_digest
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

MOST = 64
"""Most unused codes, and most sessions; the oldest are dropped."""
PATH = "/studio/sign-in"
_MOST_COOKIES = 200
"""Most cookies of a request that are tried: more than a browser keeps for a host."""


class Session(NamedTuple):
    """The two values that a browser gets for a code."""

    cookie: str
    key: str


class SignIn:
    """Codes and sessions, in memory only. Thread-safe."""

    def __init__(self) -> None:
        self.on_exchange: Callable[[str], None] = lambda code: None
        """Function that is called with each code that was used."""
        self._codes: dict[bytes, str] = {}
        self._sessions: dict[bytes, bytes] = {}  # digest of a cookie → digest of its key

    def code(self) -> str:
        """A new one-time code, for one browser."""
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = code
        _keep_newest(self._codes)
        return code

    def exchange(self, code: str) -> Session | None:
        """A session for a single-use code; None if the code is unknown or already used."""
        known = self._codes.pop(_digest(code), None)
        if known is None:
            return None
        session = Session(secrets.token_urlsafe(24), secrets.token_urlsafe(24))
        self._sessions[_digest(session.cookie)] = _digest(session.key)
        _keep_newest(self._sessions)
        self.on_exchange(known)
        return session

    def knows(self, cookie: str, key: str) -> bool:
        """Whether a cookie and a key belong to the same session."""
        expected = self._sessions.get(_digest(cookie))
        return expected is not None and compare_digest(expected, _digest(key))


def cookie_name(scope: Scope) -> str:
    """The session cookie's name for a request. It contains the port, since all ports of a host share cookies: the port
    of the browser's address, which may be forwarded to another."""
    host = Headers(scope=scope).get("host", "")
    port = host.rpartition(":")[2] if ":" in host and not host.endswith("]") else "80"
    return f"gptworks-{port if port.isdecimal() and port.isascii() else (scope.get('server') or ('', 0))[1]}"


def cookies_of(scope: Scope, name: str) -> list[str]:
    """The values of all cookies of this name in a request: other servers of the host may have set some too."""
    lines = Headers(scope=scope).getlist("cookie")
    pairs = [part.strip().partition("=") for line in lines for part in line.split(";")]
    return [value for found, _, value in pairs if found == name][:_MOST_COOKIES]


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _keep_newest(found: dict[bytes, str] | dict[bytes, bytes]) -> None:
    for digest in list(found)[:-MOST]:
        found.pop(digest, None)
