"""The playground: a prompt, its tokens and pages, and the answer as it comes."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import streamlit as st

from dashboard import process
from dashboard.client import Prompt
from dashboard.components import mount
from dashboard.facts import RESULTS, Answer
from dashboard.live_pages import Follower
from dashboard.view_parts import choose_follower, counted, figures
from kvatlas.client.errors import KvatlasError
from kvatlas.client.events import Delta, Event, Finished, Prefix, Started, Summary
from kvatlas.client.request import Message, Options

MAX_TOKENS = 512
REDRAW_SECONDS = 0.05
DEFAULT_PROMPT = (
    "The lighthouse of Skarholm stands on a rock in the North Sea. Every evening the keeper climbs 212 steps "
    "to light its lamp, which burns whale oil and can be seen from thirty miles away.\n\n"
    "Why is the sky blue?"
)


def show() -> None:
    """The view."""
    follower = choose_follower()
    if follower is None:
        return
    if follower.status.kind == "denied":
        st.info("The playground needs a token with the scope `generate`.")
        return
    text = st.text_area("Prompt", DEFAULT_PROMPT, height=140, key="prompt")
    columns = st.columns([1, 1, 1, 1, 1], vertical_alignment="bottom")
    as_chat = columns[0].toggle("as a chat", value=True, key="as_chat")
    max_tokens = int(columns[1].number_input("New tokens", 1, MAX_TOKENS, 64, key="max_tokens"))
    temperature = float(columns[2].number_input("Temperature", 0.0, 2.0, 0.7, 0.1, key="temperature"))
    samples = int(columns[3].number_input("Samples", 1, 4, 1, key="samples"))
    is_sent = columns[4].button("Send", type="primary", key="send", disabled=not text.strip())
    if not text.strip():
        return
    prompt: Prompt = [Message("user", text)] if as_chat else text
    places = _Places(st.empty(), st.empty(), st.empty(), st.empty())
    answer = st.session_state.get("answer")
    if answer is not None and answer[0] != prompt:
        answer = None  # of another prompt
    if is_sent or answer is None:
        _ruler(follower, prompt, places.ruler, None)
    if is_sent:
        options: Options = {"max_tokens": max_tokens, "temperature": temperature, "n": samples}
        _send(follower, prompt, options, places)
    elif answer is not None:
        _ruler(follower, prompt, places.ruler, answer[1].tokens)
        _plain(places.output, answer[2])
        _bill(answer[1], places.bill)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where things stand, whatever has been sent before."""

    ruler: "st.delta_generator.DeltaGenerator"
    output: "st.delta_generator.DeltaGenerator"
    controls: "st.delta_generator.DeltaGenerator"
    bill: "st.delta_generator.DeltaGenerator"


def _ruler(
    follower: Follower,
    prompt: Prompt,
    place: "st.delta_generator.DeltaGenerator",
    results: "dict[str, int] | None",
) -> None:
    try:
        tokens = process.live_pages().source.tokenize(prompt)
    except KvatlasError as failure:
        place.error(str(failure))
        return
    page_size = follower.live_map.geometry().page_size if follower.live_map.is_whole else 16
    known = dict(results) if results else _expected(len(tokens.pieces), tokens.cached_tokens, page_size)
    with place.container():
        data = {"pieces": list(tokens.pieces), "results": known, "page_size": page_size}
        mount("ruler.js", data, key=f"ruler-{'known' if results else 'expected'}")
        words = "" if results else f", {tokens.cached_tokens} of them in the cache right now"
        st.caption(f"{counted(len(tokens.pieces), 'token')} on {counted(tokens.page_count, 'page')}{words}")


def _expected(count: int, cached: int, page_size: int) -> dict[str, int]:
    """What a look-up would say now, as far as Tokenize can tell: nobody knows what was evicted."""
    unaligned = min(count % page_size, count - cached)
    return {"hit": cached, "miss_cold": count - cached - unaligned, "miss_evicted": 0, "unaligned": unaligned}


def _send(follower: Follower, prompt: Prompt, options: Options, places: _Places) -> None:
    told: list[Event] = []
    begun = time.monotonic()
    places.bill.empty()  # what stands there is of the last answer
    _plain(places.output, "")
    with places.controls.container(horizontal=True):
        st.button("Stop", key="stop")  # a press runs the script anew, which closes the stream below
        shown = st.empty()
    try:
        # Leaving the view, Stop and a closed tab all end this script, and with it the call.
        with closing(process.live_pages().source.stream(prompt, **options)) as stream:
            text, drawn_at = "", 0.0
            for piece in _texts(iter(stream), told, follower, prompt, places.ruler, shown):
                text += piece
                if time.monotonic() - drawn_at >= REDRAW_SECONDS:
                    drawn_at = time.monotonic()
                    _plain(places.output, text)
    except KvatlasError as failure:
        places.bill.error(str(failure))
        return
    finally:
        places.controls.empty()
    _plain(places.output, text)
    answer = _answer(told, time.monotonic() - begun)
    st.session_state["answer"] = (prompt, answer, text)
    _bill(answer, places.bill)


def _texts(
    events: Iterator[Event],
    told: list[Event],
    follower: Follower,
    prompt: Prompt,
    place: "st.delta_generator.DeltaGenerator",
    shown: "st.delta_generator.DeltaGenerator",
) -> Iterator[str]:
    """Pieces of the first sample; what the cache had is drawn as soon as it is known."""
    for event in events:
        told.append(event)
        if isinstance(event, Started):
            if event.prefix is not None:
                _ruler(follower, prompt, place, _by_result(event.prefix))
            shown.markdown(f"[on the map](./?req={event.request_id})")
        elif isinstance(event, Delta) and event.index == 0:
            yield event.text


def _plain(place: "st.delta_generator.DeltaGenerator", text: str) -> None:
    """What a model writes is text: as Markdown it could fetch pictures from anywhere."""
    place.code(text or " ", language=None, wrap_lines=True)


def _by_result(prefix: Prefix) -> dict[str, int]:
    return {name: getattr(prefix, f"{name}_tokens") for name in RESULTS}


def _answer(events: list[Event], seconds: float) -> Answer:
    started = next((each for each in events if isinstance(each, Started)), None)
    summary = next((each for each in events if isinstance(each, Summary)), None)
    ends = [each.reason for each in events if isinstance(each, Finished)]
    if started is None or summary is None:
        return Answer("", 0, 0, first_token_seconds=seconds)
    usage, bill = summary.usage, summary.usage.kv
    return Answer(
        request_id=started.request_id,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        tokens=_by_result(usage.prefix) if usage.prefix is not None else {},
        first_token_seconds=summary.timing.first_token_seconds,
        page_seconds=bill.page_seconds,
        page_seconds_saved=bill.shared_page_seconds_saved,
        reused_pages=bill.reused_pages,
        tail_waste_slots=bill.tail_waste_slots,
        finish_reason=", ".join(sorted(set(ends))),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def _bill(answer: Answer, place: "st.delta_generator.DeltaGenerator") -> None:
    with place.container():
        figures(
            {
                "First token": _seconds(answer.first_token_seconds),
                "Tokens": f"{answer.prompt_tokens:,} + {answer.completion_tokens:,}",
                "Bill": f"{answer.page_seconds:.1f} page·s",
                "Saved by sharing": f"{answer.page_seconds_saved:.1f} page·s",
                "Reused pages": f"{answer.reused_pages:,}",
                "Tail": f"{answer.tail_waste_slots:,} slots",
                "Ended by": answer.finish_reason,
            }
        )


show()
