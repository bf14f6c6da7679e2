"""`kvatlas generate`: one prompt, its answer on stdout, what it took on stderr."""

import json
import sys
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from kvatlas.cli.asking import constraint_and_tools, describe, sampling_options
from kvatlas.cli.connecting import connect
from kvatlas.cli.exits import DONE, USAGE, CommandFailed
from kvatlas.client.events import Delta, Event, Finished, Generation, Summary
from kvatlas.client.request import Message, Options, Prompt
from kvatlas.client.stream import gather
from kvatlas.client.token_stream import TokenStream


def run(settings: Namespace) -> int:
    """Asks once."""
    prompt = _prompt(settings)
    options = sampling_options(settings) | _own_options(settings) | constraint_and_tools(settings)
    with (
        connect(settings) as client,
        client.stream(prompt, **options) as stream,
    ):
        if settings.json:
            generation = gather(stream)
            print(json.dumps(_as_json(generation)))
            return DONE
        summary = _print_one(stream) if (settings.samples or 1) == 1 else _print_many(stream)
    if not settings.quiet:
        print("\n".join(describe(summary, stream.resumes)), file=sys.stderr)
    return DONE


def _prompt(settings: Namespace) -> Prompt:
    text = settings.prompt
    if text is None or text == "-":
        if text is None and sys.stdin.isatty():
            raise CommandFailed("no prompt: give it as an argument or on stdin", USAGE)
        text = sys.stdin.read().removesuffix("\n")
    if settings.token_ids:
        return _token_ids(text)
    if settings.chat or settings.system or settings.tools or settings.template_args:
        system = [Message("system", settings.system)] if settings.system else []
        return [*system, Message("user", text)]
    return str(text)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise CommandFailed(
            "--token-ids: the prompt must be numbers divided by blanks or commas", USAGE
        ) from None


def _own_options(settings: Namespace) -> Options:
    options = Options(output=settings.output, skip_special_tokens=settings.skip_special_tokens)
    if settings.samples is not None:
        options["n"] = settings.samples
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(settings, name)) is not None:
            options[name] = value
    if settings.model:
        options["model"] = settings.model
    if settings.request_id:
        options["request_id"] = settings.request_id
    return options


def _print_one(stream: TokenStream) -> Summary:
    """Text as it comes."""
    summary = None
    for event in stream:
        if isinstance(event, Delta):
            sys.stdout.write(_shown(event))
            sys.stdout.flush()
        elif isinstance(event, Summary):
            summary = event
    sys.stdout.write("\n")
    assert summary is not None, "a stream that ended well has a summary"
    return summary


def _print_many(stream: TokenStream) -> Summary:
    """Each answer when it is whole: several at once cannot be read."""
    texts: dict[int, list[str]] = {}
    summary = None
    for event in stream:
        if isinstance(event, Delta):
            texts.setdefault(event.index, []).append(_shown(event))
        elif isinstance(event, Finished):
            print(f"--- {event.index} ({event.reason})\n{''.join(texts.get(event.index, ()))}", flush=True)
        elif isinstance(event, Summary):
            summary = event
    assert summary is not None, "a stream that ended well has a summary"
    return summary


def _shown(event: Event) -> str:
    assert isinstance(event, Delta)
    return event.text or "".join(f"{token} " for token in event.token_ids)


def _as_json(generation: Generation) -> dict[str, Any]:
    """The answer as plain values; bytes of tokens as text where they are text, else as a list."""
    return _plain(asdict(generation))  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return list(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
