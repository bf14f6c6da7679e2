"""What a prompt is in token ids, whichever of its forms it has.

Owns the choice of thread: long text is rendered and tokenized beside the event loop. Knows no worker.
"""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.errors import Violation
from service.handlers.validate import num_bytes, plane_of
from service.text.chat import ChatTemplate, ChatTemplateError, ChatTurn
from service.text.threads import TextThreads
from service.text.tokenizer import ChatText, Encoded, Tokenizer

T = TypeVar("T")
_ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}


class Prompts:
    """Tokenizer and chat template of the served model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: TextThreads) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._threads = threads

    @property
    def features(self) -> frozenset[str]:
        """Optional features of the model's chats that are on."""
        has_tools = self._template is not None and self._template.knows_tools
        return frozenset({"tools"}) if has_tools else frozenset()

    async def ids_of(self, spec: pb.GenerationSpec) -> Sequence[int]:
        """Ids of a validated spec. Raises Failure for what the chat template refuses."""
        kind = spec.WhichOneof("prompt")
        if kind == "token_ids":
            return plane_of(spec.token_ids.ids)
        if kind == "text":
            text = spec.text
            return await self._threads.run(num_bytes(text), lambda: self.tokenizer.encode(text))
        return await self._threads.run(
            spec.chat.ByteSize(),
            lambda: self.tokenizer.encode_chat(self._rendered(spec.chat, "spec.chat")),
        )

    async def tokenized(self, request: pb.TokenizeRequest) -> tuple[str, Encoded]:
        """The rendered text and its ids with their offsets."""
        if request.WhichOneof("prompt") == "text":
            text = request.text
            adds = not request.HasField("add_special_tokens") or request.add_special_tokens
            encoded = await self._threads.run(
                num_bytes(text), lambda: self.tokenizer.encode_with_offsets(text, add_special_tokens=adds)
            )
            return text, encoded
        return await self._threads.run(request.chat.ByteSize(), lambda: self._chat(request))

    async def detokenized(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""
        return await self._threads.run(
            4 * len(token_ids),
            lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens),
        )

    async def beside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Other work over so many bytes, beside the event loop if it is long."""
        return await self._threads.run(num_bytes, work)

    def check_chat(self, chat: pb.ChatPrompt) -> None:
        """Raises Failure for what this model's chats do not offer; nothing is ignored (H8)."""
        if self._template is None:
            raise errors.feature_disabled("chat")
        if chat.tools_json and not self._template.knows_tools:
            raise errors.feature_disabled("tools")

    def _chat(self, request: pb.TokenizeRequest) -> tuple[str, Encoded]:
        chat = self._rendered(request.chat, "chat")
        encoded = self.tokenizer.encode_chat_with_offsets(chat, add_special_tokens=request.add_special_tokens)
        return chat.text, encoded

    def _rendered(self, chat: pb.ChatPrompt, path: str) -> ChatText:
        assert self._template is not None, "check_chat() comes first"
        turns = [
            ChatTurn(_ROLES[turn.role], turn.content, turn.name, turn.tool_call_id) for turn in chat.messages
        ]
        try:
            return self._template.render(
                turns,
                add_generation_prompt=not chat.HasField("add_generation_prompt")
                or chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                template_args=json.loads(chat.template_args_json) if chat.template_args_json else None,
                tools=[json.loads(tool) for tool in chat.tools_json],
            )
        except ChatTemplateError as error:
            raise errors.invalid_fields([Violation(path, str(error))]) from error
