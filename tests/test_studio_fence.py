"""Attacks on the studio's sign-in and access checks, as raw bytes: no answer contains anything of a run."""

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from gptworks.serve.settings import ServerSettings
from gptworks.serve.sign_in import MOST
from gptworks.studio.app import create_studio
from histories import write_run
from serving import Running, running_app

SECRET = "secret-run"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / SECRET, [])
    with running_app(create_studio([runs], ServerSettings(client_share=1.0), device="cpu")) as one:
        yield one


@pytest.fixture
def port(server: Running) -> int:
    found = urlsplit(server.url).port
    assert found is not None
    return found


def asked(
    port: int, request: str, *headers: str, host: str | None = None, body: str = "", kind: str = "application/json"
) -> tuple[int, str]:
    """Send a request as it is; return the status and the whole answer; status 0: the connection was closed."""
    lines = [f"{request} HTTP/1.1", f"host: {host or f'127.0.0.1:{port}'}", *headers, "connection: close"]
    lines += [f"content-length: {len(body.encode())}", f"content-type: {kind}"] if body else []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(("\r\n".join([*lines, "", ""]) + body).encode("utf-8", "surrogateescape"))
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    text = answer.decode("utf-8", "replace")
    return (int(text.split(" ", 2)[1]) if text else 0), text


def sign_in(server: Running, port: int, *headers: str, host: str | None = None) -> tuple[str, str]:
    """Return the `Cookie` and `Authorization` headers of a new session."""
    code = server.service.sign_in.code()  # type: ignore[union-attr]
    status, answer = asked(port, "POST /studio/sign-in", *headers, host=host, body=json.dumps({"code": code}))
    assert status == 200, answer
    (cookie,) = [line for line in answer.split("\r\n") if line.lower().startswith("set-cookie: ")]
    key = json.loads(answer.rpartition("\r\n\r\n")[2].strip())["key"]
    return f"cookie: {cookie.partition(': ')[2].partition(';')[0]}", f"authorization: Bearer {key}"


def test_a_session_opens_the_list(server: Running, port: int) -> None:
    status, answer = asked(port, "GET /studio/state", *sign_in(server, port))
    assert status == 200 and SECRET in answer


@pytest.mark.parametrize(
    "target",
    [
        "/studio/../studio/state", "/static/../studio/state", "/static/..%2fstudio/state", "/static%2f../studio/state",
        "/static/%2e%2e/studio/state", "/static/..;/studio/state", "/static//../../studio/state", "//studio/state",
        "/%73tudio/state", "/studio%2fstate", "/studio/state/", "/studio/state%00", "/static/%00/../studio/state",
        "/static/..%c0%af../studio/state", "/static/%c0%ae%c0%ae/studio/state", "/static/..%255cstudio/state",
        "/static/..\\studio\\state", "/health/../studio/state", "/health%2f..%2fstudio%2fstate",
        "/openapi.json/../studio/state",
        "/./studio/state", "/?/../studio/state", "/#/studio/state", "*", "http://127.0.0.1/studio/state",
        "http://evil.example/studio/state", "/static/" + "../" * 40 + "etc/passwd", "/static/" + "a" * 20_000,
        "/static//etc/passwd", "/static/js/../../app.py", "/studio/sign-in/../state", "/studio/sign-in%2f..%2fstate",
        "/STUDIO/STATE", "/studio/state?authorization=Bearer+x", "/studio/state;jsessionid=1",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "POST", "PROPFIND", "get"])
def test_no_way_to_write_a_path_gets_round_the_key(port: int, target: str, method: str) -> None:
    if method != "GET" and len(target) > 40:
        target = target[:40]
    status, answer = asked(port, f"{method} {target}")
    assert status in (0, 200, 307, 308, 400, 401, 403, 404, 405, 411, 414, 431, 501), answer
    assert SECRET not in answer and "root:" not in answer and "create_studio" not in answer
    if status == 200:  # what is open: the page, or what the server is
        assert answer.startswith("HTTP/1.1 200") and ('"name":"gptworks"' in answer or method == "HEAD")


@pytest.mark.parametrize(
    "header",
    [
        "x-forwarded-for: 127.0.0.1", "x-forwarded-host: 127.0.0.1", "x-forwarded-proto: https",
        "forwarded: for=127.0.0.1",
        "x-real-ip: 127.0.0.1", "x-original-url: /studio/state", "x-rewrite-url: /studio/state",
        "x-http-method-override: GET", "x-api-key: x", "proxy-authorization: Bearer x", "authorization: Bearer",
        "authorization: Bearer ", "authorization: bearer null", "authorization: Basic Og==", "authorization: x",
        "upgrade: websocket\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13",
        "accept: text/event-stream\r\nlast-event-id: 1", "range: bytes=0-10", "cookie: " + "a=b; " * 3000,
        "cookie: gptworks-0=x; =; ;;; gptworks-=",
    ],
)  # fmt: skip
def test_no_header_stands_for_a_key(port: int, header: str) -> None:
    for target in ("/studio/state", "/studio/runs/live", "/v1/models"):
        status, answer = asked(port, f"GET {target}", header)
        assert status in (401, 431) and SECRET not in answer, answer
        status, answer = asked(port, f"GET {target}", header, host="evil.example")
        assert status in (403, 431) and SECRET not in answer, answer


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "localhost.evil.example",
        "localhost@evil.example",
        "127.0.0.1:{port}@evil.example", "evil.example#127.0.0.1", "127.0.0.1 evil.example", "[::1].evil.example",
        "[::1]evil.example:{port}", "0.0.0.0:{port}", "[::]:{port}", "xn--localhost", "localhost%00.evil.example",
        "169.254.169.254", "10.0.0.1:{port}", "2130706433", "0x7f.1", "localhost..", "evil.example, 127.0.0.1",
    ],
)  # fmt: skip
def test_a_name_that_was_made_to_lead_here_is_refused(server: Running, port: int, host: str) -> None:
    """DNS rebinding: a page of such a name has no session and cannot get one."""
    session = sign_in(server, port)
    code = server.service.sign_in.code()  # type: ignore[union-attr]
    given = host.format(port=port)
    assert asked(port, "GET /studio/state", *session, host=given)[0] in (400, 403)
    status, answer = asked(port, "POST /studio/sign-in", host=given, body=json.dumps({"code": code}))
    assert status in (400, 403) and "set-cookie" not in answer.lower()
    assert server.service.sign_in.exchange(code), "it was not used up"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "headers",
    [
        ["origin: http://evil.example"], ["origin: null"], ["origin: http://127.0.0.1:1"], ["origin: file://"],
        ["origin: http://localhost:1", "sec-fetch-site: same-site"], ["sec-fetch-site: cross-site"],
        ["sec-fetch-site: cross-site", "sec-fetch-mode: no-cors"],
        ["sec-fetch-site: same-site", "sec-fetch-mode: navigate"],
        ["origin: http://127.0.0.1:{port}.evil.example"], ["origin: http://evil.example@127.0.0.1:{port}"],
        ["origin: http://evil.example/#127.0.0.1:{port}"],
    ],
)  # fmt: skip
def test_a_page_of_another_origin_can_neither_ask_nor_start_nor_sign_in(
    server: Running, port: int, headers: list[str]
) -> None:
    """Even with a complete session: the browser's own cookies and a leaked key."""
    session = sign_in(server, port)
    given = [header.format(port=port) for header in headers]
    code = server.service.sign_in.code()  # type: ignore[union-attr]
    asks = {"GET /studio/state": "", "POST /studio/start/new": "{}", "POST /studio/start/stop": "{}"}
    for request, body in (asks | {"POST /studio/sign-in": json.dumps({"code": code})}).items():
        status, answer = asked(port, request, *session, *given, body=body)
        assert status == 403 and "access-control-allow" not in answer.lower() and "set-cookie" not in answer.lower()
    preflight = asked(port, "OPTIONS /studio/state", *given, "access-control-request-method: GET")
    assert preflight[0] in (401, 403, 405) and "access-control-allow" not in preflight[1].lower()
    assert server.service.sign_in.exchange(code)  # type: ignore[union-attr]


def test_a_form_of_another_page_sends_nothing_that_is_read(server: Running, port: int) -> None:
    """A browser sends forms of three media types without a preflight request."""
    session = sign_in(server, port)
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"):
        status, _ = asked(port, "POST /studio/start/stop", *session, body=f'{{"run": "{SECRET}"}}', kind=kind)
        assert status == 415


def test_a_cookie_that_another_server_of_this_host_sets_ends_no_session(server: Running, port: int) -> None:
    """Servers on all ports of a host share cookies, and one with a longer path is sent first."""
    cookie, key = sign_in(server, port)
    name = cookie.partition(" ")[2].partition("=")[0]
    tossed = cookie.replace("cookie: ", f"cookie: {name}=tossed; {name}=; ")
    assert asked(port, "GET /studio/state", tossed, key)[0] == 200
    assert asked(port, "GET /studio/state", f"cookie: {name}=tossed", cookie, key)[0] == 200, "in a header of its own"
    many = f"cookie: {'; '.join(f'{name}={i}' for i in range(500))}"
    assert asked(port, "GET /studio/state", many, key)[0] == 401


def test_studios_behind_two_forwarded_ports_keep_their_sessions_apart(server: Running, port: int) -> None:
    """`ssh -L`: the page's address has another port than the server."""
    names = set()
    for host in (f"127.0.0.1:{port}", "localhost:9001", "localhost:9002", "localhost"):
        cookie, key = sign_in(server, port, host=host)
        names.add(cookie.partition(" ")[2].partition("=")[0])
        assert asked(port, "GET /studio/state", cookie, key, host=host)[0] == 200
        assert asked(port, "GET /studio/state", cookie, key, host="localhost:9003")[0] == 401
    assert names == {f"gptworks-{port}", "gptworks-9001", "gptworks-9002", "gptworks-80"}


def test_guessing_ends_no_session_and_uses_up_no_code(server: Running, port: int) -> None:
    session, offered = sign_in(server, port), server.service.sign_in
    assert offered is not None
    code = offered.code()
    for i in range(2 * MOST):
        assert asked(port, "POST /studio/sign-in", body=json.dumps({"code": f"{i}"}))[0] == 403
        assert not offered.knows(f"{i}", f"{i}")
    assert asked(port, "GET /studio/state", *session)[0] == 200 and offered.exchange(code)


def test_the_page_shares_no_window_no_frame_and_no_address(port: int) -> None:
    answer = asked(port, "GET /", "accept: text/html")[1].lower()
    for header in ("frame-ancestors 'none'", "form-action 'none'", "base-uri 'none'", "referrer-policy: no-referrer",
                   "cross-origin-opener-policy: same-origin", "cross-origin-resource-policy: same-origin",
                   "x-content-type-options: nosniff"):  # fmt: skip
        assert header in answer


def test_what_is_asked_with_a_session_is_neither_kept_nor_guessed_at(server: Running, port: int) -> None:
    """The browser must not cache it, since others may see its files, nor read it as another media type."""
    session = sign_in(server, port)
    for target in ("/studio/state", "/studio/runs", "/studio/start", f"/studio/runs/step?run={SECRET}&at=1",
                   f"/studio/runs/curves?run={SECRET}&key=train.loss", "/v1/models", "/studio/none"):  # fmt: skip
        status, answer = asked(port, f"GET {target}", *session)
        assert status in (200, 404) and "cache-control: no-store" in answer.lower(), (target, answer[:500])
        assert "x-content-type-options: nosniff" in answer.lower(), target
