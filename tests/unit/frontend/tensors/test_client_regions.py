"""Regions of clients by name: what may be registered, who sees it, and which bytes of it a tensor may name."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from frontend.tensors import regions as regions_module
from frontend.tensors.regions import ClientRegions
from frontend.tensors.request import RegionUse
from ipc import sweep
from ipc.errors import InvalidInput, PenstockError, RegionExists, RegionNotFound, Unsupported
from ipc.processes.paths import prepare_run_dir
from ipc.processes.starting import TOP
from ipc.settings import Settings, load
from ipc.store.regions import RegionTable
from ipc.store.store import Store
from ipc.wire.messages import Region
from tests.conformance.required_tool import required_tool

T = TypeVar("T")
SIZE = 4096
FAR = 1 << 62
HOLDS = """
import signal, sys
from pathlib import Path
from ipc.processes.paths import RunPaths
from ipc.store.regions import RegionTable
from ipc.store.store import Store
with RegionTable(Store(RunPaths(Path(sys.argv[1]), "t")), 10).holding(["r"]):
    print("holds", flush=True)
    signal.pause()
"""
REGISTERS = """
import asyncio, sys
from pathlib import Path
from frontend.tensors.regions import ClientRegions
from ipc.errors import InvalidInput
from ipc.settings import load
from ipc.store.store import Store
settings = load(None, {"run.dir": sys.argv[1], "shared_memory.enabled": "true"}, {})
regions = ClientRegions(settings, Store(settings.paths), Path(sys.argv[2]))
for key in ("client_a", "client_mine"):
    try:
        asyncio.run(regions.register_system(key, key, 0, 1))
        print("registered", key)
    except InvalidInput as error:
        print(error.message)
"""


def run(change: Coroutine[Any, Any, T]) -> T:
    """What a change of the table gives."""
    return asyncio.run(change)


def regions_of(settings: Settings, objects: Path) -> ClientRegions:
    """Those of one more frontend."""
    return ClientRegions(settings, Store(settings.paths), objects)


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The directory of POSIX objects, with one of `SIZE` bytes, and what is no object of a client beside it."""
    directory = tmp_path / "shm"
    directory.mkdir()
    (directory / "client_a").write_bytes(bytes(SIZE))
    (directory / "other").write_bytes(bytes(SIZE))
    (directory / "penstock.x.0.abc").write_bytes(bytes(SIZE))
    (tmp_path / "secret").write_bytes(bytes(SIZE))
    (directory / "client_link").symlink_to(tmp_path / "secret")
    (directory / "client_dir").mkdir()
    os.mkfifo(directory / "client_fifo")
    (directory / "client_mine").write_bytes(bytes(SIZE))
    (directory / "client_mine").chmod(0)
    return directory


def settings_of(tmp_path: Path, **flags: str) -> Settings:
    """Settings of a server in `tmp_path` that offers shared memory."""
    named = {f"shared_memory.{name}": value for name, value in flags.items()}
    found = load(None, {"run.dir": str(tmp_path / "run"), "shared_memory.enabled": "true", **named}, {})
    prepare_run_dir(found.paths)
    return found


@pytest.fixture
def regions(tmp_path: Path, objects: Path) -> Iterator[ClientRegions]:
    """Those of one frontend."""
    yield regions_of(settings_of(tmp_path), objects)


def test_what_one_frontend_registers_every_other_sees_at_once(tmp_path: Path, objects: Path) -> None:
    settings = settings_of(tmp_path)
    first, second = regions_of(settings, objects), regions_of(settings, objects)
    run(first.register_system("in", "/client_a", 64, 128))
    assert second.resolve(RegionUse("in", 8, 16)) == Region("system", "client_a", 72, 16)
    assert [(e.name, e.key, e.offset, e.nbytes) for e in second.status("system")] == [
        ("in", "/client_a", 64, 128)
    ]
    assert run(second.unregister("system", "in"))
    with pytest.raises(RegionNotFound, match=r"^Unable to find shared memory region: 'in'$"):
        first.resolve(RegionUse("in", 0, 1))
    run(first.register_system("in", "client_a", 0, 1))
    assert second.resolve(RegionUse("in", 0, 1)) == Region("system", "client_a", 0, 1)


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "message"),
    [
        ("client_none", 0, 1, "Unable to open shared memory region: 'client_none'"),
        ("/client_none", 0, 1, "Unable to open shared memory region: '/client_none'"),
        ("client_link", 0, 1, "Unable to open shared memory region: 'client_link'"),
        ("client_dir", 0, 1, "Unable to open shared memory region: 'client_dir'"),
        ("client_fifo", 0, 1, "Unable to open shared memory region: 'client_fifo'"),
        ("client_a", 0, SIZE + 1, "Invalid shared memory region: 'client_a'"),
        ("client_a", 1, SIZE, "Invalid shared memory region: 'client_a'"),
        ("client_a", SIZE, 1, "Invalid shared memory region: 'client_a'"),
        ("client_a", FAR - 1, 1, "Invalid shared memory region: 'client_a'"),
        ("client_a", FAR, 1, "offset: expected"),
        ("client_a", 2**64 - 1, 2, "offset: expected"),
        ("client_a", -1, 2, "offset: expected"),
        ("client_a", 0, 0, "byte_size: expected 1 to"),
        ("client_a", 0, -1, "byte_size: expected 1 to"),
        ("client_a", 0, (1 << 30) + 1, "byte_size: expected 1 to"),
        ("other", 0, 1, "this server accepts keys that begin with 'client_' only"),
        ("penstock.x.0.abc", 0, 1, "names that begin with 'penstock.' are reserved"),
        ("///penstock.x.0.abc", 0, 1, "names that begin with 'penstock.' are reserved"),
        ("", 0, 1, "must not be empty"),
        ("///", 0, 1, "must not be empty"),
        ("client_a/../other", 0, 1, "without slashes"),
        ("../secret", 0, 1, "without slashes"),
        ("..", 0, 1, "without slashes"),
        ("client_a\0", 0, 1, "without slashes"),
        ("client_\ud800", 0, 1, "without slashes"),
        ("client_" + "x" * 249, 0, 1, "without slashes"),
        ("client_" + "x" * 248, 0, 1, "Unable to open"),
    ],
)
def test_what_may_not_be_registered_is_refused_and_leaves_no_row(
    regions: ClientRegions, key: str, offset: int, nbytes: int, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        run(regions.register_system("in", key, offset, nbytes))
    assert message in caught.value.message and caught.value.status == 400
    assert "/dev/shm" not in caught.value.message and "secret" not in caught.value.message.replace(key, "")
    assert regions.status(None) == []


def test_an_object_that_the_server_may_not_write_is_refused(tmp_path: Path, objects: Path) -> None:
    """A server of root runs without the capability to write any file."""
    command = [sys.executable, "-c", REGISTERS, str(settings_of(tmp_path).paths.root), str(objects)]
    if os.geteuid() == 0:
        drop = (f"--{kind}=-dac_override,-dac_read_search" for kind in ("inh-caps", "bounding-set"))
        command = [required_tool("setpriv"), *drop, *command]
    told = subprocess.run(command, cwd=TOP, stdout=subprocess.PIPE, text=True, check=True).stdout
    may, may_not = told.splitlines()
    assert may == "registered client_a"
    assert may_not.startswith("Unable to open shared memory region: 'client_mine'; ")


def test_without_a_prefix_only_our_own_names_are_refused(tmp_path: Path, objects: Path) -> None:
    regions = regions_of(settings_of(tmp_path, key_prefix=""), objects)
    run(regions.register_system("in", "/other", 0, SIZE))
    with pytest.raises(InvalidInput, match="reserved"):
        run(regions.register_system("ours", "/penstock.x.0.abc", 0, SIZE))


@pytest.mark.parametrize("name", ["", "x" * 257, "\ud800"])
def test_names_have_a_length_and_are_text(regions: ClientRegions, name: str) -> None:
    with pytest.raises(InvalidInput, match="shared memory region name: expected 1 to 256 bytes"):
        run(regions.register_system(name, "client_a", 0, 1))
    with pytest.raises(RegionNotFound):
        regions.resolve(RegionUse(name, 0, 1))


@pytest.mark.parametrize("name", ["x" * 256, "../../x", "a/b", "ü\n", "."])
def test_any_text_may_be_a_name(regions: ClientRegions, tmp_path: Path, name: str) -> None:
    run(regions.register_system(name, "client_a", 0, 1))
    assert [entry.name for entry in regions.status(None, name)] == [name]
    assert run(regions.unregister(None, name)) and not run(regions.unregister(None, name))


def test_a_name_is_given_once_whoever_asks_at_the_same_time(tmp_path: Path, objects: Path) -> None:
    settings = settings_of(tmp_path)
    for _ in range(20):
        frontends = [regions_of(settings, objects) for _ in range(8)]

        def register(frontend: ClientRegions) -> int:
            try:
                run(frontend.register_system("in", "client_a", 0, 1))
            except RegionExists as error:
                assert error.message == "shared memory region 'in' already in manager"
                return 0
            return 1

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(register, frontends)) == 1
        assert run(frontends[0].unregister(None, None)) == 1


def test_the_number_of_regions_is_bounded(tmp_path: Path, objects: Path) -> None:
    regions = regions_of(settings_of(tmp_path, max_regions="3"), objects)
    for number in range(3):
        run(regions.register_system(f"r{number}", "client_a", 0, 1))
    with pytest.raises(InvalidInput, match=r"3 shared memory regions are registered \(shared_memory\.max_"):
        run(regions.register_system("r3", "client_a", 0, 1))
    run(regions.unregister("system", "r1"))
    run(regions.register_system("r3", "client_a", 0, 1))


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (100, 0, "Invalid offset for shared memory region 'in': 100 of 100 bytes"),
        (101, 1, "Invalid offset for shared memory region"),
        (-1, 1, "Invalid offset for shared memory region"),
        (2**64, 1, "Invalid offset for shared memory region"),
        (1, 100, "Invalid offset + byte size for shared memory region 'in': 1 + 100, it has 100 bytes"),
        (99, 2, "Invalid offset + byte size for shared memory region"),
        (1, 2**64 - 1, "Invalid offset + byte size for shared memory region"),
        (0, -1, "Invalid offset + byte size for shared memory region"),
    ],
)
def test_bytes_outside_of_a_region_are_refused(
    regions: ClientRegions, offset: int, nbytes: int, message: str
) -> None:
    run(regions.register_system("in", "client_a", 0, 100))
    with pytest.raises(InvalidInput) as caught:
        regions.resolve(RegionUse("in", offset, nbytes))
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 100), (99, 1), (0, 0), (99, 0)])
def test_bytes_within_a_region_are_resolved(regions: ClientRegions, offset: int, nbytes: int) -> None:
    run(regions.register_system("in", "client_a", 7, 100))
    assert regions.resolve(RegionUse("in", offset, nbytes)) == Region(
        "system", "client_a", 7 + offset, nbytes
    )


def test_where_it_is_off_only_unregistering_cuda_regions_is_answered(tmp_path: Path, objects: Path) -> None:
    regions = regions_of(settings_of(tmp_path, enabled="false"), objects)
    assert not regions.offered and not regions.cuda_offered
    for refused in (
        lambda: run(regions.register_system("in", "client_a", 0, 1)),
        lambda: run(regions.register_cuda("in", bytes(64), 0, 1)),
        lambda: regions.status("system"),
        lambda: regions.resolve(RegionUse("in", 0, 1)),
        lambda: run(regions.unregister("system", "in")),
        lambda: run(regions.unregister(None, None)),
    ):
        with pytest.raises(Unsupported) as caught:
            refused()
        assert caught.value.status == 501
    assert not run(regions.unregister("cuda", "in"))
    assert run(regions.unregister("cuda", None)) == 0


def test_kinds_share_their_names_and_are_listed_apart(
    tmp_path: Path, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions_module, "count_gpus", lambda: 2)
    regions = regions_of(settings_of(tmp_path), objects)
    handle = secrets.token_bytes(64)
    run(regions.register_system("a", "client_a", 0, 8))
    run(regions.register_cuda("b", handle, 1, 16))
    with pytest.raises(RegionExists):
        run(regions.register_cuda("a", handle, 0, 16))
    assert regions.resolve(RegionUse("b", 4, 8)) == Region("cuda", handle.hex(), 4, 8, 1)
    assert [entry.name for entry in regions.status("system")] == ["a"]
    assert [(e.name, e.device, e.nbytes) for e in regions.status("cuda")] == [("b", 1, 16)]
    with pytest.raises(RegionNotFound):
        regions.status("cuda", "a")
    assert not run(regions.unregister("cuda", "a")) and run(regions.unregister("cuda", None)) == 1
    assert [entry.name for entry in regions.status(None)] == ["a"]


@pytest.mark.parametrize(("nbytes", "device"), [(63, 0), (65, 0), (0, 0), (64, 2), (64, -1)])
def test_a_handle_has_64_bytes_and_a_device_of_this_server(
    tmp_path: Path, objects: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, device: int
) -> None:
    monkeypatch.setattr(regions_module, "count_gpus", lambda: 2)
    with pytest.raises(InvalidInput):
        run(regions_of(settings_of(tmp_path), objects).register_cuda("a", bytes(nbytes), device, 16))


def test_without_a_gpu_no_cuda_region_is_registered(regions: ClientRegions) -> None:
    if regions.cuda_offered:
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unsupported, match="CUDA shared memory is not offered"):
        run(regions.register_cuda("a", bytes(64), 0, 16))


def test_a_server_that_starts_knows_no_region(tmp_path: Path, objects: Path) -> None:
    settings = settings_of(tmp_path)
    run(regions_of(settings, objects).register_system("in", "client_a", 0, 1))
    sweep.forget(settings.paths)
    with pytest.raises(PenstockError):
        regions_of(settings, objects).resolve(RegionUse("in", 0, 1))


def test_a_region_in_use_stays_listed_and_takes_nothing_new_until_its_requests_have_ended(
    tmp_path: Path, objects: Path
) -> None:
    settings = settings_of(tmp_path)
    first, second = regions_of(settings, objects), regions_of(settings, objects)
    run(first.register_system("r", "/client_a", 0, 64))

    def listed() -> list[str]:
        assert [entry.name for entry in first.status("system")] == [e.name for e in second.status("system")]
        return [entry.name for entry in second.status("system")]

    with first.holding(["r", "r"]):
        with second.holding(["r"]):
            assert run(second.unregister("system", "r")) == 1
            assert listed() == ["r"] and second.status("system", "r")[0].nbytes == 64
            assert second.resolve(RegionUse("r", 0, 4)).nbytes == 4, (
                "the request that holds the region goes on"
            )
            with pytest.raises(RegionNotFound):
                regions_of(settings, objects).resolve(RegionUse("r", 0, 4))
            with pytest.raises(RegionNotFound), first.holding(["r"]):
                pass
            with pytest.raises(RegionExists):
                run(second.register_system("r", "/client_a", 0, 32))
            assert run(first.unregister("system", "r")) == 0, "it is on its way out already"
        assert listed() == ["r"]
    assert listed() == []
    run(second.register_system("r", "/client_a", 0, 32))
    with first.holding(["r"]):
        assert first.resolve(RegionUse("r", 0, 4)).nbytes == 4
    assert listed() == ["r"] and run(first.unregister("system", "r")) and listed() == []


def test_a_request_that_begins_while_its_region_is_unregistered_is_refused_and_holds_nothing(
    tmp_path: Path, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path)
    first, second = regions_of(settings, objects), regions_of(settings, objects)
    run(first.register_system("r", "/client_a", 0, 64))
    lock = RegionTable._lock

    def late(table: RegionTable, generation: int, kind: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(RegionTable, "_lock", lock)
            if kind == fcntl.F_RDLCK:
                assert run(second.unregister("system", "r"))
            lock(table, generation, kind)

    monkeypatch.setattr(RegionTable, "_lock", late)
    with pytest.raises(RegionNotFound), first.holding(["r"]):
        pass
    assert second.status("system") == first.status("system") == []
    run(second.register_system("r", "/client_a", 0, 32))
    assert [entry.nbytes for entry in first.status("system")] == [32]


def test_a_region_whose_user_has_died_is_let_go(tmp_path: Path, objects: Path) -> None:
    settings = settings_of(tmp_path)
    regions = regions_of(settings, objects)
    run(regions.register_system("r", "/client_a", 0, 64))
    command = [sys.executable, "-c", HOLDS, str(settings.paths.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TOP) as user:
        assert user.stdout is not None and user.stdout.readline() == b"holds\n"
        assert run(regions.unregister("system", "r"))
        assert [entry.name for entry in regions.status("system")] == ["r"]
        user.kill()
    assert regions.status("system") == []
    run(regions.register_system("r", "/client_a", 0, 32))
    assert [entry.nbytes for entry in regions.status("system")] == [32]
