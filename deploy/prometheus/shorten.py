"""The rules with all durations divided, so that an alert of minutes can be seen within seconds.

Expressions, comparisons and labels stay as they are; what changes are windows, `for`, offsets, evaluation
intervals, and the numbers that are seconds of waiting. Writes files, starts nothing.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from deploy.prometheus.mutations import FOLDER, RULE_FILES

MIN_WINDOW_SECONDS = 5.0  # a rate needs two scrapes
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
# Thresholds that are a time: how old a pass or a mirror may be.
WAITS = {"> 300": 300.0, "_age_seconds) > 5": 5.0}
_WINDOW = re.compile(r"(?<=\[)(\d+)([smh])(?=\])|(?<=offset )(\d+)([smh])")


def shortened(folder: Path, divisor: float) -> list[Path]:
    """Both rule files in `folder`, their durations divided; the paths."""
    paths = []
    for name in RULE_FILES:
        document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
        for group in document["groups"]:
            group["interval"] = "1s"
            for rule in group["rules"]:
                rule["expr"] = _shorter_expression(rule["expr"], divisor)
                if "for" in rule:
                    rule["for"] = _text(_seconds(rule["for"]) / divisor)
        path = folder / name
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        paths.append(path)
    return paths


def _shorter_expression(expression: str, divisor: float) -> str:
    def shorter(found: re.Match[str]) -> str:
        seconds = _seconds("".join(part for part in found.groups() if part))
        return _text(max(MIN_WINDOW_SECONDS, seconds / divisor))

    expression = _WINDOW.sub(shorter, expression)
    for text, seconds in WAITS.items():
        if text in expression:
            number = f"{max(2.0, seconds / divisor):g}"
            expression = expression.replace(text, text.rpartition(" ")[0] + " " + number)
    return expression


def _seconds(duration: str) -> float:
    return float(duration[:-1]) * SECONDS[duration[-1]]


def _text(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
