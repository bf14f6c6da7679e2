"""Long text work off the event loop, a bounded number at a time.

Owns a small thread pool. Nothing over 1 ms belongs on the loop, and a prompt may have 2 MiB; the
tokenizer lets go of the interpreter while it works, so a thread really is beside the loop.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

INLINE_BYTES = 1024
"""Text up to this is done on the loop: about 0.3 ms of tokenizing, less than a change of thread twice."""

T = TypeVar("T")


class TextThreads:
    """Runs work of a known size: small at once, large in a thread. Callers beyond the pool wait."""

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._free = asyncio.Semaphore(num_threads)

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, whose cost grows with `num_bytes`."""
        if num_bytes <= INLINE_BYTES:
            return work()
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        running = self._pool.submit(work)
        # The place is given back when the thread is done, not when a cancelled caller leaves: else
        # cancelled calls would pile up work in the executor's own queue, which has no bound.
        running.add_done_callback(lambda _: self._give_back(loop))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Ends the threads once their work is done; nothing new is taken."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _give_back(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._free.release)
