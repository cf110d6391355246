"""Sources of a recipe are fetched only by https from public addresses, also after redirects and changed DNS answers."""

import hashlib
import http.client
import os
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.config.sources import TextSource
from gptworks.errors import RunError, UserError
from gptworks.files import fetch
from gptworks.files.fetch import check_public, check_url, fetched, is_public
from web import website

TEXT = b"from afar\n"
SUM = hashlib.sha256(TEXT).hexdigest()
PUBLIC = "93.184.215.14"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(fetch.REACH, raising=False)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The answers to successive DNS questions for each name; the last one is repeated."""
    table: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        if host not in table:
            if not host[:1].isdigit() and ":" not in host:
                raise socket.gaierror(-2, "Name or service not known")
            return real(host, port, *rest, **more)
        answers = table[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that would be connected to; no connection is made."""
    found: list[Any] = []

    def connect(address: Any, *_: Any, **__: Any) -> Any:
        found.append(address)
        raise ConnectionRefusedError(111, "refused by the test")

    monkeypatch.setattr(socket, "create_connection", connect)
    return found


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://x.org/a", "data:,hello", "http://x.org/a", "HTTP://x.org/a", "gopher://x.org/",
        "/etc/passwd", "x.org/a", "//x.org/a", "https:///a", "https:a", "https://", "jar:file:///a", "http+unix://a",
        "https://user:word@x.org/a", "https://@x.org/a", "https://x.org:0/a", "https://x.org:99999/a",
        "https://x.org:a/", "https://x.org/a b", "https://x.org/a\r\nX: y", "https://x.org/\x00", "https://x.org/ä",
        " https://x.org/a", "https://x.org/a\n", "https://[::1/a", "https://x.org\\@y.org/a", "h\tttps://x.org/",
        "https://x.org/" + "a" * 5000, "", "file://localhost/etc/passwd", "http://127.0.0.1/a", "http://localhost:1/",
    ],
)  # fmt: skip
def test_what_is_no_plain_https_address_is_refused_by_the_recipe(url: str) -> None:
    with pytest.raises(UserError, match="url="):
        check_url(url)
    if url:
        with pytest.raises(ValueError, match="url="):
            TextSource(type="text", url=url, sha256=SUM)
        with pytest.raises(ValueError, match="url="):
            TextSource(type="text", url=("https://x.org/a", url), sha256=(SUM, SUM))


def test_plain_addresses_are_taken() -> None:
    for url in ("https://x.org/a", "https://x.org", "HTTPS://X.org:8443/a%20b?c=d&e#f", "https://[2606:4700::1]/a"):
        check_url(url)
        check_public(url)


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "198.18.0.1", "192.0.2.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::1", "::",
    "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe", "::127.0.0.1", "2002:7f00:1::", "2002:a00:1::1", "64:ff9b::7f00:1", "64:ff9b::a00:1",
    "64:ff9b:1::a00:1", "2001:db8::1", "2001::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_not_everyone_reaches_is_refused(
    address: str, names: dict[str, list[list[str]]], connected: list[Any], tmp_path: Path
) -> None:
    """As a literal address, and as the result of a name, even if other results are public."""
    assert not is_public(address)
    shown = f"[{address}]" if ":" in address else address
    if "%" not in address:
        with pytest.raises(UserError, match="belongs to this machine or its network"):
            check_public(f"https://{shown}/a")
    names["files.example"] = [[PUBLIC, address]]
    with pytest.raises(UserError, match="not a public address"):
        fetched("https://files.example/a", SUM, tmp_path)
    assert connected == []


@pytest.mark.parametrize(
    "host", ["0x7f.1", "2130706433", "127.1", "0177.0.0.1", "localhost", "127.0.0.1.", "[::ffff:7f00:1]"]
)
def test_other_spellings_of_this_machine_are_refused_too(host: str, connected: list[Any], tmp_path: Path) -> None:
    with pytest.raises((UserError, RunError)):
        fetched(f"https://{host}/a", SUM, tmp_path)
    assert connected == []


def test_public_addresses_are_public() -> None:
    for address in (PUBLIC, "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"):
        assert is_public(address)


def test_a_name_is_resolved_once_and_cannot_lead_elsewhere(
    names: dict[str, list[list[str]]], connected: list[Any], tmp_path: Path
) -> None:
    """DNS rebinding: the second answer would be this machine."""
    names["files.example"] = [[PUBLIC], ["127.0.0.1"]]
    with pytest.raises(RunError, match="refused by the test"):
        fetched("https://files.example/a", SUM, tmp_path)
    assert connected == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:1/a", "file:///etc/passwd", "https://127.0.0.1:1/a", "https://internal.example/a",
     "//internal.example/a", "ftp://x.org/", "https://user:word@x.org/", "https://169.254.169.254/latest"],
)  # fmt: skip
def test_a_server_cannot_lead_on_to_what_is_refused(
    location: str, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names["internal.example"] = [["10.0.0.1"]]
    names["files.example"] = [[PUBLIC]]
    asked: list[Any] = []

    class Response:
        status, reason = 302, "Found"

        def getheader(self, name: str) -> str:
            return location

    def answer(connection: Any, url: str, have: int) -> Any:
        asked.append((connection._address, url))
        return Response()

    monkeypatch.setattr(fetch, "_answer", answer)
    with pytest.raises(UserError, match="redirects to another address"):
        fetched("https://files.example/a", SUM, tmp_path)
    assert asked == [(PUBLIC, "https://files.example/a")]


def test_a_circle_ends(tmp_path: Path) -> None:
    files: dict[str, Any] = {"/a": (302, {"Location": "/b"}, b""), "/b": (307, {"Location": "/a"}, b"")}
    with website(files) as url, pytest.raises(RunError, match="redirects more than 5 times"):
        fetched(f"{url}/a", SUM, tmp_path)


def test_redirects_are_followed_to_what_is_allowed(tmp_path: Path) -> None:
    files: dict[str, Any] = {"/a.txt": (301, {"Location": "b"}, b""), "/b": TEXT}
    with website(files) as url:
        assert fetched(f"{url}/a.txt", SUM, tmp_path).read_bytes() == TEXT


def test_the_certificate_is_the_names(
    tmp_path: Path, names: dict[str, list[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is made to an address, but the server's certificate must be for the name."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl, to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"]
    made += ["-addext", "subjectAltName=DNS:files.example"]
    subprocess.run([openssl, *made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    names["files.example"] = names["other.example"] = [["127.0.0.1"]]
    with website({"/a": TEXT}, context) as url:
        port = url.rpartition(":")[2]
        with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
            fetched(f"https://files.example:{port}/a", SUM, tmp_path / "cache")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert fetched(f"https://files.example:{port}/a", SUM, tmp_path / "cache").read_bytes() == TEXT
        with pytest.raises(RunError, match="CERTIFICATE_VERIFY_FAILED"):
            fetched(f"https://other.example:{port}/a", "0" * 64, tmp_path / "cache")


# --------------------------------------------------------------------------------------------------------- bounds


def test_what_comes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_BYTES", 100_000)

    def endless(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * 65536)

    with website({"/a": endless}) as url, pytest.raises(RunError, match="more than 100,000 bytes"):
        fetched(f"{url}/a", SUM, tmp_path)


def test_what_comes_too_slowly_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**6, 20))
    monkeypatch.setattr(fetch.time, "monotonic", lambda: float(next(clock)))

    class Dripping:
        length = 10**6

        def read1(self, n: int) -> bytes:
            return b"x"

    with pytest.raises(ConnectionError, match="fewer than 65,536 bytes came in 60 seconds"):
        fetch._save(Dripping(), tmp_path / "a", 0)  # type: ignore[arg-type]
    clock = iter(range(0, 10**9, 50_000))
    monkeypatch.setattr(Dripping, "read1", lambda self, n: b"x" * 10**5)
    with pytest.raises(ConnectionError, match="172,800 seconds"):
        fetch._save(Dripping(), tmp_path / "a", 0)  # type: ignore[arg-type]


def test_headers_that_drip_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "HEADER_SECONDS", 0.2)
    ends = threading.Event()

    def drips(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(10_000):
            handler.wfile.write(f"X-{number}: y\r\n".encode())
            if ends.wait(0.01):
                return

    with website({"/a": drips}) as url:
        with pytest.raises(RunError, match="could not be downloaded"):
            fetched(f"{url}/a", SUM, tmp_path)
        ends.set()


# ----------------------------------------------------------------------------------------------------------- copies


def test_a_copy_is_its_owners_alone(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    with website({"/a.txt": TEXT}) as url:
        file = fetched(f"{url}/a.txt", SUM, cache)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in cache.iterdir())
        file.chmod(0o644)  # as an earlier version left it
        assert stat.S_IMODE(fetched(f"{url}/a.txt", SUM, cache).stat().st_mode) == 0o600


def test_a_copy_is_found_again_on_a_system_without_user_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with website({"/a.txt": TEXT}) as url:
        file = fetched(f"{url}/a.txt", SUM, tmp_path / "cache")
        file.chmod(0o666)  # the mode that Windows shows
        monkeypatch.delattr(os, "getuid")
        assert fetched(f"{url}/a.txt", SUM, tmp_path / "cache") == file


@pytest.mark.parametrize("planted", ["", ".", ".partial"])
def test_no_planted_link_is_followed(planted: str, tmp_path: Path) -> None:
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("mine")
    cache.mkdir()
    name = f"{SUM[:16]}-a.txt"
    (cache / (name if not planted else f".{name}.{'lock' if planted == '.' else 'partial'}")).symlink_to(victim)
    with website({"/a.txt": TEXT}) as url, pytest.raises((UserError, RunError, OSError)):
        fetched(f"{url}/a.txt", SUM, cache)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("path", ["/..", "/%2e%2e%2fa", "/a%00b", "/" + "n" * 300 + ".txt.gz", "/", "/a;rm", "/.%2e"])
def test_a_copys_name_is_plain_whatever_the_address_is(path: str, tmp_path: Path) -> None:
    with website({path: TEXT}) as url:
        file = fetched(f"{url}{path}", SUM, tmp_path / "cache")
    assert file.parent == tmp_path / "cache" and len(file.name) <= 120 and file.name.isprintable()
    assert set(file.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    if path.endswith(".txt.gz"):
        assert file.name.endswith(".txt.gz")


def test_who_may_not_know_does_not_learn_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with website({"/a.txt": TEXT}) as url:
        with pytest.raises(UserError, match=SUM):
            fetched(f"{url}/a.txt", "0" * 64, tmp_path)
        real = fetch.reach
        monkeypatch.setattr(fetch, "_fetch", lambda _, partial: partial.write_bytes(TEXT))
        monkeypatch.setenv(fetch.REACH, "guarded")
        assert real() == "guarded"
        with pytest.raises(UserError) as caught:
            fetched("https://files.example/a.txt", "0" * 64, tmp_path)
    assert SUM not in str(caught.value) and "sha256" in str(caught.value)
    assert not [one for one in tmp_path.iterdir() if one.suffix != ".lock"]


def test_an_unknown_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetch.REACH, "everything")
    with pytest.raises(UserError, match="GPTWORKS_DOWNLOADS=everything: it must be one of public, private, guarded"):
        check_url("https://x.org/")


# ------------------------------------------------------------------------------------------------------------ proxies


def proxied(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes = b"HTTP/1.1 403 No\r\n\r\n"
) -> list[str]:
    """Return the requests that a proxy receives, as text."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            one, _ = server.accept()
            with one:
                asked.append(one.recv(4096).decode())
                one.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv(fetch.REACH, within)
        with pytest.raises(RunError, match="the proxy answers 403"):
            fetched("https://files.example/a", SUM, tmp_path)
    return asked


def test_a_proxy_is_asked_for_the_name_or_in_the_studio_for_the_address(
    names: dict[str, list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names["files.example"] = [[PUBLIC]]
    (asked,) = proxied("public", tmp_path, monkeypatch)
    assert asked.startswith("CONNECT files.example:443 HTTP/1.1\r\n") and "Basic bWU6c2VjcmV0" in asked
    (asked,) = proxied("guarded", tmp_path, monkeypatch)
    assert asked.startswith(f"CONNECT {PUBLIC}:443 HTTP/1.1\r\n")
    names.clear()
    (asked,) = proxied("public", tmp_path, monkeypatch)  # only the proxy knows names
    assert asked.startswith("CONNECT files.example:443")
    monkeypatch.setenv(fetch.REACH, "guarded")
    with pytest.raises(RunError, match="could not be downloaded"):
        fetched("https://files.example/a", SUM, tmp_path)
    names["files.example"] = [["10.0.0.1"]]
    for within in ("public", "guarded"):
        monkeypatch.setenv(fetch.REACH, within)
        with pytest.raises(UserError, match="not a public address"):
            fetched("https://files.example/a", SUM, tmp_path)


def test_errors_of_the_disk_are_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        length = 0

        def read1(self, n: int) -> bytes:
            return b"x" * 4096

    opened: Callable[..., Any] = fetch.os.fdopen

    def full(descriptor: int, mode: str) -> Any:
        fetch.os.close(descriptor)
        return opened(fetch.os.open("/dev/full", fetch.os.O_WRONLY), mode, buffering=0)

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(fetch, "_connection", lambda parts: http.client.HTTPConnection("x"))
    monkeypatch.setattr(fetch, "_answer", lambda *_: type("R", (Full,), {"status": 200})())
    monkeypatch.setattr(fetch.os, "fdopen", full)
    with pytest.raises(RunError, match=r"could not be written.*[Nn]o space"):
        fetched("https://x.org/a", SUM, tmp_path)
