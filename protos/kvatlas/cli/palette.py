"""The colours of page states. One table for terminal and pictures; told apart in four kinds of sight.

A second cue goes with each colour (a glyph, a fill level, a pattern): nothing is told by colour alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateLook:
    """How pages of one state look."""

    dark: str  # colour on a dark ground
    light: str  # colour on a light ground
    glyph: str  # one column; states differ in it without colour
    ascii: str  # where the terminal knows no other


GROUND_DARK = "#12151c"
GROUND_LIGHT = "#ffffff"

LOOKS: Mapping[str, StateLook] = {
    "free": StateLook("#252a33", "#e6e9ef", "·", "."),
    "active": StateLook("#3a66c8", "#2f80e0", "█", "#"),
    "cached": StateLook("#35b57f", "#0a6b2f", "▒", "+"),
    "pinned": StateLook("#ffdd3c", "#b98a2c", "◆", "*"),
    "reserved": StateLook("#c4c9d6", "#2f3238", "▚", "x"),
}
"""By name of the state, in the order of legends."""

FILL_GLYPHS = "▁▂▃▄▅▆▇█"
"""An ACTIVE page by the share of its slots that hold a token."""

FREE_IN_TERMINAL = "bright_black"
"""On a terminal of unknown ground the dark grey of free pages could not be seen."""


def owner_colour(owner: int) -> str:
    """A colour per owner, at the golden angle: neighbours in time differ. Letters carry the same fact."""
    hue = (owner * 137.508) % 360
    return hex_of_hsl(hue, 0.65, 0.6)


def hex_of_hsl(hue: float, saturation: float, lightness: float) -> str:
    """#rrggbb; hue in degrees, the others 0..1."""
    reach = saturation * min(lightness, 1 - lightness)
    parts = []
    for offset in (0, 8, 4):
        k = (offset + hue / 30) % 12
        parts.append(round(255 * (lightness - reach * max(-1.0, min(k - 3, 9 - k, 1.0)))))
    return "#{:02x}{:02x}{:02x}".format(*parts)
