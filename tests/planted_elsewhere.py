"""What tests/mutations.py plants outside the control plane: in text, sampling, model files and processes.

Each names the files whose tests must notice; most are known faults of other servers (docs/known-faults.md).
"""

from tests.planted_faults import Fault

SAMPLER, STOPS, DETOKENIZER = (
    "worker/execution/sampler.py",
    "service/text/stop_strings.py",
    "service/text/detokenizer.py",
)
HUB, STORE, SUPERVISOR = (
    "worker/model/hub_config.py",
    "worker/readers/recording_store.py",
    "protos/kvatlas/cli/supervisor.py",
)


CHANNELS, TURNS, START = "worker/channels.py", "worker/link/turns.py", "worker/__main__.py"
ENGINE = "worker/engine.py"


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


ELSEWHERE = [
    Fault(
        "B052: top-k that is off becomes an index",
        SAMPLER,
        "top_k = np.where(state.top_k[rows] > 0, state.top_k[rows], state.vocab_size)",
        "top_k = np.where(state.top_k[rows] >= 0, state.top_k[rows], state.vocab_size)",
        _unit("sampler"),
    ),
    Fault(
        "B053: the token that reaches top-p is left out",
        SAMPLER,
        "(mass_before < top_p) | (top_p >= 1.0)",
        "(mass_before + probs <= top_p) | (top_p >= 1.0)",
        _unit("sampler"),
    ),
    Fault(
        "B054: padding of the vocabulary can be drawn",
        SAMPLER,
        "logits = logits[:, : self._state.vocab_size].float()",
        "logits = logits.float()",
        _unit("sampler"),
    ),
    Fault(
        "B057: a row of NaN is a number",
        SAMPLER,
        "is_finite = best.isfinite()  #",
        "is_finite = best.nan_to_num(0.0).isfinite()  #",
        _unit("sampler"),
    ),
    Fault(
        "B060: of equal logits the highest id",
        SAMPLER,
        "        best, ids = logits.max(dim=-1)\n",
        "        best, ids = logits.flip(-1).max(dim=-1)\n        ids = logits.shape[-1] - 1 - ids\n",
        _unit("sampler"),
    ),
    Fault(
        "B062: penalties do not see what was drawn",
        SAMPLER,
        "            self._state.history.add(rows[penalised].tolist(), ids[self._index(penalised)])",
        "            pass",
        _unit("sampler"),
    ),
    Fault(
        "B067: held text is lost at the end",
        STOPS,
        '        held, self._held = self._held, ""\n        return held',
        '        self._held = ""\n        return ""',
        _unit("stop_strings"),
    ),
    Fault(
        "B068: a whole stop string that is only text is held",
        STOPS,
        "longer.hold = longer.depth if longer.next else shorter.hold",
        "longer.hold = longer.depth",
        _unit("stop_strings"),
    ),
    Fault(
        "B069: a stop string inside a longer one is passed over",
        STOPS,
        "longer.stop = longer.stop or shorter.stop",
        "longer.stop = longer.stop",
        _unit("stop_strings"),
    ),
    Fault(
        "B071: a byte is kept though its character went out",
        DETOKENIZER,
        "self._held = data[num_consumed:]",
        'self._held = data[max(0, num_consumed - 1) :] if data[num_consumed:] else b""',
        _unit("detokenizer"),
    ),
    Fault(
        "B072: half a character at the end is nothing",
        DETOKENIZER,
        'text, _ = utf_8_decode(self._held, "replace", True)',
        'text, _ = utf_8_decode(self._held, "ignore", True)',
        _unit("detokenizer"),
    ),
    Fault(
        "B073: every first space of a piece is dropped",
        DETOKENIZER,
        "        self._strip_space = False\n        return text[1:]",
        "        return text[1:]",
        _unit("detokenizer"),
    ),
    Fault(
        "B073: an answer that goes on with a text loses its first space",
        "service/text/tokenizer.py",
        "strip_space=begins_text and self.vocabulary.strips_first_space",
        "strip_space=self.vocabulary.strips_first_space",
        ("tests/integration/test_stream_order.py",),
    ),
    Fault(
        "B078: marks have ids of ordinary tokens",
        "service/text/tokenizer.py",
        "max(known.values(), default=-1) + 1 - len(known)",
        "0",
        _unit("tokenizer"),
    ),
    Fault(
        "padding behind a vocabulary needs no score",
        "service/text/backend.py",
        "len(scores) < len(vocabulary.tokens)",
        "len(scores) != len(vocabulary.tokens)",
        _unit("tokenizer"),
    ),
    Fault(
        "events up to a snapshot are neither folded nor dropped",
        "worker/readers/observer.py",
        "        self._lost_events += observation.snapshot.number - fold.ledger.revision\n",
        "        self._lost_events += 1\n",
        ("tests/property/test_worker_feed_equals_pool.py",),
    ),
    Fault(
        "B076: one end token of several",
        HUB,
        "eos_token_ids=vocabulary.eos_ids,",
        "eos_token_ids=frozenset(sorted(vocabulary.eos_ids)[:1]),",
        _unit("worker_devices"),
    ),
    Fault(
        "B096: a head is tied unless the config says no",
        HUB,
        'tied_head=values.flag("tie_word_embeddings", False)',
        'tied_head=values.flag("tie_word_embeddings", True)',
        _unit("safetensors_loading"),
    ),
    Fault(
        "B098: head_dim of the config is not read",
        HUB,
        'head_dim = values.optional_integer("head_dim", family.head_dim) or hidden // heads',
        "head_dim = hidden // heads",
        _unit("model_config"),
    ),
    Fault(
        "recordings of another live worker are removed",
        STORE,
        "        self._name.take(self.folder)\n        stamp",
        "        stamp",
        _unit("recorder"),
    ),
    Fault(
        "a drained service is started again",
        SUPERVISOR,
        "event.code == 0 and",
        "event.code == 77 and",
        _unit("cli_supervisor"),
    ),
    Fault(
        "nobody serves a lent link whose borrower is held up",
        TURNS,
        "                stand_in()",
        "                pass",
        _unit("lent_link"),
    ),
    Fault(
        "an engine that sleeps in the lent link misses another thread's command",
        CHANNELS,
        "if poke is not None and threading.get_ident() != self._reader:",
        "if poke is not None and threading.get_ident() == self._reader:",
        _unit("lent_link", "worker_channels"),
    ),
    Fault(
        "beside FlashInfer a first start compiles on threads",
        START,
        'if config.attention_backend in ("triton", "auto"):',
        'if config.attention_backend == "triton":',
        _unit("compile_processes"),
    ),
    Fault(
        "a start beside FlashInfer says that ours were compiled",
        START,
        "repr((shape, limits, has_other))",
        "repr((shape, limits))",
        _unit("compile_processes"),
    ),
    Fault(
        "a step is launched behind one that was not",
        ENGINE,
        "return isinstance(self._in_flight[-1].handle, BrokenHandle)",
        "return False",
        _unit("torch_runner"),
    ),
    Fault(
        "a worker whose device is lost breaks one request after another",
        ENGINE,
        "        self._runner.read_rows([0], [1])\n",
        "",
        _unit("engine_fatal_faults"),
    ),
    Fault(
        "a step that runs again goes on with what void steps left of its rows",
        "worker/isolation.py",
        "row_starts=[each for each in step.row_starts if each.row == row] if start is None else [start],",
        "row_starts=[each for each in step.row_starts if each.row == row],",
        _unit("torch_runner"),
    ),
    Fault(
        "with overlap page events go back a step",
        "worker/scheduling/books.py",
        "self.cache.set_clock(max(step, events.step), max(time_us, events.time_us))",
        "self.cache.set_clock(step, max(time_us, events.time_us))",
        ("tests/property/test_replay.py",),
    ),
    Fault(
        "page events of any distance are read together",
        "worker/pages/events.py",
        "columns = self._copy(after_number, self._near(after_number, count), with_tokens)",
        "columns = self._copy(after_number, count, with_tokens)",
        _unit("page_events", "recorder"),
    ),
    Fault(
        "an audit that broke counts what it did not look at as passed",
        "worker/live_audit.py",
        "checks=[check for check in CHECKS if check in this.checks],",
        "checks=CHECKS,",
        _unit("live_audit"),
    ),
    Fault(
        "a certificate with another's key is given to gRPC",
        "service/tls.py",
        "        self._check()\n",
        "",
        ("tests/integration/test_service_auth.py",),
    ),
    Fault(
        "an estimate computes on when its worker is killed",
        "worker/trace/estimate.py",
        "    threading.Thread(target=_end_with_parent, daemon=True).start()\n",
        "",
        _unit("estimator"),
    ),
    Fault(
        "what-if counts its warm-up",
        "worker/trace/simulation.py",
        "if self._now < self._count_from <= time:",
        "if False:",
        _unit("what_if_times"),
    ),
    Fault(
        "what-if takes what a step leaves for the idle time before it",
        "worker/trace/simulation.py",
        "        self._looked += self._now - began\n",
        "",
        _unit("what_if_times"),
    ),
    Fault(
        "evictions observed in a window are all since the start",
        "worker/trace/estimate.py",
        "if look.time_us <= from_us], default=0",
        "if look.time_us < 0], default=0",
        _unit("observed_evictions"),
    ),
    Fault(
        "rates after a long turn are over half a second",
        "worker/readers/load.py",
        "seconds = max(now - recent.time, SAMPLE_SECONDS)",
        "seconds = SAMPLE_SECONDS",
        _unit("reader_meters"),
    ),
    Fault(
        "a request goes to a worker that would cut its answer off",
        "service/fleet/room.py",
        "        and min(wanted, request.context_tokens) <= facts.max_context_tokens\n",
        "",
        ("tests/integration/test_unlike_workers.py",),
    ),
    Fault(
        "an answer goes on with another model",
        "service/fleet/room.py",
        "facts.model_id == (request.model_id or facts.model_id)",
        "bool(facts.model_id)",
        ("tests/integration/test_unlike_workers.py",),
    ),
    Fault(
        "two models are served as one",
        "service/fleet/workers.py",
        "if other.facts.model_id != facts.model_id != self._model_id:",
        "if not other.facts.model_id:",
        ("tests/integration/test_unlike_workers.py",),
    ),
    Fault(
        "a cursor goes on behind all that came in one nanosecond",
        "service/handlers/cursors.py",
        "return min(max(first, first + told), end)",
        "return end",
        _unit("cache_answers"),
    ),
    Fault(
        "what a socket has taken is sent to it again",
        "worker/link/router.py",
        "self.unsent = data[taken:] if self.held_up else _NOTHING",
        "self.unsent = data[taken:] if self.held_up else self.unsent",
        _unit("link_router"),
    ),
    Fault(
        "as many alternatives as a service likes",
        "worker/link/codec.py",
        "return _within(getattr(params, name), 0, MAX_ALTERNATIVES, name) if params.HasField(name) else None",
        "return int(getattr(params, name)) if params.HasField(name) else None",
        _unit("worker_codec"),
    ),
    Fault(
        "a call that was given up is done all the same",
        "worker/link/recordings.py",
        "        if ticket not in self._wanted:\n            return\n",
        "",
        _unit("recording_desk"),
    ),
    Fault(
        "who waits for a constraint is not told that the worker ends",
        "worker/process.py",
        "self._constraints.refuse_waiting()",
        "pass",
        ("tests/integration/test_drained_constraints.py",),
    ),
]
