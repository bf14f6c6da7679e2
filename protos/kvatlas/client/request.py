"""A request from plain Python values: prompt and options to GenerationSpec.

Owns names and nothing else: the server validates, and answers with the path of each violation.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from google.protobuf.duration_pb2 import Duration

from kvatlas.client.errors import RequestError
from kvatlas.v1 import generation_pb2 as pb

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str
    name: str = ""
    tool_call_id: str = ""  # role "tool": the call that this answers


Prompt = str | Sequence[int] | Sequence[Message]
"""Raw text, token ids, or chat turns (rendered with the model's own template)."""


class Options(TypedDict, total=False):
    """All that can be said about a generation. What is left out takes the server's default."""

    model: str
    request_id: str
    # sampling
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    n: int
    # stop
    max_tokens: int
    min_tokens: int
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_in_output: bool
    max_duration_seconds: float
    # output
    output: Literal["text", "token_ids", "both"]
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    # what the answer must be: one of these at most
    json_schema: str | Mapping[str, Any]
    regex: str
    grammar: str
    choices: Sequence[str]
    # chat prompts
    tools: Sequence[str | Mapping[str, Any]]  # each a JSON function declaration
    template_args: Mapping[str, Any]  # more variables of the chat template
    add_generation_prompt: bool
    continue_final_message: bool
    # scheduling
    priority: int
    queue_timeout_seconds: float
    # cache
    cache_read: bool
    cache_write: bool
    cache_salt: str
    adapter: str
    # labels shown by the dashboard
    labels: Mapping[str, str]


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "seed", "n",
)  # fmt: skip
_STOP = ("max_tokens", "min_tokens", "ignore_eos", "include_stop_in_output")
_OUTPUT = ("logprobs", "prompt_logprobs", "skip_special_tokens")
_CHAT_ONLY = ("tools", "template_args", "add_generation_prompt", "continue_final_message")
_FORMATS = {
    "text": pb.OUTPUT_FORMAT_TEXT,
    "token_ids": pb.OUTPUT_FORMAT_TOKEN_IDS,
    "both": pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS,
}


def build_spec(prompt: Prompt, options: Options) -> pb.GenerationSpec:
    """The spec of a request.

    Raises TypeError for an unknown option, RequestError for a prompt, a role or a value that no request can
    carry: what a server refuses is its own affair.
    """
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(Options.__annotations__))}")
    spec = pb.GenerationSpec(
        request_id=options.get("request_id", ""),
        model=options.get("model", ""),
        adapter=options.get("adapter", ""),
    )
    _set_prompt(spec, prompt)
    _set_chat_options(spec, options)
    _set_constraint(spec, options)
    given = {name: value for name, value in options.items() if value is not None}
    for target, names in ((spec.sampling, _SAMPLING), (spec.stop, _STOP), (spec.output, _OUTPUT)):
        for name in names:
            if name in given:
                with in_range(name, given[name]):
                    setattr(target, name, given[name])
    _set_collections(spec, options)
    _set_scheduling_and_cache(spec, options)
    return spec


@contextmanager
def in_range(name: str, value: object) -> Iterator[None]:
    """Numbers that a field cannot hold are refused with their name; protobuf has the value alone."""
    try:
        yield
    except (ValueError, OverflowError):
        raise RequestError(f"{name}: {value!r} is out of range") from None


def build_stream(
    prompt: Prompt,
    options: Options,
    queue_updates: bool,
    min_tokens_per_message: int,
    max_hold_seconds: float | None = None,
) -> pb.StreamGenerateRequest:
    """The request of StreamGenerate."""
    shape = pb.StreamOptions(queue_updates=queue_updates)
    with in_range("min_tokens_per_message", min_tokens_per_message):
        shape.min_tokens_per_message = min_tokens_per_message
    if max_hold_seconds is not None:
        with in_range("max_hold_seconds", max_hold_seconds):
            shape.max_hold.CopyFrom(duration(max_hold_seconds))
    return pb.StreamGenerateRequest(spec=build_spec(prompt, options), stream=shape)


def build_tokenize(prompt: str | Sequence[Message], include_offsets: bool) -> pb.TokenizeRequest:
    """The request of Tokenize."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(text=prompt, include_offsets=include_offsets)
    return pb.TokenizeRequest(chat=build_chat(prompt), include_offsets=include_offsets)


def build_chat(messages: Sequence[Message]) -> pb.ChatPrompt:
    """Chat turns; RequestError for a role that does not exist."""
    chat = pb.ChatPrompt()
    for message in messages:
        name = f"CHAT_ROLE_{message.role.upper()}"
        if name not in pb.ChatRole.keys() or name == "CHAT_ROLE_UNSPECIFIED":  # noqa: SIM118 - enum wrapper
            raise RequestError(f"unknown chat role {message.role!r}: system, user, assistant or tool")
        chat.messages.add(
            role=pb.ChatRole.Value(name),
            content=message.content,
            name=message.name,
            tool_call_id=message.tool_call_id,
        )
    return chat


def duration(seconds: float) -> Duration:
    """Seconds as protobuf's Duration. Raises RequestError for what it cannot hold, as infinity."""
    value = Duration()
    with in_range("seconds", seconds):
        value.FromNanoseconds(round(seconds * 1e9))
    return value


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.text = prompt
        return
    turns = [item for item in prompt if isinstance(item, Message)]
    ids = [item for item in prompt if isinstance(item, int)]
    if turns and len(turns) == len(prompt):
        spec.chat.CopyFrom(build_chat(turns))
    elif len(ids) == len(prompt):
        spec.token_ids.SetInParent()  # an empty list is still this form of prompt: the server refuses it
        try:
            spec.token_ids.ids.extend(ids)
        except ValueError:
            raise RequestError("prompt: token ids must be from 0 to 4294967295") from None
    else:
        raise RequestError("a prompt is a text, a list of token ids, or a list of Message")


def _set_chat_options(spec: pb.GenerationSpec, options: Options) -> None:
    given = [name for name in _CHAT_ONLY if options.get(name) is not None]
    if not given:
        return
    if spec.WhichOneof("prompt") != "chat":
        raise RequestError(f"{given[0]} is for chat prompts only")
    spec.chat.tools_json.extend(_json(tool) for tool in options.get("tools") or ())
    if (variables := options.get("template_args")) is not None:
        spec.chat.template_args_json = _json(variables)
    if (adds := options.get("add_generation_prompt")) is not None:
        spec.chat.add_generation_prompt = adds
    spec.chat.continue_final_message = bool(options.get("continue_final_message"))


def _set_constraint(spec: pb.GenerationSpec, options: Options) -> None:
    given = [name for name in ("json_schema", "regex", "grammar", "choices") if options.get(name) is not None]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]}: an answer can have one constraint")
    if (schema := options.get("json_schema")) is not None:
        spec.json_schema = _json(schema)
    if (regex := options.get("regex")) is not None:
        spec.regex = regex
    if (grammar := options.get("grammar")) is not None:
        spec.grammar = grammar
    if (choices := options.get("choices")) is not None:
        spec.choices.SetInParent()
        spec.choices.choices.extend(choices)


def _json(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _set_collections(spec: pb.GenerationSpec, options: Options) -> None:
    biases, stop_ids = options.get("logit_bias") or {}, options.get("stop_token_ids") or ()
    with in_range("logit_bias", biases):
        spec.sampling.logit_bias.update(biases)
    with in_range("stop_token_ids", stop_ids):
        spec.stop.stop_token_ids.extend(stop_ids)
    spec.stop.stop_strings.extend(options.get("stop_strings") or ())
    spec.labels.update(options.get("labels") or {})
    form = options.get("output")
    if form is not None:
        spec.output.format = _FORMATS[form]
    limit = options.get("max_duration_seconds")
    if limit is not None:
        with in_range("max_duration_seconds", limit):
            spec.stop.max_duration.CopyFrom(duration(limit))


def _set_scheduling_and_cache(spec: pb.GenerationSpec, options: Options) -> None:
    if (priority := options.get("priority")) is not None:
        with in_range("priority", priority):
            spec.scheduling.priority = priority
    if (wait := options.get("queue_timeout_seconds")) is not None:
        with in_range("queue_timeout_seconds", wait):
            spec.scheduling.queue_timeout.CopyFrom(duration(wait))
    if (read := options.get("cache_read")) is not None:
        spec.cache.read = read
    if (write := options.get("cache_write")) is not None:
        spec.cache.write = write
    spec.cache.salt = options.get("cache_salt") or ""
