"""What the responders of one frontend share. Filled in at start-up, after the fork."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from frontend.access.gate import Gate
from frontend.bodies import BodyReader
from frontend.catalog_following import CatalogFollower
from frontend.engine import Engine
from frontend.recording import Recorder
from frontend.server.drain import DRAIN, Drain
from frontend.tensors.extensions import Extensions
from frontend.tensors.served import ServedModels
from frontend.tensors.uploading import InputRoom, UploadOrder
from frontend.tracing.tracer import Tracer
from ipc.catalog import Catalog
from ipc.client import Client
from ipc.copy_budget import CopyBudget
from ipc.recent import RecentWriter
from ipc.settings import Settings


@dataclass(slots=True)
class Services:
    """Engine, readers, recorder and settings of this process; the late ones exist once `started` is true."""

    settings: Settings
    catalog: Catalog
    access: Gate
    drain: Drain = DRAIN
    started: bool = False
    started_at: float = field(default_factory=time.time)
    since_ns: int = field(default_factory=time.monotonic_ns)
    """When this frontend began, in CLOCK_MONOTONIC."""
    slot: int = -1
    client: Client = None  # type: ignore[assignment]
    engine: Engine = None  # type: ignore[assignment]
    recorder: Recorder = None  # type: ignore[assignment]
    recent: RecentWriter | None = None
    tracer: Tracer | None = None
    bodies: BodyReader = None  # type: ignore[assignment]
    copies: CopyBudget = None  # type: ignore[assignment]
    extensions: Extensions = None  # type: ignore[assignment]
    follower: CatalogFollower = None  # type: ignore[assignment]
    served: ServedModels = field(default_factory=ServedModels)
    room: InputRoom = None  # type: ignore[assignment]
    uploads: UploadOrder = field(default_factory=UploadOrder)
