"""Serve the page's static files, which hold no user data and need no key, and exchange sign-in codes for sessions."""

import mimetypes
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from gptworks.serve import sign_in
from gptworks.serve.app import body_of, service_of
from gptworks.serve.errors import APIError
from gptworks.serve.guard import STATIC
from gptworks.serve.wire import Wire

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

mimetypes.add_type("text/javascript", ".js")  # replaces the system's entry: browsers run scripts only of this type

router = APIRouter(include_in_schema=False)


_FILES = StaticFiles(directory=Path(__file__).parent / "static")


async def home(request: Request) -> Response:
    """Return the page's HTML."""
    return await static_file(request, "index.html")


@router.get(STATIC + "{name:path}")
async def static_file(request: Request, name: str) -> Response:
    """Return a file of the page, or status 304 if the browser already has it."""
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(_HEADERS)
    return response


class Code(Wire):
    """The one-time code from the link that signs a browser in."""

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
    response = JSONResponse({"key": session.key})
    response.set_cookie(sign_in.cookie_name(request.scope), session.cookie, httponly=True, samesite="strict", path="/")
    return response
