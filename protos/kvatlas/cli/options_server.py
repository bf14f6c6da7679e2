"""Options of the commands that start something: serve, pull, demo, dashboard."""

from kvatlas.cli.option import ADDRESS, DEFAULT_MODEL, JSON, Argument, Command, Option

SERVE = Command(
    "serve",
    "start a worker and a service on this machine and keep them running",
    "Fetches the model if it is not here, starts one worker and one service as processes of their own,\n"
    "restarts the one that dies, and ends both in order on SIGINT, SIGTERM or `kvatlas admin drain`:\n"
    "running requests finish first; a second signal ends them, a third kills. What is not said here, the\n"
    "processes take from KVATLAS_WORKER_* and KVATLAS_SERVICE_*.",
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
        Option(
            "admin_port",
            int,
            "port of AdminService on the loopback; else the one after the listener's",
            most=65_535,
        ),
        Option("runner", str, "what computes; fake needs no torch", "torch", choices=("torch", "fake")),
        Option("device", str, "device of the runner", "cpu", choices=("cpu", "cuda")),
        Option("page_size", int, "tokens per page; 0: the worker's default", 0),
        Option("num_pages", int, "pages of the pool; 0: as many as fit", 0),
        Option("max_running", int, "running sequences at most; 0: the worker's default", 0),
        Option(
            "metrics_port",
            int,
            "port of the service's /metrics; 0: any free one",
            9101,
            metavar="PORT",
            most=65_535,
        ),
        Option(
            "worker_metrics_port",
            int,
            "port of the worker's /metrics; 0: any free one",
            9102,
            metavar="PORT",
            most=65_535,
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
        Option(
            "parent_watch",
            int,
            "end in order when the process of this id is no longer the parent; 0: off",
            0,
            metavar="PID",
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

PULL = Command(
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

KEYS = Command(
    "keys",
    "make keys for a tcp seam",
    "Writes a pair of keys for each name into a folder: NAME.key, which is for NAME alone, and NAME.pub for\n"
    "the other end. A worker and a service on different hosts need them: --seam-key, --seam-peers of both.",
    ("kvatlas keys seam", "kvatlas keys seam worker,service-1,service-2"),
    (),
    (Argument("folder", "where to"), Argument("names", "whose, joined by commas (default: worker,service)")),
)

DEMO = Command(
    "demo",
    "see it work: one model, two questions, three page maps",
    "Starts a server on free ports, streams an answer, shows the page map before, during and after,\n"
    "asks again with the same beginning, and shows which pages were found in the cache. On a terminal, or\n"
    "with --keep, it then serves on and shows the pages in a browser.",
    ("kvatlas demo", "kvatlas demo --keep"),
    (
        Option("model", str, "a name that `kvatlas pull` knows, or a path", DEFAULT_MODEL, "m", "NAME"),
        Option("num_pages", int, "pages of the pool", 255),
        Option("page_size", int, "tokens per page", 16),
        Option("max_tokens", int, "tokens of each answer", 48, "n"),
        Option(
            "svg", str, "also write a picture of the page map during the second answer", "", metavar="FILE"
        ),
        Option(
            "keep", bool, "then serve on, with the dashboard, until Ctrl-C; on a terminal by itself", False
        ),
    ),
)

DASHBOARD = Command(
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
        Option(
            "listen",
            str,
            "host:port where browsers come; port 0: any free one",
            "127.0.0.1:8501",
            metavar="ADDR",
        ),
        Option("demo", bool, "a simulated pool; no server is asked", False),
        Option("token_file", str, "file with the bearer token for the service", "", metavar="FILE"),
        Option(
            "ca_file", str, "TLS to the service, with the authorities of this PEM file", "", metavar="FILE"
        ),
        Option("certificate_file", str, "certificate of the dashboard (mTLS), PEM", "", metavar="FILE"),
        Option("key_file", str, "its key, PEM", "", metavar="FILE"),
        Option("grafana_url", str, "where Grafana is, for links", "", metavar="URL"),
        Option("ready_file", str, "write the address there, as JSON, when ready", "", metavar="FILE"),
        Option("log_level", str, "what is logged", "info", choices=("debug", "info", "warning", "error")),
        Option(
            "set", str, "any setting of `python -m dashboard` (repeatable)", is_list=True, metavar="NAME=V"
        ),
    ),
)
