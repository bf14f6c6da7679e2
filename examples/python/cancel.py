"""A stream that is left early gives its pages back. `python examples/python/cancel.py [ADDRESS]`."""

import sys
import time

from kvatlas.client.config import credentials_from_environment
from kvatlas.client.events import Delta
from kvatlas.client.sync import Client


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address, credentials=credentials_from_environment()) as client:
        with client.stream("Count: 1, 2, 3,", max_tokens=1000, ignore_eos=True) as stream:
            for event in stream:
                if isinstance(event, Delta) and event.token_offset >= 8:
                    break  # leaving the block cancels the call
        limit = time.monotonic() + 10
        while (active := client.page_pool().stats.active_pages) and time.monotonic() < limit:
            time.sleep(0.02)
        print(f"cancelled; {active} pages in use")


if __name__ == "__main__":
    main(*sys.argv[1:])
