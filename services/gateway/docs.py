"""GET /docs: Swagger UI over /openapi.json, with files of its own: the internet is not needed."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

# Relative to /docs, so that the page works behind any prefix of a proxy.
_FILES = "docs/files"


def install(app: FastAPI) -> None:
    """Add the page and its files."""

    @app.get("/docs", include_in_schema=False)
    async def page() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} {app.version}",
            swagger_js_url=f"{_FILES}/swagger-ui-bundle.js",
            swagger_css_url=f"{_FILES}/swagger-ui.css",
            swagger_favicon_url=f"{_FILES}/favicon.png",
        )

    # Of that package only the files are used: it keeps a released Swagger UI on the package index.
    app.mount(f"/{_FILES}", StaticFiles(packages=[("fastapi_offline", "static")]))
