"""What an interceptor reads of a call's metadata: the first text of a key, and nothing that is no text."""

from collections.abc import Sequence

from service.interceptor import metadata_values


class _Context:
    def __init__(self, *pairs: tuple[str, str | bytes]) -> None:
        self._pairs = pairs
        self.asked = 0

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        self.asked += 1
        return self._pairs or None


def test_values_come_in_the_order_of_the_keys_and_a_key_that_is_missing_is_empty() -> None:
    context = _Context(("tracestate", "s"), ("user-agent", "u"), ("traceparent", "p"))
    assert metadata_values(context, ("traceparent", "attempts", "tracestate")) == ["p", "", "s"]
    assert context.asked == 1
    assert metadata_values(_Context(), ("traceparent",)) == [""]


def test_of_a_key_that_comes_twice_the_first_counts_and_bytes_are_no_text() -> None:
    assert metadata_values(_Context(("a", "first"), ("a", "second")), ("a",)) == ["first"]
    assert metadata_values(_Context(("a", b"\xff"), ("a", "second")), ("a",)) == [""]
