"""What the responders of one frontend share. Filled in at start-up, after the fork."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from frontend.access.gate import Gate
from frontend.access.restricted import Restrictions
from frontend.engine.interface import Directory, Engine
from frontend.engine.local.catalog_following import CatalogFollower
from frontend.engine.local.copy_budget import CopyBudget
from frontend.engine.recording import Recorder
from frontend.engine.scope import current_scope
from frontend.http.bodies import BodyReader
from frontend.http.places import Places
from frontend.server.drain import DRAIN, Drain
from frontend.status.recent import RecentWriter
from frontend.tensors.extensions import Extensions
from frontend.tensors.models import TensorModels
from frontend.tensors.uploading import InputRoom, UploadOrder
from frontend.tracing.tracer import Tracer
from ipc.catalog.entries import Catalog
from ipc.errors import QueueFull
from ipc.settings import Settings
from ipc.store.store import Store

REQUESTS_OF_PIXELS = 4
"""Pixels that are decoded at a time: of so many requests as large as a request may be."""


@dataclass(slots=True)
class Services:
    """Engine, readers, recorder and settings of this process; the late ones exist once `started` is true."""

    settings: Settings
    catalog: Catalog
    access: Gate
    restrictions: Restrictions = field(default_factory=Restrictions)
    drain: Drain = DRAIN
    started: bool = False
    started_at: float = field(default_factory=time.time)
    since_ns: int = field(default_factory=time.monotonic_ns)
    """When this frontend began, in CLOCK_MONOTONIC."""
    slot: int = -1
    store: Store = None  # type: ignore[assignment]
    engine: Engine = None  # type: ignore[assignment]
    directory: Directory = None  # type: ignore[assignment]
    recorder: Recorder = None  # type: ignore[assignment]
    recent: RecentWriter | None = None
    tracer: Tracer | None = None
    bodies: BodyReader = None  # type: ignore[assignment]
    copies: CopyBudget = None  # type: ignore[assignment]
    extensions: Extensions = None  # type: ignore[assignment]
    follower: CatalogFollower = None  # type: ignore[assignment]
    models: TensorModels = None  # type: ignore[assignment]
    room: InputRoom = None  # type: ignore[assignment]
    uploads: UploadOrder = field(default_factory=UploadOrder)
    pixels: Places = field(init=False)

    def __post_init__(self) -> None:
        limits = self.settings.limits
        self.pixels = Places(REQUESTS_OF_PIXELS * limits.max_image_pixels * limits.max_images)

    @contextmanager
    def decoding(self, pixels: int) -> Iterator[None]:
        """Count pixels that are being decoded for the current request. Raises `QueueFull` when there are too many."""
        asking = current_scope.get()
        caller = "" if asking is None else asking.caller
        if not self.pixels.take(caller, pixels):
            raise QueueFull("too many pixels of images are being decoded here", retry_after_s=1)
        try:
            yield
        finally:
            self.pixels.give(caller, pixels)
