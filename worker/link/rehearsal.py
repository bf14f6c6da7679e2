"""An AddSequence of nobody, read again and again by an idle link: the reading of the next stays hot.

It takes 0.06 ms if it was done a moment ago and twice to three times that behind a tenth of a second of
sleep. Owns the example; when it is read is the link's matter.
"""

from array import array

from kvatlas.rehearsal import PROMPT_TOKENS
from kvatlas.worker.v1 import worker_pb2
from worker.link import codec


def example() -> bytes:
    """A message as services send it."""
    params = worker_pb2.SequenceParams(temperature=0.5, top_p=0.9, repetition_penalty=1.0, max_tokens=16)
    add = worker_pb2.AddSequence(
        sequence_id=1,
        sample_count=1,
        prompt_token_ids=array("I", bytes(4 * PROMPT_TOKENS)).tobytes(),
        params=params,
        cache_read=True,
        cache_write=True,
        cache_salt=b"\0",
        request_id="rehearsal",
    )
    return worker_pb2.ServiceMessage(add=add).SerializeToString()


def play(data: bytes) -> None:
    """All that the link does with it, but for handing it to the engine."""
    message = worker_pb2.ServiceMessage.FromString(data)
    assert message.WhichOneof("kind") == "add"
    codec.request_spec(message.add, session=0, source="rehearsal", now=0.0, vocab_size=1)
    assert codec.constraint_text(message.add.params) is None
