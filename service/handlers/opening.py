"""From what a client sent to a run that can be submitted: checks in order, prompt, samples.

Owns the order of the checks and what an unset max_tokens becomes. Sends nothing.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvatlas.v1 import generation_pb2 as pb
from service import errors
from service.errors import Violation
from service.fleet.codec import WorkerFacts
from service.handlers import convert, sizes, validate
from service.handlers.account import RequestAccount
from service.handlers.backstage import Backstage
from service.handlers.choice import Choice
from service.handlers.convert import StreamShape
from service.handlers.run import GenerationRun
from service.mailbox import Inbox, Mailbox
from service.request import Call, Request
from service.text.answer import AnswerText
from service.text.constraints import TooManyConstraints
from service.text.stop_strings import StopMatcher, StopStrings


class Opening:
    """Makes requests and runs."""

    def __init__(self, backstage: Backstage) -> None:
        self._backstage = backstage
        self._loop = asyncio.get_running_loop()

    def check(
        self, spec: pb.GenerationSpec, faults: Sequence[Violation], call: Call
    ) -> tuple[Request, WorkerFacts]:
        """The request without its prompt. Raises Failure for the first kind of thing that is wrong."""
        backstage = self._backstage
        # Whatever becomes of the call, its status and its line in the log have an id in common.
        has_id = validate.REQUEST_ID.fullmatch(spec.request_id) is not None
        call.request_id = spec.request_id if has_id else convert.new_request_id()
        backstage.refuse_if_draining()
        known = backstage.pool.facts
        limits = (known.vocab_size, backstage.max_samples(known)) if known is not None else (1 << 32,)
        if known is not None:  # before they are looked at one by one: a message holds two millions
            self._check_length(len(spec.token_ids.ids), known)
        ids = convert.prompt_ids(spec)
        if found := [*validate.generation(spec, *limits, prompt_ids=ids), *faults]:
            raise errors.invalid_fields(found)
        if spec.scheduling.priority > 0 and not call.may("priority"):
            raise errors.missing_scope("priority")
        facts = backstage.facts_of(spec.model)
        request = convert.request_from(spec, call, facts.model, ids, facts.max_context_tokens)
        if request.constraint is not None and "constraints" not in backstage.features_of(facts):
            raise errors.feature_disabled("constraints")
        if request.adapter and "adapters" not in facts.features:
            raise errors.feature_disabled("adapters")
        if spec.WhichOneof("prompt") == "chat":
            backstage.prompts.check_chat(spec.chat)
        return request, facts

    async def check_constraint(self, request: Request, call: Call) -> None:
        """Raises Failure for a constraint that cannot be meant, before anything waits for a worker."""
        checks, constraint = self._backstage.constraints, request.constraint
        if constraint is None or checks is None:
            return
        try:
            fault = await checks.fault_of(constraint)
        except TooManyConstraints:
            raise errors.queue_full(0, call.attempts_before) from None
        if fault:
            raise errors.invalid_fields([Violation(f"spec.{constraint.kind}", fault)])

    def complete(self, request: Request, ids: Sequence[int], facts: WorkerFacts) -> Request:
        """The request with its prompt, and with what is left for output if the client gave no limit."""
        if not ids:
            raise errors.invalid_fields([Violation("spec.prompt", "has no tokens")])
        self._check_length(len(ids), facts)
        sizes.check_prompt(request.output, len(ids))
        left = min(facts.max_context_tokens - len(ids), self._pool_room(request, len(ids), facts))
        return convert.with_prompt(request, ids, request.stops.max_tokens or left)

    def _check_length(self, num_tokens: int, facts: WorkerFacts) -> None:
        limit = self._backstage.max_prompt_tokens(facts)
        if num_tokens > limit:
            raise errors.prompt_too_long(num_tokens, limit, facts.max_context_tokens)

    def run_of(
        self, request: Request, shape: StreamShape, account: RequestAccount, call: Call, *, begins_text: bool
    ) -> GenerationRun:
        """A run with its inbox and samples. `begins_text` false: its answers go on with the prompt's text."""
        inbox = Inbox(self._loop)
        stops = StopStrings(request.stops.strings) if request.stops.strings else None
        answer = partial(self._answer, request, stops, begins_text)
        choices = [self._choice(index, request, shape, inbox, answer) for index in range(request.num_samples)]
        return GenerationRun(
            request,
            choices,
            inbox,
            pool=self._backstage.pool,
            metrics=self._backstage.metrics,
            account=account,
            resume_seconds=self._backstage.config.resume_seconds,
            attempts_before=call.attempts_before,
        )

    async def begin_behind(self, run: GenerationRun, token_ids: Sequence[int], facts: WorkerFacts) -> None:
        """Puts output that the client has already before the answer. Raises Failure where it cannot be so."""
        if not token_ids:
            return
        eos_ids = facts.model.eos_token_ids
        if found := validate.resumption(token_ids, run.request, facts.vocab_size, eos_ids):
            raise errors.invalid_fields(found)
        choice = run.choices[0]
        choice.begin_behind(token_ids)
        work = partial(choice.read_again, token_ids)
        if not await self._backstage.prompts.beside(4 * len(token_ids), work):
            fault = Violation("resume_after", "holds a stop string: the answer is over")
            raise errors.invalid_fields([fault])

    def _pool_room(self, request: Request, num_prompt_tokens: int, facts: WorkerFacts) -> int:
        """Output tokens that fit the pool beside the prompt; whole prompt pages are shared by the samples."""
        shared = num_prompt_tokens // facts.page_size
        usable = facts.page_count - 1 - self._backstage.pool.pin_pages
        private = max(1, (usable - shared) // request.num_samples)
        return max(1, (shared + private) * facts.page_size - num_prompt_tokens)

    def _choice(
        self,
        index: int,
        request: Request,
        shape: StreamShape,
        inbox: Inbox,
        answer: Callable[[], AnswerText | None],
    ) -> Choice:
        box = Mailbox(
            inbox,
            request.stops.max_tokens,
            self._loop,
            has_scores=request.output.logprobs is not None,
            hold_seconds=shape.hold_seconds,
        )
        most = sizes.tokens_per_message(request.output.logprobs, shape.min_tokens)
        return Choice(index, box, answer(), request.stops, min_tokens=shape.min_tokens, max_tokens=most)

    def _answer(self, request: Request, stops: StopStrings | None, begins_text: bool) -> AnswerText | None:
        if not request.output.text and stops is None:
            return None
        detokenizer = self._backstage.prompts.tokenizer.detokenizer(
            skip_special_tokens=request.output.skip_special, begins_text=begins_text
        )
        shows_stop = request.stops.include_in_output
        matcher = StopMatcher(stops, include_stop=shows_stop) if stops is not None else None
        return AnswerText(detokenizer, matcher, min_tokens=request.stops.min_tokens)
