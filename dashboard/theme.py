"""One palette for everything: palette.json → Streamlit's theme, charts and the browser's modules."""

import json
from pathlib import Path
from typing import Any

PALETTE: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("palette.json").read_text()
)
STATES = tuple(PALETTE["states"])


def colours(group: str, kind: str) -> dict[str, str]:
    """Of a group (`states`, `results`, `bands`, `ground`) on a `dark` or `light` ground."""
    return {name: looks[kind] for name, looks in PALETTE[group].items()}


def options(theme: str) -> dict[str, Any]:
    """Options of Streamlit. `auto` follows the browser's wish for dark or light."""
    base = {} if theme == "auto" else {"theme.base": theme}
    return base | {
        f"theme.{kind}.{option}": colours("ground", kind)[name]
        for kind in ("dark", "light")
        for option, name in (
            ("backgroundColor", "background"),
            ("secondaryBackgroundColor", "surface"),
            ("textColor", "text"),
            ("primaryColor", "accent"),
        )
    }
