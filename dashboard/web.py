"""The ASGI application: the Streamlit script and our own routes beside it.

`python -m dashboard` serves it; so does any ASGI server that is given `dashboard.web:app`.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit import config as streamlit_config

from dashboard import process
from dashboard.config import DashboardConfig
from dashboard.live_route import LiveRoutes
from dashboard.theme import options as theme_options

SCRIPT = Path(__file__).with_name("app.py")
GONE = "WebSocketDisconnected"  # of Starlette; older ones have no such class, and no such exception

log = logging.getLogger("dashboard.web")


def configure(settings: DashboardConfig) -> None:
    """Streamlit's options; before the app is made."""
    options: dict[str, Any] = {
        "server.baseUrlPath": settings.base_path.strip("/"),
        "server.fileWatcherType": "none",  # a reloaded module would start a second subscriber
        "server.corsAllowedOrigins": list(settings.allowed_origins),
        "server.allowedHosts": list(settings.allowed_hosts),
        "server.headless": True,
        "runner.magicEnabled": False,  # a string that stands alone is a docstring, not something to show
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "server.showEmailPrompt": False,
        **theme_options(settings.theme),
    }
    for name, value in options.items():
        streamlit_config.set_option(name, value)


class GoneTabs:
    """Passes everything to `app`. A tab may vanish while it is answered; Streamlit then closes a socket that
    is closed, and a server would log that as a crash of ours."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._app(scope, receive, send)
        except RuntimeError as error:
            if scope["type"] != "websocket" or type(error).__name__ != GONE:
                raise
            log.debug("event=tab_gone path=%s", scope["path"])


def make_app(settings: DashboardConfig) -> Any:
    """The application of one process."""
    configure(settings)
    live = LiveRoutes(
        process.live_pages,
        prefix=settings.prefix,
        allowed=settings.allowed_origins,
        hosts=settings.allowed_hosts,
        max_viewers=settings.max_viewers,
    )
    return GoneTabs(st.App(SCRIPT, routes=live.routes(), lifespan=_lifespan))


@asynccontextmanager
async def _lifespan(app: Any) -> AsyncIterator[None]:
    process.live_pages()
    try:
        yield
    finally:
        process.shut_down()


def __getattr__(name: str) -> Any:
    """`app` is made when an ASGI server asks for it, not when somebody imports this module."""
    if name == "app":
        return make_app(process.config())
    raise AttributeError(name)
