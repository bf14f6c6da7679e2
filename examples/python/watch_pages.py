"""The page map, live: a line for each change, until COUNT messages have come; one a second comes at least.

`python examples/python/watch_pages.py [ADDRESS] [COUNT]`
"""

import sys
from contextlib import closing

from kvatlas.client.config import credentials_from_environment
from kvatlas.client.sync import Client


def main(address: str = "127.0.0.1:50051", count: str = "10") -> None:
    with (
        Client(address, credentials=credentials_from_environment()) as client,
        closing(client.watch_pages(interval_seconds=0.1)) as maps,
    ):
        last = None
        for _, page_map in zip(range(int(count)), maps, strict=False):
            if page_map.revision == last:
                continue  # nothing has changed: a sign of life
            last = page_map.revision
            words = " · ".join(f"{state} {pages}" for state, pages in page_map.counts().items())
            print(f"revision {page_map.revision.number}: {words}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
