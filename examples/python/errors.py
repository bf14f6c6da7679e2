"""What can go wrong, told apart by what one can do about it. `python examples/python/errors.py [ADDRESS]`.

Streams go on by themselves when the server they came from dies: `resumes` says how often.
"""

import sys
import time

from kvatlas.client.config import credentials_from_environment
from kvatlas.client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvatlasError,
    Reason,
    Refused,
    Unavailable,
)
from kvatlas.client.request import Options
from kvatlas.client.sync import Client

ATTEMPTS = 3


def ask(client: Client, prompt: str, timeout_seconds: float = 60.0, **options: object) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with client.stream(prompt, timeout_seconds=timeout_seconds, **Options(**options)) as stream:
                text = "".join(stream.text())
                print(f"{text!r}, resumed {stream.resumes} times")
                return
        except InvalidRequest as error:
            if error.reason is Reason.PROMPT_TOO_LONG:
                print(f"too long: {error.metadata['prompt_tokens']} tokens")
            for violation in error.violations:
                print(f"{violation.field}: {violation.description}")
            return
        except DeadlineExceeded:
            print("no answer in time")
            return
        except (Refused, Unavailable) as error:  # a limit, or nobody took it: later it may work
            if attempt == ATTEMPTS:
                print(f"given up: {error}")
                return
            time.sleep(error.retry_seconds or 1.0)
        except KvatlasError as error:  # credentials, a fault: again it would be the same
            print(error)
            return


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address, credentials=credentials_from_environment()) as client:
        ask(client, "The sky is", max_tokens=8, temperature=0.0)
        ask(client, "The sky is", temperature=9.0)
        ask(client, "Count:", timeout_seconds=0.05, max_tokens=4000, ignore_eos=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
