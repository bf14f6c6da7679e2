"""Chat turns -> the text that the model reads, by the model's own template.

Owns the sandbox in which templates run. What a template inserts (a default system text, BOS) is
kept as it is. Output equals transformers' `apply_chat_template`, but for control tokens typed by a
user, which stay text here (`control_tokens.py`).
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NoReturn

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from service.text.control_tokens import ControlTokens, JsonValue
from service.text.tokenizer import ChatText, Tokenizer, whole_text

MAX_RENDERED_CHARACTERS = 4 * 1024 * 1024
"""A template may repeat what it is given (its tools, a system text in every turn): not without end."""
MAX_RENDER_SECONDS = 10.0

_END_MARK = "\ue000kvatlas-end-of-turn\ue000 "
"""Follows the turn to be continued, to find its end again. The space shows whether a template trims."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One turn. `role` is what templates call it: system, user, assistant, tool."""

    role: str
    content: str
    name: str = ""
    tool_call_id: str = ""

    def as_template_sees(self) -> dict[str, JsonValue]:
        """Only what is set: templates test for presence."""
        turn: dict[str, JsonValue] = {"role": self.role, "content": self.content}
        if self.name:
            turn["name"] = self.name
        if self.tool_call_id:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class ChatTemplateError(Exception):
    """The template refuses these turns or arguments; the text is for the client."""


class NoChatTemplateError(Exception):
    """The model has no chat template."""


class ChatTemplate:
    """A model's template, compiled once. Rendering is safe from several threads.

    Raises ValueError where the template itself cannot be compiled: a fault of the model's files.
    """

    def __init__(
        self,
        source: str,
        control_tokens: ControlTokens,
        variables: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._control_tokens = control_tokens
        self._variables = dict(variables or {})
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, now: Callable[[], datetime] = datetime.now) -> "ChatTemplate | None":
        """The template of a tokenizer's model; None where it has none."""
        vocabulary = tokenizer.vocabulary
        if vocabulary.chat_template is None:
            return None
        return cls(vocabulary.chat_template, tokenizer.control_tokens, vocabulary.template_variables, now=now)

    def render(
        self,
        turns: Sequence[ChatTurn],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_args: Mapping[str, JsonValue] | None = None,
        tools: Sequence[JsonValue] = (),
    ) -> ChatText:
        """The prompt. `template_args` are further variables; they may not replace the turns."""
        messages: JsonValue = [turn.as_template_sees() for turn in turns]
        given = {"messages": messages, "tools": list(tools) or None, "args": dict(template_args or {})}
        try:
            needs_masks = self._control_tokens.is_in(given)
            if needs_masks:
                masked = self._control_tokens.mask(given)
                assert isinstance(masked, dict)
                given = masked
        except RecursionError:  # what json.loads still takes
            raise ChatTemplateError("tools or template arguments are nested too deeply") from None
        text = self._run(given, add_generation_prompt, continue_final_message)
        if not needs_masks:
            return ChatText(text)
        return ChatText(self._control_tokens.unmask(text), self._control_tokens.mark(text))

    def _run(self, given: dict[str, JsonValue], add_generation_prompt: bool, continues: bool) -> str:
        messages = given["messages"]
        assert isinstance(messages, list)
        if continues:
            if not messages:
                raise ChatTemplateError("there is no turn to continue")
            messages[-1]["content"] += _END_MARK
        variables = self._variables | given["args"]  # type: ignore[operator]
        variables |= {
            "messages": messages,
            "tools": given["tools"],
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continues,
        }
        text = self._fill(variables)
        return _cut_at_end_mark(text) if continues else text

    def _fill(self, variables: Mapping[str, JsonValue]) -> str:
        try:
            return whole_text(_bounded(self._template.generate(variables)))
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses this: {error.message}") from error
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template fails on this: {error}") from error


def _bounded(pieces: Iterable[str]) -> str:
    """All pieces, unless they are too many or take too long."""
    found, size, deadline = [], 0, time.monotonic() + MAX_RENDER_SECONDS
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template makes more than {MAX_RENDERED_CHARACTERS} characters of this"
            )
        if time.monotonic() > deadline:
            raise ChatTemplateError(f"the chat template takes more than {MAX_RENDER_SECONDS:g} s for this")
    return "".join(found)


def _cut_at_end_mark(text: str) -> str:
    """The text up to the end of the turn that is to be continued."""
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise ChatTemplateError("the chat template leaves out the turn that is to be continued")
    if text.startswith(_END_MARK, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims its turns


def _environment(now: Callable[[], datetime]) -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and &, which are plain characters in a prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(str(message))
