"""Tokenize and Detokenize: the tokenizer and nothing else, on threads of their own.

Owns which of them are let in: generations never wait for them, and no principal has more of them at once
than it may have generations.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.fleet.mirrors import PageMirrors
from service.fleet.prefix_hint import cached_tokens, page_fingerprints
from service.handlers import sizes, validate
from service.handlers.backstage import Backstage
from service.handlers.validate import IDS_PER_PIECE
from service.request import Call, current_call
from service.text.tokenizer import Encoded

MAX_TEXT_CALLS = 256  # of a process at once, with those that wait: each may have brought a whole message


class TokenDesk:
    """What GenerationService answers without a worker's help."""

    def __init__(self, backstage: Backstage, mirrors: PageMirrors) -> None:
        self._backstage = backstage
        self._mirrors = mirrors

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Ids and pages of a text or a chat. Raises Failure."""
        if faults := validate.tokenization(request):
            raise errors.invalid_fields(faults)
        backstage, kind = self._backstage, request.WhichOneof("prompt") or "prompt"
        facts = backstage.facts_of(request.model)
        if kind == "chat":
            backstage.prompts.check_chat(request.chat)
        with self._place(current_call.get()):
            text, encoded = await backstage.prompts.tokenized(request)
            answer = pb.TokenizeResponse(
                token_count=len(encoded.ids),
                rendered_text=text,
                page_count=-(-len(encoded.ids) // facts.page_size),
                cached_tokens=await self._cached_tokens(encoded.ids),
            )
            work = partial(_complete, answer, encoded, kind)
            return await backstage.prompts.aside(4 * len(encoded.ids), work)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Text of ids. Raises Failure."""
        facts = self._backstage.facts_of(request.model)
        with self._place(current_call.get()):
            text = await self._backstage.prompts.detokenized(request, facts.vocab_size)
            response = pb.DetokenizeResponse(text=text)
            sizes.check_answer(response, "token_ids")
            return response

    @contextmanager
    def _place(self, call: Call) -> Iterator[None]:
        """Of the principal and of the process. Raises Failure where there is none."""
        if call.quota is not None and (limit := call.quota.full_of_text_calls()) is not None:
            raise errors.quota_exceeded(call.principal, *limit)
        permit = self._backstage.text_calls.enter()
        if permit is None:
            raise errors.queue_full(0, call.attempts_before)
        share = call.quota.enter_text_call() if call.quota is not None else None
        try:
            yield
        finally:
            permit.release()
            if share is not None:
                share.release()

    async def _cached_tokens(self, ids: Sequence[int]) -> int:
        """Of the worker that has the most of them; without a salt, as Tokenize knows none."""
        salt = current_call.get().tenant.encode() + b"\0"
        most = 0
        for kept in self._mirrors.kept:
            facts, pool = kept.link.facts, kept.mirror.planes.get("fingerprints")
            if facts is None or pool is None or not kept.link.is_up:
                continue
            work = partial(_cached_tokens, ids, facts.page_size, facts.fingerprint_key, salt, pool)
            most = max(most, await self._backstage.prompts.aside(4 * len(ids) + pool.nbytes, work))
        return most


def _complete(answer: pb.TokenizeResponse, encoded: Encoded, path: str) -> pb.TokenizeResponse:
    """With its ids and offsets. Raises Failure for one that no message holds, at once where it never can."""
    ids, starts = encoded.ids, encoded.start_offsets
    sizes.check_size(answer.ByteSize() + len(ids) + len(starts), path)  # each is a byte at least
    for first in range(0, len(ids), IDS_PER_PIECE):
        answer.token_ids.extend(ids[first : first + IDS_PER_PIECE])
        answer.start_offsets.extend(starts[first : first + IDS_PER_PIECE])
    sizes.check_answer(answer, path)
    return answer


def _cached_tokens(
    ids: Sequence[int], page_size: int, key: bytes, salt: bytes, pool: npt.NDArray[np.uint64]
) -> int:
    """A microsecond a page of the prompt, and a look at every page of the pool."""
    return cached_tokens(page_fingerprints(ids, page_size, key, salt), pool, page_size)
