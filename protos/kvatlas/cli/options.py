"""Every command of `kvatlas` with its options, as data: parser, variables, TOML keys and help come from it.

Imports nothing that is slow: `kvatlas --help` reads these tables and no more.
"""

from kvatlas.cli.option import ADDRESS, CREDENTIALS, TIMEOUT, Command, Option
from kvatlas.cli.options_admin import ADMIN
from kvatlas.cli.options_ask import CHAT, GENERATE
from kvatlas.cli.options_look import LOAD, PAGES, RECORD, REPLAY, TOP, WHATIF
from kvatlas.cli.options_server import DASHBOARD, DEMO, KEYS, PULL, SERVE

SHARED = (ADDRESS, TIMEOUT, *CREDENTIALS)
"""Also without a command: KVATLAS_ADDRESS, and `address` at the top of the TOML file."""

COMMANDS = {
    command.name: command
    for command in (
        SERVE,
        GENERATE,
        CHAT,
        PAGES,
        TOP,
        LOAD,
        PULL,
        KEYS,
        DEMO,
        RECORD,
        ADMIN,
        REPLAY,
        WHATIF,
        DASHBOARD,
    )
}

WITHOUT_SERVER = frozenset(
    {"serve", "pull", "keys", "demo", "record", "admin", "replay", "whatif", "dashboard"}
)
"""Commands that do not take both --address and --timeout."""


def options_of(command: Command) -> tuple[Option, ...]:
    """All options of a command, the shared ones included."""
    return tuple(command.options) if command.name in WITHOUT_SERVER else (*command.options, *SHARED)
