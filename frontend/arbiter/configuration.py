"""The configuration in force: the last configuration without mistakes.

1. Gunicorn's configuration file calls `accept` at the start and again on every reload (SIGHUP).
2. At the start a mistake is raised. On a reload a mistake is logged, and the accepted configuration stays.
3. Frontends are forked from the arbiter and serve with the accepted configuration, also when the files change later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from frontend import tracing
from frontend.access.gate import Gate, Restrictions
from frontend.engine import planning
from frontend.http import listeners
from frontend.tensors.request import Forwarding
from frontend.web import child
from frontend.web.addresses import networks_of
from ipc import brokers, mcp_servers, settings
from ipc.addresses import is_loopback, parse, unix_path
from ipc.catalog.entries import Catalog
from ipc.catalog.reading import check_lists, check_lora_dirs, read_served
from ipc.catalog.repository import check_models, model_directories, names_of, refuse_clash
from ipc.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings, and the catalog, the API keys and the secrets of restricted groups that they name."""

    settings: settings.Settings
    catalog: Catalog
    access: Gate
    restrictions: Restrictions


_accepted: Configuration | None = None


def read(config: settings.Settings | None = None) -> Configuration:
    """`config`, or this process's settings, with the catalog, keys and secrets it names. Raises `ConfigError`.

    The catalog of a gateway is empty: boxes tell their models.
    """
    config = config or settings.load()
    tracing.check(config.tracing)
    if config.grpc.enabled:
        parse(config.grpc.bind, "grpc.bind")
    listeners.check_addresses(config)
    check_tools(config)
    if config.server.compatible:
        # The tables of all protocols take as long to import as the rest of the arbiter.
        from frontend.protocols import registry

        registry.protocols(config.server.compatible)
    if config.is_gateway:
        return Configuration(config, Catalog(()), Gate.of(config.server), restrictions_of(config))
    catalog = read_served(config.catalog, config.repository, added=config.configured_dirs)
    models = model_directories(config.repository.dirs)
    refuse_clash(models, names_of(catalog.sources))
    if _accepted is not None:
        catalog = catalog.keeping(_accepted.catalog.sources)
    check_lists(catalog, config.catalog.preload, config.catalog.pinned)
    planning.check(catalog, config)
    check_models(config.repository.models, models)
    check_lora_dirs(config.catalog.lora_dirs)
    return Configuration(config, catalog, Gate.of(config.server), restrictions_of(config))


def require_keys_for_tools(config: settings.Settings) -> None:
    """Raise `ConfigError` if strangers could run tools: tools are on, no keys are set, and the address is not local."""
    bind = config.server.bind
    local = (
        bool(unix_path(bind))
        or is_loopback(bind.rpartition(":")[0].strip("[]"))
        or bind.startswith("localhost:")
    )
    if config.agent.acts and not (local or config.server.keys_file or config.agent.open_without_keys):
        raise ConfigError(
            f"server.bind = {bind}: tools are enabled and server.keys_file is empty, so whoever reaches the address "
            "could run tools of this machine: set server.keys_file, bind a loopback address, or set "
            "agent.open_without_keys"
        )


def require_search(config: settings.Settings) -> None:
    """Raise `ConfigError` if web search is on and a package of the search is missing."""
    if config.agent.search and (why := child.missing(needs_engine=not config.agent.search_url)):
        raise ConfigError(f"agent.search (--enable-search, --agent): {why}")


TOOL_CHECKS: tuple[Callable[[settings.Settings], object], ...] = (
    require_keys_for_tools,
    lambda config: networks_of(config.fetch.allowed_networks),
    lambda config: mcp_servers.read(config.agent.mcp_config),
    require_search,
    brokers.check,
)
"""Each raises `ConfigError` for a mistake in the sections `fetch`, `agent` and `cluster`."""


def check_tools(config: settings.Settings) -> None:
    """Raise `ConfigError` for the first mistake in the sections `fetch`, `agent` and `cluster`."""
    for check in TOOL_CHECKS:
        check(config)


def restrictions_of(config: settings.Settings) -> Restrictions:
    """The restrictions of the section `kserve`. Raises `ConfigError` for a mistake in the section."""
    Forwarding(config.kserve.forward_headers)
    return Restrictions.of(config.kserve.restricted_file)


def accept() -> Configuration:
    """Read the configuration anew. Raises `ConfigError` when it is wrong and none was accepted before."""
    global _accepted
    try:
        configuration = read()
        if _accepted is not None and configuration.settings.paths != _accepted.settings.paths:
            raise ConfigError(
                "run.dir, run.instance and the port they follow from cannot change while the server runs"
            )
        if _accepted is not None and _address(configuration) != _address(_accepted):
            raise ConfigError("grpc.enabled and grpc.bind cannot change while the server runs")
        if _accepted is not None and listeners.addresses(
            configuration.settings.server
        ) != listeners.addresses(_accepted.settings.server):
            raise ConfigError(
                "server.bind, server.metrics_bind, server.health_bind and server.mcp_port cannot change while the "
                "server runs"
            )
        if _accepted is not None and _accepted.access.closed and not configuration.access.closed:
            log.warning("server.keys_file is empty now: requests need no key any more")
        _accepted = configuration
    except ConfigError as error:
        if _accepted is None:
            raise
        log.error("the new configuration is refused, the old one stays: %s", error.message)
    return _accepted


def _address(chosen: Configuration) -> tuple[bool, str]:
    return chosen.settings.grpc.enabled, chosen.settings.grpc.bind


def current() -> Configuration:
    """The accepted configuration; outside of Gunicorn, the present files. Raises `ConfigError`."""
    return _accepted or read()
