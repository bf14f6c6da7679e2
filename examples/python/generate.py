"""One prompt, streamed. `python examples/python/generate.py [ADDRESS] [PROMPT]`."""

import sys

from kvatlas.client.config import credentials_from_environment
from kvatlas.client.events import Delta, Started, Summary
from kvatlas.client.sync import Client


def main(address: str = "127.0.0.1:50051", prompt: str = "The sky is") -> None:
    with (
        Client(address, credentials=credentials_from_environment()) as client,
        client.stream(prompt, max_tokens=24, temperature=0.0) as stream,
    ):
        for event in stream:
            if isinstance(event, Started):
                print(f"[{event.prompt_tokens} prompt tokens on {event.worker_id}] ", end="")
            elif isinstance(event, Delta):
                print(event.text, end="", flush=True)
            elif isinstance(event, Summary):
                usage = event.usage
                print(f"\n[{usage.completion_tokens} tokens, {usage.kv.page_seconds:.2f} page-seconds]")


if __name__ == "__main__":
    main(*sys.argv[1:])
