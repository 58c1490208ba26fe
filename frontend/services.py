"""The services that all responders of one frontend share, filled in after the fork (`frontend.assembly`)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from frontend.access.gate import Gate
from frontend.access.restricted import Restrictions
from frontend.background import Background
from frontend.engine.answer import CopyBudget
from frontend.engine.interface import Directory, Engine
from frontend.http.bodies import BodyReader
from frontend.records.finishing import Finisher
from frontend.records.recording import Recorder
from frontend.server.drain import DRAIN, Drain
from frontend.tensors.extensions import Extensions
from frontend.tensors.inference import TensorInference
from frontend.tensors.models import TensorModels
from ipc.catalog.entries import Catalog
from ipc.settings import Settings
from ipc.store.store import Store


@dataclass(slots=True)
class Services:
    """Engine, readers, recorder and settings of this process; fields without a value exist once `started` is true."""

    settings: Settings
    catalog: Catalog
    access: Gate
    restrictions: Restrictions = field(default_factory=Restrictions)
    drain: Drain = DRAIN
    background: Background = field(default_factory=Background)
    started: bool = False
    started_at: float = field(default_factory=time.time)
    since_ns: int = field(default_factory=time.monotonic_ns)
    """When this frontend began, in CLOCK_MONOTONIC."""
    slot: int = -1
    store: Store = None  # type: ignore[assignment]
    engine: Engine = None  # type: ignore[assignment]
    directory: Directory = None  # type: ignore[assignment]
    recorder: Recorder = None  # type: ignore[assignment]
    finisher: Finisher = field(default_factory=Finisher)
    bodies: BodyReader = None  # type: ignore[assignment]
    copies: CopyBudget = None  # type: ignore[assignment]
    extensions: Extensions = None  # type: ignore[assignment]
    models: TensorModels = None  # type: ignore[assignment]
    inference: TensorInference = None  # type: ignore[assignment]
