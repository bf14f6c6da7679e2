"""`kvatlas` and `python -m kvatlas.cli`: settings, then the command's own module, then an exit code.

Nothing of ours is imported before `main` catches Ctrl-C: it may come while Python still reads modules.
"""

import importlib
import sys
from collections.abc import Sequence

EXTRAS = {"matplotlib": "pictures", "huggingface_hub": "hub"}
"""Of packages that only some commands need; the others are in kvatlas[cli]."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        from kvatlas.cli import config, exits

        config.prepare_environment()
        settings = config.read(sys.argv[1:] if arguments is None else arguments)
        command = importlib.import_module(f"kvatlas.cli.{settings.command}")
        code: int = command.run(settings)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130  # exits.INTERRUPTED, which may not be there yet
    except BrokenPipeError:
        exits.drop(sys.stdout)  # who read it has left
        return exits.BROKEN_PIPE
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0], "cli")
        exits.complain(f"{error.name} is not installed: pip install 'kvatlas[{extra}]'")
        return exits.USAGE
    except UnicodeError as error:
        exits.complain(f"an argument or the input is not UTF-8: {error}")
        return exits.USAGE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in exits.NO_ROOM:
            exits.drop(sys.stdout)
        code_or_bug = exits.code_of(error)
        if code_or_bug is None:
            raise
        exits.complain(str(error))
        return code_or_bug


if __name__ == "__main__":
    sys.exit(main())
