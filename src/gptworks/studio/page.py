"""The static files of the page, which need no key: they hold nothing of anyone's."""

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gptworks.serve.errors import APIError
from gptworks.serve.guard import STATIC

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
