"""Which machine a server says it is: by its settings, else by its workers' devices."""

from __future__ import annotations

import pytest

from frontend.protocols.sie.flow import profiles_of
from ipc.errors import NoReplica
from ipc.settings import Server


@pytest.mark.parametrize(
    ("server", "devices", "found"),
    [
        (Server(machine_profile="mine", gpu_type="l4"), ["NVIDIA H200"], ["mine"]),
        (Server(gpu_type="l4"), ["NVIDIA H200"], ["l4"]),
        (Server(), ["NVIDIA H200", "NVIDIA H200"], ["h200"]),
        (Server(), ["NVIDIA L4", "", "NVIDIA A100-SXM4-80GB"], ["l4", "a100-80gb"]),
        (Server(), ["cpu"], []),
        (Server(), ["NVIDIA L40S"], []),
        (Server(gpu_type="t4"), [], ["t4"]),
    ],
)
def test_the_first_that_is_known_counts(server: Server, devices: list[str], found: list[str]) -> None:
    assert profiles_of(server, devices) == found


@pytest.mark.parametrize("devices", [[], ["", ""]])
def test_before_a_worker_has_told_its_device_nobody_is_refused_for_good(devices: list[str]) -> None:
    with pytest.raises(NoReplica):
        profiles_of(Server(), devices)
