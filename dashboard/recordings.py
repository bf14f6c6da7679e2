"""The last minutes as a recording, for `kvatlas replay` and `kvatlas whatif`: through AdminService.

Owns nothing that lasts: a recording is begun in the past, ended at once, and fetched.
"""

import tempfile
from pathlib import Path

from kvatlas.client.recordings import Recorder

MAX_BYTES = 64 * 1024 * 1024
NOTE = "saved from the dashboard"


def save_past(address: str, worker_id: str, seconds: float) -> bytes:
    """The file, as far back as the worker still knows. KvatlasError, e.g. where a recording runs already."""
    with Recorder(address) as recorder, tempfile.TemporaryDirectory() as folder:
        recording = recorder.start(worker_id, lookback_seconds=seconds, max_bytes=MAX_BYTES, note=NOTE)
        recorder.stop(recording.recording_id, worker_id=worker_id)
        path = Path(folder) / "recording"
        recorder.download(recording.recording_id, path, worker_id=worker_id)
        return path.read_bytes()
