"""The dashboard's live map of a demo pool, as its snapshot makes it."""

from dashboard import demo_messages
from dashboard.demo_pool import DemoPool
from dashboard.live_map import LiveMap


def live_map(pool: DemoPool) -> LiveMap:
    live = LiveMap("w")
    for message in demo_messages.snapshot(pool):
        live.apply(message)
    demo_messages.forget_changes(pool)
    return live
