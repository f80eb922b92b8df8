"""The page at /, and the files it is made of."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

router = APIRouter(include_in_schema=False)

_DIRECTORY = Path(__file__).resolve().parents[1] / "static"
_FILES = {path.name: path for path in _DIRECTORY.iterdir()}
_PAGE = "index.html"
# The page needs nothing from elsewhere, and nothing from elsewhere may show it.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
async def show_page() -> FileResponse:
    return FileResponse(_FILES[_PAGE], headers=_HEADERS)


@router.get("/static/{name}")
async def show_file(name: str) -> FileResponse:
    if name not in _FILES:
        raise HTTPException(404)
    return FileResponse(_FILES[name], headers=_HEADERS)
