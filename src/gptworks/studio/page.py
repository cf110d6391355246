"""The static files of the page, which need no key as they hold nothing of anyone's; and the exchange of a code."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from gptworks.serve import sign_in
from gptworks.serve.app import body_of, service_of
from gptworks.serve.errors import APIError
from gptworks.serve.guard import STATIC
from gptworks.serve.openai import Wire

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".woff2": "font/woff2", ".json": "application/json",
    ".txt": "text/plain; charset=utf-8", ".md": "text/plain; charset=utf-8",
}  # fmt: skip
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept",
}

router = APIRouter(include_in_schema=False)


def home(request: Request) -> Response:
    """The page."""
    return _file(request, "index.html")


@router.get(STATIC + "{name:path}")
async def static_file(request: Request, name: str) -> Response:
    """A file of the page."""
    return _file(request, name)


class Code(Wire):
    """What the link carries that signs a browser in."""

    code: str = Field(max_length=256)


@router.post(sign_in.PATH)
async def signed_in(request: Request) -> Response:
    """Exchange a one-time code for a session: a cookie, and a key for the page's scripts."""
    body = await body_of(request, Code)
    offered = service_of(request).sign_in
    session = None if offered is None else offered.exchange(body.code)
    if session is None:
        raise APIError(
            403, "this link was used already, or is of a studio that has ended: open the newest link that `gptworks "
            "studio` printed.", code="invalid_code",
        )  # fmt: skip
    response = JSONResponse({"key": session.key}, headers={"cache-control": "no-store"})
    response.set_cookie(sign_in.cookie_name(request.scope), session.cookie, httponly=True, samesite="strict", path="/")
    return response


def _file(request: Request, name: str) -> Response:
    """A file of the folder, or 304 where the browser has it."""
    found = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.suffix in _TYPES}.get(name)
    if found is None:
        raise APIError(404, f"the page has no file {name[:128]!r}.")
    data = found.read_bytes()
    headers = _HEADERS | {"etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=_TYPES[found.suffix])
