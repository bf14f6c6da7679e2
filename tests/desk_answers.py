"""What a worker's desk has answered, read as a service would."""

from kvatlas.worker.v1 import worker_pb2
from worker.channels import OutputQueue
from worker.messages import CallFailure, EncodedReply


def answers_told(answers: OutputQueue) -> list[worker_pb2.CommandReply | CallFailure]:
    """Answers so far, each checked to be the last of its call where it says so."""
    found: list[worker_pb2.CommandReply | CallFailure] = []
    for answer in answers.take(1000):
        if isinstance(answer, EncodedReply):
            reply = worker_pb2.CommandReply.FromString(answer.payload)
            assert (reply.command_id, reply.more) == (answer.ticket.command_id, not answer.is_last)
            found.append(reply)
        else:
            assert isinstance(answer, CallFailure)
            found.append(answer)
    return found
