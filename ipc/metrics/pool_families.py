"""The families of pools, which frontends of a gateway feed beside `families.GATEWAY`."""

from __future__ import annotations

from ipc.metrics.families import HIGHEST, counter, gauge

POOLS = (
    counter(
        "pool_events", "sie_gateway_pool_events", "What gateways did with pools and their boxes.", "event"
    ),
    gauge(
        "leased",
        "sie_gateway_active_lease_gpus",
        "Boxes that pools need by their `gpus`.",
        "machine_profile bundle",
        HIGHEST,
    ),
    gauge(
        "demand",
        "sie_gateway_pending_demand",
        "Requests of the last two minutes that found no box of their machine profile.",
        "machine_profile bundle",
    ),
)
POOL_EVENTS = ("created", "updated", "renewed", "deleted", "expired", "assigned", "released")
