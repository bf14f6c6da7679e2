from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from kvatlas.v1 import cache_pb2 as _cache_pb2
from kvatlas.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_STATE_UNSPECIFIED: _ClassVar[ServerState]
    SERVER_STATE_STARTING: _ClassVar[ServerState]
    SERVER_STATE_SERVING: _ClassVar[ServerState]
    SERVER_STATE_DRAINING: _ClassVar[ServerState]
    SERVER_STATE_LOST: _ClassVar[ServerState]

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
SERVER_STATE_UNSPECIFIED: ServerState
SERVER_STATE_STARTING: ServerState
SERVER_STATE_SERVING: ServerState
SERVER_STATE_DRAINING: ServerState
SERVER_STATE_LOST: ServerState
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "git_commit", "start_time", "instance_id", "limits", "features", "state", "workers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GIT_COMMIT_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    git_commit: str
    start_time: _timestamp_pb2.Timestamp
    instance_id: str
    limits: ServerLimits
    features: _containers.RepeatedScalarFieldContainer[str]
    state: ServerState
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, version: _Optional[str] = ..., git_commit: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., instance_id: _Optional[str] = ..., limits: _Optional[_Union[ServerLimits, _Mapping]] = ..., features: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[ServerState, str]] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("max_request_bytes", "max_context_tokens", "max_prompt_tokens", "max_samples", "max_queued_requests", "max_running_sequences", "max_logprobs", "default_deadline", "max_deadline", "max_watches", "max_pinned_pages")
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    MAX_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    MAX_WATCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    max_request_bytes: int
    max_context_tokens: int
    max_prompt_tokens: int
    max_samples: int
    max_queued_requests: int
    max_running_sequences: int
    max_logprobs: int
    default_deadline: _duration_pb2.Duration
    max_deadline: _duration_pb2.Duration
    max_watches: int
    max_pinned_pages: int
    def __init__(self, max_request_bytes: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_samples: _Optional[int] = ..., max_queued_requests: _Optional[int] = ..., max_running_sequences: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., default_deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_deadline: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_watches: _Optional[int] = ..., max_pinned_pages: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "epoch", "state", "model_id", "version", "device_name", "device_memory_bytes", "compute_capability", "attention_backend", "versions", "last_heartbeat_time", "attention_backend_reason")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_TIME_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    state: ServerState
    model_id: str
    version: str
    device_name: str
    device_memory_bytes: int
    compute_capability: str
    attention_backend: str
    versions: _containers.ScalarMap[str, str]
    last_heartbeat_time: _timestamp_pb2.Timestamp
    attention_backend_reason: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[ServerState, str]] = ..., model_id: _Optional[str] = ..., version: _Optional[str] = ..., device_name: _Optional[str] = ..., device_memory_bytes: _Optional[int] = ..., compute_capability: _Optional[str] = ..., attention_backend: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., last_heartbeat_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., attention_backend_reason: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("model_id", "revision", "architecture", "max_context_tokens", "vocab_size", "eos_token_ids", "dtype", "parameter_count", "has_chat_template", "tokenizer_sha256", "defaults")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    parameter_count: int
    has_chat_template: bool
    tokenizer_sha256: str
    defaults: DefaultSampling
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., parameter_count: _Optional[int] = ..., has_chat_template: bool = ..., tokenizer_sha256: _Optional[str] = ..., defaults: _Optional[_Union[DefaultSampling, _Mapping]] = ...) -> None: ...

class DefaultSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("max_results", "cursor")
    MAX_RESULTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    max_results: int
    cursor: str
    def __init__(self, max_results: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_cursor")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_cursor: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "state", "running_sequences", "waiting_requests", "waiting_uncached_tokens", "available_pages", "total_pages", "output_tokens_per_second", "prompt_tokens_per_second", "prefix_hit_rate", "mean_step_time", "last_step_age")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    MEAN_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: ServerState
    running_sequences: int
    waiting_requests: int
    waiting_uncached_tokens: int
    available_pages: int
    total_pages: int
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    prefix_hit_rate: float
    mean_step_time: _duration_pb2.Duration
    last_step_age: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[_Union[ServerState, str]] = ..., running_sequences: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_uncached_tokens: _Optional[int] = ..., available_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., output_tokens_per_second: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., prefix_hit_rate: _Optional[float] = ..., mean_step_time: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., last_step_age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("active_requests", "waiting_requests", "estimated_wait", "workers", "age")
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    active_requests: int
    waiting_requests: int
    estimated_wait: _duration_pb2.Duration
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    age: _duration_pb2.Duration
    def __init__(self, active_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., estimated_wait: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., age: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class StartDrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StartDrainResponse(_message.Message):
    __slots__ = ("running_requests",)
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    def __init__(self, running_requests: _Optional[int] = ...) -> None: ...

class StopDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopDrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("worker_id", "tenant", "salt", "include_active", "include_pinned")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_PINNED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    tenant: str
    salt: str
    include_active: bool
    include_pinned: bool
    def __init__(self, worker_id: _Optional[str] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., include_active: bool = ..., include_pinned: bool = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_pages", "unindexed_pages")
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    UNINDEXED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    unindexed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ..., unindexed_pages: _Optional[int] = ...) -> None: ...

class SetPinnedPrefixRequest(_message.Message):
    __slots__ = ("worker_id", "name", "model", "text", "token_ids", "chat", "tenant", "salt", "ttl", "remove")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    name: str
    model: str
    text: str
    token_ids: _generation_pb2.TokenSequence
    chat: _generation_pb2.ChatPrompt
    tenant: str
    salt: str
    ttl: _duration_pb2.Duration
    remove: bool
    def __init__(self, worker_id: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenSequence, _Mapping]] = ..., chat: _Optional[_Union[_generation_pb2.ChatPrompt, _Mapping]] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., remove: bool = ...) -> None: ...

class SetPinnedPrefixResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "worker_id", "token_count", "pinned_tokens", "pinned_pages", "computed_tokens", "hit_tokens", "tenant", "salt", "expire_time")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_id: str
    token_count: int
    pinned_tokens: int
    pinned_pages: int
    computed_tokens: int
    hit_tokens: int
    tenant: str
    salt: str
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., worker_id: _Optional[str] = ..., token_count: _Optional[int] = ..., pinned_tokens: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., salt: _Optional[str] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListPinnedPrefixesRequest(_message.Message):
    __slots__ = ("worker_id", "max_results", "cursor")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_RESULTS_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    max_results: int
    cursor: str
    def __init__(self, worker_id: _Optional[str] = ..., max_results: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class ListPinnedPrefixesResponse(_message.Message):
    __slots__ = ("pins", "next_cursor")
    PINS_FIELD_NUMBER: _ClassVar[int]
    NEXT_CURSOR_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    next_cursor: str
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ..., next_cursor: _Optional[str] = ...) -> None: ...

class CancelRequestsRequest(_message.Message):
    __slots__ = ("request_ids", "reason", "principal", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    principal: str
    labels: _containers.ScalarMap[str, str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., principal: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CancelRequestsResponse(_message.Message):
    __slots__ = ("cancelled_ids",)
    CANCELLED_IDS_FIELD_NUMBER: _ClassVar[int]
    cancelled_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("worker_id", "logger", "level", "duration")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    logger: str
    level: LogLevel
    duration: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., logger: _Optional[str] = ..., level: _Optional[_Union[LogLevel, str]] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CaptureProfileRequest(_message.Message):
    __slots__ = ("worker_id", "steps")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    steps: int
    def __init__(self, worker_id: _Optional[str] = ..., steps: _Optional[int] = ...) -> None: ...

class CaptureProfileResponse(_message.Message):
    __slots__ = ("file_name", "byte_count", "steps")
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    file_name: str
    byte_count: int
    steps: int
    def __init__(self, file_name: _Optional[str] = ..., byte_count: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class GetProfileRequest(_message.Message):
    __slots__ = ("worker_id", "file_name", "first_byte")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    file_name: str
    first_byte: int
    def __init__(self, worker_id: _Optional[str] = ..., file_name: _Optional[str] = ..., first_byte: _Optional[int] = ...) -> None: ...

class GetProfileResponse(_message.Message):
    __slots__ = ("first_byte", "data", "file_name", "byte_count")
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_NAME_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    first_byte: int
    data: bytes
    file_name: str
    byte_count: int
    def __init__(self, first_byte: _Optional[int] = ..., data: _Optional[bytes] = ..., file_name: _Optional[str] = ..., byte_count: _Optional[int] = ...) -> None: ...

class StartRecordingRequest(_message.Message):
    __slots__ = ("worker_id", "lookback", "max_duration", "max_bytes", "include_token_ids", "note", "rotate")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOOKBACK_FIELD_NUMBER: _ClassVar[int]
    MAX_DURATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ROTATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    lookback: _duration_pb2.Duration
    max_duration: _duration_pb2.Duration
    max_bytes: int
    include_token_ids: bool
    note: str
    rotate: bool
    def __init__(self, worker_id: _Optional[str] = ..., lookback: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., max_bytes: _Optional[int] = ..., include_token_ids: bool = ..., note: _Optional[str] = ..., rotate: bool = ...) -> None: ...

class StartRecordingResponse(_message.Message):
    __slots__ = ("recording",)
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    recording: RecordingInfo
    def __init__(self, recording: _Optional[_Union[RecordingInfo, _Mapping]] = ...) -> None: ...

class RecordingInfo(_message.Message):
    __slots__ = ("recording_id", "worker_id", "start_time", "duration", "byte_count", "event_count", "end_cause", "request_count", "dropped_events", "note", "message")
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    END_CAUSE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    recording_id: str
    worker_id: str
    start_time: _timestamp_pb2.Timestamp
    duration: _duration_pb2.Duration
    byte_count: int
    event_count: int
    end_cause: _cache_pb2.RecordingEndCause
    request_count: int
    dropped_events: int
    note: str
    message: str
    def __init__(self, recording_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., start_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., byte_count: _Optional[int] = ..., event_count: _Optional[int] = ..., end_cause: _Optional[_Union[_cache_pb2.RecordingEndCause, str]] = ..., request_count: _Optional[int] = ..., dropped_events: _Optional[int] = ..., note: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StopRecordingRequest(_message.Message):
    __slots__ = ("worker_id", "recording_id")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    recording_id: str
    def __init__(self, worker_id: _Optional[str] = ..., recording_id: _Optional[str] = ...) -> None: ...

class StopRecordingResponse(_message.Message):
    __slots__ = ("recording",)
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    recording: RecordingInfo
    def __init__(self, recording: _Optional[_Union[RecordingInfo, _Mapping]] = ...) -> None: ...

class GetRecordingRequest(_message.Message):
    __slots__ = ("worker_id", "recording_id", "first_byte")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RECORDING_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    recording_id: str
    first_byte: int
    def __init__(self, worker_id: _Optional[str] = ..., recording_id: _Optional[str] = ..., first_byte: _Optional[int] = ...) -> None: ...

class GetRecordingResponse(_message.Message):
    __slots__ = ("first_byte", "data", "recording")
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    first_byte: int
    data: bytes
    recording: RecordingInfo
    def __init__(self, first_byte: _Optional[int] = ..., data: _Optional[bytes] = ..., recording: _Optional[_Union[RecordingInfo, _Mapping]] = ...) -> None: ...

class ListRecordingsRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class ListRecordingsResponse(_message.Message):
    __slots__ = ("recordings",)
    RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    recordings: _containers.RepeatedCompositeFieldContainer[RecordingInfo]
    def __init__(self, recordings: _Optional[_Iterable[_Union[RecordingInfo, _Mapping]]] = ...) -> None: ...
