"""An answer of the demo pool: a request whose pages are real pages of the simulation."""

import re
import threading
import time
from collections.abc import Callable, Iterator

from dashboard.demo_pool import DemoPool, DemoSequence, mix
from kvatlas.client.events import Delta, Event, Finished, KvBill, Prefix, Started, Summary, Timing, Usage
from kvatlas.client.request import Options

POLL_SECONDS = 0.05
PATIENCE_SECONDS = 60.0
TEXT = (
    "A page holds the keys and values of sixteen tokens. Prompts that begin alike share their pages, and "
    "what nobody uses stays until its room is needed."
)
WORDS = TEXT.split()


def pieces_of(text: str) -> tuple[str, ...]:
    """Words with the blank before them; long ones in pieces of six."""
    return tuple(
        part for word in re.findall(r"\s*\S+|\s+", text) for part in re.findall(r".{1,7}", word, re.S)
    )


class DemoStream:
    """Puts a request into the pool and tells how it goes."""

    def __init__(
        self, pool: DemoPool, lock: threading.RLock, pieces: tuple[str, ...], options: Options
    ) -> None:
        self._pool, self._lock, self._pieces = pool, lock, pieces
        self._is_closed = False
        keys: list[int] = []
        for end in range(pool.page_size, len(pieces) + 1, pool.page_size):
            content = hash_of("".join(pieces[end - pool.page_size : end]))
            keys.append(mix(keys[-1] if keys else 1, content))
        self._sequence = DemoSequence(
            request_id=options.get("request_id") or f"play-{pool.number}",
            keys=keys,
            prompt_tokens=max(1, len(pieces)),
            max_tokens=options.get("max_tokens", 64),
            receive_ms=pool.now_ms,
        )

    def __iter__(self) -> Iterator[Event]:
        one, began = self._sequence, time.monotonic()
        with self._lock:
            self._pool.waiting.append(one)
        self._wait(lambda: one.owner > 0)
        prefix = Prefix(*one.result_tokens)
        yield Started(one.request_id, "simulated", one.prompt_tokens, prefix, 0, 0.0, "demo-0")
        first_token, sent = 0.0, 0
        while sent < one.max_tokens and not self._is_closed:
            done = (
                max(0, one.token_count - one.prompt_tokens) if one in self._pool.running else one.max_tokens
            )
            if done > sent:
                first_token = first_token or time.monotonic() - began
                words = [WORDS[place % len(WORDS)] + " " for place in range(sent, done)]
                yield Delta(0, "".join(words), (), (), sent, done - sent)
                sent = done
            else:
                time.sleep(POLL_SECONDS)
        yield Finished(0, "max_tokens", None, sent)
        bill = KvBill(reused_pages=prefix.hit_tokens // self._pool.page_size)
        yield Summary(Usage(one.prompt_tokens, sent, prefix, bill), Timing(0.0, 0.0, first_token, 0.0))

    def close(self) -> None:
        """Nobody reads on; the simulated request ends by itself."""
        self._is_closed = True

    def _wait(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not is_so() and not self._is_closed and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def hash_of(text: str) -> int:
    """The same in every process, unlike hash()."""
    value = 14695981039346656037
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return value
