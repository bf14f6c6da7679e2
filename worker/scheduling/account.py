"""What a request is charged for the pages it holds: page-seconds, shared pages split by references.

Owns three numbers for each request; costs O(1) for each change, whatever the number of pages. Bills of
all requests together are the time integral of the pages in use.
"""


class Account:
    """Page-seconds of one request, over all its sequences. Times are seconds of the page events' clock."""

    __slots__ = ("_held", "_num_held", "_saved")

    def __init__(self) -> None:
        self._num_held = 0  # references now
        self._held = 0.0  # reference-seconds, less what the present ones will have begun with
        self._saved = 0.0  # likewise, saved by sharing

    def took(self, count: int, now: float, saved: float = 0.0) -> None:
        """So many references more; ``saved``: sum of S (see pages/sharing.py) over their pages now."""
        self._num_held += count
        self._held -= count * now
        self._saved -= saved

    def gave(self, count: int, now: float, saved: float) -> None:
        """So many references less."""
        self._num_held -= count
        self._held += count * now
        self._saved += saved

    def bill(self, now: float, saved: float = 0.0) -> tuple[float, float]:
        """Page-seconds charged, and page-seconds saved; ``saved``: sum of S over all pages held now."""
        page_seconds_saved = self._saved + saved
        return self._held + self._num_held * now - page_seconds_saved, page_seconds_saved
