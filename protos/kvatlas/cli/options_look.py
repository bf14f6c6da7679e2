"""Options of the commands that look: pages, top, and those of recordings."""

from kvatlas.cli.option import ADMIN_ADDRESS, CREDENTIALS, JSON, WORKER, Argument, Command, Option

PAGES = Command(
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

TOP = Command(
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

LOAD = Command(
    "load",
    "how busy the service and its workers are",
    "Requests, waits, pages and rates, once or pushed by the service.",
    ("kvatlas load", "kvatlas load --watch --interval 0.5", "kvatlas load --json | jq .workers"),
    (
        Option("watch", bool, "stay and follow", False, "w"),
        Option("interval", float, "time between two looks with --watch", 1.0, metavar="S"),
        Option("count", int, "looks until --watch ends; 0: until Ctrl-C", 0, "n"),
        JSON,
    ),
)

RECORD = Command(
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
        ADMIN_ADDRESS,
        Option("lookback", float, "begin this long ago, as far as the worker still knows", 0.0, metavar="S"),
        Option("max_seconds", float, "end after this long", 600.0, metavar="S"),
        Option("max_bytes", int, "end at this size; 0: 64 MiB", 0, most=2**63 - 1),
        Option("rotate", bool, "go on in a new file at either bound; the last four are kept", False),
        Option("token_ids", bool, "put token ids in it: prompts can be read from it then", False),
        Option("note", str, "kept in the recording", "", metavar="TEXT"),
        Option("output", str, "where `get` writes; else the recording's name here", "", "o", "FILE"),
        Option("timeout", float, "deadline of a download, in seconds", 600.0, metavar="S", least=0.001),
        WORKER,
        JSON,
        *CREDENTIALS,
    ),
    (
        Argument("action", "start, stop, list or get"),
        Argument("recording", "id of a recording; else the one that runs, or the last"),
    ),
)

REPLAY = Command(
    "replay",
    "check a recording, show the pool at any moment of it",
    "Applies every page event of a recording to a pool of its own, checks each, and names the first that\n"
    "cannot have happened. A file that is cut or changed is named by the byte.",
    ("kvatlas replay noon.kvrec", "kvatlas replay noon.kvrec --at 48211 --json"),
    (
        Option("at", int, "the pool as of this page event", metavar="REVISION", most=2**63 - 1),
        Option("check", bool, "check each event, not only fold it", True),
        JSON,
    ),
    (Argument("file", "the recording"),),
)

WHATIF = Command(
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
