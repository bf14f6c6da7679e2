"""Options of `kvatlas admin`."""

from kvatlas.cli.option import ADMIN_ADDRESS, CREDENTIALS, JSON, Argument, Command, Option

ADMIN = Command(
    "admin",
    "operate a service: drain, flush, pins, cancel, log level, profile",
    "Asks AdminService, which listens on an address of its own and needs the `admin` scope.\n"
    "  drain | undrain           take no new requests, end when the running ones have; take it back.\n"
    "                            `kvatlas serve` ends with its service, containers start it again\n"
    "  flush                     drop what the prefix cache holds\n"
    "  pins | pin NAME | unpin NAME   prefixes that are kept: list, set (--text), let go\n"
    "  cancel [ID]               end requests of anyone: by id, --principal or --label\n"
    "  log-level LEVEL           debug, info, warning or error, for --seconds\n"
    "  profile                   the next --steps of a worker, as a file",
    (
        "kvatlas admin drain --grace 30",
        "kvatlas admin flush --tenant team-a",
        'kvatlas admin pin system --text "$(cat system.txt)" && kvatlas admin pins',
        "kvatlas admin cancel --label experiment=7 --reason 'wrong prompt'",
        "kvatlas admin log-level debug --worker-id worker-0 --seconds 60",
        "kvatlas admin profile --steps 200 -o steps.json.gz",
    ),
    (
        ADMIN_ADDRESS,
        Option("worker_id", str, "one worker; else the service, or all its workers", "", metavar="ID"),
        Option("grace", float, "drain: seconds until running requests are ended", metavar="S"),
        Option("tenant", str, "flush, pin: of this tenant", "", metavar="NAME"),
        Option("salt", str, "flush, pin: under this salt", metavar="TEXT"),
        Option("include_active", bool, "flush: pages in use are freed, not cached, afterwards", False),
        Option("include_pinned", bool, "flush: pins go, too", False),
        Option("text", str, "pin: the prefix; - reads stdin", "", metavar="TEXT"),
        Option("ttl", float, "pin: ends after this many seconds", metavar="S"),
        Option("principal", str, "cancel: of this caller", "", metavar="NAME"),
        Option("label", str, "cancel: with this label (repeatable)", is_list=True, metavar="KEY=VALUE"),
        Option("reason", str, "cancel: for the log and the caller", "", metavar="TEXT"),
        Option("logger", str, "log-level: of this logger; else of all", "", metavar="NAME"),
        Option("seconds", float, "log-level: goes back after so long; else it stays", metavar="S"),
        Option("steps", int, "profile: engine steps", 100),
        Option("output", str, "profile: file to write; else the profile's name here", "", "o", "FILE"),
        JSON,
        *CREDENTIALS,
    ),
    (
        Argument("action", "what to do, see above"),
        Argument("subject", "name of a pin, id of a request, or a level"),
    ),
)
