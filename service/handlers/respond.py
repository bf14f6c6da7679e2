"""The messages of GenerationService, made from a run and its pieces. Pure; owns nothing."""

from kvatlas.v1 import generation_pb2 as pb
from service.handlers import convert
from service.handlers.choice import Piece
from service.handlers.convert import TokenBytes, to_bill, to_duration, to_prefix, to_timestamp
from service.handlers.run import GenerationRun
from service.request import AddOutcome, Output


def queued(run: GenerationRun, outcome: AddOutcome, now: float) -> pb.StreamGenerateResponse:
    """Still waiting. The worker told its place once; requests ahead only become fewer."""
    update = pb.QueueUpdate(position=run.queue_position(outcome))
    if outcome.estimated_wait_ms:
        left = outcome.estimated_wait_ms / 1000 - run.account.age(now)
        update.estimated_wait.CopyFrom(to_duration(left))
    return pb.StreamGenerateResponse(queued=update)


def started(run: GenerationRun, model_id: str) -> pb.StreamGenerateResponse:
    """The request was admitted."""
    return pb.StreamGenerateResponse(
        started=pb.GenerationStarted(
            request_id=run.request.request_id,
            model=model_id,
            prompt_tokens=len(run.request.prompt_ids),
            prefix=to_prefix(run.prefix) if run.prefix is not None else None,
            seed=run.request.sampling.seed,
            queue_time=to_duration(run.account.queue_seconds),
            worker_id=run.worker_id,
        )
    )


def delta(piece: Piece, output: Output, token_bytes: TokenBytes) -> pb.StreamGenerateResponse:
    """New tokens: the hot message."""
    message = pb.StreamGenerateResponse()
    fields = message.delta
    if piece.sample:
        fields.index = piece.sample
    if output.text:
        fields.text = piece.text
    if output.ids:
        fields.token_ids.extend(piece.token_ids)
    if piece.scores is not None:
        fields.logprobs.extend(convert.to_logprobs(piece.token_ids, piece.scores, token_bytes))
    fields.token_offset = piece.offset
    fields.token_count = len(piece.token_ids)
    return message


def choice_finished(piece: Piece) -> pb.StreamGenerateResponse:
    """A sample ended."""
    assert piece.finish is not None, "only the last piece of a sample ends it"
    finished = pb.ChoiceFinished(
        index=piece.sample,
        finish_reason=int(piece.finish.reason),  # type: ignore[arg-type]  # the numbers are the enum's
        stop_string=piece.finish.stop_string,
        completion_tokens=piece.offset + len(piece.token_ids),
    )
    if piece.finish.stop_token_id is not None:
        finished.stop_token_id = piece.finish.stop_token_id
    return pb.StreamGenerateResponse(choice_finished=finished)


def end_choice(made: pb.Choice, last: Piece | None) -> None:
    """A sample of a unary call is finished."""
    assert last is not None and last.finish is not None, f"sample {made.index} has no end"  # noqa: PT018
    made.finish_reason = int(last.finish.reason)  # type: ignore[assignment]
    if last.finish.stop_string is not None:
        made.stop_string = last.finish.stop_string
    if last.finish.stop_token_id is not None:
        made.stop_token_id = last.finish.stop_token_id


def add_summary(run: GenerationRun, message: pb.StreamGenerateResponse) -> pb.StreamGenerateResponse:
    """Totals, always last, beside what the summary has of the prompt."""
    message.summary.usage.CopyFrom(_usage(run))
    message.summary.timing.CopyFrom(_timing(run))
    return message


def add_totals(run: GenerationRun, model_id: str, message: pb.GenerateResponse) -> pb.GenerateResponse:
    """What a unary answer has beside its choices and what it has of the prompt."""
    message.request_id = run.request.request_id
    message.model = model_id
    message.usage.CopyFrom(_usage(run))
    message.timing.CopyFrom(_timing(run))
    message.seed = run.request.sampling.seed
    message.worker_id = run.worker_id
    return message


def _usage(run: GenerationRun) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(run.request.prompt_ids),
        completion_tokens=sum(choice.num_tokens for choice in run.choices),
        prefix=to_prefix(run.prefix) if run.prefix is not None else None,
        kv=to_bill(run.bill),
        resumes=run.resumes,
    )


def _timing(run: GenerationRun) -> pb.Timing:
    account = run.account
    timing = pb.Timing(
        receive_time=to_timestamp(run.request.receive_time_ns), queue_time=to_duration(account.queue_seconds)
    )
    first, last, admitted = account.first_token_at, account.last_token_at, account.admitted_at
    if first is not None and last is not None:
        timing.prefill_time.CopyFrom(to_duration(first - (admitted if admitted is not None else first)))
        timing.time_to_first_token.CopyFrom(to_duration(account.age(first)))
        timing.decode_time.CopyFrom(to_duration(last - first))
    return timing
