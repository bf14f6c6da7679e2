"""Four answers to one question share the pages of its prompt: a picture of that, from a running server.

`python examples/python/draw_pages.py [ADDRESS] [FILE]`. docs/images/pages.svg is made by it.
"""

import sys
from pathlib import Path

from kvatlas.cli.demo import QUESTIONS, SYSTEM
from kvatlas.cli.svg import draw
from kvatlas.client.config import credentials_from_environment
from kvatlas.client.events import Delta
from kvatlas.client.request import Message
from kvatlas.client.sync import Client


def main(address: str = "127.0.0.1:50051", file: str = "pages.svg") -> None:
    with Client(address, credentials=credentials_from_environment()) as client:
        for topic in ("the sea", "a lamp", "an island", "the winter"):  # what the cache keeps of others
            client.chat([Message("user", f"Tell me about {topic}.")], max_tokens=90)
        question = [Message("system", SYSTEM), Message("user", QUESTIONS[0])]
        with client.stream(
            question, n=4, max_tokens=400, ignore_eos=True, seed=1, request_id="lighthouse"
        ) as stream:
            for event in stream:
                if isinstance(event, Delta) and event.token_offset + event.token_count >= 120:
                    Path(file).write_text(draw(client.page_map()))
                    print(f"{file}: the page map while four answers grow")
                    return


if __name__ == "__main__":
    main(*sys.argv[1:])
