"""What this process has one of: its config and its subscriber.

Views, routes and the lifespan all come here, so that a view run by a test, without any server around it,
gets the same objects by the same functions.
"""

import threading

from dashboard.client import ServiceSource, Source
from dashboard.config import DashboardConfig, from_args
from dashboard.demo_source import DemoSource
from dashboard.live_pages import LivePages

_lock = threading.Lock()
_config: list[DashboardConfig] = []
_live_pages: list[LivePages] = []


def config() -> DashboardConfig:
    """Of this process; made from the environment where nobody has installed one."""
    with _lock:
        if not _config:
            _config.append(from_args([]))
        return _config[0]


def live_pages() -> LivePages:
    """The one subscriber, started by whoever comes first."""
    settings = config()
    with _lock:
        if not _live_pages:
            _live_pages.append(LivePages(make_source(settings), settings.history_seconds))
        return _live_pages[0].start()


def make_source(settings: DashboardConfig) -> Source:
    """What the config says to look at."""
    if settings.demo:
        return DemoSource(settings.demo_pages)
    return ServiceSource(
        settings.server, settings.read_token, settings.read_server_ca(), settings.read_identity()
    )


def install(settings: DashboardConfig, pages: LivePages | None = None) -> None:
    """Sets what the process has, before anybody asks."""
    with _lock:
        _config[:] = [settings]
        _live_pages[:] = [pages] if pages is not None else []


def shut_down() -> None:
    """Ends the subscriber, if there is one."""
    with _lock:
        pages, _live_pages[:] = list(_live_pages), []
    for each in pages:
        each.stop()
