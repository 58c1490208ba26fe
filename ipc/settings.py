"""One frozen tree of settings: defaults < server.yaml < names of SIE < PENSTOCK_SECTION__FIELD < flags.

1. `load` collects the sources (`ipc.setting_sources`), which refuse unknown names.
2. msgspec converts text to the declared types and checks the ranges.

No other module reads the environment for settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ipc.machine import available_cores, count_gpus, memory_nbytes
from ipc.processes.paths import RunPaths, default_cache_root, default_run_root, default_state_root
from ipc.setting_sources import PREFIX, Sources

KEEP_ALIVE = "KEEP_ALIVE_INTERVAL"
"""Milliseconds between two comments of an idle stream, by the name that mistral.rs reads."""
SANDBOX = "MISTRALRS_SANDBOX"
"""Mode of the sandbox where nothing else sets `agent.sandbox`, by the name that mistral.rs reads."""
MCP_CONFIG = "MCP_CONFIG_PATH"
"""File of MCP servers where nothing else sets `agent.mcp_config`, by the name that mistral.rs reads."""
_MILLISECONDS = re.compile(r"[1-9][0-9]{0,8}")
SIE_NAMES = {
    "SIE_MAX_BATCH_REQUESTS": "batch.max_items",
    "SIE_MAX_BATCH_TOKENS": "batch.max_tokens",
    "SIE_MAX_REQUEST_BODY_BYTES": "limits.max_body_bytes",
    "SIE_LOAD_WAIT_S": "limits.load_wait_s",
    "SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT": "worker.memory_pressure_percent",
    "SIE_IDLE_EVICT_S": "worker.idle_unload_s",
    "SIE_MAX_LORAS_PER_MODEL": "worker.max_loras",
    "SIE_PREPROCESSOR_WORKERS": "worker.prepare_threads",
    "SIE_DEFAULT_COMPUTE_PRECISION": "worker.precision",
    "SIE_DEVICE": "worker.device",
    "SIE_MODELS_DIR": "catalog.dirs",
    "SIE_MODEL_FILTER": "catalog.models",
    "SIE_PRELOAD_MODELS": "catalog.preload",
    "SIE_MACHINE_PROFILE": "server.machine_profile",
    "SIE_GPU_TYPE": "server.gpu_type",
}
"""Environment variables of SIE that set a setting of ours; a variable of ours wins."""
FLAGS = {
    "server.bind": "--bind",
    "worker.count": "--workers",
    "server.frontends": "--frontends",
    "worker.device": "--device",
    "catalog.models": "--models",
    "catalog.dirs": "--catalog",
    "generation.max_sequences": "--max-seqs",
    "fetch.file_urls": "--fetch-file-urls",
    "agent.code_execution": "--enable-code-execution",
    "agent.shell": "--enable-shell",
    "agent.search": "--enable-search",
    "agent.search_url": "--search-url",
    "agent.code_exec_python": "--code-exec-python",
    "agent.code_exec_timeout_s": "--code-exec-timeout",
    "agent.shell_path": "--shell-path",
    "agent.shell_timeout_s": "--shell-timeout",
    "agent.workdir": "--code-exec-workdir",
    "agent.sandbox": "--sandbox",
    "agent.sandbox_profile": "--sandbox-profile",
    "agent.sandbox_network": "--sandbox-network",
    "agent.max_memory_bytes": "--sb-max-memory-mb",
    "agent.max_cpu_s": "--sb-max-cpu-secs",
    "agent.max_procs": "--sb-max-procs",
    "agent.permission": "--agent-permission",
    "agent.max_tool_rounds": "--max-tool-rounds",
    "agent.tool_dispatch_url": "--tool-dispatch-url",
    "agent.mcp_config": "--mcp-config",
    "server.mcp_port": "--mcp-port",
}
"""Settings that have a flag of their own."""

CORES_OF_A_WORKER = 4
MEMORY_OF_A_WORKER = 4 << 30
"""Cores and bytes of memory of a worker on CPU when `worker.count` is 0."""

Positive = Annotated[int, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Duration = Annotated[float, msgspec.Meta(ge=0)]


Origin = Annotated[str, msgspec.Meta(pattern=r"^(\*|auto|local|https?://[^\s/,]{1,255})\Z")]
Compatible = Annotated[str, msgspec.Meta(pattern=r"^(tei|vllm|infinity)(:/[a-z_]{1,32})?\Z")]
HostName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.*-]{1,255}\Z")]
BrokerUrl = Annotated[
    str, msgspec.Meta(pattern=r"^(nats|tls)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")
]
"""Without user and password, which a log line would tell."""
PeerAddress = Annotated[str, msgspec.Meta(pattern=r"^((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})?\Z")]
"""HOST:PORT or nothing; port 0 is chosen by the kernel."""
PoolName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,63}\Z")]
MachineProfile = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\Z")]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown fields refused."""


class Server(Section, frozen=True):
    """HTTP side. `frontends` 0 = one per two cores, at most 4. `metrics_bind` and `health_bind` "" = on `bind` only.

    `mcp_port` 0 = none.
    """

    bind: str = "127.0.0.1:8080"
    metrics_bind: str = ""
    health_bind: str = ""
    mcp_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    metrics_on_bind: bool = True
    frontends: Count = 0
    worker_class: Literal["penstock", "asgi"] = "penstock"
    engine: Literal["local", "cluster"] = "local"
    keepalive_s: Seconds = 120.0
    graceful_timeout_s: Seconds = 30.0
    stream_drain_s: Duration = 600.0
    max_draining: Positive = 8
    drain_s: Duration = 2.0
    header_deadline_s: Seconds = 10.0
    body_floor_bytes_per_s: Count = 1024
    body_floor_after_s: Seconds = 10.0
    max_connections: Positive = 10000
    write_stall_s: Seconds = 60.0
    max_header_bytes: Annotated[int, msgspec.Meta(ge=4096, le=16 << 20)] = 256 << 10
    version_header: str = "0.3.4"
    machine_profile: str = ""
    machine_profile_strict: bool = False
    gpu_type: str = ""
    admin: bool = True
    allowed_hosts: tuple[HostName, ...] = ()
    behind_proxy: bool = False
    cors_origins: tuple[Origin, ...] = ("auto",)
    request_id_header: bool = True
    metrics: bool = True
    status_origins: str = ""
    status_user: str = ""
    status_working_dir: str = ""
    keys_file: str = ""
    open_metrics: bool = True
    compatible: tuple[Compatible, ...] = ()
    default_models: tuple[str, ...] = ()

    @property
    def mcp_bind(self) -> str:
        """The address of `mcp_port`, on the host of `bind`; empty for none."""
        return f"{self.bind.rpartition(':')[0]}:{self.mcp_port}" if self.mcp_port else ""


class Run(Section, frozen=True):
    """Run directory. Empty values are derived from the port."""

    dir: str = ""
    state_dir: str = ""
    cache_dir: str = ""
    instance: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,32}\Z")] = ""
    shm_dir: str = "/dev/shm"


class Worker(Section, frozen=True):
    """GPU processes. `count` 0 = one per GPU, on CPU one for four cores; `torch_threads` 0 = cores divided by workers.

    `spare` processes wait for the slot of a worker that dies; `auto` = one on hosts with GPUs, else none.
    """

    count: Count = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    torch_threads: Count = 0
    prepare_threads: Annotated[int, msgspec.Meta(gt=0, le=15)] = 2
    spare: Literal["auto"] | Annotated[int, msgspec.Meta(ge=0, le=16)] = "auto"
    heartbeat_timeout_s: Seconds = 2.0
    hang_timeout_s: Seconds = 60.0
    load_stall_s: Seconds = 300.0
    drain_timeout_s: Seconds = 25.0
    precision: Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"] = "auto"
    restart_backoff_s: Seconds = 1.0
    healthy_after_s: Seconds = 300.0
    trust_remote_code: bool = False
    load_threads: Annotated[int, msgspec.Meta(gt=0, le=16)] = 2
    remember_trials: bool = True
    memory_budget_bytes: Count = 0
    memory_pressure_percent: Annotated[int, msgspec.Meta(ge=10, le=100)] = 85
    unload_drain_s: Duration = 30.0
    idle_unload_s: Duration = 0.0
    max_loras: Positive = 10


class Batch(Section, frozen=True):
    """Batching. `max_tokens` 0 = 2048 on CPU, 32768 on CUDA."""

    max_tokens: Count = 0
    max_items: Annotated[int, msgspec.Meta(gt=0, le=3500)] = 512
    bulk_tokens: Positive = 8192
    starve_after_s: Duration = 2.0
    turn_s: Duration = 0.02


class Queue(Section, frozen=True):
    """Bound of a worker's queue in predicted time: `max_wait_s` for queries, `bulk_max_wait_s` for bulk work.

    `min_tokens` may wait in any case; 0 = one full batch. Of each model `max_waiting_sequences` sequences may wait for
    a slot. `max_resting_streams` is of the whole worker.
    """

    max_wait_s: Seconds = 2.0
    bulk_max_wait_s: Seconds = 15.0
    min_tokens: Count = 0
    max_waiting_sequences: Count = 1024
    max_resting_streams: Count = 1024


class Arena(Section, frozen=True):
    """Shared memory for results, one file of `bytes` per worker, and for large inputs, `input_bytes` per frontend."""

    bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 256 << 20
    inline_bytes: Count = 64 << 10
    lease_max_age_s: Seconds = 30.0
    lease_copy_after_s: Duration = 1.0
    slice_bytes: Positive = 512 << 10
    copy_out_bytes: Positive = 1 << 30
    input_bytes: Count = 256 << 20
    input_inline_bytes: Count = 64 << 10


class SharedMemory(Section, frozen=True):
    """Shared memory that clients of the tensor protocols register: allowed names and limits."""

    enabled: bool = False
    key_prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}\Z")] = "client_"
    max_region_bytes: Positive = 1 << 30
    max_regions: Positive = 256
    max_copy_bytes: Positive = 1 << 30
    map_inputs: bool = False


class Cache(Section, frozen=True):
    """Embeddings that are kept: `embeddings_bytes` in each frontend, 0 = none; `shared`: across API keys."""

    embeddings_bytes: Count = 0
    shared: bool = False


class Limits(Section, frozen=True):
    """Limits of a request: sizes, numbers, times."""

    max_body_bytes: Positive = 256 << 20
    max_buffered_bytes: Positive = 1 << 30
    max_items: Positive = 10000
    max_text_bytes: Positive = 1 << 20
    max_chunked_tokens: Positive = 1 << 17
    max_labels: Positive = 1000
    max_images: Positive = 16
    max_image_bytes: Positive = 32 << 20
    max_image_pixels: Positive = 64 << 20
    request_timeout_s: Seconds = 60.0
    load_wait_s: Duration = 10.0
    restart_wait_s: Duration = 10.0
    poison_ttl_s: Seconds = 600.0
    exhausted_retry_s: Annotated[int, msgspec.Meta(ge=1, le=60)] = 5
    max_status_streams: Count = 32


class Catalog(Section, frozen=True):
    """Directories of model files (empty: the shipped ones) and which models to serve (empty: the default)."""

    dirs: tuple[str, ...] = ()
    lora_dirs: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    preload: tuple[str, ...] = ("auto",)
    pinned: tuple[str, ...] = ()
    on_demand: bool = True
    watch: bool = True
    serve_all: bool = False


class Repository(Section, frozen=True):
    """Directories of models of named tensors, and which of them are loaded.

    `default_max_batch_size` is for programs whose configuration is inferred; `allow_files` lets loads by name bring
    programs, which take `max_upload_bytes` of all models together.
    """

    dirs: tuple[str, ...] = ()
    control: Literal["none", "explicit"] = "none"
    models: tuple[str, ...] = ()
    allow_python: bool = False
    follow_links: bool = False
    allow_files: bool = False
    max_upload_bytes: Positive = 256 << 20
    default_max_batch_size: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 32


class Log(Section, frozen=True):
    """Log level and form; `auto` is text on a terminal, JSON otherwise. `access`: two lines for each HTTP request."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    access: bool = False
    access_health: bool = False


class Tracing(Section, frozen=True):
    """OpenTelemetry spans over OTLP/HTTP; off while `endpoint` is empty."""

    endpoint: str = ""
    sample_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    service_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = "penstock"
    headers_file: str = ""


class Grpc(Section, frozen=True):
    """gRPC side. `max_message_bytes` 0 = `limits.max_body_bytes`."""

    enabled: bool = True
    bind: str = "127.0.0.1:8001"
    max_message_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    max_connections: Positive = 2048
    max_rpcs: Positive = 10000
    max_stream_requests: Annotated[int, msgspec.Meta(gt=0, le=4096)] = 64
    max_connection_age_s: Duration = 0.0


class Trtis(Section, frozen=True):
    """TensorRT Inference Server API: the name in statuses, and the condition of readiness."""

    server_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = "inference:0"
    strict_readiness: bool = True


class Kserve(Section, frozen=True):
    """KServe v2 over HTTP. `json_nonfinite`: NaN and infinities in JSON answers are refused, or sent as words."""

    server_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = "penstock"
    max_json_bytes: Positive = 64 << 20
    max_unpack_ratio: Positive = 200
    compress_min_bytes: Positive = 1024
    json_nonfinite: Literal["refuse", "words"] = "refuse"
    forward_headers: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    restricted_file: str = ""


class Generation(Section, frozen=True):
    """Generated text. `default_model` "" = the only chat model that is served; `cache_bytes` 0 = from free memory.

    A model has at most `max_sequences` running and `max_waiting` waiting sequences, and `prefill_tokens` of prompts in
    one step; 0 = as many as suit the device. A model that sees keeps features of pictures of `picture_cache_bytes`
    bytes; 0 = as many as suit the device. With `cuda_graphs` CUDA replays steps of single tokens, with `prompt_graphs`
    also those with parts of prompts, and with `kernels` layers run in kernels of our own where these are proven. By
    `run_ahead` a step begins before the host has read the tokens of the step before; "auto" = on CUDA. Beginnings of
    prompts are found by the API key that sent them, with `share_prefixes` by all keys. `keep_alive_s` is the time until
    a stream opens whose request waits, and between comments in an idle stream. With `fetch_media` pictures of messages
    may be URLs of http and https. Without `stream_arguments` the arguments of a call leave in one piece. A text whose
    worker is lost while writing is carried on by another at most `continuations` times (0: never). For this each
    frontend keeps ids of tokens, `continuation_bytes` at most.
    """

    default_model: str = ""
    cache_bytes: Count = 0
    picture_cache_bytes: Count = 0
    block_tokens: Annotated[int, msgspec.Meta(ge=4, le=256)] = 16
    prefix_cache: bool = True
    share_prefixes: bool = False
    cuda_graphs: bool = True
    prompt_graphs: bool = True
    kernels: bool = True
    run_ahead: Literal["auto", "always", "never"] = "auto"
    max_sequences: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    max_waiting: Count = 256
    prefill_tokens: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    first_token_timeout_s: Seconds = 300.0
    idle_timeout_s: Seconds = 60.0
    keep_alive_s: Seconds = 10.0
    fetch_media: bool = True
    stream_arguments: bool = True
    continuations: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    continuation_bytes: Count = 64 << 20


class Responses(Section, frozen=True):
    """Stored responses of /v1/responses, in `run.state_dir`. Whatever exceeds a bound is deleted, oldest first."""

    max_stored: Annotated[int, msgspec.Meta(gt=0)] = 10_000
    max_stored_bytes: Annotated[int, msgspec.Meta(gt=0)] = 1 << 30
    max_age_s: Seconds = 2_592_000.0
    max_background: Count = 256


class State(Section, frozen=True):
    """Files, skills and sessions of clients, in `run.state_dir`.

    `max_files`, `max_sessions` and `max_skills` hold for each key. Files and sessions that exceed a bound are deleted,
    oldest first; a skill that exceeds a bound is refused. `skills_dir` "" = `run.state_dir`.
    """

    max_file_bytes: Positive = 64 << 20
    max_files: Positive = 4096
    max_files_bytes: Positive = 8 << 30
    file_age_s: Seconds = 1800.0
    max_sessions: Positive = 128
    max_sessions_bytes: Positive = 1 << 30
    session_idle_s: Seconds = 1800.0
    match_sessions: Literal["none", "keys", "all"] = "keys"
    approval_wait_s: Seconds = 300.0
    skills_dir: str = ""
    max_skills: Positive = 256
    max_skill_versions: Positive = 100
    max_skills_bytes: Positive = 8 << 30


class Fetch(Section, frozen=True):
    """What the server fetches by URLs of clients and models: files of messages, pages for web search.

    `max_bytes` holds for one answer, inflated. `allowed_networks` may be reached beside the internet.
    """

    file_urls: bool = False
    timeout_s: Seconds = 30.0
    max_redirects: Annotated[int, msgspec.Meta(ge=0, le=20)] = 3
    max_bytes: Positive = 64 << 20
    allowed_networks: tuple[str, ...] = ()


class Agent(Section, frozen=True):
    """Tools that run on the server, and their sandbox.

    `code_exec_python` "" = the Python of the server; `workdir` "" = a temporary directory per session.
    """

    code_execution: bool = False
    shell: bool = False
    search: bool = False
    search_url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/][^\s]*)?\Z")] = ""
    search_timeout_s: Seconds = 20.0
    search_embedding_model: str = ""
    code_exec_python: str = ""
    code_exec_timeout_s: Seconds = 60.0
    shell_path: Annotated[str, msgspec.Meta(pattern=r"^/")] = "/bin/sh"
    shell_timeout_s: Seconds = 600.0
    workdir: str = ""
    max_workdir_bytes: Positive = 1 << 30
    max_workdir_files: Positive = 20_000
    min_free_disk_bytes: Count = 1 << 30
    idle_s: Seconds = 3600.0
    max_sandboxes: Positive = 64
    sandbox: Literal["off", "auto", "on"] = "auto"
    sandbox_profile: Literal["developer", "restricted"] = "developer"
    sandbox_network: Literal["none", "loopback", "full"] = "loopback"
    max_memory_bytes: Annotated[int, msgspec.Meta(ge=64 << 20)] = 2 << 30
    max_cpu_s: Positive = 300
    max_procs: Positive = 64
    max_cores: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    permission: Literal["auto", "ask", "deny"] = "auto"
    max_tool_rounds: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 256
    open_without_keys: bool = False
    tool_dispatch_url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/][^\s]*)?\Z")] = ""
    tool_dispatch_timeout_s: Seconds = 60.0
    mcp_config: str = ""

    @property
    def has_tools(self) -> bool:
        """Whether the server needs a tool host."""
        return self.code_execution or self.shell or bool(self.mcp_config)

    @property
    def acts(self) -> bool:
        """Whether calls of models have effects: in the tool host, on the web, or behind the dispatch URL."""
        return self.has_tools or self.search or bool(self.tool_dispatch_url)


class Cluster(Section, frozen=True):
    """Brokers that join several hosts; without `urls` the server is one host and knows nothing of brokers.

    `name` stands before all names at the brokers. `box` "" = the name of the host. Secrets are in files alone.
    `profiles` are the machine profiles of the cluster, for a gateway; () = those of the boxes that are there.
    `lane` `auto` = the queue while the queue has no trouble. `transfer_bind` "" = large bytes go through the brokers.
    `payload_store` is the directory where other producers put inputs of their items; "" = such items are refused.
    """

    urls: tuple[BrokerUrl, ...] = ()
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,32}\Z")] = ""
    user: Annotated[str, msgspec.Meta(max_length=128)] = ""
    password_file: str = ""
    token_file: str = ""
    credentials_file: str = ""
    tls_ca_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    insecure: bool = False
    box: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{0,63}\Z")] = ""
    pool: PoolName = "default"
    bundle: PoolName = "default"
    profiles: tuple[MachineProfile, ...] = ()
    lane: Literal["auto", "queue", "direct"] = "auto"
    payload_store: str = ""
    transfer_bind: PeerAddress = ""
    transfer_advertise: PeerAddress = ""
    max_transfers: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    inline_bytes: Annotated[int, msgspec.Meta(ge=4096, le=512 << 10)] = 512 << 10
    beat_s: Annotated[float, msgspec.Meta(gt=0, le=10)] = 0.2
    missing_beats: Annotated[int, msgspec.Meta(ge=2, le=100)] = 4
    gateway_silence_s: Seconds = 2.0
    ack_wait_s: Annotated[float, msgspec.Meta(ge=0.5, le=60)] = 2.0
    extend_every_s: Seconds = 0.6
    confirm_s: Seconds = 0.3
    ask_after_s: Seconds = 1.0
    max_down_s: Seconds = 5.0
    keep_results_s: Seconds = 30.0
    keep_result_bytes: Positive = 256 << 20
    dead_letter_bodies: bool = False

    @property
    def on(self) -> bool:
        """Whether there are brokers."""
        return bool(self.urls)

    @property
    def box_name(self) -> str:
        """Name of this host in the cluster: without dots, which part names at the brokers."""
        host = os.uname().nodename.partition(".")[0]
        return self.box or re.sub("[^A-Za-z0-9_-]", "-", host)[:63] or "box"

    @property
    def peer_silence_s(self) -> float:
        """Time without a beat after which a box is taken for dead."""
        return self.beat_s * self.missing_beats


class Settings(Section, frozen=True):
    """The whole tree."""

    server: Server = Server()
    run: Run = Run()
    worker: Worker = Worker()
    batch: Batch = Batch()
    queue: Queue = Queue()
    arena: Arena = Arena()
    shared_memory: SharedMemory = SharedMemory()
    cache: Cache = Cache()
    limits: Limits = Limits()
    catalog: Catalog = Catalog()
    repository: Repository = Repository()
    log: Log = Log()
    tracing: Tracing = Tracing()
    grpc: Grpc = Grpc()
    trtis: Trtis = Trtis()
    kserve: Kserve = Kserve()
    generation: Generation = Generation()
    responses: Responses = Responses()
    state: State = State()
    fetch: Fetch = Fetch()
    agent: Agent = Agent()
    cluster: Cluster = Cluster()

    @property
    def instance(self) -> str:
        """Name that keeps several servers on one host apart; the port unless set."""
        port_or_path = self.server.bind.rpartition(":")[2].strip("/")
        return self.run.instance or re.sub("[^A-Za-z0-9_-]", "-", port_or_path) or "default"

    @property
    def configured_dirs(self) -> tuple[str, ...]:
        """Directories of models that a box of a cluster serves besides those of its own catalog."""
        return (str(self.paths.configurations()),) if self.cluster.on else ()

    @property
    def paths(self) -> RunPaths:
        """File names of this instance."""
        root = Path(self.run.dir) if self.run.dir else default_run_root(self.instance)
        return RunPaths(root, self.instance, Path(self.run.shm_dir))

    @property
    def state_root(self) -> Path:
        """Directory of what outlives a start. A run directory that `run.dir` names has the state below."""
        if self.run.state_dir:
            return Path(self.run.state_dir)
        lasting = None if self.run.dir else default_state_root(self.instance)
        return lasting or self.paths.root / "state"

    @property
    def is_gateway(self) -> bool:
        """Whether models run behind brokers, and no worker belongs to this server."""
        return self.server.engine == "cluster"

    @property
    def findings_root(self) -> Path | None:
        """Directory of what loads have found out about this machine; None where nothing is remembered."""
        if not self.worker.remember_trials:
            return None
        return (Path(self.run.cache_dir) if self.run.cache_dir else default_cache_root()) / "findings"

    @property
    def worker_count(self) -> int:
        """GPU processes that the embedded supervisor starts; none at a gateway, whose models run on other hosts."""
        if self.is_gateway:
            return 0
        gpus = count_gpus() if self.worker.device != "cpu" else 0
        return self.worker.count or gpus or cpu_workers(available_cores(), memory_nbytes())

    @property
    def spare_count(self) -> int:
        """Processes that the embedded supervisor keeps ready for the slots of workers that die."""
        if self.worker.spare == "auto":
            return int(self.worker.device != "cpu" and count_gpus() > 0)
        return self.worker.spare

    @property
    def max_rpc_bytes(self) -> int:
        """Largest message that the gRPC server takes; the library knows no larger limit than 2 GiB."""
        return self.grpc.max_message_bytes or min(self.limits.max_body_bytes, (1 << 31) - 1)

    @property
    def frontend_count(self) -> int:
        """Gunicorn children."""
        return self.server.frontends or max(1, min(4, available_cores() // 2))


def cpu_workers(cores: int, nbytes: int) -> int:
    """Workers of a host without GPUs: one for four cores, as far as memory of `nbytes` gives each 4 GiB; at least one.

    Few threads each bring more together, but every worker holds all models. docs/adr/0042 has the figures.
    """
    return max(1, min(cores // CORES_OF_A_WORKER, nbytes // MEMORY_OF_A_WORKER))


def load(
    file: str | Path | None = None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from file, environment and flags (`{"section.field": "value"}`).

    The file defaults to `$PENSTOCK_CONFIG`. Raises `ConfigError` that names the setting, the value, the place where it
    stands, and what is allowed.
    """
    env = os.environ if environ is None else environ
    sources = Sources(Settings)
    for name, field in ((SANDBOX, "sandbox"), (MCP_CONFIG, "mcp_config")):
        if name in env:
            sources.put("agent", field, env[name], name)
    file = file or env.get(f"{PREFIX}CONFIG")
    if file:
        sources.read_file(Path(file))
    for name, place in SIE_NAMES.items():
        if name in env:
            section, _, field = place.partition(".")
            sources.put(section, field, env[name], name)
    if interval := _keep_alive(env.get(KEEP_ALIVE, "")):
        sources.put("generation", "keep_alive_s", interval, KEEP_ALIVE)
    sources.read_environ(env)
    for name, value in (flags or {}).items():
        section, _, field = name.partition(".")
        sources.put(section, field, value, FLAGS.get(name) or f"--set {name}")
    settings: Settings = sources.convert()
    return settings


def _keep_alive(milliseconds: str) -> str:
    """The seconds of a number of milliseconds. Empty for a text that is no such number, which is no mistake here."""
    return f"{int(milliseconds) / 1000}" if _MILLISECONDS.fullmatch(milliseconds) else ""


def to_environ(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags as environment variables, for handing them to a child process."""
    return {f"{PREFIX}{name.replace('.', '__', 1).upper()}": value for name, value in flags.items()}
