"""An answer that is JSON of a schema, and one of two words.

`python examples/python/structured.py [ADDRESS]`.
"""

import json
import sys

from kvatlas.client.config import credentials_from_environment
from kvatlas.client.request import Message
from kvatlas.client.sync import Client

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "rainy": {"type": "boolean"}},
    "required": ["city", "rainy"],
    "additionalProperties": False,
}


def main(address: str = "127.0.0.1:50051") -> None:
    with Client(address, credentials=credentials_from_environment()) as client:
        question = [Message("user", "A city and whether it rains there, as JSON.")]
        answer = client.chat(question, json_schema=SCHEMA, max_tokens=80, temperature=0.0)
        print(json.loads(answer.text))
        answer = client.chat([Message("user", "Is the sea salty?")], choices=["yes", "no"], temperature=0.0)
        print(answer.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
