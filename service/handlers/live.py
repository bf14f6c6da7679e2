"""The generations in progress here, by tenant and request id: for duplicates, cancels, the drain and gauges.

Owns the table. An entry is there from the id's check to the end of the call, or until a slow reader lost it.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from service.errors import Failure
from service.handlers.run import GenerationRun
from service.request import AbortReason


@dataclass(slots=True, eq=False)
class LiveCall:
    """One generation; `run` is there once the prompt is tokenized."""

    request_id: str
    tenant: str
    principal: str
    labels: Mapping[str, str]
    task: "asyncio.Task[object] | None"
    run: GenerationRun | None = None
    is_cancelled: bool = False
    failure: Failure | None = field(default=None)  # what ends it, if that was decided before it had a run

    @property
    def tokens_sent(self) -> int:
        """Tokens that have left for the client."""
        return self.run.tokens_sent if self.run is not None else 0

    def cancel(self) -> None:
        """CancelGeneration, wherever the call stands."""
        self.is_cancelled = True
        if self.run is not None:
            self.run.cancel()

    def fail(self, failure: Failure, reason: AbortReason) -> None:
        """Ends it with a status. Its pages go now, also while its reader does not read."""
        self.failure = self.failure or failure
        if self.run is not None:
            self.run.fail(failure, reason)
            self.run.close(reason)

    def fits(self, request_ids: Collection[str], principal: str, labels: Mapping[str, str]) -> bool:
        """Whether it is one of those meant; what is empty does not matter."""
        return (
            (not request_ids or self.request_id in request_ids)
            and (not principal or self.principal == principal)
            and all(self.labels.get(key) == value for key, value in labels.items())
        )


class LiveCalls:
    """All of them. One per request id and tenant, so that no tenant learns of another's ids."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], LiveCall] = {}
        self._empty: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def enter(
        self, request_id: str, tenant: str, principal: str = "", labels: Mapping[str, str] | None = None
    ) -> LiveCall | None:
        """A place under this id; None: the tenant has it in flight."""
        if (tenant, request_id) in self._calls:
            return None
        call = LiveCall(request_id, tenant, principal, labels or {}, asyncio.current_task())
        self._calls[tenant, request_id] = call
        return call

    def leave(self, call: LiveCall) -> None:
        """Frees the id; may be called twice."""
        key = (call.tenant, call.request_id)
        if self._calls.get(key) is call:
            del self._calls[key]
            if not self._calls and self._empty is not None:
                self._empty.set()

    def find(self, request_id: str, tenant: str) -> LiveCall | None:
        """The call of that id, if it belongs to that tenant."""
        return self._calls.get((tenant, request_id))

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
