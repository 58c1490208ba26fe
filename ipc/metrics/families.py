"""Every metric family as a row of a table: name in the code, exposed name, help text, labels, buckets or gauge mode.

The tables are ordered by the process that feeds the family. Below them stand the values of labels that have few.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZE_BUCKETS = tuple(2.0**n for n in range(11))
TOKEN_BUCKETS = tuple(2.0**n for n in range(6, 17))
# NOTE: mistral.rs has the two families below.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
BETWEEN_TOKENS_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
HTTP_BUCKETS = (*LATENCY_BUCKETS, 60, 120, 300, 600, 1200)
BODY_BUCKETS = tuple(
    float(n) for n in (128, 512, *(1 << bits for bits in range(10, 25, 2)), 50 << 20, 100 << 20)
)
RATIO_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)

GaugeMode = Literal["livesum", "livemax", "livemostrecent", "max"]
"""`max` keeps the values of slots that run no more. Only instants have this mode, since they never go back."""
LATEST: GaugeMode = "livemostrecent"
HIGHEST: GaugeMode = "livemax"
Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """One family; `attribute` is its name in the code."""

    attribute: str
    kind: Kind
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    mode: GaugeMode = "livesum"


def counter(attribute: str, name: str, text: str, labels: str = "") -> Family:
    """A row; `labels` are separated by spaces, here as below."""
    return Family(attribute, "counter", name, text, tuple(labels.split()))


def gauge(attribute: str, name: str, text: str, labels: str = "", mode: GaugeMode = "livesum") -> Family:
    """A row; `mode` says how the values of several processes become one."""
    return Family(attribute, "gauge", name, text, tuple(labels.split()), mode=mode)


def histogram(attribute: str, name: str, text: str, labels: str, buckets: tuple[float, ...]) -> Family:
    """A row with upper bounds of its buckets."""
    return Family(attribute, "histogram", name, text, tuple(labels.split()), buckets)


_HTTP = "method path model"
_VERSION = "model version"
_ANSWERED = "model version batch_size uuid"
_RUN = "model batch_size uuid"
_LOADED = "model worker"
_DEVICE = "worker uuid"

FRONTEND = (
    counter("requests", "penstock_requests", "Requests by outcome.", "protocol operation model code"),
    histogram(
        "duration",
        "penstock_request_duration_seconds",
        "Time per phase, of requests that were answered (ok) or not (error).",
        "operation model phase outcome",
        LATENCY_BUCKETS,
    ),
    gauge("in_flight", "penstock_requests_in_flight", "Requests being served.", "model lane"),
    counter("rejected", "penstock_rejected", "Requests refused before they ran.", "model reason"),
    counter("retries", "penstock_retries", "Requests sent again after a worker was lost.", "reason"),
    counter(
        "continuations",
        "penstock_continuations",
        "Generated texts whose worker or frontend was lost, or whose worker is leaving, by what became of the text.",
        "outcome",
    ),
    gauge("continuation_bytes", "penstock_continuation_bytes", "Bytes of ids of tokens of open streams.", ""),
    counter("poison", "penstock_poison", "Inputs refused because they crashed workers.", "reason"),
    counter("by_key", "penstock_requests_by_key", "Requests by API key and outcome.", "key code"),
    counter("access_refused", "penstock_access_refused", "Requests refused for their API key.", "reason"),
    counter(
        "traced",
        "penstock_traced_requests",
        "Traced requests whose spans were exported, failed to be, or were dropped.",
        "outcome",
    ),
    # Embeddings that frontends keep.
    counter("kept_hits", "penstock_embedding_cache_hits", "Items found in the cache of embeddings.", "model"),
    counter("kept_misses", "penstock_embedding_cache_misses", "Items looked up and not found.", "model"),
    counter("kept_evictions", "penstock_embedding_cache_evictions", "Embeddings given up for room.", "model"),
    gauge("kept_bytes", "penstock_embedding_cache_bytes", "Bytes of embeddings that are kept.", "model"),
    gauge("ready", "penstock_ready", "1 when this server accepts traffic.", "", HIGHEST),
    gauge("workers_joined", "penstock_worker_up", "1 when a worker answers.", "worker", HIGHEST),
    gauge("input_shm_used", "penstock_input_shm_bytes_used", "Input arena bytes in use.", "frontend", LATEST),
    gauge("state_files", "penstock_state_files", "Files of clients and runs that are kept.", "", LATEST),
    gauge("state_bytes", "penstock_state_file_bytes", "Bytes of these files.", "", LATEST),
    gauge("state_full", "penstock_state_full", "1 when the state directory lacks room.", "", HIGHEST),
    counter(
        "copied",
        "penstock_tensor_copied_bytes",
        "Bytes of named tensors that were copied, by place.",
        "process place",
    ),
    gauge("build_info", "penstock_build_info", "Constant 1 with the version.", "version", HIGHEST),
    # Requests of the tensor protocols.
    counter("infer_requests", "penstock_infer_requests", "Tensor requests answered.", _ANSWERED),
    counter("infer_seconds", "penstock_infer_request_seconds", "Time of answered requests.", _ANSWERED),
    counter("infer_queue", "penstock_infer_queue_seconds", "Waiting time of answered requests.", _ANSWERED),
    counter(
        "infer_input",
        "penstock_infer_compute_input_seconds",
        "Time for inputs of answered requests.",
        _ANSWERED,
    ),
    counter("infer_compute", "penstock_infer_compute_seconds", "Model time of answered requests.", _ANSWERED),
    counter(
        "infer_output",
        "penstock_infer_compute_output_seconds",
        "Time for outputs of answered requests.",
        _ANSWERED,
    ),
    counter(
        "infer_cached", "penstock_infer_cached", "Answered requests that were wholly in the cache.", _ANSWERED
    ),
    counter("infer_rows", "penstock_infer_rows", "Computed rows of answered requests.", "model version uuid"),
    counter(
        "infer_failures",
        "penstock_infer_failures",
        "Tensor requests that failed.",
        "model version batch_size reason",
    ),
    counter(
        "infer_failed",
        "penstock_infer_failed_seconds",
        "Time of failed requests.",
        "model version batch_size",
    ),
    gauge(
        "infer_last",
        "penstock_infer_last_timestamp_seconds",
        "When the last tensor request was answered.",
        _VERSION,
        "max",
    ),
    counter("infer_calls", "penstock_infer_calls", "Calls about server and models.", "kind"),
    counter("infer_calls_time", "penstock_infer_calls_seconds", "Time of them.", "kind"),
    # HTTP requests of all routes, under the names of mistral.rs.
    counter("http_requests", "http_requests", "HTTP requests answered.", f"{_HTTP} status"),
    histogram(
        "http_duration",
        "http_request_duration_seconds",
        "From the head of a request to the last byte of its answer.",
        f"{_HTTP} status",
        HTTP_BUCKETS,
    ),
    gauge("http_in_flight", "http_requests_in_flight", "HTTP requests being answered.", _HTTP),
    histogram("http_body", "http_request_body_bytes", "Sizes of request bodies.", _HTTP, BODY_BUCKETS),
    # Requests for generated text.
    histogram(
        "first_token",
        "penstock_time_to_first_token_seconds",
        "From the arrival of a request to its first token.",
        "model",
        FIRST_TOKEN_BUCKETS,
    ),
    histogram(
        "between_tokens",
        "penstock_inter_token_latency_seconds",
        "Between two steps that added to the same choice.",
        "model",
        BETWEEN_TOKENS_BUCKETS,
    ),
    histogram(
        "rs_first_token",
        "mistralrs_time_to_first_token_seconds",
        "From the arrival of a request to its first token.",
        f"{_HTTP} status",
        FIRST_TOKEN_BUCKETS,
    ),
    histogram(
        "rs_between_tokens",
        "mistralrs_inter_token_latency_seconds",
        "Between two steps that added to the same choice.",
        f"{_HTTP} status",
        BETWEEN_TOKENS_BUCKETS,
    ),
    counter(
        "cached_tokens", "penstock_cached_prompt_tokens", "Tokens of prompts found in the cache.", "model"
    ),
    counter(
        "tokens_by_key",
        "penstock_tokens_by_key",
        "Tokens of prompts (in) and answers (out) by API key.",
        "key direction",
    ),
    counter("rs_completed", "mistralrs_sequences_completed", "Generated texts by how they ended.", "reason"),
    counter("rs_rejected", "mistralrs_sequences_rejected", "Requests for texts refused before they ran."),
    # The names of the SIE contract, for dashboards that exist.
    counter("sie_requests", "sie_requests", "Total request count.", "model endpoint status"),
    gauge("sie_active", "sie_active_requests", "Requests being served.", "model"),
    histogram(
        "sie_duration",
        "sie_request_duration_seconds",
        "Latency by phase.",
        "model endpoint phase",
        LATENCY_BUCKETS,
    ),
)
WORKER = (
    gauge("queue_depth", "penstock_queue_depth", "Items waiting.", "model lane"),
    gauge("queue_tokens", "penstock_queue_tokens", "Tokens waiting.", "model lane"),
    gauge("queue_oldest", "penstock_queue_oldest_seconds", "Age of the oldest item.", "model lane", HIGHEST),
    counter("cancelled", "penstock_cancelled", "Requests whose caller went away.", "model stage"),
    counter(
        "saved", "penstock_cancelled_saved_seconds", "Device time not spent on cancelled work.", "model stage"
    ),
    histogram("batch_size", "penstock_batch_size", "Items per batch.", _LOADED, SIZE_BUCKETS),
    histogram("batch_tokens", "penstock_batch_tokens", "Tokens per batch.", _LOADED, TOKEN_BUCKETS),
    histogram("padding", "penstock_padding_ratio", "Share of padding per batch.", _LOADED, RATIO_BUCKETS),
    counter("busy", "penstock_device_busy_seconds", "Time in which batches ran.", "worker"),
    counter("oom", "penstock_oom", "Batches that ran out of memory.", _LOADED),
    gauge("budget", "penstock_batch_budget_tokens", "Token budget of a batch.", _LOADED, LATEST),
    gauge("state", "penstock_model_state", "1 for the present state.", "model worker state", LATEST),
    gauge("load_seconds", "penstock_model_load_seconds", "Duration of the last load.", _LOADED, LATEST),
    gauge("load_progress", "penstock_model_load_progress_ratio", "Progress of a load.", _LOADED, LATEST),
    gauge("memory", "penstock_model_memory_bytes", "Memory of a model.", _LOADED, LATEST),
    gauge("shm_used", "penstock_shm_bytes_used", "Arena bytes in use.", "worker", LATEST),
    gauge("shm_total", "penstock_shm_bytes", "Arena size.", "worker", LATEST),
    gauge("shm_leases", "penstock_shm_leases", "Blocks that frontends may read.", "worker", LATEST),
    counter("revoked", "penstock_shm_leases_revoked", "Leases taken back.", "worker reason"),
    counter(
        "copied",
        "penstock_tensor_copied_bytes",
        "Bytes of named tensors that were copied, by place.",
        "process place",
    ),
    gauge(
        "sequences",
        "penstock_sequences",
        "Sequences that have a slot (active) or wait for one (waiting).",
        "model worker state",
        LATEST,
    ),
    counter(
        "sequences_expired",
        "penstock_sequences_expired",
        "Sequences whose slot was taken back because nobody asked for them.",
        _LOADED,
    ),
    counter("tokens", "penstock_tokens", "Tokens processed.", "model direction"),
    counter("truncated", "penstock_truncated_inputs", "Inputs cut to the model's length.", "model policy"),
    gauge("gpu_memory", "penstock_gpu_memory_bytes", "Device memory in use.", _DEVICE, LATEST),
    gauge(
        "gpu_temperature",
        "penstock_gpu_temperature_celsius",
        "Temperature of the device, 0 when nobody can tell.",
        _DEVICE,
        LATEST,
    ),
    gauge(
        "gpu_utilization",
        "penstock_gpu_utilization_ratio",
        "Share of time the device was busy.",
        _DEVICE,
        LATEST,
    ),
    counter("loads", "penstock_model_loads", "Loads by how they ended.", "model worker outcome"),
    counter("unloads", "penstock_model_unloads", "Models unloaded, by why.", "model worker reason"),
    gauge(
        "model_budget",
        "penstock_model_budget_bytes",
        "Memory that models may take together.",
        "worker",
        LATEST,
    ),
    # Models that generate.
    gauge(
        "generations", "penstock_generation_sequences", "Sequences by state.", "model worker state", LATEST
    ),
    gauge("cache_used", "penstock_kv_cache_blocks_used", "Cache blocks that are held.", _LOADED, LATEST),
    gauge("cache_blocks", "penstock_kv_cache_blocks", "Cache blocks.", _LOADED, LATEST),
    counter("preemptions", "penstock_preemptions", "Sequences that gave their blocks away.", _LOADED),
    counter("prefix_lookups", "penstock_prefix_cache_lookups", "Prompts looked up in the cache.", _LOADED),
    counter("prefix_hits", "penstock_prefix_cache_hits", "Prompts with a known beginning.", _LOADED),
    counter("prefix_evictions", "penstock_prefix_cache_evictions", "Known blocks given up.", _LOADED),
    counter("pictures", "penstock_pictures", "Pictures that went through a vision tower.", _LOADED),
    gauge("feature_bytes", "penstock_picture_cache_bytes", "Features of pictures.", _LOADED, LATEST),
    counter("feature_lookups", "penstock_picture_cache_lookups", "Pictures looked up.", _LOADED),
    counter("feature_hits", "penstock_picture_cache_hits", "Pictures whose features were known.", _LOADED),
    counter("feature_evictions", "penstock_picture_cache_evictions", "Features given up for room.", _LOADED),
    # The names of mistral.rs, for dashboards that exist.
    counter("rs_tokens", "mistralrs_tokens_processed", "Tokens of prompts and answers."),
    counter("rs_lookups", "mistralrs_prefix_cache_lookups", "Prompts looked up in the cache."),
    counter("rs_hits", "mistralrs_prefix_cache_hits", "Prompts with a known beginning."),
    counter("rs_evictions", "mistralrs_prefix_cache_evictions", "Known blocks given up."),
    counter("rs_preemptions", "mistralrs_paged_preemptions", "Sequences that gave their blocks away."),
    gauge("rs_running", "mistralrs_sequences_running", "Sequences that are computed."),
    gauge("rs_waiting", "mistralrs_sequences_waiting", "Sequences that wait."),
    gauge("rs_capacity", "mistralrs_sequences_capacity", "Sequences that may be computed together."),
    gauge("rs_blocks_used", "mistralrs_kv_cache_blocks_used", "Cache blocks that are held."),
    gauge("rs_blocks", "mistralrs_kv_cache_blocks_total", "Cache blocks."),
    # Runs of models by the tensor protocols, and their devices.
    counter("runs", "penstock_infer_runs", "Runs for tensor requests by batch size.", _RUN),
    counter("runs_input", "penstock_infer_runs_input_seconds", "Preparing and joining their inputs.", _RUN),
    counter("runs_compute", "penstock_infer_runs_compute_seconds", "The runs themselves.", _RUN),
    counter("runs_output", "penstock_infer_runs_output_seconds", "Writing their outputs.", _RUN),
    counter("parts", "penstock_stream_parts", "Parts of streamed answers.", "model"),
    gauge("gpu_memory_total", "penstock_gpu_memory_total_bytes", "Memory of the device.", _DEVICE, LATEST),
    gauge(
        "gpu_power",
        "penstock_gpu_power_watts",
        "Power that the device draws, 0 when nobody can tell.",
        _DEVICE,
        LATEST,
    ),
    gauge(
        "gpu_power_limit",
        "penstock_gpu_power_limit_watts",
        "Power that the device may draw.",
        _DEVICE,
        LATEST,
    ),
    gauge(
        "gpu_energy",
        "penstock_gpu_energy_joules",
        "Energy that the device took since the worker started.",
        _DEVICE,
        LATEST,
    ),
    # The names of the SIE contract, for dashboards that exist.
    histogram("sie_batch_size", "sie_batch_size", "Batch size distribution.", "model", SIZE_BUCKETS),
    counter("sie_tokens", "sie_tokens_processed", "Total tokens processed.", "model"),
    gauge("sie_queue_depth", "sie_queue_depth", "Pending items per model.", "model"),
    gauge("sie_request_queue", "sie_request_queue_depth", "The same, under its other name.", "model"),
    histogram(
        "sie_gpu_items", "sie_gpu_batch_items", "Items per batch on the device.", "model", SIZE_BUCKETS[:10]
    ),
    histogram(
        "sie_gpu_tokens",
        "sie_gpu_batch_tokens",
        "Tokens per batch on the device.",
        "model",
        TOKEN_BUCKETS[:10],
    ),
    gauge("sie_adaptive_wait", "sie_adaptive_batch_wait_ms", "Wait to fill a batch: none.", "model"),
    gauge("sie_adaptive_p50", "sie_adaptive_p50_ms", "Median of recent batches.", "model", HIGHEST),
    gauge("sie_adaptive_cost", "sie_adaptive_batch_cost", "Tokens a batch may have.", "model", HIGHEST),
    gauge(
        "sie_adaptive_fill", "sie_adaptive_fill_ratio", "Fill of recent batches, 0 to 1.", "model", HIGHEST
    ),
    histogram(
        "sie_adaptive_efficiency",
        "sie_adaptive_batch_efficiency",
        "Tokens of a batch over those it may have.",
        "model",
        RATIO_BUCKETS,
    ),
    counter("sie_oom_attempted", "sie_oom_recoveries_attempted", "Batches that ran out of memory.", "model"),
    counter(
        "sie_oom_succeeded",
        "sie_oom_recoveries_succeeded",
        "Batches out of memory that lost no item.",
        "model",
    ),
    counter("sie_oom_terminal", "sie_oom_terminal_failures", "Items that did not fit even alone.", "model"),
    counter("sie_oom_clears", "sie_oom_cache_clears", "Cached device memory given back.", "model"),
    counter(
        "sie_oom_evictions",
        "sie_oom_evictions_triggered",
        "Models unloaded for an item of this model that did not fit alone.",
        "model",
    ),
    counter("sie_oom_splits", "sie_oom_batch_splits", "Batches split in halves.", "model"),
    gauge("sie_loaded", "sie_model_loaded", "Model load status.", "model device", HIGHEST),
    gauge("sie_memory", "sie_model_memory_bytes", "Memory per model.", "model device"),
    counter("sie_idle_evictions", "sie_idle_evictions", "Models unloaded for being idle.", "model"),
)
RUNS = (
    gauge("tool_host_up", "penstock_tool_host_up", "1 when the tool host answers.", "host", HIGHEST),
    counter("agent_runs", "penstock_agent_runs", "Runs with tools by how they ended.", "model outcome"),
    gauge("agent_running", "penstock_agent_runs_in_flight", "Runs with tools by what they do now.", "state"),
    counter("agent_rounds", "penstock_agent_rounds", "Turns of models in runs with tools.", "model"),
    counter("agent_calls", "penstock_agent_calls", "Calls of tools in runs by outcome.", "tool outcome"),
    histogram(
        "agent_call_seconds",
        "penstock_agent_call_seconds",
        "Time of a call in a run with its files, without the wait for a decision.",
        "tool",
        HTTP_BUCKETS,
    ),
    histogram(
        "agent_waits",
        "penstock_agent_approval_seconds",
        "Waits for decisions about calls, by how they ended.",
        "outcome",
        HTTP_BUCKETS,
    ),
)
"""Of frontends, from the first run with tools of the server on; the tool host where a tool needs the host."""
TOOLS = (
    gauge("sandboxes", "penstock_tool_sandboxes", "Sandboxes that are alive."),
    gauge("mcp_servers", "penstock_mcp_servers_connected", "MCP servers that are connected."),
    gauge("mcp_tools", "penstock_mcp_tools", "Tools of MCP servers that models may call."),
    counter("calls", "penstock_tool_calls", "Calls that the tool host ran, by outcome.", "tool outcome"),
    histogram(
        "seconds", "penstock_tool_call_seconds", "Time of a call, waiting included.", "tool", HTTP_BUCKETS
    ),
    gauge(
        "layer", "penstock_tool_sandbox_layer", "1 when this layer of the sandbox is active.", "layer", LATEST
    ),
)
SUPERVISOR = (
    counter("restarts", "penstock_worker_restarts", "Workers started again, by cause.", "worker reason"),
    gauge("quarantined", "penstock_quarantined", "1 when a slot is no longer restarted.", "worker", HIGHEST),
)

PHASES = ("queue", "tokenize", "device", "copy", "encode", "total")
STATES = ("available", "loading", "loaded", "unloading", "failed")
SEQUENCE_STATES = ("active", "waiting")
REJECTIONS = ("queue_full", "no_worker", "loading", "deadline", "too_long", "draining")
GENERATION_STATES = ("running", "waiting")
DIRECTIONS = ("in", "out")
NO_KEY = "-"
"""Label of requests that were refused because they had no known key, and of tokens without a key."""
ACCESS_REFUSALS = ("unauthenticated", "forbidden", "rate_limited")
CONTINUATIONS = ("carried", "moved", "adopted", "refused", "unkept", "failed")
"""What became of a text without its worker: another went on after a loss, or instead of a worker that leaves; the input
is suspect or lost too often; its ids were not kept; no worker could go on in time."""
TRACED = ("exported", "failed", "dropped")
CANCEL_STAGES = ("queued", "running")
LOADS = ("loaded", "failed")
UNLOADS = ("admin", "catalog", "idle", "memory", "oom")
REVOCATIONS = ("age", "session")
GPU_GAUGES = ("memory", "memory_total", "utilization", "temperature", "power", "power_limit", "energy")
UNKNOWN = "unknown"
"""Label of models that the catalog lacks."""
UNVERSIONED = -1
"""Version label of requests that failed before their version was known; their batch size is 0."""
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
CALLS = ("status", "profile", "health", "control", "regions", "index")
EXACT_SIZES = 32
LARGEST_SIZE = 1 << 20


def size_label(rows: int) -> int:
    """The batch size that stands for `rows` in labels: itself up to 32, above the next power of two."""
    if rows <= EXACT_SIZES:
        return max(rows, 0)
    return min(1 << (rows - 1).bit_length(), LARGEST_SIZE)
