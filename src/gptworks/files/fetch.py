"""Download by https, from public addresses, with limits of bytes and time, to a file that only its owner may read.

A recipe may come from someone else, and its files are fetched with the rights and from the network of the user. So a
server's name is resolved once, all its addresses are checked, and the connection goes to one of them: the name cannot
lead elsewhere afterwards (DNS rebinding). Each redirect is checked in the same way. A proxy gets the server's name and
resolves it again, unless downloads are `guarded`.
"""

import base64
import contextlib
import http.client
import os
import re
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Literal, cast, get_args
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from gptworks.errors import RunError, UserError
from gptworks.files.disk import naming_disk_errors
from gptworks.files.folder import O_NOFOLLOW
from gptworks.files.lock import file_lock
from gptworks.files.sums import sha256_file
from gptworks.files.write import sync

Reach = Literal["public", "private", "guarded"]
"""Allowed origins of downloads. public: addresses on the internet. private: also an intranet and this machine, and from
this machine also by http. guarded: as public, but an error does not reveal the downloaded bytes."""
REACH = "GPTWORKS_DOWNLOADS"
"""The environment variable that selects a `Reach`; the studio sets it for the runs that it starts."""
CACHE = "GPTWORKS_CACHE"
"""The environment variable that names the folder for downloads and mirrors of object stores."""

MOST_BYTES = 1 << 38
MOST_SECONDS = 2 * 86_400
MOST_REDIRECTS = 5
CONNECT_SECONDS = 30
HEADER_SECONDS = 60
"""Longest wait for the headers of a response."""
SLOW_SECONDS = 60
SLOW_BYTES = 1 << 16
"""A download fails if fewer bytes than this arrive within SLOW_SECONDS."""
_CHUNK_BYTES = 1 << 20
_URL = re.compile(r"[!#-;=?-\[\]_a-z~]{1,4096}")
"""Matches a URL of at most 4,096 characters, with special characters percent-encoded."""
_NAT64 = IPv6Network("64:ff9b::/96")
_NETWORK = (OSError, http.client.HTTPException)


def reach() -> Reach:
    """Return the allowed origins of downloads, from the environment. Raises UserError if the environment variable
    GPTWORKS_DOWNLOADS has an unknown value."""
    given = os.environ.get(REACH) or "public"
    if given not in get_args(Reach):
        raise UserError(f"{REACH}={given}: it must be one of {', '.join(get_args(Reach))}.")
    return cast(Reach, given)


def cache_folder() -> Path:
    """Return the folder for downloads: $GPTWORKS_CACHE, else $XDG_CACHE_HOME/gptworks, else ~/.cache/gptworks."""
    if chosen := os.environ.get(CACHE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gptworks"


def check_url(url: str, within: Reach | None = None) -> SplitResult:
    """Return the parts of a plain https URL; http is allowed only to this machine, within the reach `private`. Raises
    UserError if the URL is invalid, has another scheme, or contains a user name or password."""
    within = within or reach()
    shown = url[:200]
    if not _URL.fullmatch(url):
        raise UserError(
            f"url={shown!r} is not an address: it has characters that must be percent-encoded, or more than 4,096."
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"url={shown} is not an address: {error}. Correct it.") from None
    is_own = parts.scheme == "http" and within == "private" and _is_own_name(parts.hostname or "")
    if parts.scheme != "https" and not is_own:
        raise UserError(f"url={shown}: only https is allowed. Give an https address, or a local file as `path`.")
    if not parts.hostname or port == 0 or parts.username is not None or parts.password is not None:
        raise UserError(f"url={shown}: it must name a server, without a user name or password. Correct it.")
    return parts


def check_public(url: str) -> None:
    """Check, before any request, that a URL is https and does not name this machine or its network. Raises UserError if
    the URL is not https (see `check_url`), or its host is not public."""
    host = check_url(url, "public").hostname or ""
    try:
        is_refused = not is_public(host)
    except ValueError:  # `host` is a name, not an address
        is_refused = host == "localhost" or host.endswith((".localhost", ".local", ".internal"))
    if is_refused:
        raise UserError(f"url={url[:200]}: {host} belongs to this machine or its network. Give a public address.")


def is_public(address: str) -> bool:
    """Return whether an IP address is on the internet: not of this machine, its network or a special range."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            return is_public(".".join(str(byte) for byte in found.packed[-4:]))
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def fetched(url: str, sha256: str, folder: Path) -> Path:
    """Return the local copy of the file at `url`, downloaded once into a folder, which is made with mode 0700 if it is
    missing. The copy has mode 0600, and gets its name only if its sha256 is right. The next call continues an
    interrupted download.

    Raises:
        UserError: the URL is not allowed, or the download has another sha256.
        RunError: the download or the disk failed.
    """
    parts = check_url(url)
    file = folder / f"{sha256[:16]}-{_plain(parts.path)}"
    if _is_there(file):
        return file
    advice = "Make room or permission there and try again."
    with naming_disk_errors(f"{file} could not be written", file, advice):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = file.with_name(f".{file.name}.partial")
        with file_lock(file.with_name(f".{file.name}.lock"), mode=0o600):
            if _is_there(file):  # another process has fetched it first
                return file
            _fetch(url, partial)
            if (actual := sha256_file(partial)) != sha256:
                partial.unlink()
                what = f"the download has the sha256 {actual} and the recipe states {sha256}"
                if reach() == "guarded":
                    what = "the download does not have the sha256 that the recipe states"
                raise UserError(f"{url}: {what}. It was deleted. If you trust the new file, correct the recipe.")
            sync(partial)
            partial.replace(file)
    return file


def _plain(path: str) -> str:
    """Return the file name in a URL's path, with only characters that every system allows."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", unquote(path).rpartition("/")[2])[-100:]
    return name or "download"


def _is_there(file: Path) -> bool:
    """Return whether the file exists. If the user owns the file, forbid all access by other users. Raises UserError if
    it is not a regular file."""
    try:
        found = file.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{file} is not a regular file: delete it, so that it can be downloaded.")
    if hasattr(os, "getuid") and stat.S_IMODE(found.st_mode) & 0o077 and found.st_uid == os.getuid():
        file.chmod(0o600)
    return True


# ---------------------------------------------------------------------------------------------------- the download


def _fetch(url: str, partial: Path) -> None:
    """Download the missing part of a file, or the whole file if the server cannot send parts."""
    have = partial.lstat().st_size if partial.exists() else 0
    place = url
    try:
        for _ in range(MOST_REDIRECTS + 1):
            connection = _connection(check_url(place))
            with contextlib.closing(connection):
                response = _answer(connection, place, have)
                if response.status in (301, 302, 303, 307, 308):
                    place = urljoin(place, response.getheader("Location") or "")
                    continue
                if response.status == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and have:
                    return  # `partial` is complete, or another file: its sha256 decides
                if response.status not in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
                    raise ConnectionError(f"the server answers {response.status} {response.reason[:100]!r}")
                _save(response, partial, have if response.status == http.HTTPStatus.PARTIAL_CONTENT else 0)
                return
        raise ConnectionError(f"it redirects more than {MOST_REDIRECTS} times")
    except UserError as error:
        if place == url:
            raise
        raise UserError(f"{url} redirects to another address: {error}") from None
    except _NETWORK as error:
        kept = partial.stat().st_size if partial.exists() else 0
        fix = "Try again" + (f", which continues after the first {kept:,} bytes" if kept else "")
        what = f"{type(error).__name__}: {error}" if isinstance(error, http.client.HTTPException) else error
        raise RunError(
            f"{url} could not be downloaded: {what}. {fix}, or download it yourself and set `path` to it."
        ) from error


def _save(response: http.client.HTTPResponse, partial: Path, have: int) -> None:
    """Append the response to a file of `have` bytes, or replace the file if `have` is 0."""
    began = window = time.monotonic()
    n_bytes, n_before = have, have
    flags = os.O_WRONLY | os.O_CREAT | O_NOFOLLOW | (os.O_APPEND if have else os.O_TRUNC)
    with _writing():
        file = os.fdopen(os.open(partial, flags, 0o600), "ab" if have else "wb")
    with file:
        while data := response.read1(_CHUNK_BYTES):
            with _writing():
                file.write(data)
            n_bytes += len(data)
            now = time.monotonic()
            if n_bytes > MOST_BYTES or now - began > MOST_SECONDS:
                raise ConnectionError(f"it takes more than {MOST_BYTES:,} bytes or {MOST_SECONDS:,} seconds")
            if now - window > SLOW_SECONDS:
                if n_bytes - n_before < SLOW_BYTES:
                    raise ConnectionError(f"fewer than {SLOW_BYTES:,} bytes came in {SLOW_SECONDS} seconds")
                window, n_before = now, n_bytes
        with _writing():
            file.flush()
    if response.length:
        raise ConnectionError(f"the connection closed {response.length:,} bytes before the end")


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Within the context, turn disk errors into RunErrors, to distinguish them from network errors."""
    try:
        yield
    except OSError as error:
        raise RunError(str(error)) from error


def _answer(connection: "_Connection", url: str, have: int) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    headers = {"User-Agent": "gptworks", "Accept-Encoding": "identity"}
    with _within(HEADER_SECONDS, connection):
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers=headers | ({"Range": f"bytes={have}-"} if have else {}))
        return connection.getresponse()


@contextlib.contextmanager
def _within(seconds: float, connection: "_Connection") -> Iterator[None]:
    """Within the context, end the connection after `seconds`, even if the server sends something now and then. Raises
    TimeoutError if the context took longer."""
    late = threading.Event()

    def end() -> None:
        late.set()
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError(f"the server did not answer within {seconds:g} seconds")


class _Connection(http.client.HTTPConnection):
    """A connection to `address`, through a proxy if one is set. If `address` is the server's name, the proxy resolves
    it; an IP address is not resolved again."""

    def __init__(self, parts: SplitResult, address: str, proxy: SplitResult | None) -> None:
        self._is_https = parts.scheme == "https"
        super().__init__(parts.hostname or "", parts.port or (443 if self._is_https else 80), timeout=CONNECT_SECONDS)
        self._address, self._proxy = address, proxy

    def connect(self) -> None:
        proxy = self._proxy
        peer = (self._address, self.port) if proxy is None else (proxy.hostname or "", proxy.port or 8080)
        self.sock = socket.create_connection(peer, CONNECT_SECONDS)
        if proxy is not None:
            self._ask(proxy)
        if self._is_https:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)

    def _ask(self, proxy: SplitResult) -> None:
        """Have the proxy connect to the server's address or name."""
        shown = f"[{self._address}]" if ":" in self._address else self._address
        lines = [f"CONNECT {shown}:{self.port} HTTP/1.1", f"Host: {shown}:{self.port}"]
        if proxy.username is not None:
            pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}")
        self.sock.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = http.client.HTTPResponse(self.sock, method="CONNECT")
        answer.begin()
        if answer.status != http.HTTPStatus.OK:
            raise ConnectionError(f"the proxy answers {answer.status} {answer.reason[:100]!r}")


def _connection(parts: SplitResult) -> _Connection:
    """Check all addresses of a server, and return a connection to it that is not yet open. Raises UserError if an
    address of the server is not allowed; OSError if the server's name has no address, and no proxy may resolve it."""
    host, within = parts.hostname or "", reach()
    given = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    proxy = None if given is None else urlsplit(given if "://" in given else f"http://{given}")
    try:
        found = socket.getaddrinfo(host, parts.port or 443, type=socket.SOCK_STREAM)
    except OSError:
        if proxy is None or within == "guarded":
            raise
        return _Connection(parts, host, proxy)  # only the proxy can resolve the name
    except UnicodeError:
        raise OSError(f"{host[:100]!r} is not a server's name") from None
    addresses = [str(one[4][0]) for one in found]
    refused = [one for one in addresses if not (is_public(one) or within == "private")]
    if refused:
        raise UserError(
            f"url={parts.geturl()[:200]}: {host} is {refused[0]}, which is not a public address. Give another url; "
            f"for your own intranet, set {REACH}=private."
        )
    if parts.scheme == "http" and not all(ip_address(one.partition("%")[0]).is_loopback for one in addresses):
        raise UserError(f"url={parts.geturl()[:200]}: http is allowed only to this machine. Give an https address.")
    return _Connection(parts, host if proxy is not None and within != "guarded" else addresses[0], proxy)


def _is_own_name(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
