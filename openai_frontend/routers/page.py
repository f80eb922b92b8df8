"""The pages at / and /docs, and the files they are made of."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

_DIRECTORY = Path(__file__).resolve().parents[1] / "static"
_PAGE, _API_PAGE = "index.html", "docs.html"


def _swagger_ui() -> Path:
    """The files of Swagger UI. Their package is not imported: its own routes read them anew for every request."""
    spec = find_spec("fastapi_swagger")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "resources"


_FILES = {path.name: path for path in _DIRECTORY.iterdir()}
_FILES |= {name: _swagger_ui() / name for name in ("swagger-ui.css", "swagger-ui-bundle.js")}
# The page needs nothing from elsewhere, and nothing from elsewhere may show it.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_CONTENT = _HEADERS["content-security-policy"]
_API_HEADERS = _HEADERS | {
    "content-security-policy": f"{_CONTENT}; style-src 'self' 'unsafe-inline'"
}  # as it sets them


@router.get("/")
async def show_page() -> FileResponse:
    return FileResponse(_FILES[_PAGE], headers=_HEADERS)


@router.get("/docs")
async def show_api() -> FileResponse:
    return FileResponse(_FILES[_API_PAGE], headers=_API_HEADERS)


@router.get("/static/{name}")
async def show_file(name: str) -> FileResponse:
    if name not in _FILES:
        raise HTTPException(404)
    return FileResponse(_FILES[name], headers=_HEADERS)
