"""Which of several links to one worker are shown: its address may have changed, the old one stays known."""

from collections.abc import Sequence

from service.fleet.link import WorkerLink


def shown(links: Sequence[WorkerLink]) -> list[WorkerLink]:
    """Those that have introduced themselves. Of a worker that is lost at an address, none if it is there at
    another, else the one that was heard last: it is one worker.
    """
    known = [link for link in links if link.facts is not None]
    there = {link.worker_id for link in known if link.is_up}
    last = {link.worker_id: link for link in sorted(known, key=lambda link: link.beat_time)}
    return [
        link for link in known if link.is_up or (link.worker_id not in there and last[link.worker_id] is link)
    ]
