"""Our own routes: the page feed on a WebSocket, the spectrogram, and the browser's modules.

Owns viewers: what each has seen and what it wants. The next frame is built when the last one was written,
so a slow viewer gets merged frames and never a queue. Routes of our own bypass Streamlit's checks, so the
Origin is compared here, before a socket is accepted.
"""

import asyncio
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from dashboard.live_pages import LivePages
from dashboard.viewer import Viewer

COMPONENTS = Path(__file__).parent / "components"
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
MAX_COMMAND_CHARACTERS = 200
COLUMN = re.compile(r"[0-9]{1,15}")  # a number of the spectrogram's
REFUSED, TOO_MANY = 1008, 1013  # close codes: policy, try again later


def assets() -> dict[str, bytes]:
    """The browser's modules by name."""
    return {path.name: path.read_bytes() for path in COMPONENTS.iterdir() if path.suffix in MEDIA_TYPES}


def assets_digest() -> str:
    """Part of their path, so that they may be cached for ever."""
    whole = b"".join(name.encode() + data for name, data in sorted(assets().items()))
    return hashlib.sha256(whole).hexdigest()[:16]


def is_ours(connection: HTTPConnection, origins: tuple[str, ...], hosts: tuple[str, ...]) -> bool:
    """Whether a page of ours, or of an allowed origin, asks, and by a name that is ours.

    `hosts`: the names; empty: any. Programs send no Origin.
    """
    host = connection.headers.get("host", "")
    if hosts and urlsplit(f"//{host}").hostname not in hosts:
        return False
    origin = connection.headers.get("origin")
    return origin is None or origin in origins or urlsplit(origin).netloc == host


class LiveRoutes:
    """The routes of one process. `pages` is asked for at each use: the subscriber starts with the app."""

    def __init__(
        self,
        pages: Callable[[], LivePages],
        *,
        prefix: str,
        allowed: tuple[str, ...],
        hosts: tuple[str, ...],
        max_viewers: int,
    ) -> None:
        self._pages = pages
        self._prefix = prefix
        self._allowed = (allowed, hosts)
        self._max_viewers = max_viewers
        self._assets = assets()
        self.num_viewers = 0

    def routes(self) -> list[BaseRoute]:
        """For the app; Streamlit does not put them under its base path, so we do."""
        live = f"{self._prefix}/live"
        return [
            WebSocketRoute(f"{live}/pages", self._serve_pages),
            Route(f"{live}/spectrogram", self._serve_spectrogram),
            Route(f"{live}/health", self._serve_health),
            Route(f"{live}/{assets_digest()}/{{name}}", self._serve_asset),
        ]

    async def _serve_pages(self, socket: WebSocket) -> None:
        if not is_ours(socket, *self._allowed):
            await socket.close(REFUSED)  # before `accept`: the browser sees 403
            return
        await socket.accept()
        if self.num_viewers >= self._max_viewers:
            await socket.close(TOO_MANY)  # after `accept`, or the browser would not see the code
            return
        self.num_viewers += 1
        viewer = Viewer(self._pages(), socket.query_params)
        tasks = [asyncio.ensure_future(_listen(socket, viewer)), asyncio.ensure_future(_tell(socket, viewer))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_viewers -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(RuntimeError, WebSocketDisconnect):  # closed by the other end
                await socket.close()

    async def _serve_spectrogram(self, request: Request) -> Response:
        """Columns from number `since` on: u32 first, count, bands, pages; then f64 times [n],
        u32 figures [n, 14], u8 cuts [n], u8 columns [n, 4, bands]; all of it deflated."""
        if not is_ours(request, *self._allowed):
            return Response(status_code=403)
        follower = self._pages().follower(request.query_params.get("worker", ""))
        since = request.query_params.get("since", "0")
        if follower is None or not COLUMN.fullmatch(since):
            return Response(status_code=404)
        with follower.live_map.lock:
            gram = follower.live_map.spectrogram
            first = gram.first_for(int(since))
            columns, times, cuts = gram.columns(first)
            figures, _ = gram.figures(first)
            bands, page_count = gram.num_bands, gram.page_count
        head = struct.pack("<IIII", first, len(times), bands, page_count)
        body = (
            times.astype("<f8").tobytes()
            + figures.astype("<u4").tobytes()
            + cuts.astype(np.uint8).tobytes()
            + columns.tobytes()
        )
        return Response(zlib.compress(head + body, 1), media_type="application/octet-stream")

    async def _serve_health(self, request: Request) -> Response:
        """For probes: the process answers; what it sees is told, not judged."""
        pages = self._pages()
        workers = {each.worker_id: each.status.kind for each in pages.followers()}
        return JSONResponse({"workers": workers, "failure": pages.failure, "viewers": self.num_viewers})

    async def _serve_asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._assets:
            return Response(status_code=404)
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(self._assets[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)


async def _listen(socket: WebSocket, viewer: Viewer) -> None:
    """Wishes of the viewer, until it goes."""
    with suppress(WebSocketDisconnect):
        while True:
            text = await socket.receive_text()
            if len(text) > MAX_COMMAND_CHARACTERS:
                return
            with suppress(ValueError):
                wish = json.loads(text)
                if isinstance(wish, dict):
                    viewer.take_wish(wish)


async def _tell(socket: WebSocket, viewer: Viewer) -> None:
    """Frames, one after the other."""
    with suppress(WebSocketDisconnect, RuntimeError):  # RuntimeError: closed while it was written
        while True:
            async for frame in viewer.frames():
                if isinstance(frame, bytes):
                    await socket.send_bytes(frame)
                else:
                    await socket.send_text(frame)
            await viewer.pause()
