"""How log lines of all processes are written: one event, one line, whatever is in it.

Text of clients gets into logs (request ids, reasons of operators, texts of exceptions). A line break or a
terminal's escape in it must not look like another event: control characters are shown escaped, and the lines
of a traceback begin with `| `, which no event does.
"""

import logging
import re
import time

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # tabs too


class LineFormatter(logging.Formatter):
    """`time level=… logger=… message`, in UTC. `ending` names a field of the record that is put behind it."""

    def __init__(self, ending: str = "") -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s %(message)s{ending}",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without control characters."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """The traceback, each line marked as none of an event."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(
            f"| {one_line(line)}" for line in re.split(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text)
        )


def one_line(text: str) -> str:
    """The text with control characters as `\\n`, `\\x1b`, `\\u2028`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
