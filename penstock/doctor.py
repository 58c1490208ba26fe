"""`penstock doctor`: facts about this machine, line by line; exit 1 for a fact that keeps the server from starting."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from frontend.arbiter.configuration import TOOL_CHECKS, restrictions_of
from frontend.http import listeners
from frontend.status import health
from frontend.status.health import Finding
from ipc import addresses, brokers, extras
from ipc.errors import ConfigError, PenstockError
from ipc.machine import available_cores, count_gpus
from ipc.processes.liveness import is_held
from ipc.processes.paths import SERVER, prepare_run_dir
from ipc.settings import Settings
from ipc.version import VERSION
from penstock import configuration, families, terminal
from workers.tools import layers

PACKAGES = (
    "gunicorn",
    "falcon",
    "grpcio",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
)


def _versions(config: Settings) -> Iterator[Finding]:
    yield (
        True,
        f"penstock {VERSION}, python {platform.python_version()}, {platform.system()} {platform.release()}",
    )
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} -")
    yield True, ", ".join(versions)


def _devices(config: Settings) -> Iterator[Finding]:
    gpus = count_gpus()
    yield (
        True,
        f"{available_cores()} cores, {gpus} GPU device nodes; "
        f"{config.worker_count} workers, {config.frontend_count} frontends",
    )
    try:
        import torch
    except ImportError:
        yield False, f"torch is not installed: workers need {extras.needed('worker')}"
        return
    usable = torch.cuda.is_available()
    names = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if usable else []
    )
    fine = usable or (config.worker.device == "cpu") or (config.worker.device == "auto" and not gpus)
    yield (
        fine,
        f"torch {torch.__version__}: CUDA {', '.join(names) if usable else 'not usable'}; "
        f"worker.device={config.worker.device}",
    )


def _run_directory(config: Settings) -> Iterator[Finding]:
    try:
        prepare_run_dir(config.paths)
        yield True, f"run directory {config.paths.root}"
    except (ConfigError, OSError) as error:
        yield False, f"run directory {config.paths.root}: {error}"


def _port(config: Settings) -> Iterator[Finding]:
    if is_held(config.paths.lock(SERVER)):
        yield True, f"a server runs with these settings: {config.paths.root}"
        return
    try:
        listeners.check_addresses(config)
    except ConfigError as error:
        yield False, error.message
        return
    for bind, setting in listeners.binds(config).items():
        try:
            addresses.ensure_free(bind, setting)
            yield True, f"{bind} is free ({setting})"
        except ConfigError as error:
            yield False, error.message


def _catalog(config: Settings) -> Iterator[Finding]:
    try:
        models = configuration.read(config)
        wrong = configuration.mistakes(models)
        yield from ((False, f"catalog: {each}") for each in wrong)
        if not wrong:
            yield True, f"catalog: {configuration.summary(models)}"
    except PenstockError as error:
        yield False, f"catalog: {error.message}"


def _libraries(config: Settings) -> Iterator[Finding]:
    """Optional libraries that served models need. Without a library the server starts, and its models answer 409."""
    try:
        used = {
            families.FAMILIES[one.adapter].extra
            for one in configuration.read(config).values()
            if one.adapter in families.FAMILIES
        }
    except PenstockError:
        return
    missing = sorted(extra for extra in used - {""} if not families.installed(extra))
    if missing:
        names = "; ".join(map(extras.needed, missing))
        yield True, f"libraries: some models need {names}, and answer 409 without"
    else:
        yield True, "libraries: all that the models of the catalog need"


def _restricted(config: Settings) -> Iterator[Finding]:
    try:
        restrictions_of(config)
    except ConfigError as error:
        yield False, error.message


def _tools(config: Settings) -> Iterator[Finding]:
    """Mistakes in settings of tools; web search and the tool host; each layer of the sandbox, tried out."""
    for check in TOOL_CHECKS:
        try:
            check(config)
        except ConfigError as error:
            yield False, error.message
    where = "agent.search_url" if config.agent.search_url else "a public engine"
    yield True, f"web search: {where if config.agent.search else 'off (agent.search)'}"
    if not config.agent.has_tools:
        yield True, "tools: off (agent.code_execution, agent.shell, agent.mcp_config)"
        return
    try:
        sandbox = layers.find(config.agent)
    except ConfigError as error:
        yield False, error.message
        return
    for name, state in sandbox.states.items():
        yield True, f"sandbox {config.agent.sandbox}, layer {name}: {state}"


def _brokers(config: Settings) -> Iterator[Finding]:
    """Each broker of `cluster.urls`, joined for a moment."""
    cluster = config.cluster
    if not cluster.on:
        yield True, "cluster: off (cluster.urls)"
        return
    try:
        brokers.require_client("a cluster")
    except ConfigError as error:
        yield False, error.message
        return
    yield True, f"cluster: box {cluster.box_name}, pool {cluster.pool}, lane {cluster.lane}"
    from frontend.cluster import examining

    yield from examining.look(cluster)


CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    _versions,
    _devices,
    health.shared_memory,
    health.open_files,
    _run_directory,
    _port,
    _catalog,
    _libraries,
    health.keys,
    _restricted,
    _tools,
    _brokers,
)


def run(config: Settings, *, as_json: bool = False) -> int:
    """Print all findings; 0 when all are fine, 1 otherwise."""
    findings = [finding for check in CHECKS for finding in check(config)]
    if as_json:
        print(terminal.as_json([{"fine": fine, "text": text} for fine, text in findings]))
        return 0 if all(fine for fine, _ in findings) else 1
    for fine, text in findings:
        print(f"{'ok  ' if fine else terminal.styled('BAD ', 'bad')} {text}")
    return 0 if all(fine for fine, _ in findings) else 1
