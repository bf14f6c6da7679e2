from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvatlas.v1 import cache_pb2 as _cache_pb2
from kvatlas.v1 import errors_pb2 as _errors_pb2
from kvatlas.v1 import generation_pb2 as _generation_pb2
from kvatlas.v1 import server_pb2 as _server_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_REASON_UNSPECIFIED: _ClassVar[AbortReason]
    ABORT_REASON_STOP_STRING: _ClassVar[AbortReason]
    ABORT_REASON_CLIENT: _ClassVar[AbortReason]
    ABORT_REASON_DEADLINE: _ClassVar[AbortReason]
    ABORT_REASON_CANCELLED: _ClassVar[AbortReason]
    ABORT_REASON_OPERATOR: _ClassVar[AbortReason]
    ABORT_REASON_SERVICE_ERROR: _ClassVar[AbortReason]

class AddStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADD_STATUS_UNSPECIFIED: _ClassVar[AddStatus]
    ADD_STATUS_ACCEPTED: _ClassVar[AddStatus]
    ADD_STATUS_QUEUE_FULL: _ClassVar[AddStatus]
    ADD_STATUS_NEVER_FITS: _ClassVar[AddStatus]
    ADD_STATUS_TOO_LONG: _ClassVar[AddStatus]
    ADD_STATUS_TIMEOUT_TOO_SHORT: _ClassVar[AddStatus]
    ADD_STATUS_DRAINING: _ClassVar[AddStatus]
    ADD_STATUS_NOT_READY: _ClassVar[AddStatus]
    ADD_STATUS_FEATURE_DISABLED: _ClassVar[AddStatus]
    ADD_STATUS_INVALID: _ClassVar[AddStatus]

class FinishCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_CODE_UNSPECIFIED: _ClassVar[FinishCode]
    FINISH_CODE_EOS: _ClassVar[FinishCode]
    FINISH_CODE_STOP_TOKEN: _ClassVar[FinishCode]
    FINISH_CODE_MAX_TOKENS: _ClassVar[FinishCode]
    FINISH_CODE_CONTEXT_LENGTH: _ClassVar[FinishCode]
    FINISH_CODE_TIME_LIMIT: _ClassVar[FinishCode]
    FINISH_CODE_ABORTED: _ClassVar[FinishCode]
    FINISH_CODE_TIMED_OUT: _ClassVar[FinishCode]
    FINISH_CODE_QUEUE_TIMEOUT: _ClassVar[FinishCode]
    FINISH_CODE_FAILED: _ClassVar[FinishCode]
    FINISH_CODE_DRAINED: _ClassVar[FinishCode]
ABORT_REASON_UNSPECIFIED: AbortReason
ABORT_REASON_STOP_STRING: AbortReason
ABORT_REASON_CLIENT: AbortReason
ABORT_REASON_DEADLINE: AbortReason
ABORT_REASON_CANCELLED: AbortReason
ABORT_REASON_OPERATOR: AbortReason
ABORT_REASON_SERVICE_ERROR: AbortReason
ADD_STATUS_UNSPECIFIED: AddStatus
ADD_STATUS_ACCEPTED: AddStatus
ADD_STATUS_QUEUE_FULL: AddStatus
ADD_STATUS_NEVER_FITS: AddStatus
ADD_STATUS_TOO_LONG: AddStatus
ADD_STATUS_TIMEOUT_TOO_SHORT: AddStatus
ADD_STATUS_DRAINING: AddStatus
ADD_STATUS_NOT_READY: AddStatus
ADD_STATUS_FEATURE_DISABLED: AddStatus
ADD_STATUS_INVALID: AddStatus
FINISH_CODE_UNSPECIFIED: FinishCode
FINISH_CODE_EOS: FinishCode
FINISH_CODE_STOP_TOKEN: FinishCode
FINISH_CODE_MAX_TOKENS: FinishCode
FINISH_CODE_CONTEXT_LENGTH: FinishCode
FINISH_CODE_TIME_LIMIT: FinishCode
FINISH_CODE_ABORTED: FinishCode
FINISH_CODE_TIMED_OUT: FinishCode
FINISH_CODE_QUEUE_TIMEOUT: FinishCode
FINISH_CODE_FAILED: FinishCode
FINISH_CODE_DRAINED: FinishCode

class ServiceMessage(_message.Message):
    __slots__ = ("hello", "add", "abort", "heartbeat", "command", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    add: AddSequence
    abort: AbortSequences
    heartbeat: ServiceHeartbeat
    command: Command
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., add: _Optional[_Union[AddSequence, _Mapping]] = ..., abort: _Optional[_Union[AbortSequences, _Mapping]] = ..., heartbeat: _Optional[_Union[ServiceHeartbeat, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("number", "config", "refusal", "add_result", "step", "heartbeat", "reply")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ADD_RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    number: int
    config: Config
    refusal: Refusal
    add_result: AddResult
    step: StepOutput
    heartbeat: Heartbeat
    reply: CommandReply
    def __init__(self, number: _Optional[int] = ..., config: _Optional[_Union[Config, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., add_result: _Optional[_Union[AddResult, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., reply: _Optional[_Union[CommandReply, _Mapping]] = ...) -> None: ...

class PageFeed(_message.Message):
    __slots__ = ("revision", "base_number", "delta", "events", "stats", "publish_time", "violations")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    revision: _cache_pb2.Revision
    base_number: int
    delta: _cache_pb2.PageDelta
    events: _cache_pb2.PageEventBatch
    stats: _cache_pb2.PoolStats
    publish_time: _timestamp_pb2.Timestamp
    violations: _containers.RepeatedCompositeFieldContainer[_cache_pb2.IntegrityViolation]
    def __init__(self, revision: _Optional[_Union[_cache_pb2.Revision, _Mapping]] = ..., base_number: _Optional[int] = ..., delta: _Optional[_Union[_cache_pb2.PageDelta, _Mapping]] = ..., events: _Optional[_Union[_cache_pb2.PageEventBatch, _Mapping]] = ..., stats: _Optional[_Union[_cache_pb2.PoolStats, _Mapping]] = ..., publish_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., violations: _Optional[_Iterable[_Union[_cache_pb2.IntegrityViolation, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "instance_id", "service_epoch", "version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    instance_id: str
    service_epoch: int
    version: str
    def __init__(self, protocol: _Optional[int] = ..., instance_id: _Optional[str] = ..., service_epoch: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Config(_message.Message):
    __slots__ = ("protocol", "worker", "model", "geometry", "max_running_sequences", "max_queued_requests", "max_context_tokens", "max_pinned_pages", "features", "pages_address", "fingerprint_key")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PAGES_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: _server_pb2.WorkerInfo
    model: _server_pb2.Model
    geometry: _cache_pb2.PoolGeometry
    max_running_sequences: int
    max_queued_requests: int
    max_context_tokens: int
    max_pinned_pages: int
    features: _containers.RepeatedScalarFieldContainer[str]
    pages_address: str
    fingerprint_key: bytes
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[_Union[_server_pb2.WorkerInfo, _Mapping]] = ..., model: _Optional[_Union[_server_pb2.Model, _Mapping]] = ..., geometry: _Optional[_Union[_cache_pb2.PoolGeometry, _Mapping]] = ..., max_running_sequences: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_pinned_pages: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., pages_address: _Optional[str] = ..., fingerprint_key: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("protocol", "message")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    message: str
    def __init__(self, protocol: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class ServiceHeartbeat(_message.Message):
    __slots__ = ("live_sequences",)
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    live_sequences: int
    def __init__(self, live_sequences: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddSequence(_message.Message):
    __slots__ = ("sequence_id", "sample_count", "prompt_token_ids", "params", "priority", "timeout_ms", "queue_timeout_ms", "cache_read", "cache_write", "cache_salt", "request_id", "tenant", "labels", "receive_time", "traceparent", "adapter", "first_choice_index", "resume_token_ids", "attempt")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    sample_count: int
    prompt_token_ids: bytes
    params: SequenceParams
    priority: int
    timeout_ms: int
    queue_timeout_ms: int
    cache_read: bool
    cache_write: bool
    cache_salt: bytes
    request_id: str
    tenant: str
    labels: _containers.ScalarMap[str, str]
    receive_time: _timestamp_pb2.Timestamp
    traceparent: str
    adapter: str
    first_choice_index: int
    resume_token_ids: bytes
    attempt: int
    def __init__(self, sequence_id: _Optional[int] = ..., sample_count: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., params: _Optional[_Union[SequenceParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., queue_timeout_ms: _Optional[int] = ..., cache_read: bool = ..., cache_write: bool = ..., cache_salt: _Optional[bytes] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., receive_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., traceparent: _Optional[str] = ..., adapter: _Optional[str] = ..., first_choice_index: _Optional[int] = ..., resume_token_ids: _Optional[bytes] = ..., attempt: _Optional[int] = ...) -> None: ...

class SequenceParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "logit_bias_token_ids", "logit_bias_values", "max_tokens", "min_tokens", "stop_token_ids", "stop_at_eos", "max_duration_ms", "logprobs", "prompt_logprobs", "json_schema", "regex", "grammar", "choices")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias_token_ids: bytes
    logit_bias_values: bytes
    max_tokens: int
    min_tokens: int
    stop_token_ids: bytes
    stop_at_eos: bool
    max_duration_ms: int
    logprobs: int
    prompt_logprobs: int
    json_schema: str
    regex: str
    grammar: str
    choices: _generation_pb2.ChoiceConstraint
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias_token_ids: _Optional[bytes] = ..., logit_bias_values: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ..., stop_at_eos: bool = ..., max_duration_ms: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices: _Optional[_Union[_generation_pb2.ChoiceConstraint, _Mapping]] = ...) -> None: ...

class AbortSequences(_message.Message):
    __slots__ = ("sequence_ids", "reason")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    reason: AbortReason
    def __init__(self, sequence_ids: _Optional[bytes] = ..., reason: _Optional[_Union[AbortReason, str]] = ...) -> None: ...

class AddResult(_message.Message):
    __slots__ = ("sequence_id", "status", "queue_position", "estimated_wait_ms", "needed_pages", "total_pages", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    status: AddStatus
    queue_position: int
    estimated_wait_ms: int
    needed_pages: int
    total_pages: int
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., status: _Optional[_Union[AddStatus, str]] = ..., queue_position: _Optional[int] = ..., estimated_wait_ms: _Optional[int] = ..., needed_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "step_us", "starts", "sequence_ids", "token_ids", "finish_codes", "logprobs", "ends", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_CODES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    step_us: int
    starts: _containers.RepeatedCompositeFieldContainer[SequenceStart]
    sequence_ids: bytes
    token_ids: bytes
    finish_codes: bytes
    logprobs: LogprobColumns
    ends: _containers.RepeatedCompositeFieldContainer[SequenceEnd]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, step: _Optional[int] = ..., step_us: _Optional[int] = ..., starts: _Optional[_Iterable[_Union[SequenceStart, _Mapping]]] = ..., sequence_ids: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., finish_codes: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., ends: _Optional[_Iterable[_Union[SequenceEnd, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class SequenceStart(_message.Message):
    __slots__ = ("sequence_id", "prefix", "reused_pages", "queue_us", "resumed")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    REUSED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prefix: _generation_pb2.PrefixLookup
    reused_pages: int
    queue_us: int
    resumed: bool
    def __init__(self, sequence_id: _Optional[int] = ..., prefix: _Optional[_Union[_generation_pb2.PrefixLookup, _Mapping]] = ..., reused_pages: _Optional[int] = ..., queue_us: _Optional[int] = ..., resumed: bool = ...) -> None: ...

class SequenceEnd(_message.Message):
    __slots__ = ("sequence_id", "completion_tokens", "bill", "error_reason", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BILL_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    completion_tokens: int
    bill: _generation_pb2.KvBill
    error_reason: _errors_pb2.ErrorReason
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., bill: _Optional[_Union[_generation_pb2.KvBill, _Mapping]] = ..., error_reason: _Optional[_Union[_errors_pb2.ErrorReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("logprobs", "ranks", "alternative_counts", "alternative_token_ids", "alternative_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    ranks: bytes
    alternative_counts: bytes
    alternative_token_ids: bytes
    alternative_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., alternative_counts: _Optional[bytes] = ..., alternative_token_ids: _Optional[bytes] = ..., alternative_logprobs: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence_id", "columns")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    columns: LogprobColumns
    def __init__(self, sequence_id: _Optional[int] = ..., columns: _Optional[_Union[LogprobColumns, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "load", "pool", "revision", "estimated_wait_ms", "pin_pages")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    PIN_PAGES_FIELD_NUMBER: _ClassVar[int]
    step: int
    load: _server_pb2.WorkerLoad
    pool: _cache_pb2.PoolStats
    revision: _cache_pb2.Revision
    estimated_wait_ms: int
    pin_pages: int
    def __init__(self, step: _Optional[int] = ..., load: _Optional[_Union[_server_pb2.WorkerLoad, _Mapping]] = ..., pool: _Optional[_Union[_cache_pb2.PoolStats, _Mapping]] = ..., revision: _Optional[_Union[_cache_pb2.Revision, _Mapping]] = ..., estimated_wait_ms: _Optional[int] = ..., pin_pages: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("command_id", "timeout_ms", "snapshot", "replay", "page_table", "estimate", "flush", "pin", "list_pins", "start_recording", "stop_recording", "get_recording", "profile", "log_level", "cancel", "integrity", "check_integrity", "list_recordings", "get_profile")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLE_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LIST_PINS_FIELD_NUMBER: _ClassVar[int]
    START_RECORDING_FIELD_NUMBER: _ClassVar[int]
    STOP_RECORDING_FIELD_NUMBER: _ClassVar[int]
    GET_RECORDING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    LIST_RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    GET_PROFILE_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    timeout_ms: int
    snapshot: SnapshotRequest
    replay: ReplayRequest
    page_table: _cache_pb2.GetPageTableRequest
    estimate: _cache_pb2.EstimateCacheRequest
    flush: _server_pb2.FlushPrefixCacheRequest
    pin: PinPrefix
    list_pins: _server_pb2.ListPinnedPrefixesRequest
    start_recording: _server_pb2.StartRecordingRequest
    stop_recording: _server_pb2.StopRecordingRequest
    get_recording: _server_pb2.GetRecordingRequest
    profile: _server_pb2.CaptureProfileRequest
    log_level: _server_pb2.SetLogLevelRequest
    cancel: CancelCommand
    integrity: _cache_pb2.GetIntegrityRequest
    check_integrity: _cache_pb2.RunIntegrityCheckRequest
    list_recordings: _server_pb2.ListRecordingsRequest
    get_profile: _server_pb2.GetProfileRequest
    def __init__(self, command_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., replay: _Optional[_Union[ReplayRequest, _Mapping]] = ..., page_table: _Optional[_Union[_cache_pb2.GetPageTableRequest, _Mapping]] = ..., estimate: _Optional[_Union[_cache_pb2.EstimateCacheRequest, _Mapping]] = ..., flush: _Optional[_Union[_server_pb2.FlushPrefixCacheRequest, _Mapping]] = ..., pin: _Optional[_Union[PinPrefix, _Mapping]] = ..., list_pins: _Optional[_Union[_server_pb2.ListPinnedPrefixesRequest, _Mapping]] = ..., start_recording: _Optional[_Union[_server_pb2.StartRecordingRequest, _Mapping]] = ..., stop_recording: _Optional[_Union[_server_pb2.StopRecordingRequest, _Mapping]] = ..., get_recording: _Optional[_Union[_server_pb2.GetRecordingRequest, _Mapping]] = ..., profile: _Optional[_Union[_server_pb2.CaptureProfileRequest, _Mapping]] = ..., log_level: _Optional[_Union[_server_pb2.SetLogLevelRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelCommand, _Mapping]] = ..., integrity: _Optional[_Union[_cache_pb2.GetIntegrityRequest, _Mapping]] = ..., check_integrity: _Optional[_Union[_cache_pb2.RunIntegrityCheckRequest, _Mapping]] = ..., list_recordings: _Optional[_Union[_server_pb2.ListRecordingsRequest, _Mapping]] = ..., get_profile: _Optional[_Union[_server_pb2.GetProfileRequest, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplayRequest(_message.Message):
    __slots__ = ("after_number", "include_token_ids")
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    after_number: int
    include_token_ids: bool
    def __init__(self, after_number: _Optional[int] = ..., include_token_ids: bool = ...) -> None: ...

class PinPrefix(_message.Message):
    __slots__ = ("name", "token_ids", "cache_salt", "ttl_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token_ids: bytes
    cache_salt: bytes
    ttl_ms: int
    def __init__(self, name: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class CancelCommand(_message.Message):
    __slots__ = ("command_id",)
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    def __init__(self, command_id: _Optional[int] = ...) -> None: ...

class CommandReply(_message.Message):
    __slots__ = ("command_id", "more", "code", "error_reason", "message", "snapshot", "events", "page_table", "estimate", "flush", "pin", "pins", "start_recording", "stop_recording", "get_recording", "profile", "log_level", "integrity", "check_integrity", "list_recordings", "get_profile", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLE_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    START_RECORDING_FIELD_NUMBER: _ClassVar[int]
    STOP_RECORDING_FIELD_NUMBER: _ClassVar[int]
    GET_RECORDING_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    CHECK_INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    LIST_RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    GET_PROFILE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    command_id: int
    more: bool
    code: int
    error_reason: _errors_pb2.ErrorReason
    message: str
    snapshot: SnapshotReply
    events: _cache_pb2.PageEventBatch
    page_table: _cache_pb2.GetPageTableResponse
    estimate: _cache_pb2.EstimateCacheResponse
    flush: _server_pb2.FlushPrefixCacheResponse
    pin: _server_pb2.PinnedPrefix
    pins: _server_pb2.ListPinnedPrefixesResponse
    start_recording: _server_pb2.StartRecordingResponse
    stop_recording: _server_pb2.StopRecordingResponse
    get_recording: _server_pb2.GetRecordingResponse
    profile: _server_pb2.CaptureProfileResponse
    log_level: _server_pb2.SetLogLevelResponse
    integrity: _cache_pb2.GetIntegrityResponse
    check_integrity: _cache_pb2.RunIntegrityCheckResponse
    list_recordings: _server_pb2.ListRecordingsResponse
    get_profile: _server_pb2.GetProfileResponse
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, command_id: _Optional[int] = ..., more: bool = ..., code: _Optional[int] = ..., error_reason: _Optional[_Union[_errors_pb2.ErrorReason, str]] = ..., message: _Optional[str] = ..., snapshot: _Optional[_Union[SnapshotReply, _Mapping]] = ..., events: _Optional[_Union[_cache_pb2.PageEventBatch, _Mapping]] = ..., page_table: _Optional[_Union[_cache_pb2.GetPageTableResponse, _Mapping]] = ..., estimate: _Optional[_Union[_cache_pb2.EstimateCacheResponse, _Mapping]] = ..., flush: _Optional[_Union[_server_pb2.FlushPrefixCacheResponse, _Mapping]] = ..., pin: _Optional[_Union[_server_pb2.PinnedPrefix, _Mapping]] = ..., pins: _Optional[_Union[_server_pb2.ListPinnedPrefixesResponse, _Mapping]] = ..., start_recording: _Optional[_Union[_server_pb2.StartRecordingResponse, _Mapping]] = ..., stop_recording: _Optional[_Union[_server_pb2.StopRecordingResponse, _Mapping]] = ..., get_recording: _Optional[_Union[_server_pb2.GetRecordingResponse, _Mapping]] = ..., profile: _Optional[_Union[_server_pb2.CaptureProfileResponse, _Mapping]] = ..., log_level: _Optional[_Union[_server_pb2.SetLogLevelResponse, _Mapping]] = ..., integrity: _Optional[_Union[_cache_pb2.GetIntegrityResponse, _Mapping]] = ..., check_integrity: _Optional[_Union[_cache_pb2.RunIntegrityCheckResponse, _Mapping]] = ..., list_recordings: _Optional[_Union[_server_pb2.ListRecordingsResponse, _Mapping]] = ..., get_profile: _Optional[_Union[_server_pb2.GetProfileResponse, _Mapping]] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("revision", "chunk", "stats", "publish_time")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    revision: _cache_pb2.Revision
    chunk: _cache_pb2.SnapshotChunk
    stats: _cache_pb2.PoolStats
    publish_time: _timestamp_pb2.Timestamp
    def __init__(self, revision: _Optional[_Union[_cache_pb2.Revision, _Mapping]] = ..., chunk: _Optional[_Union[_cache_pb2.SnapshotChunk, _Mapping]] = ..., stats: _Optional[_Union[_cache_pb2.PoolStats, _Mapping]] = ..., publish_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
