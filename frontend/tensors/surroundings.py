"""What control of models by name needs of its frontend: a part of `frontend.services.Services`, named here.

`Services` holds the control, so the control cannot import it.
"""

from __future__ import annotations

from typing import Protocol

from frontend.engine.catalog_following import CatalogFollower
from frontend.engine.interface import Directory
from frontend.http.bodies import BodyReader
from frontend.tensors.models import TensorModels
from ipc.catalog.entries import Catalog
from ipc.settings import Settings
from ipc.store.store import Store


class Surroundings(Protocol):
    """`models` and `follower` are there once the frontend has started."""

    settings: Settings
    catalog: Catalog
    slot: int
    store: Store
    directory: Directory
    bodies: BodyReader
    models: TensorModels
    follower: CatalogFollower
