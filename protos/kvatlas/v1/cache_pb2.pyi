from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvatlas.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_STATE_UNSPECIFIED: _ClassVar[PageState]
    PAGE_STATE_FREE: _ClassVar[PageState]
    PAGE_STATE_ACTIVE: _ClassVar[PageState]
    PAGE_STATE_CACHED: _ClassVar[PageState]
    PAGE_STATE_PINNED: _ClassVar[PageState]
    PAGE_STATE_RESERVED: _ClassVar[PageState]

class PageFlag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_FLAG_UNSPECIFIED: _ClassVar[PageFlag]
    PAGE_FLAG_SEALED: _ClassVar[PageFlag]
    PAGE_FLAG_PINNED: _ClassVar[PageFlag]

class PageEventType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGE_EVENT_TYPE_UNSPECIFIED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_ALLOCATED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_SHARED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_SEALED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_RELEASED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_CACHED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_EVICTED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_FREED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_COPIED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_PINNED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_UNPINNED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_REVIVED: _ClassVar[PageEventType]
    PAGE_EVENT_TYPE_MOVED: _ClassVar[PageEventType]

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREFILL: _ClassVar[SequenceState]
    SEQUENCE_STATE_DECODE: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREEMPTED: _ClassVar[SequenceState]

class WaitReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_REASON_UNSPECIFIED: _ClassVar[WaitReason]
    WAIT_REASON_PAGES: _ClassVar[WaitReason]
    WAIT_REASON_ROWS: _ClassVar[WaitReason]
    WAIT_REASON_STEP_TOKENS: _ClassVar[WaitReason]
    WAIT_REASON_PRIORITY: _ClassVar[WaitReason]

class WatchMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WATCH_MODE_UNSPECIFIED: _ClassVar[WatchMode]
    WATCH_MODE_STATE: _ClassVar[WatchMode]
    WATCH_MODE_EVENTS: _ClassVar[WatchMode]

class SnapshotCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_CAUSE_UNSPECIFIED: _ClassVar[SnapshotCause]
    SNAPSHOT_CAUSE_INITIAL: _ClassVar[SnapshotCause]
    SNAPSHOT_CAUSE_EPOCH_CHANGED: _ClassVar[SnapshotCause]
    SNAPSHOT_CAUSE_LAGGED: _ClassVar[SnapshotCause]
    SNAPSHOT_CAUSE_RESYNCED: _ClassVar[SnapshotCause]

class IntegrityCheck(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INTEGRITY_CHECK_UNSPECIFIED: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_STATE_SUM: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_REFCOUNT: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_FREE_LIST: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_PAGE_TABLE: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_TRIE: _ClassVar[IntegrityCheck]
    INTEGRITY_CHECK_DEVICE_TABLE: _ClassVar[IntegrityCheck]

class RecordingEndCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORDING_END_CAUSE_UNSPECIFIED: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_STOPPED: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_DURATION: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_SIZE: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_SHUTDOWN: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_DISK: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_AUDIT: _ClassVar[RecordingEndCause]
    RECORDING_END_CAUSE_LOST: _ClassVar[RecordingEndCause]
PAGE_STATE_UNSPECIFIED: PageState
PAGE_STATE_FREE: PageState
PAGE_STATE_ACTIVE: PageState
PAGE_STATE_CACHED: PageState
PAGE_STATE_PINNED: PageState
PAGE_STATE_RESERVED: PageState
PAGE_FLAG_UNSPECIFIED: PageFlag
PAGE_FLAG_SEALED: PageFlag
PAGE_FLAG_PINNED: PageFlag
PAGE_EVENT_TYPE_UNSPECIFIED: PageEventType
PAGE_EVENT_TYPE_ALLOCATED: PageEventType
PAGE_EVENT_TYPE_SHARED: PageEventType
PAGE_EVENT_TYPE_SEALED: PageEventType
PAGE_EVENT_TYPE_RELEASED: PageEventType
PAGE_EVENT_TYPE_CACHED: PageEventType
PAGE_EVENT_TYPE_EVICTED: PageEventType
PAGE_EVENT_TYPE_FREED: PageEventType
PAGE_EVENT_TYPE_COPIED: PageEventType
PAGE_EVENT_TYPE_PINNED: PageEventType
PAGE_EVENT_TYPE_UNPINNED: PageEventType
PAGE_EVENT_TYPE_REVIVED: PageEventType
PAGE_EVENT_TYPE_MOVED: PageEventType
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_PREFILL: SequenceState
SEQUENCE_STATE_DECODE: SequenceState
SEQUENCE_STATE_PREEMPTED: SequenceState
WAIT_REASON_UNSPECIFIED: WaitReason
WAIT_REASON_PAGES: WaitReason
WAIT_REASON_ROWS: WaitReason
WAIT_REASON_STEP_TOKENS: WaitReason
WAIT_REASON_PRIORITY: WaitReason
WATCH_MODE_UNSPECIFIED: WatchMode
WATCH_MODE_STATE: WatchMode
WATCH_MODE_EVENTS: WatchMode
SNAPSHOT_CAUSE_UNSPECIFIED: SnapshotCause
SNAPSHOT_CAUSE_INITIAL: SnapshotCause
SNAPSHOT_CAUSE_EPOCH_CHANGED: SnapshotCause
SNAPSHOT_CAUSE_LAGGED: SnapshotCause
SNAPSHOT_CAUSE_RESYNCED: SnapshotCause
INTEGRITY_CHECK_UNSPECIFIED: IntegrityCheck
INTEGRITY_CHECK_STATE_SUM: IntegrityCheck
INTEGRITY_CHECK_REFCOUNT: IntegrityCheck
INTEGRITY_CHECK_FREE_LIST: IntegrityCheck
INTEGRITY_CHECK_PAGE_TABLE: IntegrityCheck
INTEGRITY_CHECK_TRIE: IntegrityCheck
INTEGRITY_CHECK_DEVICE_TABLE: IntegrityCheck
RECORDING_END_CAUSE_UNSPECIFIED: RecordingEndCause
RECORDING_END_CAUSE_STOPPED: RecordingEndCause
RECORDING_END_CAUSE_DURATION: RecordingEndCause
RECORDING_END_CAUSE_SIZE: RecordingEndCause
RECORDING_END_CAUSE_SHUTDOWN: RecordingEndCause
RECORDING_END_CAUSE_DISK: RecordingEndCause
RECORDING_END_CAUSE_AUDIT: RecordingEndCause
RECORDING_END_CAUSE_LOST: RecordingEndCause

class PoolGeometry(_message.Message):
    __slots__ = ("worker_id", "epoch", "start_time", "page_count", "page_size", "page_bytes", "layer_count", "kv_head_count", "head_dim", "dtype", "device", "rank_count", "row_count", "row_width", "dummy_page_id", "eviction_policy")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DUMMY_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    start_time: _timestamp_pb2.Timestamp
    page_count: int
    page_size: int
    page_bytes: int
    layer_count: int
    kv_head_count: int
    head_dim: int
    dtype: str
    device: str
    rank_count: int
    row_count: int
    row_width: int
    dummy_page_id: int
    eviction_policy: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., page_count: _Optional[int] = ..., page_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., layer_count: _Optional[int] = ..., kv_head_count: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., rank_count: _Optional[int] = ..., row_count: _Optional[int] = ..., row_width: _Optional[int] = ..., dummy_page_id: _Optional[int] = ..., eviction_policy: _Optional[str] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("free_pages", "active_pages", "cached_pages", "pinned_pages", "reserved_pages", "shared_pages", "references", "wasted_slots", "allocations_total", "evictions_total", "copies_total", "hit_tokens_total", "miss_cold_tokens_total", "miss_evicted_tokens_total", "unaligned_tokens_total", "preemptions_total")
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    SHARED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REFERENCES_FIELD_NUMBER: _ClassVar[int]
    WASTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COPIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISS_COLD_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MISS_EVICTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNALIGNED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    free_pages: int
    active_pages: int
    cached_pages: int
    pinned_pages: int
    reserved_pages: int
    shared_pages: int
    references: int
    wasted_slots: int
    allocations_total: int
    evictions_total: int
    copies_total: int
    hit_tokens_total: int
    miss_cold_tokens_total: int
    miss_evicted_tokens_total: int
    unaligned_tokens_total: int
    preemptions_total: int
    def __init__(self, free_pages: _Optional[int] = ..., active_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., reserved_pages: _Optional[int] = ..., shared_pages: _Optional[int] = ..., references: _Optional[int] = ..., wasted_slots: _Optional[int] = ..., allocations_total: _Optional[int] = ..., evictions_total: _Optional[int] = ..., copies_total: _Optional[int] = ..., hit_tokens_total: _Optional[int] = ..., miss_cold_tokens_total: _Optional[int] = ..., miss_evicted_tokens_total: _Optional[int] = ..., unaligned_tokens_total: _Optional[int] = ..., preemptions_total: _Optional[int] = ...) -> None: ...

class Revision(_message.Message):
    __slots__ = ("epoch", "number", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class GetPagePoolRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class GetPagePoolResponse(_message.Message):
    __slots__ = ("geometry", "stats", "revision", "observe_time")
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_TIME_FIELD_NUMBER: _ClassVar[int]
    geometry: PoolGeometry
    stats: PoolStats
    revision: Revision
    observe_time: _timestamp_pb2.Timestamp
    def __init__(self, geometry: _Optional[_Union[PoolGeometry, _Mapping]] = ..., stats: _Optional[_Union[PoolStats, _Mapping]] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., observe_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PageMap(_message.Message):
    __slots__ = ("states", "flags", "ref_counts", "filled_slots", "owners", "hit_counts", "parent_page_ids", "born_ms", "used_ms", "fingerprints")
    STATES_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    FILLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PARENT_PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    BORN_MS_FIELD_NUMBER: _ClassVar[int]
    USED_MS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    flags: bytes
    ref_counts: bytes
    filled_slots: bytes
    owners: bytes
    hit_counts: bytes
    parent_page_ids: bytes
    born_ms: bytes
    used_ms: bytes
    fingerprints: bytes
    def __init__(self, states: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., ref_counts: _Optional[bytes] = ..., filled_slots: _Optional[bytes] = ..., owners: _Optional[bytes] = ..., hit_counts: _Optional[bytes] = ..., parent_page_ids: _Optional[bytes] = ..., born_ms: _Optional[bytes] = ..., used_ms: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ...) -> None: ...

class GetPageMapRequest(_message.Message):
    __slots__ = ("worker_id", "planes", "first_page_id", "page_limit")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    planes: _containers.RepeatedScalarFieldContainer[str]
    first_page_id: int
    page_limit: int
    def __init__(self, worker_id: _Optional[str] = ..., planes: _Optional[_Iterable[str]] = ..., first_page_id: _Optional[int] = ..., page_limit: _Optional[int] = ...) -> None: ...

class GetPageMapResponse(_message.Message):
    __slots__ = ("pages", "first_page_id", "page_count", "stats", "revision")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    pages: PageMap
    first_page_id: int
    page_count: int
    stats: PoolStats
    revision: Revision
    def __init__(self, pages: _Optional[_Union[PageMap, _Mapping]] = ..., first_page_id: _Optional[int] = ..., page_count: _Optional[int] = ..., stats: _Optional[_Union[PoolStats, _Mapping]] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("request_id", "choice_index", "owner", "row", "state", "page_ids", "first_page_index", "token_count", "prompt_tokens", "prefix", "priority", "preemptions", "receive_time", "wait_reason", "needed_pages", "tenant", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    WAIT_REASON_FIELD_NUMBER: _ClassVar[int]
    NEEDED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    owner: int
    row: int
    state: SequenceState
    page_ids: bytes
    first_page_index: int
    token_count: int
    prompt_tokens: int
    prefix: _generation_pb2.PrefixLookup
    priority: int
    preemptions: int
    receive_time: _timestamp_pb2.Timestamp
    wait_reason: WaitReason
    needed_pages: int
    tenant: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., owner: _Optional[int] = ..., row: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., page_ids: _Optional[bytes] = ..., first_page_index: _Optional[int] = ..., token_count: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prefix: _Optional[_Union[_generation_pb2.PrefixLookup, _Mapping]] = ..., priority: _Optional[int] = ..., preemptions: _Optional[int] = ..., receive_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., wait_reason: _Optional[_Union[WaitReason, str]] = ..., needed_pages: _Optional[int] = ..., tenant: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SequenceProgress(_message.Message):
    __slots__ = ("owners", "token_counts")
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    owners: bytes
    token_counts: bytes
    def __init__(self, owners: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ...) -> None: ...

class GetPageRequest(_message.Message):
    __slots__ = ("worker_id", "page_id", "event_limit")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    page_id: int
    event_limit: int
    def __init__(self, worker_id: _Optional[str] = ..., page_id: _Optional[int] = ..., event_limit: _Optional[int] = ...) -> None: ...

class GetPageResponse(_message.Message):
    __slots__ = ("state", "sealed", "pinned", "ref_count", "filled_slots", "sequences", "parent_page_id", "child_page_ids", "hit_count", "age", "idle", "events", "revision")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    FILLED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PARENT_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CHILD_PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    state: PageState
    sealed: bool
    pinned: bool
    ref_count: int
    filled_slots: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    parent_page_id: int
    child_page_ids: _containers.RepeatedScalarFieldContainer[int]
    hit_count: int
    age: _duration_pb2.Duration
    idle: _duration_pb2.Duration
    events: _containers.RepeatedCompositeFieldContainer[PageEvent]
    revision: Revision
    def __init__(self, state: _Optional[_Union[PageState, str]] = ..., sealed: bool = ..., pinned: bool = ..., ref_count: _Optional[int] = ..., filled_slots: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., parent_page_id: _Optional[int] = ..., child_page_ids: _Optional[_Iterable[int]] = ..., hit_count: _Optional[int] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., idle: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., events: _Optional[_Iterable[_Union[PageEvent, _Mapping]]] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class PageEvent(_message.Message):
    __slots__ = ("number", "type", "step", "time", "owner", "request_id", "ref_count", "other_page_id")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    OTHER_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    number: int
    type: PageEventType
    step: int
    time: _timestamp_pb2.Timestamp
    owner: int
    request_id: str
    ref_count: int
    other_page_id: int
    def __init__(self, number: _Optional[int] = ..., type: _Optional[_Union[PageEventType, str]] = ..., step: _Optional[int] = ..., time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., owner: _Optional[int] = ..., request_id: _Optional[str] = ..., ref_count: _Optional[int] = ..., other_page_id: _Optional[int] = ...) -> None: ...

class GetPageTableRequest(_message.Message):
    __slots__ = ("worker_id", "rows", "from_device")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FROM_DEVICE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    rows: _containers.RepeatedScalarFieldContainer[int]
    from_device: bool
    def __init__(self, worker_id: _Optional[str] = ..., rows: _Optional[_Iterable[int]] = ..., from_device: bool = ...) -> None: ...

class GetPageTableResponse(_message.Message):
    __slots__ = ("row", "owner", "request_id", "choice_index", "token_count", "slots", "step", "rows_left")
    ROW_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_LEFT_FIELD_NUMBER: _ClassVar[int]
    row: int
    owner: int
    request_id: str
    choice_index: int
    token_count: int
    slots: bytes
    step: int
    rows_left: int
    def __init__(self, row: _Optional[int] = ..., owner: _Optional[int] = ..., request_id: _Optional[str] = ..., choice_index: _Optional[int] = ..., token_count: _Optional[int] = ..., slots: _Optional[bytes] = ..., step: _Optional[int] = ..., rows_left: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("worker_id", "max_results", "cursor", "states", "omit_page_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_RESULTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    OMIT_PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    max_results: int
    cursor: str
    states: _containers.RepeatedScalarFieldContainer[SequenceState]
    omit_page_ids: bool
    def __init__(self, worker_id: _Optional[str] = ..., max_results: _Optional[int] = ..., cursor: _Optional[str] = ..., states: _Optional[_Iterable[_Union[SequenceState, str]]] = ..., omit_page_ids: bool = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_cursor", "total_count", "revision")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    next_cursor: str
    total_count: int
    revision: Revision
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_cursor: _Optional[str] = ..., total_count: _Optional[int] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class GetSequenceRequest(_message.Message):
    __slots__ = ("request_id", "choice_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice_index: int
    def __init__(self, request_id: _Optional[str] = ..., choice_index: _Optional[int] = ...) -> None: ...

class GetSequenceResponse(_message.Message):
    __slots__ = ("sequence", "worker_id", "revision")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceInfo
    worker_id: str
    revision: Revision
    def __init__(self, sequence: _Optional[_Union[SequenceInfo, _Mapping]] = ..., worker_id: _Optional[str] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class WatchPageMapRequest(_message.Message):
    __slots__ = ("worker_id", "mode", "min_interval", "resume_after", "heartbeat_interval", "include_sequences", "planes", "include_token_ids")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    mode: WatchMode
    min_interval: _duration_pb2.Duration
    resume_after: Revision
    heartbeat_interval: _duration_pb2.Duration
    include_sequences: bool
    planes: _containers.RepeatedScalarFieldContainer[str]
    include_token_ids: bool
    def __init__(self, worker_id: _Optional[str] = ..., mode: _Optional[_Union[WatchMode, str]] = ..., min_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., resume_after: _Optional[_Union[Revision, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., include_sequences: bool = ..., planes: _Optional[_Iterable[str]] = ..., include_token_ids: bool = ...) -> None: ...

class WatchPageMapResponse(_message.Message):
    __slots__ = ("revision", "base_number", "snapshot", "delta", "events", "heartbeat", "stats", "observe_time", "violations")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    OBSERVE_TIME_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    base_number: int
    snapshot: SnapshotChunk
    delta: PageDelta
    events: PageEventBatch
    heartbeat: WatchHeartbeat
    stats: PoolStats
    observe_time: _timestamp_pb2.Timestamp
    violations: _containers.RepeatedCompositeFieldContainer[IntegrityViolation]
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., base_number: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., delta: _Optional[_Union[PageDelta, _Mapping]] = ..., events: _Optional[_Union[PageEventBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[WatchHeartbeat, _Mapping]] = ..., stats: _Optional[_Union[PoolStats, _Mapping]] = ..., observe_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., violations: _Optional[_Iterable[_Union[IntegrityViolation, _Mapping]]] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("geometry", "first_page_id", "page_count", "pages", "sequences", "cause", "chunks_left")
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_LEFT_FIELD_NUMBER: _ClassVar[int]
    geometry: PoolGeometry
    first_page_id: int
    page_count: int
    pages: PageMap
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    cause: SnapshotCause
    chunks_left: int
    def __init__(self, geometry: _Optional[_Union[PoolGeometry, _Mapping]] = ..., first_page_id: _Optional[int] = ..., page_count: _Optional[int] = ..., pages: _Optional[_Union[PageMap, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., cause: _Optional[_Union[SnapshotCause, str]] = ..., chunks_left: _Optional[int] = ...) -> None: ...

class PageDelta(_message.Message):
    __slots__ = ("page_ids", "pages", "sequences", "progress", "ended_owners", "merged_events")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ENDED_OWNERS_FIELD_NUMBER: _ClassVar[int]
    MERGED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    page_ids: bytes
    pages: PageMap
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    progress: SequenceProgress
    ended_owners: bytes
    merged_events: int
    def __init__(self, page_ids: _Optional[bytes] = ..., pages: _Optional[_Union[PageMap, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., progress: _Optional[_Union[SequenceProgress, _Mapping]] = ..., ended_owners: _Optional[bytes] = ..., merged_events: _Optional[int] = ...) -> None: ...

class PageEventBatch(_message.Message):
    __slots__ = ("first_number", "first_step", "first_time", "types", "page_ids", "owners", "ref_counts", "step_offsets", "time_offsets_us", "other_page_ids", "fingerprints", "token_ids", "started_sequences", "ended_owners")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIME_FIELD_NUMBER: _ClassVar[int]
    TYPES_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEP_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    TIME_OFFSETS_US_FIELD_NUMBER: _ClassVar[int]
    OTHER_PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDED_OWNERS_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    first_step: int
    first_time: _timestamp_pb2.Timestamp
    types: bytes
    page_ids: bytes
    owners: bytes
    ref_counts: bytes
    step_offsets: bytes
    time_offsets_us: bytes
    other_page_ids: bytes
    fingerprints: bytes
    token_ids: bytes
    started_sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    ended_owners: bytes
    def __init__(self, first_number: _Optional[int] = ..., first_step: _Optional[int] = ..., first_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., types: _Optional[bytes] = ..., page_ids: _Optional[bytes] = ..., owners: _Optional[bytes] = ..., ref_counts: _Optional[bytes] = ..., step_offsets: _Optional[bytes] = ..., time_offsets_us: _Optional[bytes] = ..., other_page_ids: _Optional[bytes] = ..., fingerprints: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., started_sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., ended_owners: _Optional[bytes] = ...) -> None: ...

class WatchHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EstimateCacheRequest(_message.Message):
    __slots__ = ("worker_id", "pool_slots", "page_sizes", "eviction_policies", "window")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZES_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICIES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pool_slots: _containers.RepeatedScalarFieldContainer[int]
    page_sizes: _containers.RepeatedScalarFieldContainer[int]
    eviction_policies: _containers.RepeatedScalarFieldContainer[str]
    window: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., pool_slots: _Optional[_Iterable[int]] = ..., page_sizes: _Optional[_Iterable[int]] = ..., eviction_policies: _Optional[_Iterable[str]] = ..., window: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EstimateCacheResponse(_message.Message):
    __slots__ = ("estimates", "observed", "sample")
    ESTIMATES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    estimates: _containers.RepeatedCompositeFieldContainer[CacheEstimate]
    observed: CacheEstimate
    sample: EstimateSample
    def __init__(self, estimates: _Optional[_Iterable[_Union[CacheEstimate, _Mapping]]] = ..., observed: _Optional[_Union[CacheEstimate, _Mapping]] = ..., sample: _Optional[_Union[EstimateSample, _Mapping]] = ...) -> None: ...

class CacheEstimate(_message.Message):
    __slots__ = ("pool_slots", "page_size", "eviction_policy", "prefix", "hit_ratio", "hit_ratio_error", "evictions", "mean_wasted_slots", "preemptions", "mean_queue_time")
    POOL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVICTION_POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_ERROR_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    MEAN_WASTED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    MEAN_QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    pool_slots: int
    page_size: int
    eviction_policy: str
    prefix: PrefixLookupTotals
    hit_ratio: float
    hit_ratio_error: float
    evictions: int
    mean_wasted_slots: float
    preemptions: int
    mean_queue_time: _duration_pb2.Duration
    def __init__(self, pool_slots: _Optional[int] = ..., page_size: _Optional[int] = ..., eviction_policy: _Optional[str] = ..., prefix: _Optional[_Union[PrefixLookupTotals, _Mapping]] = ..., hit_ratio: _Optional[float] = ..., hit_ratio_error: _Optional[float] = ..., evictions: _Optional[int] = ..., mean_wasted_slots: _Optional[float] = ..., preemptions: _Optional[int] = ..., mean_queue_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PrefixLookupTotals(_message.Message):
    __slots__ = ("hit_tokens", "miss_cold_tokens", "miss_evicted_tokens", "unaligned_tokens")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_COLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNALIGNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    miss_cold_tokens: int
    miss_evicted_tokens: int
    unaligned_tokens: int
    def __init__(self, hit_tokens: _Optional[int] = ..., miss_cold_tokens: _Optional[int] = ..., miss_evicted_tokens: _Optional[int] = ..., unaligned_tokens: _Optional[int] = ...) -> None: ...

class EstimateSample(_message.Message):
    __slots__ = ("sampling_rate", "request_count", "token_count", "start_time", "duration", "token_granularity")
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    sampling_rate: float
    request_count: int
    token_count: int
    start_time: _timestamp_pb2.Timestamp
    duration: _duration_pb2.Duration
    token_granularity: int
    def __init__(self, sampling_rate: _Optional[float] = ..., request_count: _Optional[int] = ..., token_count: _Optional[int] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., token_granularity: _Optional[int] = ...) -> None: ...

class IntegrityViolation(_message.Message):
    __slots__ = ("check", "subject", "expected", "found", "page_id", "row", "revision", "find_time")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FIND_TIME_FIELD_NUMBER: _ClassVar[int]
    check: IntegrityCheck
    subject: str
    expected: str
    found: str
    page_id: int
    row: int
    revision: Revision
    find_time: _timestamp_pb2.Timestamp
    def __init__(self, check: _Optional[_Union[IntegrityCheck, str]] = ..., subject: _Optional[str] = ..., expected: _Optional[str] = ..., found: _Optional[str] = ..., page_id: _Optional[int] = ..., row: _Optional[int] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., find_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class IntegrityCheckStats(_message.Message):
    __slots__ = ("check", "pass_count", "fail_count", "last_run_time", "last_pass_time")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    PASS_COUNT_FIELD_NUMBER: _ClassVar[int]
    FAIL_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_RUN_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_PASS_TIME_FIELD_NUMBER: _ClassVar[int]
    check: IntegrityCheck
    pass_count: int
    fail_count: int
    last_run_time: _timestamp_pb2.Timestamp
    last_pass_time: _timestamp_pb2.Timestamp
    def __init__(self, check: _Optional[_Union[IntegrityCheck, str]] = ..., pass_count: _Optional[int] = ..., fail_count: _Optional[int] = ..., last_run_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., last_pass_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetIntegrityRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class GetIntegrityResponse(_message.Message):
    __slots__ = ("checks", "violations", "violations_total", "last_success_time", "last_round_time", "sweep_count", "revision")
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    LAST_SUCCESS_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_TIME_FIELD_NUMBER: _ClassVar[int]
    SWEEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    checks: _containers.RepeatedCompositeFieldContainer[IntegrityCheckStats]
    violations: _containers.RepeatedCompositeFieldContainer[IntegrityViolation]
    violations_total: int
    last_success_time: _timestamp_pb2.Timestamp
    last_round_time: _duration_pb2.Duration
    sweep_count: int
    revision: Revision
    def __init__(self, checks: _Optional[_Iterable[_Union[IntegrityCheckStats, _Mapping]]] = ..., violations: _Optional[_Iterable[_Union[IntegrityViolation, _Mapping]]] = ..., violations_total: _Optional[int] = ..., last_success_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., last_round_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., sweep_count: _Optional[int] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class RunIntegrityCheckRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class RunIntegrityCheckResponse(_message.Message):
    __slots__ = ("violations", "violations_total", "checked_pages", "checked_rows", "round_count", "engine_time", "first_revision", "last_revision")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHECKED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CHECKED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROUND_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TIME_FIELD_NUMBER: _ClassVar[int]
    FIRST_REVISION_FIELD_NUMBER: _ClassVar[int]
    LAST_REVISION_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[IntegrityViolation]
    violations_total: int
    checked_pages: int
    checked_rows: int
    round_count: int
    engine_time: _duration_pb2.Duration
    first_revision: Revision
    last_revision: Revision
    def __init__(self, violations: _Optional[_Iterable[_Union[IntegrityViolation, _Mapping]]] = ..., violations_total: _Optional[int] = ..., checked_pages: _Optional[int] = ..., checked_rows: _Optional[int] = ..., round_count: _Optional[int] = ..., engine_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., first_revision: _Optional[_Union[Revision, _Mapping]] = ..., last_revision: _Optional[_Union[Revision, _Mapping]] = ...) -> None: ...

class RecordingFrame(_message.Message):
    __slots__ = ("header", "snapshot", "events", "request", "end", "violation", "sequence", "steps", "gap", "sharers", "checksum")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    SHARERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    header: RecordingHeader
    snapshot: SnapshotChunk
    events: PageEventBatch
    request: RequestRecord
    end: RecordingEnd
    violation: IntegrityViolation
    sequence: SequenceRecord
    steps: StepBatch
    gap: RecordingGap
    sharers: PageSharers
    checksum: int
    def __init__(self, header: _Optional[_Union[RecordingHeader, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., events: _Optional[_Union[PageEventBatch, _Mapping]] = ..., request: _Optional[_Union[RequestRecord, _Mapping]] = ..., end: _Optional[_Union[RecordingEnd, _Mapping]] = ..., violation: _Optional[_Union[IntegrityViolation, _Mapping]] = ..., sequence: _Optional[_Union[SequenceRecord, _Mapping]] = ..., steps: _Optional[_Union[StepBatch, _Mapping]] = ..., gap: _Optional[_Union[RecordingGap, _Mapping]] = ..., sharers: _Optional[_Union[PageSharers, _Mapping]] = ..., checksum: _Optional[int] = ...) -> None: ...

class RecordingHeader(_message.Message):
    __slots__ = ("format_version", "version", "model", "geometry", "revision", "start_time", "has_token_ids", "note", "scheduler", "recording_id", "token_granularity")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    version: str
    model: str
    geometry: PoolGeometry
    revision: Revision
    start_time: _timestamp_pb2.Timestamp
    has_token_ids: bool
    note: str
    scheduler: SchedulerLimits
    recording_id: str
    token_granularity: int
    def __init__(self, format_version: _Optional[int] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., geometry: _Optional[_Union[PoolGeometry, _Mapping]] = ..., revision: _Optional[_Union[Revision, _Mapping]] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., has_token_ids: bool = ..., note: _Optional[str] = ..., scheduler: _Optional[_Union[SchedulerLimits, _Mapping]] = ..., recording_id: _Optional[str] = ..., token_granularity: _Optional[int] = ...) -> None: ...

class SchedulerLimits(_message.Message):
    __slots__ = ("max_running_sequences", "max_step_tokens", "max_context_tokens", "max_queued_requests", "max_chunk_tokens", "watermark_pages", "overlap", "prefix_cache", "doubling_context_tokens")
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_PAGES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    DOUBLING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_running_sequences: int
    max_step_tokens: int
    max_context_tokens: int
    max_queued_requests: int
    max_chunk_tokens: int
    watermark_pages: int
    overlap: bool
    prefix_cache: bool
    doubling_context_tokens: int
    def __init__(self, max_running_sequences: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_chunk_tokens: _Optional[int] = ..., watermark_pages: _Optional[int] = ..., overlap: bool = ..., prefix_cache: bool = ..., doubling_context_tokens: _Optional[int] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("time", "number", "request_id", "sample_count", "prompt_tokens", "max_tokens", "priority", "cache_read", "cache_write", "token_granularity", "fingerprints", "token_ids", "sequence_id")
    TIME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_GRANULARITY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    number: int
    request_id: str
    sample_count: int
    prompt_tokens: int
    max_tokens: int
    priority: int
    cache_read: bool
    cache_write: bool
    token_granularity: int
    fingerprints: bytes
    token_ids: bytes
    sequence_id: int
    def __init__(self, time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., number: _Optional[int] = ..., request_id: _Optional[str] = ..., sample_count: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., cache_read: bool = ..., cache_write: bool = ..., token_granularity: _Optional[int] = ..., fingerprints: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., sequence_id: _Optional[int] = ...) -> None: ...

class SequenceRecord(_message.Message):
    __slots__ = ("time", "number", "sequence_id", "completion_tokens", "preemptions", "finish_code", "prefix", "queue_us", "fingerprints", "token_ids")
    TIME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_CODE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    number: int
    sequence_id: int
    completion_tokens: int
    preemptions: int
    finish_code: int
    prefix: _generation_pb2.PrefixLookup
    queue_us: int
    fingerprints: bytes
    token_ids: bytes
    def __init__(self, time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., number: _Optional[int] = ..., sequence_id: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., finish_code: _Optional[int] = ..., prefix: _Optional[_Union[_generation_pb2.PrefixLookup, _Mapping]] = ..., queue_us: _Optional[int] = ..., fingerprints: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("steps", "durations_us", "prefill_tokens", "decode_tokens", "context_tokens")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    steps: bytes
    durations_us: bytes
    prefill_tokens: bytes
    decode_tokens: bytes
    context_tokens: bytes
    def __init__(self, steps: _Optional[bytes] = ..., durations_us: _Optional[bytes] = ..., prefill_tokens: _Optional[bytes] = ..., decode_tokens: _Optional[bytes] = ..., context_tokens: _Optional[bytes] = ...) -> None: ...

class RecordingGap(_message.Message):
    __slots__ = ("after_number", "lost_events", "lost_records")
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOST_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOST_RECORDS_FIELD_NUMBER: _ClassVar[int]
    after_number: int
    lost_events: int
    lost_records: int
    def __init__(self, after_number: _Optional[int] = ..., lost_events: _Optional[int] = ..., lost_records: _Optional[int] = ...) -> None: ...

class PageSharers(_message.Message):
    __slots__ = ("page_ids", "owners")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    page_ids: bytes
    owners: bytes
    def __init__(self, page_ids: _Optional[bytes] = ..., owners: _Optional[bytes] = ...) -> None: ...

class RecordingEnd(_message.Message):
    __slots__ = ("revision", "event_count", "request_count", "cause", "sequence_count", "dropped_events", "state_digest")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EVENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    revision: Revision
    event_count: int
    request_count: int
    cause: RecordingEndCause
    sequence_count: int
    dropped_events: int
    state_digest: bytes
    def __init__(self, revision: _Optional[_Union[Revision, _Mapping]] = ..., event_count: _Optional[int] = ..., request_count: _Optional[int] = ..., cause: _Optional[_Union[RecordingEndCause, str]] = ..., sequence_count: _Optional[int] = ..., dropped_events: _Optional[int] = ..., state_digest: _Optional[bytes] = ...) -> None: ...
