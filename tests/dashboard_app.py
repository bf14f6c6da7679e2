"""The dashboard's program as Streamlit runs it for tests, without a server and a browser."""

import functools
from pathlib import Path

from streamlit.components.v2 import manifest_scanner
from streamlit.testing.v1 import AppTest

_APP = Path(__file__).parents[1] / "dashboard" / "app.py"

# For each program Streamlit reads the metadata of all packages that are installed, four times each: half a
# second, while a view takes a twentieth.
manifest_scanner.scan_component_manifests = functools.cache(manifest_scanner.scan_component_manifests)


def dashboard_app() -> AppTest:
    """To be run; a view waits for a minute."""
    return AppTest.from_file(str(_APP), default_timeout=60)
