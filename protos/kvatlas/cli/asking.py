"""From settings to a request, and from an answer to the line that sums it up.

Shared by `generate`, `chat` and `demo`. Owns no connection.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvatlas.cli.counted import counted
from kvatlas.cli.exits import USAGE, CommandFailed
from kvatlas.client.events import Summary, Timing, Usage
from kvatlas.client.request import Options

_SAME_NAME = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "seed", "min_tokens", "priority",
)  # fmt: skip


def sampling_options(settings: Namespace) -> Options:
    """The options of SAMPLING; what was not said stays unsaid, so that the server's default counts."""
    options = Options()
    for name in _SAME_NAME:
        if (value := getattr(settings, name)) is not None:
            options[name] = value  # type: ignore[literal-required]
    if settings.stop:
        options["stop_strings"] = settings.stop
    if settings.stop_token_id:
        options["stop_token_ids"] = settings.stop_token_id
    if settings.logit_bias:
        options["logit_bias"] = _biases(settings.logit_bias)
    if settings.ignore_eos:
        options["ignore_eos"] = True
    if settings.include_stop:
        options["include_stop_in_output"] = True
    if settings.max_duration is not None:
        options["max_duration_seconds"] = settings.max_duration
    if settings.queue_timeout is not None:
        options["queue_timeout_seconds"] = settings.queue_timeout
    if not settings.cache_read:
        options["cache_read"] = False
    if not settings.cache_write:
        options["cache_write"] = False
    if settings.salt:
        options["cache_salt"] = settings.salt
    return options


def constraint_and_tools(settings: Namespace) -> Options:
    """What the answer must be, and what the chat template is given. Raises CommandFailed."""
    options = Options()
    given = [name for name in ("json_schema", "regex", "grammar", "choice") if getattr(settings, name)]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise CommandFailed(f"{flags}: an answer can have one constraint", USAGE)
    if settings.json_schema:
        options["json_schema"] = _text_of(settings.json_schema, "--json-schema")
    if settings.regex:
        options["regex"] = settings.regex
    if settings.grammar:
        options["grammar"] = _text_of(settings.grammar, "--grammar")
    if settings.choice:
        options["choices"] = settings.choice
    if settings.tools:
        tools = _json_of(_text_of(settings.tools, "--tools"), "--tools")
        options["tools"] = tools if isinstance(tools, list) else [tools]
    if settings.template_args:
        options["template_args"] = _json_of(settings.template_args, "--template-args")
    return options


def _text_of(file_name: str, flag: str) -> str:
    try:
        return Path(file_name).read_text()
    except OSError as error:
        raise CommandFailed(f"{flag} {file_name}: {error.strerror}", USAGE) from None
    except UnicodeDecodeError:
        raise CommandFailed(f"{flag} {file_name}: no UTF-8", USAGE) from None


def _json_of(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandFailed(f"{flag} is no JSON: {error}", USAGE) from None


def _biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise CommandFailed(f"--logit-bias {pair!r} is not ID=X", USAGE) from None
    return biases


def describe(summary: Summary, client_resumes: int = 0) -> list[str]:
    """What it took, in two lines; a third where the service died meanwhile."""
    usage, timing = summary.usage, summary.timing
    lines = [
        f"prompt {counted(usage.prompt_tokens, 'token')}{_cached(usage)}"
        f" · answer {counted(usage.completion_tokens, 'token')}"
        f"{_speed(usage, timing)}",
        f"pages: {usage.kv.peak_pages} at most, {usage.kv.reused_pages} from the cache"
        f"{_copies(usage)}{_bill(usage)}{_trouble(usage)}",
    ]
    if client_resumes:
        times = counted(client_resumes, "time")
        lines.append(f"the service was lost: another, or the same one again, went on ({times})")
    return lines


def _cached(usage: Usage) -> str:
    if usage.prefix is None:
        return " (cache not looked up)"
    hits = usage.prefix.hit_tokens
    evicted = usage.prefix.miss_evicted_tokens
    lost = f", {evicted} had been evicted" if evicted else ""
    return f", {hits} of them from cached pages{lost}"


def _speed(usage: Usage, timing: Timing) -> str:
    first = f" · first after {timing.first_token_seconds * 1000:.0f} ms"
    if timing.decode_seconds <= 0 or usage.completion_tokens < 2:
        return first
    return f"{first}, then {(usage.completion_tokens - 1) / timing.decode_seconds:.1f} tokens/s"


def _copies(usage: Usage) -> str:
    return f", {usage.kv.copied_pages} copied" if usage.kv.copied_pages else ""


def _bill(usage: Usage) -> str:
    return f" · {usage.kv.page_seconds:.2f} page-seconds" if usage.kv.page_seconds else ""


def _trouble(usage: Usage) -> str:
    parts = []
    if usage.kv.preemptions:
        parts.append(
            f"{counted(usage.kv.preemptions, 'preemption')},"
            f" {counted(usage.kv.recomputed_tokens, 'token')} computed again"
        )
    if usage.resumes:
        parts.append(f"resumed {counted(usage.resumes, 'time')}")
    return "".join(f" · {part}" for part in parts)
