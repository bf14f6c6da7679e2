"""The generations in progress here, by request id: for duplicates, cancels, the drain and the gauges.

Owns the table. An entry is there from the id's check to the end of the call, or until a slow reader lost it.
"""

import asyncio
from dataclasses import dataclass

from service.handlers.run import GenerationRun


@dataclass(slots=True, eq=False)
class LiveCall:
    """One generation; `run` is there once the prompt is tokenized."""

    request_id: str
    tenant: str
    task: "asyncio.Task[object] | None"
    run: GenerationRun | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """CancelGeneration, wherever the call stands."""
        self.is_cancelled = True
        if self.run is not None:
            self.run.cancel()


class LiveCalls:
    """All of them. One per request id."""

    def __init__(self) -> None:
        self._calls: dict[str, LiveCall] = {}
        self._empty: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def enter(self, request_id: str, tenant: str) -> LiveCall | None:
        """A place under this id; None: the id is in flight."""
        if request_id in self._calls:
            return None
        call = LiveCall(request_id, tenant, asyncio.current_task())
        self._calls[request_id] = call
        return call

    def leave(self, call: LiveCall) -> None:
        """Frees the id; may be called twice."""
        if self._calls.get(call.request_id) is call:
            del self._calls[call.request_id]
            if not self._calls and self._empty is not None:
                self._empty.set()

    def find(self, request_id: str, tenant: str) -> LiveCall | None:
        """The call of that id, if it belongs to that tenant."""
        call = self._calls.get(request_id)
        return call if call is not None and call.tenant == tenant else None

    async def wait_until_empty(self) -> None:
        """Returns once no generation is left."""
        while self._calls:
            self._empty = asyncio.Event()
            await self._empty.wait()

    def everything(self) -> list[LiveCall]:
        """A copy, safe to make on any thread."""
        return list(self._calls.values())

    # For gauges; called on the scraping thread, only reads.

    def unread_tokens(self) -> int:
        """Tokens that wait in mailboxes."""
        return sum(call.run.inbox.unread for call in self.everything() if call.run is not None)

    def untaken(self) -> int:
        """Requests that no worker has taken yet."""
        return sum(1 for call in self.everything() if call.run is None or call.run.outcome is None)

    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return sum(1 for call in self.everything() if call.run is None or call.run.start is None)
