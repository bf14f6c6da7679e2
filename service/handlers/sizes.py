"""How large an answer and its messages may become. Pure; owns nothing.

Log-probabilities are what makes an answer large: with 20 alternatives a token is some 340 bytes and takes
some 66 us to write. So what waits goes out in bounded pieces, and an answer that no message holds is refused
in words: gRPC's core would refuse it at its end, with a status that says to try again.
"""

from google.protobuf.message import Message

from service import errors
from service.errors import Failure, Violation
from service.request import Output
from service.server_options import MAX_MESSAGE_BYTES

ENTRIES_PER_MESSAGE = 512
"""Tokens and alternatives of one message, if the client does not ask for more: some 2 ms of the loop."""
MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES - 16_384  # beside what else is in the message
MIN_ENTRY_BYTES = 12  # of one: id, log-probability, a byte of text, with their tags and lengths


def tokens_per_message(logprobs: int | None, min_tokens: int) -> int:
    """Tokens of one message at most; 0: any number."""
    return 0 if logprobs is None else max(min_tokens, ENTRIES_PER_MESSAGE // (1 + logprobs))


def entries_of(num_tokens: int, alternatives: int | None) -> int:
    """Tokens and alternatives that are written for so many tokens."""
    return 0 if alternatives is None else num_tokens * (1 + alternatives)


def check_prompt(output: Output, prompt_tokens: int) -> None:
    """Raises Failure where log-probabilities of the prompt can never fit an answer: before anything runs."""
    entries = entries_of(prompt_tokens, output.prompt_logprobs)
    if entries * MIN_ENTRY_BYTES > MAX_ANSWER_BYTES:
        text = (
            f"{output.prompt_logprobs} alternatives for each of {prompt_tokens} tokens are more than"
            f" {MAX_ANSWER_BYTES} bytes, the most that an answer holds"
        )
        raise errors.invalid_fields([Violation("spec.output.prompt_logprobs", text)])


def check_answer(answer: Message, path: str) -> None:
    """Raises Failure for a whole answer that no message holds: of text and ids it is told at the end only."""
    check_size(answer.ByteSize(), path)


def check_size(num_bytes: int, path: str) -> None:
    """The same of one that is not made yet, and will have so many bytes at least."""
    if num_bytes > MAX_ANSWER_BYTES:
        text = f"its answer is larger than {MAX_ANSWER_BYTES} bytes, the most of a message: ask in parts"
        raise errors.invalid_fields([Violation(path, text)])


def too_large(is_stream: bool) -> Failure:
    """An answer that turned out larger than a message."""
    advice = "ask for less" if is_stream else "ask for less, or take it by StreamGenerate"
    text = f"the answer is larger than {MAX_ANSWER_BYTES} bytes, the most that a message holds: {advice}"
    return errors.invalid_fields([Violation("spec.output", text)])
