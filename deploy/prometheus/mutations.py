"""Plants one fault after another in the rules and shows which of them promtool's tests do not notice.

    python -m deploy.prometheus.mutations               all faults; exit status 1 if any survives
    python -m deploy.prometheus.mutations --only Leak   those of rules whose name contains a word

A fault drops a rule, one of its conditions or its `for`, flips a comparison, changes a number, a window, a
matcher, a function, a grouping, a label or a text. A fault that changes nothing is not planted.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from service.metric_table import TABLE as SERVICE_TABLE
from worker.readers.metric_table import TABLE as WORKER_TABLE

FOLDER = Path(__file__).resolve().parent
RULE_FILES = ("recording.yml", "alerts.yml")
TEST_FILES = ("rules_test.yml", "slo_test.yml")  # in the order of their cost
TIMEOUT_SECONDS = (
    1800.0  # of a promtool that hangs: a loaded machine takes minutes for what a quiet one does in 3 s
)

TOLD_EVERY = 10  # faults between two words on how far it is

LABELS = {metric.exposed: set(metric.labels) for metric in (*WORKER_TABLE, *SERVICE_TABLE)}
FLIPS = {">": "<", "<": ">", "==": "!=", "!=": "=="}
FUNCTIONS = {
    "rate": "irate",
    "min_over_time": "max_over_time",
    "max_over_time": "min_over_time",
    "sum": "min",
    "max": "sum",
    "and": "or",
}
_COMPARISON = re.compile(r"(?<= )(?:>|<|==|!=)(?= )")
_NUMBER = re.compile(r"(?<![\w.\"\[])\d+(?:\.\d+)?(?![\w.\"\]])")
_WINDOW = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=offset )\d+[smh]")
_MATCHER = re.compile(r"\w+(?:=~|!~|!=|=)\"[^\"]*\"")
_FUNCTION = re.compile(rf"(?<![:\w])(?:{'|'.join(FUNCTIONS)})\b(?=[ (])")
_GROUPING = re.compile(r"\b(?:by|on) \([\w, ]+\) ?")
_AGGREGATED = re.compile(
    r" by \((?P<by>[\w, ]+)\) \((?:\w+\()?(?P<name>\w+?)(?:_bucket|_count)?(?:\{(?P<inside>[^}]*)\})?[\[) ]"
)
_ARITHMETIC = re.compile(r"(?<= )[-+/](?= )")


@dataclass(frozen=True)
class Fault:
    """One changed rule, in the text of its file."""

    rule: str
    what: str
    file: str
    text: str


def faults() -> Iterator[Fault]:
    """Every fault of every rule."""
    for file in RULE_FILES:
        document = _document(file)
        for group_index, group in enumerate(document["groups"]):
            for rule_index, rule in enumerate(group["rules"]):
                for what, changed in _changes(rule):
                    mutant = deepcopy(document)
                    rules = mutant["groups"][group_index]["rules"]
                    rules[rule_index : rule_index + 1] = [changed] if changed else []
                    name = rule.get("alert") or rule["record"]
                    yield Fault(name, what, file, json.dumps(mutant))


def _changes(rule: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    yield "rule dropped", None
    for what, expression in _expressions(rule["expr"]):
        yield what, {**rule, "expr": expression}
    if "for" in rule:
        yield "for dropped", {key: value for key, value in rule.items() if key != "for"}
        yield f"for {rule['for']} → 2h", {**rule, "for": "2h"}
    if "labels" in rule:
        yield "severity changed", {**rule, "labels": {"severity": "none"}}
    for name in rule.get("annotations", {}):
        yield f"{name} dropped", {**rule, "annotations": {**rule["annotations"], name: ""}}


def _expressions(expression: str) -> Iterator[tuple[str, str]]:
    yield from _without_conditions(expression)
    yield from _replaced(expression, _COMPARISON, lambda text: FLIPS[text])
    yield from _replaced(expression, _NUMBER, _other_number)
    yield from _replaced(expression, _WINDOW, lambda text: "30s" if text != "30s" else "5m")
    yield from _replaced(expression, _WINDOW, lambda text: f"{int(text[:-1]) * 3}{text[-1]}")
    yield from _replaced(expression, _MATCHER, lambda _: "")
    yield from _replaced(expression, _MATCHER, _other_value)
    yield from _replaced(expression, _FUNCTION, lambda text: FUNCTIONS[text])
    yield from _replaced(expression, _GROUPING, lambda _: "")
    yield from _replaced(expression, _ARITHMETIC, lambda text: {"-": "+", "+": "-", "/": "*"}[text])


def _without_conditions(expression: str) -> Iterator[tuple[str, str]]:
    """The expression without one of the lines that begin with `and`, where one is enough to drop."""
    lines = expression.strip().splitlines()
    for index, line in enumerate(lines):
        if line.strip().startswith("and ") and line.count("(") == line.count(")"):
            yield f"{line.strip()!r} dropped", "\n".join(lines[:index] + lines[index + 1 :])


def _replaced(
    expression: str, pattern: re.Pattern[str], change: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    for found in pattern.finditer(expression):
        new = change(found[0])
        if found[0] in ("sum", "max") and _is_of_one_series(expression[found.end() :]):
            continue
        text = expression[: found.start()] + new + expression[found.end() :]
        text = text.replace("{,", "{").replace(",}", "}").replace("on (instance) (", "(")
        if text != expression:
            yield f"{found[0].strip()} → {new or 'nothing'} at {found.start()}", text


def _is_of_one_series(rest: str) -> bool:
    """Whether an aggregation that begins before `rest` has one series a process, whatever is done with it."""
    found = _AGGREGATED.match(rest)
    if found is None:
        return False
    grouping, name, inside = set(found["by"].split(", ")), found["name"], found["inside"] or ""
    fixed = set(re.findall(r'(\w+)="', inside))
    return "instance" in grouping and LABELS.get(name, {"?"}) <= fixed | grouping


def _other_number(text: str) -> str:
    return f"{float(text) * 2 if float(text) else 1e9:g}"


def _other_value(matcher: str) -> str:
    name, _, value = matcher.partition("=")
    return f'{name}="nobody"' if value else matcher


def is_noticed(fault: Fault) -> bool:
    """Whether a test fails with it; asked are those that name the rule, or a rule that reads it."""
    readers = _readers_of(fault.rule)
    with tempfile.TemporaryDirectory(prefix="rules-") as name:
        folder = Path(name)
        for file in RULE_FILES:
            shutil.copy(FOLDER / file, folder)
        (folder / fault.file).write_text(fault.text)
        return any(not _passes(folder, test, readers) for test in TEST_FILES)


@cache
def _document(file: str) -> dict[str, Any]:
    """A file, parsed once; not to be changed."""
    document: dict[str, Any] = yaml.safe_load((FOLDER / file).read_text())
    return document


@cache
def _readers_of(rule: str) -> frozenset[str]:
    """The rule, and all that read it, directly or not."""
    readers, num_before = {rule}, 0
    while len(readers) > num_before:
        num_before = len(readers)
        for file in RULE_FILES:
            for group in _document(file)["groups"]:
                for each in group["rules"]:
                    if any(name in each["expr"] for name in readers):
                        readers.add(each.get("alert") or each["record"])
    return frozenset(readers)


def _passes(folder: Path, test: str, names: Collection[str]) -> bool:
    """Whether the tests of a file pass that have one of these names in them; empty: all tests."""
    document = _document(test)
    chosen = [
        each for each in document["tests"] if not names or any(name in json.dumps(each) for name in names)
    ]
    (folder / test).write_text(json.dumps({**document, "tests": chosen}))  # JSON is YAML
    command = ["promtool", "test", "rules", test]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=TIMEOUT_SECONDS)
    return done.returncode == 0


def survivors(tried: Sequence[Fault], workers: int = 2) -> list[Fault]:
    """The faults that no test notices. Raises ValueError if the rules fail their own tests."""
    with tempfile.TemporaryDirectory(prefix="rules-") as name:
        for file in RULE_FILES:
            shutil.copy(FOLDER / file, name)
        if not all(_passes(Path(name), test, ()) for test in TEST_FILES):
            raise ValueError("the rules fail their own tests")
    found = []
    with ThreadPoolExecutor(workers) as pool:
        for number, (fault, is_seen) in enumerate(zip(tried, pool.map(is_noticed, tried), strict=True), 1):
            if not is_seen:
                found.append(fault)
            if number % TOLD_EVERY == 0:
                print(f"{number} of {len(tried)}, {len(found)} not noticed", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Tries the faults; prints those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="faults of rules whose name contains this")
    parser.add_argument("--workers", type=int, default=2, help="promtools at once")
    arguments = parser.parse_args()
    tried = [fault for fault in faults() if arguments.only in fault.rule]
    left = survivors(tried, arguments.workers)
    for fault in left:
        print(f"SURVIVED: {fault.rule}: {fault.what}")
    print(f"{len(tried) - len(left)} of {len(tried)} faults were noticed")
    return 1 if left or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
