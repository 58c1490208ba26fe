"""The models of all boxes, without a broker and with one."""

from __future__ import annotations

import asyncio

import pytest

from frontend.cluster.boxes import Boxes
from frontend.cluster.directory import ClusterModels
from ipc import deadline
from ipc.catalog.entries import Catalog
from ipc.errors import PenstockError
from ipc.settings import Cluster


@pytest.mark.parametrize(("up", "code"), [(True, "PROVISIONING"), (False, "QUEUE_UNAVAILABLE")])
def test_whoever_knows_no_box_is_told_whether_there_is_a_broker(up: bool, code: str) -> None:
    models = ClusterModels(Catalog(()), Boxes(Cluster()), 5.0, lambda: up)
    with pytest.raises(PenstockError) as unknown:
        models.find("m")
    with pytest.raises(PenstockError) as unloaded:
        asyncio.run(models.ensure_loaded("m", deadline.after(30)))
    assert (
        {raised.value.code for raised in (unknown, unloaded)} == {models.why_unavailable("m").code} == {code}
    )
