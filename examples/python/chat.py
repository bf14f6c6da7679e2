"""Two turns of a chat with asyncio; the second finds the first in the prefix cache.

`python examples/python/chat.py [ADDRESS]`
"""

import asyncio
import sys

from kvatlas.client.aio import AsyncClient
from kvatlas.client.config import credentials_from_environment
from kvatlas.client.request import Message


async def main(address: str = "127.0.0.1:50051") -> None:
    turns = [Message("system", "You answer in one short sentence.")]
    async with AsyncClient(address, credentials=credentials_from_environment()) as client:
        for question in ("Why is the sky blue?", "And why is it red in the evening?"):
            turns.append(Message("user", question))
            answer = await client.chat(turns, max_tokens=32, temperature=0.0)
            turns.append(Message("assistant", answer.text))
            hits = answer.usage.prefix.hit_tokens if answer.usage.prefix else 0
            print(
                f"> {question}\n{answer.text}\n[{hits} of {answer.usage.prompt_tokens} prompt tokens cached]"
            )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
