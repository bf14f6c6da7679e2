"""A constraint as a client writes it → the grammar language that the library compiles, a dialect of Lark.

Owns the limits of what a client may send, since some of them keep the library's recursion in bounds. Compiles
nothing. A constraint that cannot be meant raises ConstraintError with a sentence for the client.
"""

import json
import re

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from kvatlas.constraints.text import MAX_CONSTRAINT_BYTES, ConstraintError, ConstraintText

MAX_GBNF_RULES = 256  # its converter looks at all rules once more for each that turns out to be a terminal
MAX_GBNF_BYTES = 16 * 1024

# Without it only one tokenization of text that is certain would be allowed, the longest tokens first, which
# is rarely the one that the model was trained on.
_HEADER = '%llguidance {"no_forcing": true}\n'
# One line, spaces as json.dumps puts them. A keyword that the library cannot enforce is an error.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_OPTIONS_KEY = "x-guidance"


def grammar_of(constraint: ConstraintText) -> str:
    """The grammar whose language is the allowed outputs. Raises ConstraintError."""
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        raise ConstraintError(f"longer than {MAX_CONSTRAINT_BYTES} bytes")
    match constraint.kind:
        case "json_schema":
            return f"{_HEADER}start: %json {_with_options(constraint.text)}"
        case "regex":
            return f"{_HEADER}start: /{regex_to_lark(constraint.text)}/"
        case "grammar":
            return _HEADER + _as_lark(constraint.text)
        case "choices":
            return f"{_HEADER}start: /{'|'.join(map(_literal, constraint.choices))}/"
    raise ConstraintError(f"{constraint.kind} is no kind of constraint")


def _with_options(schema: str) -> str:
    """The schema as it was written, numbers and order untouched, with our options in front."""
    try:
        parsed = json.loads(schema)
    except RecursionError:
        raise ConstraintError("nested too deeply") from None
    except ValueError as error:
        raise ConstraintError(f"is not JSON: {error}") from None
    if isinstance(parsed, bool):
        return json.dumps(parsed)
    if not isinstance(parsed, dict):
        raise ConstraintError("must be a JSON object or a boolean")
    if _OPTIONS_KEY in parsed:
        raise ConstraintError(f"the key {_OPTIONS_KEY!r} is not taken")
    rest = schema.strip()[1:]
    return f'{{"{_OPTIONS_KEY}": {json.dumps(_JSON_OPTIONS)}{"," if parsed else ""}{rest}'


def _literal(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _as_lark(text: str) -> str:
    if "%llguidance" in text:
        raise ConstraintError("%llguidance is not taken")
    if is_lark_syntax(text):
        return text
    if len(text.encode()) > MAX_GBNF_BYTES or text.count("::=") > MAX_GBNF_RULES:
        raise ConstraintError(f"GBNF of more than {MAX_GBNF_BYTES} bytes or {MAX_GBNF_RULES} rules")
    try:
        converted = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise ConstraintError(str(error)) from None
    except RecursionError:
        raise ConstraintError("nested too deeply") from None
    except Exception as error:  # the converter raises bare Exception for unknown and missing rules
        raise ConstraintError(f"neither GBNF nor Lark: {error}") from None
    return re.sub(r"^%llguidance .*\n", "", converted, count=1)
