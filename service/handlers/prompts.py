"""What a prompt is in token ids, whichever of its forms it has.

Owns the choice of thread: long text is rendered and tokenized beside the event loop. Knows no worker.
"""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.errors import Violation
from service.handlers.validate import detokenization, num_bytes, plane_in_pieces, plane_of
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
    """Tokenizer and chat template of the served model. `threads` are of generations, `aside` of the rest."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, threads: TextThreads, aside: TextThreads
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._threads = threads
        self._aside = aside

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
        """The rendered text and its ids, with their offsets if these are asked for."""
        if request.WhichOneof("prompt") == "text":
            text = request.text
            return text, await self._aside.run(num_bytes(text), lambda: self._raw(request))
        return await self._aside.run(request.chat.ByteSize(), lambda: self._chat(request))

    async def detokenized(self, request: pb.DetokenizeRequest, vocab_size: int) -> str:
        """Text of ids. Raises Failure for ids that are none."""
        return await self._aside.run(4 * len(request.token_ids), lambda: self._text(request, vocab_size))

    async def beside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Other work of a generation over so many bytes, beside the event loop if it is long."""
        return await self._threads.run(num_bytes, work)

    async def aside(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The same where no generation may have to wait for it."""
        return await self._aside.run(num_bytes, work)

    def check_chat(self, chat: pb.ChatPrompt) -> None:
        """Raises Failure for what this model's chats do not offer; nothing is ignored (H8)."""
        if self._template is None:
            raise errors.feature_disabled("chat")
        if chat.tools_json and not self._template.knows_tools:
            raise errors.feature_disabled("tools")

    def _raw(self, request: pb.TokenizeRequest) -> Encoded:
        adds = not request.HasField("add_special_tokens") or request.add_special_tokens
        if request.include_offsets:
            return self.tokenizer.encode_with_offsets(request.text, add_special_tokens=adds)
        return Encoded(self.tokenizer.encode(request.text, add_special_tokens=adds))

    def _chat(self, request: pb.TokenizeRequest) -> tuple[str, Encoded]:
        chat, adds = self._rendered(request.chat, "chat"), request.add_special_tokens
        if request.include_offsets:
            return chat.text, self.tokenizer.encode_chat_with_offsets(chat, add_special_tokens=adds)
        return chat.text, Encoded(self.tokenizer.encode_chat(chat, add_special_tokens=adds))

    def _text(self, request: pb.DetokenizeRequest, vocab_size: int) -> str:
        ids = plane_in_pieces(request.token_ids)
        if faults := detokenization(ids, vocab_size):
            raise errors.invalid_fields(faults)
        skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        return self.tokenizer.decode(ids, skip_special_tokens=skips)

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
