"""Access to the studio's pages: a browser exchanges a one-time code, which only the owner sees, for a session.

A session has two random values, a cookie and a key, and a request needs both. The cookie is hidden from scripts, but
browsers send it to every port of the host, and so to servers of this machine's other users. The key is kept by the
page's own scripts, for this address and port only.
"""

import secrets
from collections.abc import Callable
from hashlib import sha256
from hmac import compare_digest
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

MOST = 64
"""Maximum number of unused codes, and of sessions; the oldest are dropped."""
PATH = "/studio/sign-in"
_MOST_COOKIES = 200
"""Maximum number of a request's cookies that are checked: more than a browser keeps for a host."""


class Session(NamedTuple):
    """The two secrets that a browser gets in exchange for a one-time code."""

    cookie: str
    key: str


class SignIn:
    """Issues and checks one-time codes and sessions, which it holds in memory only. Thread-safe."""

    def __init__(self) -> None:
        self.on_exchange: Callable[[str], None] = lambda code: None
        """A function that is called with each code when it is used."""
        self._codes: dict[bytes, str] = {}
        self._sessions: dict[bytes, bytes] = {}  # digest of a cookie → digest of its key

    def code(self) -> str:
        """Return a new one-time code, for one browser."""
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = code
        _keep_newest(self._codes)
        return code

    def exchange(self, code: str) -> Session | None:
        """Return a new session for a one-time code; None if the code is unknown or already used."""
        known = self._codes.pop(_digest(code), None)
        if known is None:
            return None
        session = Session(secrets.token_urlsafe(24), secrets.token_urlsafe(24))
        self._sessions[_digest(session.cookie)] = _digest(session.key)
        _keep_newest(self._sessions)
        self.on_exchange(known)
        return session

    def knows(self, cookie: str, key: str) -> bool:
        """Return whether a cookie and a key belong to the same session."""
        expected = self._sessions.get(_digest(cookie))
        return expected is not None and compare_digest(expected, _digest(key))


def cookie_name(scope: Scope) -> str:
    """Return the name of the session cookie for a request.

    The name contains the port in the browser's address, because all ports of a host share cookies. This port may be
    forwarded to the server's port.
    """
    host = Headers(scope=scope).get("host", "")
    port = host.rpartition(":")[2] if ":" in host and not host.endswith("]") else "80"
    return f"gptworks-{port if port.isdecimal() and port.isascii() else (scope.get('server') or ('', 0))[1]}"


def cookies_of(scope: Scope, name: str) -> list[str]:
    """Return the values of a request's cookies with this name, at most `_MOST_COOKIES`. Other servers of the host may
    have set cookies with this name too."""
    lines = Headers(scope=scope).getlist("cookie")
    pairs = [part.strip().partition("=") for line in lines for part in line.split(";")]
    return [value for found, _, value in pairs if found == name][:_MOST_COOKIES]


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _keep_newest(found: dict[bytes, str] | dict[bytes, bytes]) -> None:
    for digest in list(found)[:-MOST]:
        found.pop(digest, None)
