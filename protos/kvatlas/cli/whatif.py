"""`kvatlas whatif`: hit rates and preemptions with other pools, as a table and a picture.

Starts `python -m worker.trace.what_if`, which runs the worker's own code, and shows what it says. Imports
none of it.
"""

import json
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvatlas.cli.config import child_environment
from kvatlas.cli.counted import counted
from kvatlas.cli.exits import DONE, FAILED, USAGE, CommandFailed
from kvatlas.cli.tables import PIPED_WIDTH, Output, print_whole

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")


def run(settings: Namespace) -> int:
    """Asks, shows the table, draws."""
    if not settings.file:
        raise CommandFailed("whatif: which recording? (see kvatlas whatif --help)", USAGE)
    pictures = [Path(name) for name in settings.picture or ()]
    for path in pictures:
        if path.suffix not in PICTURE_SUFFIXES:
            raise CommandFailed(f"--picture {path}: not one of {', '.join(PICTURE_SUFFIXES)}", USAGE)
    if pictures:
        import kvatlas.cli.whatif_picture as picture  # before the work: it may not be installed
    document = _ask(_command(settings))
    if settings.json:
        print(json.dumps(document))
    else:
        console = Output()
        show(document, console if console.is_terminal else Output(width=PIPED_WIDTH))
    for path in pictures:
        try:
            picture.draw(document, path)
        except OSError as error:
            raise CommandFailed(f"cannot write {path}: {error.strerror}", USAGE) from None
        print(f"{path}: hit rate by pool size", file=sys.stderr)
    return DONE


def _command(settings: Namespace) -> list[str]:
    command = [sys.executable, "-m", "worker.trace.what_if", settings.file, "--progress"]
    for name in (
        "format",
        "pages",
        "page_size",
        "policy",
        "host_tier",
        "pool_pages",
        "warmup",
        "resolution",
        "step_model",
    ):
        value = getattr(settings, name)
        if value not in (None, ""):
            command.append(f"--{name.replace('_', '-')}={value}")
    return command


def _ask(command: Sequence[str]) -> dict[str, Any]:
    """Runs it under a progress bar. Raises CommandFailed with what it complained of."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
        ) as child,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        assert child.stdout is not None
        assert child.stderr is not None
        complaints: list[str] = []
        reader = threading.Thread(target=_follow, args=(child.stderr, progress, complaints), daemon=True)
        reader.start()
        try:
            output = child.stdout.read()
        except BaseException:  # an interrupt as well: the child must not outlive it
            child.kill()
            raise
        status = child.wait()
        reader.join()
    if status:
        text = complaints[-1] if complaints else f"it ended with status {status}"
        raise CommandFailed(text, USAGE if status == USAGE else FAILED)
    document: dict[str, Any] = json.loads(output)
    return document


def _follow(lines: IO[str], progress: Progress, complaints: list[str]) -> None:
    """Lines of JSON move the bar, others are for the user."""
    task = progress.add_task("running", total=None)
    for line in lines:
        try:
            told = json.loads(line)
            progress.update(task, completed=told["done"], total=told["total"])
        except (ValueError, TypeError, KeyError):
            if line.strip():
                complaints.append(line.strip())


def show(document: Mapping[str, Any], console: Console) -> None:
    """The table, what was observed, and what makes it less than exact."""
    trace = document["trace"]
    pool = f"{trace['num_pages']:,} pages of {trace['page_size']} tokens, {trace['policy']}"
    load = (
        f"{counted(trace['requests'], 'request')}, {counted(trace['prompt_tokens'], 'prompt token')},"
        f" {trace['seconds']:.0f} s"
    )
    console.print(Text(trace["name"], "bold").append(f": {load}; recorded with {pool}", "not bold"))
    table = Table(box=None, pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for result in document["results"]:
        table.add_row(*_cells(result), style="bold" if is_today(result, trace) else "")
    print_whole(table, console)
    observed = document["observed"]
    if observed:
        console.print(
            f"observed then, of {counted(observed['num_requests'], 'request')} that had ended:"
            f" hits {observed['hit_ratio']:.1%}, {observed['evictions']:,} evictions,"
            f" {observed['preemptions']:,} preemptions, waits {observed['mean_queue_seconds'] * 1e3:.1f} ms",
            highlight=False,
        )
    step = document["step_time"]
    source = f"fitted to {counted(step['num_steps'], 'step')}, median error {step['median_error']:.1%}"
    costs = (
        f"{step['base'] * 1e3:.2f} ms + {step['per_prompt_token'] * 1e6:.1f} us a prompt token"
        f" + {step['per_sequence'] * 1e6:.1f} us a sequence"
        f" + {step['per_context_token'] * 1e9:.1f} ns a token of context"
    )
    told = f"a step: {costs} ({source if step['num_steps'] else 'assumed'})"
    console.print(told, style="dim", highlight=False)
    for note in document["notes"]:
        console.print(Text(f"note: {note}", "dim"))
    console.print(_speed(document), style="dim", highlight=False)


_COLUMNS = (
    "pages",
    "size",
    "policy",
    "slots",
    "hits",
    "±",
    "cold",
    "evicted",
    "un-\naligned",
    "evic-\ntions",
    "pre-\nempted",
    "recom-\nputed",
    "un-\nfilled",
    "wait\np50",
    "\np99",
    "refused",
)


def _cells(result: Mapping[str, Any]) -> list[str]:
    tokens = sum(result[name] for name in ("hit_tokens", "miss_cold_tokens", "miss_evicted_tokens"))
    tokens += result["unaligned_tokens"]
    shares = [
        result[f"{name}_tokens"] / max(1, tokens) for name in ("miss_cold", "miss_evicted", "unaligned")
    ]
    return [
        f"{result['num_pages']:,}",
        str(result["page_size"]),
        result["policy"],
        f"{result['pool_slots']:,}",
        f"{result['hit_ratio']:.1%}",
        f"{result['hit_ratio_error']:.1%}",
        *(f"{share:.1%}" for share in shares),
        f"{result['evictions']:,}",
        f"{result['preemptions']:,}",
        f"{result['recomputed_tokens']:,}",
        f"{result['fragmentation']:.1%}",
        f"{result['queue_seconds']['p50'] * 1e3:,.0f} ms",
        f"{result['queue_seconds']['p99'] * 1e3:,.0f} ms",
        f"{result['refused']:,}",
    ]


def is_today(result: Mapping[str, Any], trace: Mapping[str, Any]) -> bool:
    """Whether a setting is the recorded one."""
    return all(result[name] == trace[name] for name in ("num_pages", "page_size", "policy"))


def _speed(document: Mapping[str, Any]) -> str:
    count, taken = len(document["results"]), document["taken_seconds"]
    speed = document["trace"]["seconds"] * count / taken if taken else 0.0
    unit = document["resolution"]
    moves = "token by token" if unit == 1 else f"{unit} tokens at a time"
    return f"{counted(count, 'setting')} in {taken:.1f} s, {speed:,.0f} times real time each, {moves}"
