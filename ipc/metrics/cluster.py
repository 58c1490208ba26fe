"""The metric families of a cluster: those of gateways, of bridges and of pools, and the objects that feed the families.

SIE's gateway and worker have the names that begin with `sie_`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from ipc.metrics.families import HIGHEST, LATENCY_BUCKETS, counter, gauge, histogram
from ipc.metrics.registry import Families, Tally, touched

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

GATEWAY = (
    counter("requests", "sie_gateway_requests", "Requests by outcome.", "endpoint status machine_profile"),
    histogram(
        "latency",
        "sie_gateway_request_latency_seconds",
        "Time of requests, answered or not.",
        "endpoint machine_profile",
        LATENCY_BUCKETS,
    ),
    counter(
        "provisioning",
        "sie_gateway_provisioning_responses",
        "Requests that no box was there for.",
        "machine_profile",
    ),
    counter(
        "rejected",
        "sie_gateway_rejected_requests",
        "Requests that were refused, by why.",
        "machine_profile bundle reason",
    ),
    gauge("workers", "sie_gateway_workers", "Boxes that take work, and the others.", "status", HIGHEST),
    gauge("model_workers", "sie_gateway_model_workers", "Boxes that have a model ready.", "model", HIGHEST),
    gauge("connected", "sie_gateway_nats_connected", "1 while a broker is joined.", "", HIGHEST),
    counter("published", "sie_gateway_queue_items_published", "Items given to the queue."),
    histogram(
        "publish",
        "sie_gateway_queue_publish_seconds",
        "Time until the broker confirmed an item of the queue.",
        "",
        LATENCY_BUCKETS,
    ),
    histogram(
        "result_wait",
        "sie_gateway_queue_result_wait_seconds",
        "Time of an item until its answer.",
        "operation",
        LATENCY_BUCKETS,
    ),
    counter("offloads", "sie_gateway_queue_payload_offloads", "Items whose inputs went beside the queue."),
    counter(
        "skips", "sie_gateway_queue_inbox_skips", "Results that nobody waited for, or nobody could read."
    ),
    counter("unconfirmed", "sie_gateway_queue_ack_failures", "Items that the broker did not confirm."),
    counter(
        "dead",
        "sie_gateway_dlq_events",
        "Items that a queue gave up, and that this gateway told to the dead letters first.",
        "stream consumer",
    ),
    counter(
        "dead_failures",
        "sie_gateway_dlq_republish_failures",
        "Items that a queue gave up, and that no dead letter could be written about.",
        "stream consumer",
    ),
    gauge(
        "config_epoch",
        "sie_gateway_config_epoch",
        "Number of the last change of configurations.",
        "",
        HIGHEST,
    ),
    gauge(
        "config_degraded",
        "sie_gateway_config_bootstrap_degraded",
        "1 until the brokers have told the configurations.",
        "",
        HIGHEST,
    ),
    counter(
        "config_failures",
        "sie_gateway_config_bootstrap_failures",
        "Reads of the configurations that failed.",
    ),
    counter(
        "config_deltas",
        "sie_gateway_config_deltas",
        "Configurations that came from the brokers, by what became of them.",
        "kind result",
    ),
    gauge(
        "box_queue",
        "sie_gateway_worker_queue_depth",
        "Inputs that wait at a box.",
        "worker machine_profile bundle",
        HIGHEST,
    ),
    gauge(
        "box_memory",
        "sie_gateway_worker_memory_used_bytes",
        "Memory of the devices of a box that is used.",
        "worker machine_profile bundle",
        HIGHEST,
    ),
    counter("transferred", "penstock_cluster_transfer_bytes", "Large bytes between hosts.", "way"),
    histogram(
        "transfers", "penstock_cluster_transfer_seconds", "Time of one transfer to here.", "", LATENCY_BUCKETS
    ),
    counter("lane", "penstock_cluster_lane", "Items by how they went to a box.", "lane"),
    counter(
        "resent",
        "penstock_cluster_resent",
        "Items that were sent again, and pieces of text that were asked for again, by why.",
        "reason",
    ),
    counter("duplicates", "penstock_cluster_duplicate_results", "Answers that came a second time."),
    counter("claims", "penstock_cluster_claims", "Items that boxes said to have before their answer."),
    counter("dropped", "penstock_cluster_dropped", "Messages of boxes that were dropped, by why.", "reason"),
    counter("beats_missed", "penstock_cluster_beats_missed", "Signs of life that did not come.", "peer"),
)
"""Of frontends of a gateway."""
BRIDGE = (
    histogram(
        "fetched",
        "sie_pull_loop_items_fetched",
        "Items of a model that came in one turn.",
        "model",
        tuple(2.0**n for n in range(9)),
    ),
    histogram(
        "processed",
        "sie_pull_loop_batch_process_seconds",
        "Time of an item at its box.",
        "model operation",
        LATENCY_BUCKETS,
    ),
    histogram(
        "waited",
        "sie_pull_loop_queue_wait_seconds",
        "Time of an item in the queue.",
        "model",
        LATENCY_BUCKETS,
    ),
    counter(
        "unloaded", "sie_pull_loop_nak_unloaded", "Items given back since the box lacks the model.", "model"
    ),
    counter("loads", "sie_pull_loop_model_loads", "Loads that items asked for.", "model"),
    counter(
        "mismatches",
        "sie_pull_loop_config_hash_mismatches",
        "Items whose producer has other configurations than the box; they run all the same.",
        "model",
    ),
    counter("received", "sie_worker_messages_received", "Deliveries of the queue to the box."),
    counter("acked", "sie_worker_messages_acked", "Deliveries that are done."),
    counter("naked", "sie_worker_messages_naked", "Deliveries that were given back."),
    gauge("inflight", "sie_worker_inflight_batches", "Items that the box holds now."),
    counter(
        "config_messages",
        "penstock_cluster_config_messages",
        "Messages of a configuration service to the bundle of the box, by what became of them.",
        "result",
    ),
    gauge(
        "untold", "penstock_cluster_models_untold", "Models of the box that are too large to tell gateways."
    ),
)
"""Of the bridge of a box."""

ConfigResult = Literal["applied", "repeated", "stale", "unreadable", "refused", "dropped", "ignored"]
"""What became of a message about a configuration: stale is older than the last one, dropped came too fast.

A box that has a bucket of configurations has ignored the message: gateways write the same change into the bucket.
"""
CONFIG_RESULTS: tuple[ConfigResult, ...] = get_args(ConfigResult)
GATEWAY_REJECTIONS = ("queue_full", "no_broker", "deadline", "loading")
Trouble = Literal["lost", "no stream", "refused", "unconfirmed"]
"""Why a gateway leaves the queue alone for a while."""
Resent = Literal[
    Trouble,
    "missing",
    "busy",
    "nobody",
    "silence",
    "reconnect",
    "box died",
    "pool",
    "old",
    "transfer",
    "gap",
    "version",
]
"""Why an item is sent again."""
RESENT: tuple[Resent, ...] = get_args(Resent)


class GatewayMetrics(Families):
    """Families fed by frontends of a gateway."""

    def __init__(self) -> None:
        super().__init__((*GATEWAY, *POOLS))

    def touch(self) -> None:
        """Make every series exist at zero from the first scrape on; those of models and profiles begin with boxes."""
        for operation in ("encode", "score", "extract"):
            self.requests.labels(operation, "200", ""), self.latency.labels(operation, "")
        self.provisioning.labels("")
        for reason in GATEWAY_REJECTIONS:
            self.rejected.labels("", "default", reason)
        for status in ("healthy", "unhealthy"):
            self.workers.labels(status).set(0)
        self.connected.set(0), self.config_epoch.set(0), self.config_degraded.set(0)
        for result in ("applied", "unreadable"):
            self.config_deltas.labels("model", result)
        for result in CONFIG_RESULTS:
            self.config_deltas.labels("message", result)
        for lane in ("queue", "direct"):
            self.lane.labels(lane)
        for reason in RESENT:
            self.resent.labels(reason)
        for family in (self.dead, self.dead_failures):
            family.labels("WORK_POOL_default", "default_default")
        for event in POOL_EVENTS:
            self.pool_events.labels(event)
        for amount in (self.leased, self.demand):
            amount.labels("", "default").set(0)
        self.dropped.labels("unknown box"), self.beats_missed.labels("box")
        for operation in ("encode", "score", "extract"):
            self.result_wait.labels(operation)
        for way in ("in", "out"):
            self.transferred.labels(way)


class BridgeMetrics(Families):
    """Families fed by the bridge of a box."""

    def __init__(self) -> None:
        super().__init__(BRIDGE)
        self.tally = Tally()

    def touch(self, models: Iterable[str]) -> None:
        """Make every series exist at zero from the first scrape on, of `MOST_TOUCHED` models at most."""
        self.inflight.set(0), self.untold.set(0)
        for result in CONFIG_RESULTS:
            self.config_messages.labels(result)
        for model in touched(models):
            for family in (self.fetched, self.waited, self.unloaded, self.loads, self.mismatches):
                family.labels(model)
            for operation in ("encode", "score", "extract"):
                self.processed.labels(model, operation)
