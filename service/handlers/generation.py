"""GenerationService: open, stream, close. Text in, tokens out, one end per request.

Owns the order of a stream's messages. What a request needs is in run.py, what a sample is in choice.py.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

from kvatlas.v1 import generation_pb2 as pb
from kvatlas.v1 import generation_pb2_grpc
from service import errors
from service.admission import Permit, Share
from service.errors import Failure, Violation
from service.fleet.mirrors import PageMirrors
from service.handlers import convert, respond, sizes, validate
from service.handlers.account import RequestAccount
from service.handlers.backstage import Backstage
from service.handlers.choice import Piece
from service.handlers.convert import StreamShape, TokenBytes
from service.handlers.live import LiveCall
from service.handlers.opening import Opening
from service.handlers.run import GenerationRun
from service.handlers.spans import ending_of
from service.handlers.tokens import TokenDesk
from service.handlers.verdicts import outcome_of
from service.request import AbortReason, Output, Request, Scores, current_call
from service.writing import begin, write

REQUEST_ID_KEY = "x-request-id"
QUEUE_UPDATE_SECONDS = 1.0
_PLAIN = StreamShape()  # where a client asks for nothing else


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Handlers of GenerationService."""

    def __init__(self, backstage: Backstage, mirrors: PageMirrors) -> None:
        self._backstage = backstage
        self._tokens = TokenDesk(backstage, mirrors)
        self._opening = Opening(backstage)
        self._loop = asyncio.get_running_loop()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """The whole answer. Nothing is sent before it, so the client may retry throughout."""
        async with self._running(request.spec, _PLAIN, ()) as run:
            run.settle()
            while not run.is_admitted:
                await run.wait()
                run.settle()
            answer = _Answer(run.request.output, run.choices, self._token_bytes)
            while (pieces := run.take()) is not None:
                for piece in pieces:
                    self._count_collected(run, piece)
                    answer.add(piece)
                if answer.num_bytes > sizes.MAX_ANSWER_BYTES:
                    raise sizes.too_large(is_stream=False)
                if answer.num_bytes:
                    await asyncio.sleep(0)  # a wait for what has come already gives nobody else a turn
                if not ends_any(pieces):
                    await run.inbox.wait()
            response = respond.add_totals(run, self._model_id, answer.response())
            await self._add_prompt_scores(run, response.prompt_logprobs)
            if response.ByteSize() > sizes.MAX_ANSWER_BYTES:
                raise sizes.too_large(is_stream=False)
            await begin(context, ((REQUEST_ID_KEY, run.request.request_id),))
            return response

    async def StreamGenerate(self, request: pb.StreamGenerateRequest, context: Any) -> None:
        """The answer as it comes. From the end of the last sequence on the reader has limited time."""
        faults: list[Violation] = []
        shape = _PLAIN
        if request.HasField("stream") or request.HasField("resume_after"):
            faults = validate.stream_options(request.stream)
            if (facts := self._backstage.pool.facts) is not None:
                faults += validate.resumed_length(len(request.resume_after.ids), facts.max_context_tokens)
            shape = convert.stream_shape(request) if not faults else _PLAIN
        async with self._running(request.spec, shape, faults) as run:
            stream = _Stream(run, context)
            patience = asyncio.timeout(None)
            try:
                async with patience:
                    run.inbox.on_all_ended = lambda ended: self._set_patience(patience, ended)
                    self._set_patience(patience, run.inbox.has_all_ended)
                    await self._stream(run, shape, stream)
            except TimeoutError:
                if not patience.expired():
                    raise
                self._backstage.metrics.slow_readers.inc()
                raise errors.slow_reader(run.tokens_sent) from None
            finally:
                run.inbox.on_all_ended = None

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: Any
    ) -> pb.CancelGenerationResponse:
        """Ends calls of this process normally; ids that are not live here are listed."""
        if faults := validate.cancellation(request):
            raise errors.invalid_fields(faults)
        response = pb.CancelGenerationResponse()
        tenant = current_call.get().tenant
        for request_id in dict.fromkeys(request.request_ids):
            call = self._backstage.live.find(request_id, tenant)
            if call is None:
                response.unknown_ids.append(request_id)
            else:
                call.cancel()
                response.cancelled_ids.append(request_id)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Template and tokenizer without the model."""
        return await self._tokens.tokenize(request)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Text of ids."""
        return await self._tokens.detokenize(request)

    # Open and close

    @asynccontextmanager
    async def _running(
        self, spec: pb.GenerationSpec, shape: StreamShape, faults: Sequence[Violation]
    ) -> AsyncIterator[GenerationRun]:
        """A run that was let in and sent to a worker. Everything is given back at the end, whatever it is."""
        call = current_call.get()
        trace = self._backstage.tracing.begin(call) if self._backstage.tracing is not None else None
        account = RequestAccount(self._backstage.metrics, call.received, call.traceparent)
        request: Request | None = None
        live: LiveCall | None = None
        permit: Permit | None = None
        share: Share | None = None
        failure: Failure | None = None
        reason = AbortReason.SERVICE_ERROR
        is_cancelled = False
        try:
            request, facts = self._opening.check(spec, faults, call)
            live = self._backstage.live.enter(
                request.request_id, request.tenant, call.principal, request.labels
            )
            if live is None:
                raise errors.duplicate_request_id(request.request_id)
            if call.quota is not None:
                if (limit := call.quota.full()) is not None:
                    raise errors.quota_exceeded(call.principal, *limit)
                share = call.quota.enter()
                account.on_admitted = share.started
            permit = self._backstage.admission.enter()
            if permit is None:
                raise errors.queue_full(self._backstage.estimated_wait_ms() or 0, call.attempts_before)
            await self._opening.check_constraint(request, call)
            ids = request.prompt_ids or await self._backstage.prompts.ids_of(spec)
            request = self._opening.complete(request, ids, facts)
            run = self._opening.run_of(request, shape, account, call, begins_text=_begins_text(spec))
            await self._opening.begin_behind(run, shape.resume_ids, facts)
            live.run = run
            if live.failure is not None:
                raise live.failure
            if live.is_cancelled:
                run.cancel()
            else:
                run.submit()
            yield run
        except Failure as raised:
            failure = raised
            raise
        except asyncio.CancelledError as cancelled:
            is_cancelled = True
            if live is not None and live.run is None and live.failure is not None:
                failure = live.failure  # a drain has ended, and waits no longer for a long prompt
                raise failure from cancelled
            has_deadline_passed = call.is_over(monotonic())
            if has_deadline_passed:
                failure = errors.deadline_passed()
            reason = AbortReason.DEADLINE if has_deadline_passed else AbortReason.CLIENT
            raise
        except BaseException:
            failure = errors.internal()
            raise
        finally:
            # Never waits: after a cancel this may run while the generator is closed.
            if live is not None:
                if live.run is not None:
                    live.run.close(reason)
                self._backstage.live.leave(live)
            for held in (permit, share):
                if held is not None:
                    held.release()
            done = live.run if live is not None else None
            outcome = outcome_of(
                failure,
                was_admitted=done is not None and done.start is not None,
                was_cancelled=is_cancelled or (live is not None and live.is_cancelled),
            )
            counts = [choice.num_tokens - choice.num_before for choice in done.choices] if done else []
            now = monotonic()
            account.ended(outcome, now, counts)
            if trace is not None:
                model = self._model_id
                trace.end(
                    ending_of(
                        spec, request, done, account, model=model, outcome=outcome, failure=failure, now=now
                    )
                )

    # A stream

    async def _stream(self, run: GenerationRun, shape: StreamShape, stream: "_Stream") -> None:
        run.settle()
        while not run.is_admitted:
            if shape.queue_updates:
                await stream.say_queued(self._backstage.pool)
            await run.wait(QUEUE_UPDATE_SECONDS if shape.queue_updates else None)
            run.settle()
        await stream.begin(respond.started(run, self._model_id))
        token_bytes = self._backstage.prompts.tokenizer.token_bytes
        while (pieces := run.take()) is not None:
            for piece in pieces:
                self._count(run, shape, piece)
                if piece.has_content:
                    await stream.write(respond.delta(piece, run.request.output, token_bytes))
                if piece.finish is not None:
                    await stream.write(respond.choice_finished(piece))
            if not ends_any(pieces):
                await run.inbox.wait()
        message = respond.add_summary(run, pb.StreamGenerateResponse())
        await self._add_prompt_scores(run, message.summary.prompt_logprobs)
        if message.ByteSize() > sizes.MAX_ANSWER_BYTES:
            raise sizes.too_large(is_stream=True)
        await stream.write(message)

    def _count(self, run: GenerationRun, shape: StreamShape, piece: Piece) -> None:
        count = len(piece.token_ids)
        if count:
            run.account.tokens(piece.sample, count, monotonic(), are_sent=True)
            if count > shape.min_tokens:
                self._backstage.metrics.merges.inc(count - shape.min_tokens)

    def _set_patience(self, patience: asyncio.Timeout, ended: bool) -> None:
        limit = self._backstage.config.slow_reader_seconds
        patience.reschedule(self._loop.time() + limit if ended else None)

    # A whole answer

    def _count_collected(self, run: GenerationRun, piece: Piece) -> None:
        if piece.token_ids:
            run.account.tokens(piece.sample, len(piece.token_ids), monotonic(), are_sent=False)

    async def _add_prompt_scores(self, run: GenerationRun, entries: Any) -> None:
        """Log-probabilities of the prompt into a message, beside the loop where they are many."""
        scores, request = run.inbox.prompt_scores, run.request
        if scores is None:
            return
        num_bytes = 16 * sizes.entries_of(len(request.prompt_ids), request.output.prompt_logprobs)
        work = partial(_write_scores, entries, request.prompt_ids, scores, self._token_bytes)
        await self._backstage.prompts.beside(num_bytes, work)

    @property
    def _token_bytes(self) -> TokenBytes:
        return self._backstage.prompts.tokenizer.token_bytes

    @property
    def _model_id(self) -> str:
        facts = self._backstage.pool.facts
        return facts.model_id if facts is not None else ""


def _begins_text(spec: pb.GenerationSpec) -> bool:
    """Whether the answer is a turn of its own, and does not go on with a text that the client has."""
    return spec.WhichOneof("prompt") == "chat" and not spec.chat.continue_final_message


def ends_any(pieces: Sequence[Piece]) -> bool:
    """Whether a sample ended: then all may be over, and nobody would wake a reader that waits."""
    return any(piece.finish is not None for piece in pieces)


def _write_scores(entries: Any, token_ids: Sequence[int], scores: Scores, token_bytes: TokenBytes) -> None:
    entries.extend(convert.to_logprobs(token_ids, scores, token_bytes))


class _Answer:
    """The samples of a unary call, written into its response as they come."""

    def __init__(self, output: Output, choices: Sequence[Any], token_bytes: TokenBytes) -> None:
        self.num_bytes = 0  # of log-probabilities so far
        self._output = output
        self._token_bytes = token_bytes
        self._response = pb.GenerateResponse()
        self._choices = [self._response.choices.add(index=index) for index in range(len(choices))]
        self._texts: list[list[str]] = [[] for _ in choices]
        self._last: list[Piece | None] = [None for _ in choices]

    def add(self, piece: Piece) -> None:
        """What came of a sample."""
        choice = self._choices[piece.sample]
        self._texts[piece.sample].append(piece.text)
        if self._output.ids:
            choice.token_ids.extend(piece.token_ids)
        if piece.scores is not None:
            entries = convert.to_logprobs(piece.token_ids, piece.scores, self._token_bytes)
            self.num_bytes += sum(entry.ByteSize() for entry in entries)
            choice.logprobs.extend(entries)
        self._last[piece.sample] = piece

    def response(self) -> pb.GenerateResponse:
        """With every sample's text and end."""
        for choice, texts, last in zip(self._choices, self._texts, self._last, strict=True):
            choice.text = "".join(texts) if self._output.text else ""
            respond.end_choice(choice, last)
        return self._response


class _Stream:
    """The writing end of one call. Initial metadata goes out with the first message that commits it."""

    def __init__(self, run: GenerationRun, context: Any) -> None:
        self._run = run
        self._context = context
        self._next_update = 0.0

    async def begin(self, message: pb.StreamGenerateResponse) -> None:
        """The first message, unless the queue's updates were first."""
        if not self._run.has_sent:
            self._run.has_sent = True
            request_id = self._run.request.request_id
            await begin(self._context, ((REQUEST_ID_KEY, request_id),))
        await self.write(message)

    async def write(self, message: pb.StreamGenerateResponse) -> None:
        """One message; the time that a reader stalls it is counted, also when it never ends."""
        began = monotonic()
        try:
            await write(self._context, message)
        finally:
            self._run.account.written(monotonic() - began)

    async def say_queued(self, pool: Any) -> None:
        """The place in the queue, at most once a second."""
        outcome, now = self._run.outcome, monotonic()
        if outcome is None or now < self._next_update:
            return
        self._next_update = now + QUEUE_UPDATE_SECONDS - 0.01
        await self.begin(respond.queued(self._run, outcome, now))
