"""The studio authenticates its user: other users of the machine reach its port, but get nothing."""

import http.client
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

import gptworks.cli.serve as command
from gptworks import cli
from gptworks.cli.serve import _invitations
from gptworks.serve.app import router as served
from gptworks.serve.settings import ServerSettings
from gptworks.serve.sign_in import MOST, SignIn
from gptworks.studio import page, start
from gptworks.studio.app import ROUTERS, create_studio
from gptworks.studio.processes import Processes
from serving import KEY, Running, running_app, until

OPEN = {"/", "/health", "/openapi.json", "/static/{name:path}", "/studio/sign-in"}
"""The routes that hold nothing of anyone's."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    runs = tmp_path_factory.mktemp("runs")
    (runs / "secret-run").mkdir()
    with running_app(create_studio([runs], ServerSettings(client_share=1.0), device="cpu")) as one:
        yield one


def port_of(server: Running) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def signed_in(server: Running) -> tuple[dict[str, str], str]:
    """Return the headers of a session, and the `Set-Cookie` that started it."""
    code = server.service.sign_in.code()  # type: ignore[union-attr]
    with server.http(headers={}) as http:
        answer = http.post("/studio/sign-in", json={"code": code})
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    cookie = answer.headers["set-cookie"]
    return {"authorization": f"Bearer {answer.json()['key']}", "cookie": cookie.partition(";")[0]}, cookie


def asked(server: Running, method: str, path: str, headers: dict[str, str]) -> int:
    """Return the status of the answer, without waiting for the end of a stream."""
    one = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    try:
        body = b"{}" if method == "POST" else None
        one.request(method, path, body, {"content-type": "application/json"} | headers)
        return one.getresponse().status
    finally:
        one.close()


def routes() -> list[tuple[str, str]]:
    """Return every route of the app that needs a session, and one that does not exist."""
    routers: list[Any] = [served, page.router, *ROUTERS, start.actions]
    found = [(method, route.path) for router in routers for route in router.routes for method in route.methods]
    assert len(found) > 30 and {path for _, path in found} >= OPEN - {"/openapi.json"}
    return [pair for pair in found if pair[1] not in OPEN] + [("GET", "/none"), ("PUT", "/studio/state")]


def test_no_route_answers_without_a_session(server: Running) -> None:
    session, _ = signed_in(server)
    other, _ = signed_in(server)
    cookie, key = session["cookie"], session["authorization"]
    name = cookie.partition("=")[0]
    without = {
        "nothing": {}, "no key": {"cookie": cookie}, "no cookie": {"authorization": key},
        "a wrong key": session | {"authorization": "Bearer x"}, "a wrong cookie": session | {"cookie": f"{name}=x"},
        "another session's key": session | {"authorization": other["authorization"]},
        "another port's cookie": session | {"cookie": cookie.replace(str(port_of(server)), "1")},
        "another kind": session | {"authorization": key.replace("Bearer", "Basic")},
        "halves swapped": {"authorization": f"Bearer {cookie.partition('=')[2]}", "cookie": f"{name}={key[7:]}"},
    }  # fmt: skip
    for method, path in routes():
        for what, headers in without.items() if path == "/studio/state" else [("nothing", {})]:
            assert asked(server, method, path, headers) == 401, (method, path, what)
        assert asked(server, method, path, session) not in (401, 403), (method, path)


def test_what_is_open_names_no_run(server: Running) -> None:
    with server.http(headers={}) as http:
        for path in ("/", "/health", "/openapi.json", "/static/index.html", "/static/js/api.js"):
            answer = http.get(path, headers={"accept": "text/html"})
            assert answer.status_code == 200 and "secret-run" not in answer.text and "set-cookie" not in answer.headers
        assert http.get("/static/../studio/state").status_code in (401, 404)
        assert http.get("/static/%2e%2e/%2e%2e/studio/state").status_code == 404


def test_a_code_is_good_for_one_session(server: Running) -> None:
    sign_in = server.service.sign_in
    assert sign_in is not None
    code = sign_in.code()
    with server.http(headers={}) as http:
        post = lambda given, **more: http.post("/studio/sign-in", json={"code": given}, **more)  # noqa: E731
        for wrong in ("", "x", code[:-1], code + "x"):
            assert post(wrong).status_code == 403
        half = http.post(
            "/studio/sign-in", content=b'{"code": "\\ud800"}', headers={"content-type": "application/json"}
        )
        assert half.status_code == 400
        assert http.get(f"/studio/sign-in?code={code}").status_code == 405, "a link that is looked at does not use it"
        assert post(code, headers={"origin": "http://evil.example"}).status_code == 403
        assert post(code, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert http.post("/studio/sign-in", content=json.dumps({"code": code})).status_code == 415
        assert http.post("/studio/sign-in", data={"code": code}).status_code == 415
        assert post("a" * 300).status_code == post(["a"]).status_code == 400
        assert post(code, headers={"cookie": f"gptworks-{port_of(server)}=fixed"}).status_code == 200
        used = post(code)
        assert used.status_code == 403 and used.json()["error"]["code"] == "invalid_code"
        assert "used already" in used.json()["error"]["message"] and "set-cookie" not in used.headers


def test_a_cookie_that_someone_chose_is_no_session(server: Running) -> None:
    """Session fixation: the server accepts only sessions that it created."""
    name = f"gptworks-{port_of(server)}"
    code = server.service.sign_in.code()  # type: ignore[union-attr]
    with server.http(headers={"cookie": f"{name}=chosen"}) as http:
        answer = http.post("/studio/sign-in", json={"code": code})
    key = answer.json()["key"]
    assert asked(server, "GET", "/studio/state", {"authorization": f"Bearer {key}", "cookie": f"{name}=chosen"}) == 401
    value = answer.headers["set-cookie"].partition(";")[0].partition("=")[2]
    both = f"{name}=chosen; other=1; {name}2={value}"
    assert asked(server, "GET", "/studio/state", {"authorization": f"Bearer {key}", "cookie": both}) == 401
    assert (
        asked(server, "GET", "/studio/state", {"authorization": f"Bearer {key}", "cookie": f"a=b; {name}={value}"})
        == 200
    )


def test_the_cookie_is_hidden_from_scripts_and_other_sites(server: Running) -> None:
    session, cookie = signed_in(server)
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= attributes and not any("domain" in one for one in attributes)
    assert not any(one.startswith(("max-age", "expires")) for one in attributes), "it ends with the browser"
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
                    {"origin": "http://127.0.0.1:1"}, {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"},
                    {"host": "localhost@evil.example"}, {"host": ""}):  # fmt: skip
        assert asked(server, "GET", "/studio/state", session | headers) in (400, 403), headers
        assert asked(server, "POST", "/studio/sign-in", headers) in (400, 403), headers


def test_sessions_and_codes_are_bounded() -> None:
    sign_in = SignIn()
    first = sign_in.code()
    codes = [sign_in.code() for _ in range(MOST)]
    assert len({first, *codes}) == MOST + 1 and all(len(code) >= 32 for code in codes)
    assert sign_in.exchange(first) is None
    sessions = [sign_in.exchange(code) for code in codes]
    newest = sign_in.exchange(sign_in.code())
    assert sessions[0] is not None and not sign_in.knows(*sessions[0])
    assert newest is not None and sign_in.knows(*newest)


def test_an_api_key_is_enough_for_programs(tmp_path: Path) -> None:
    app = create_studio([tmp_path], ServerSettings(api_keys=(KEY,)), device="cpu")
    with running_app(app) as server:
        assert asked(server, "GET", "/v1/models", {"authorization": f"Bearer {KEY}"}) == 200
        session, _ = signed_in(server)
        assert asked(server, "GET", "/v1/models", session) == 200 and asked(server, "GET", "/v1/models", {}) == 401


# ---------------------------------------------------------------------------------------------------- the owner


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", found.append)
    return found


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_link_is_the_owners_to_read(
    is_terminal: bool, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is on the terminal or in a file that only the owner can read, never in the browser's arguments or in a log."""
    sign_in = SignIn()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    old = os.umask(0)
    try:
        with _invitations(sign_in, "http://127.0.0.1:7/", opens=True):
            until(lambda: bool(opened))
            file = Path(urlsplit(opened[0]).path)
            assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            (code,) = set(re.findall(r"#code=([\w-]+)", file.read_text()))
            assert code not in opened[0] and "no-referrer" in file.read_text()
            printed = re.findall(r"http://127.0.0.1:7/#code=([\w-]+)", capsys.readouterr().err)
            assert len(printed) == is_terminal and code not in printed
            assert sign_in.exchange(code) and sign_in.exchange(code) is None
            if is_terminal:
                assert not file.exists(), "it has been used"
                assert sign_in.exchange(printed[0])
            again = capsys.readouterr().err if is_terminal else file.read_text()
            (further,) = set(re.findall(r"#code=([\w-]+)", again))
            assert sign_in.exchange(further), "there is a link for another browser"
    finally:
        os.umask(old)
    assert not file.parent.exists()


def test_runs_that_the_page_starts_know_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the environment and the arguments of the training process."""
    lines = ("import json, os, sys", "print(json.dumps([sys.argv, dict(os.environ)]))")
    monkeypatch.setattr("gptworks.studio.processes.COMMAND", ("-c", "\n".join(lines)))
    processes: list[Any] = []

    class Server:
        def __init__(self, app: Any, *_: Any) -> None:
            self.app = app

        def run(self) -> None:
            sign_in = self.app.state.service.sign_in
            session = sign_in.exchange(sign_in.code())
            training = Processes().start("one", tmp_path, [])
            training.process.wait()
            processes.append((session, sign_in.code()))

    monkeypatch.setattr("gptworks.serve.server.make_server", Server)
    monkeypatch.setenv("GPTWORKS_API_KEY", "the-key-of-the-owner")
    result = CliRunner().invoke(cli.app, ["studio", str(tmp_path), "--no-open", "--device", "cpu"])
    assert result.exception is None, result.exception
    said = (tmp_path / "console.log").read_text()
    assert "PATH" in json.loads(said)[1]
    ((session, code),) = processes
    for secret in (*session, code, "the-key-of-the-owner"):
        assert secret not in said


def test_the_log_has_no_secret(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gptworks"):
        code = server.service.sign_in.code()  # type: ignore[union-attr]
        with server.http(headers={}) as http:
            http.get(f"/studio/state?code={code}")
            key = http.post("/studio/sign-in", json={"code": code}).json()["key"]
            http.get("/studio/state", headers={"authorization": f"Bearer {key}"})
    assert "/studio/sign-in 200" in caplog.text and code not in caplog.text and key not in caplog.text
