"""`kvatlas chat`: questions and streamed answers, with history. The same code reads a terminal or a pipe."""

import sys
from argparse import Namespace

from kvatlas.cli.asking import describe, sampling_options
from kvatlas.cli.connecting import connect
from kvatlas.cli.exits import DONE, complain
from kvatlas.client.errors import KvatlasError
from kvatlas.client.events import Delta, Summary
from kvatlas.client.request import Message, Options
from kvatlas.client.sync import Client

HELP = """\
/reset          forget the conversation
/system TEXT    another system turn, from the next question on
/pages          the page map as it is now
/help           this
/exit           leave; so does Ctrl-D. Ctrl-C stops an answer"""


def run(settings: Namespace) -> int:
    """Talks until /exit or the end of the input; or answers once."""
    options = sampling_options(settings)
    if settings.model:
        options["model"] = settings.model
    with connect(settings) as client:
        chat = Chat(client, options, settings.system, is_quiet=settings.quiet)
        if settings.message is not None:
            chat.ask(settings.message)
            return DONE
        Terminal(chat).run() if sys.stdin.isatty() else _read_pipe(chat)
    return DONE


class Chat:
    """One conversation. An answer that is cut short is remembered as far as it came."""

    def __init__(self, client: Client, options: Options, system: str, *, is_quiet: bool) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._is_quiet = is_quiet
        self.turns: list[Message] = []

    def ask(self, question: str) -> None:
        """Raises KvatlasError where it fails; a question to which no answer came is then forgotten."""
        self.turns.append(Message("user", question))
        pieces: list[str] = []
        try:
            self._stream(pieces)
        finally:
            if pieces:
                self.turns.append(Message("assistant", "".join(pieces)))
            else:
                self.turns.pop()

    def obey(self, line: str) -> bool:
        """A line that starts with /; False: leave."""
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self.turns.clear()
        elif word == "/system":
            self._system = rest.strip()
        elif word == "/pages":
            self._show_pages()
        elif word == "/help":
            print(HELP, file=sys.stderr)
        else:
            complain(f"no such command: {word}; /help lists them")
        return True

    def _stream(self, pieces: list[str]) -> None:
        system = [Message("system", self._system)] if self._system else []
        with self._client.stream([*system, *self.turns], **self._options) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    pieces.append(event.text)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, Summary):
                    sys.stdout.write("\n")
                    sys.stdout.flush()
                    if not self._is_quiet:
                        print(describe(event)[0], file=sys.stderr)

    def _show_pages(self) -> None:
        from kvatlas.cli.pages import print_map

        print_map(self._client.page_map(), by="state")


class Terminal:
    """Reads questions with line editing. Ctrl-C at the prompt clears the line, a second one leaves."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def run(self) -> None:
        import readline  # noqa: F401  # gives input() its line editing and history

        print("/help lists the commands.", file=sys.stderr)
        interrupts = 0
        while interrupts < 2:
            try:
                line = input("> ").strip()
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                interrupts += 1
                print(file=sys.stderr)
                continue
            interrupts = 0
            if line and not self.take(line):
                return

    def take(self, line: str) -> bool:
        """One line; an answer that failed or was stopped is told, and the chat goes on."""
        try:
            if line.startswith("/"):
                return self._chat.obey(line)
            self._chat.ask(line)
        except KeyboardInterrupt:
            print(" [stopped]")
        except KvatlasError as error:
            complain(str(error))
        except UnicodeError as error:
            complain(f"the question is not UTF-8: {error}")
        return True


def _read_pipe(chat: Chat) -> None:
    """Each line is a question; the first failure ends it, Ctrl-C too, so that a script notices."""
    for raw in sys.stdin:
        line = raw.strip()
        if line.startswith("/"):
            if not chat.obey(line):
                return
        elif line:
            chat.ask(line)
