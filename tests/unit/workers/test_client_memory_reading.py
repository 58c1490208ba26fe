"""A worker reads and writes the memory of clients, whatever they do to it meanwhile."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.errors import InvalidInput, Unsupported
from ipc.memory import copies
from ipc.settings import load
from ipc.wire.messages import Region, TensorInput
from workers.inputs import ClientMemory, OpenRegion, Payload

SIZE = 1 << 20


@pytest.fixture
def pattern(tmp_path: Path) -> bytes:
    """What is in the object `client_a`."""
    content = np.random.default_rng(7).bytes(SIZE)
    (tmp_path / "client_a").write_bytes(content)
    return content


@pytest.fixture
def memory(tmp_path: Path, pattern: bytes) -> ClientMemory:
    """That of a worker on the CPU."""
    settings = load(None, {"run.dir": str(tmp_path / "run"), "shared_memory.enabled": "true"}, {})
    return ClientMemory(settings, torch.device("cpu"), tmp_path)


def read(opened: OpenRegion) -> bytes:
    """All of a region."""
    target = bytearray(opened.nbytes)
    opened.read(memoryview(target))
    return bytes(target)


def part(offset: int, nbytes: int, key: str = "client_a") -> Region:
    """Bytes of a POSIX object."""
    return Region("system", key, offset, nbytes)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SIZE), (1, SIZE - 1), (4097, 3), (0, 0), (SIZE, 0)])
def test_bytes_are_read_as_they_lie(memory: ClientMemory, pattern: bytes, offset: int, nbytes: int) -> None:
    assert read(memory.open(part(offset, nbytes))) == pattern[offset : offset + nbytes]


@pytest.mark.parametrize("offset", [0, 5, SIZE - 96])
def test_bytes_are_written_where_they_belong_and_nowhere_else(
    memory: ClientMemory, pattern: bytes, tmp_path: Path, offset: int
) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    memory.open(part(offset, 96)).write(memoryview(values))
    expected = pattern[:offset] + values.tobytes() + pattern[offset + 96 :]
    assert (tmp_path / "client_a").read_bytes() == expected


def test_bytes_that_are_copied_from_and_to_regions_are_counted(
    memory: ClientMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, int]] = []
    monkeypatch.setattr(copies, "count", lambda kind, nbytes: counted.append((kind, nbytes)))
    opened = memory.open(part(0, 100))
    read(opened)
    opened.write(memoryview(b"abc"))
    assert counted == [("region", 100), ("region", 3)]


def test_a_region_larger_than_the_output_keeps_its_rest(
    memory: ClientMemory, pattern: bytes, tmp_path: Path
) -> None:
    memory.open(part(8, 100)).write(memoryview(b"abc"))
    assert (tmp_path / "client_a").read_bytes() == pattern[:8] + b"abc" + pattern[11:]


def test_an_output_that_does_not_fit_is_refused_with_both_sizes(memory: ClientMemory, pattern: bytes) -> None:
    opened = memory.open(part(0, 10))
    with pytest.raises(InvalidInput, match="too small for the output: 10 bytes given, 11 needed"):
        opened.write(memoryview(bytes(11)))
    assert read(opened) == pattern[:10]


@pytest.mark.parametrize(
    "region",
    [
        part(0, SIZE + 1),
        part(SIZE, 1),
        part((1 << 62) - 1, 1),
        part(0, 1, "client_none"),
        part(0, 1, "other"),
        part(0, 1, "penstock.x.0.y"),
        part(0, 1, "../client_a"),
        part(0, 1, "client_link"),
        part(-1, 1),
        part(0, -1),
    ],
)
def test_what_a_frontend_would_have_refused_is_refused_here_too(
    memory: ClientMemory, tmp_path: Path, region: Region
) -> None:
    (tmp_path / "client_link").symlink_to(tmp_path / "client_a")
    before = descriptors()
    with pytest.raises(InvalidInput):
        memory.open(region)
    assert descriptors() <= before


@pytest.mark.parametrize("left", [0, 1, SIZE // 2, SIZE - 1])
def test_an_object_that_shrinks_under_a_request_is_an_error_of_it(
    memory: ClientMemory, tmp_path: Path, left: int
) -> None:
    opened = memory.open(part(0, SIZE))
    os.truncate(tmp_path / "client_a", left)
    uses: tuple[Callable[[], object], ...] = (
        lambda: read(opened),
        lambda: opened.write(memoryview(bytes(SIZE))),
    )
    for use in uses:
        with pytest.raises(InvalidInput, match="its object has shrunk below the 1048576 bytes registered"):
            use()
    assert (tmp_path / "client_a").stat().st_size == left
    with pytest.raises(InvalidInput, match="Invalid shared memory region: 'client_a'"):
        memory.open(part(0, SIZE))


def test_a_name_that_goes_away_takes_nothing_from_a_request_that_has_begun(
    memory: ClientMemory, pattern: bytes, tmp_path: Path
) -> None:
    opened = memory.open(part(0, SIZE))
    (tmp_path / "client_a").unlink()
    assert read(opened) == pattern
    opened.write(memoryview(b"still there"))
    assert read(opened).startswith(b"still there")
    with pytest.raises(InvalidInput, match="Unable to open shared memory region: 'client_a'"):
        memory.open(part(0, 1))


def test_a_new_object_of_an_old_name_is_the_one_that_new_requests_get(
    memory: ClientMemory, pattern: bytes, tmp_path: Path
) -> None:
    old = memory.open(part(0, 4))
    (tmp_path / "client_a").unlink()
    (tmp_path / "client_a").write_bytes(b"newer")
    new = memory.open(part(0, 4))
    assert (read(old), read(new)) == (pattern[:4], b"newe")


def test_a_descriptor_is_shared_and_goes_with_the_last_request(memory: ClientMemory) -> None:
    gc.collect()
    before = descriptors()
    held = [memory.open(part(number, 1)) for number in range(50)]
    assert descriptors() == before + 1
    del held[1:]
    gc.collect()
    assert descriptors() == before + 1
    del held
    gc.collect()
    assert descriptors() == before


def test_it_is_off_unless_the_settings_offer_it(tmp_path: Path, pattern: bytes) -> None:
    memory = ClientMemory(load(None, {"run.dir": str(tmp_path / "run")}, {}), torch.device("cpu"), tmp_path)
    with pytest.raises(Unsupported):
        memory.open(part(0, 1))


def test_a_worker_without_cuda_opens_no_cuda_memory(memory: ClientMemory) -> None:
    with pytest.raises(Unsupported, match="CUDA"):
        memory.open(Region("cuda", bytes(64).hex(), 0, 16))
    memory.tick()


def test_room_that_does_not_fit_is_a_mistake_of_ours(memory: ClientMemory) -> None:
    with pytest.raises(ValueError, match="9 bytes of room for 10"):
        memory.open(part(0, 10)).read(memoryview(bytearray(9)))


@pytest.fixture
def mapping(tmp_path: Path, pattern: bytes) -> ClientMemory:
    """That of a worker whose operator trusts his clients."""
    named = {"shared_memory.enabled": "true", "shared_memory.map_inputs": "true"}
    return ClientMemory(
        load(None, {"run.dir": str(tmp_path / "run"), **named}, {}), torch.device("cpu"), tmp_path
    )


@pytest.mark.parametrize(("offset", "nbytes"), [(0, SIZE), (1, SIZE - 1), (4097, 3), (SIZE - 1, 1)])
def test_a_mapped_region_is_seen_where_it_lies_without_a_copy(
    mapping: ClientMemory, pattern: bytes, tmp_path: Path, offset: int, nbytes: int
) -> None:
    before = copies.copied()["region"]
    view = mapping.open(part(offset, nbytes)).view()
    assert view.readonly and view == pattern[offset : offset + nbytes]
    with (tmp_path / "client_a").open("r+b") as file:
        file.seek(offset)
        file.write(bytes([pattern[offset] ^ 255]))
    assert view[0] == pattern[offset] ^ 255, "it is the client's memory, not a copy of it"
    assert copies.copied()["region"] == before


def test_a_region_is_mapped_only_where_the_operator_trusts_his_clients(
    memory: ClientMemory, mapping: ClientMemory
) -> None:
    opened = memory.open(part(0, 8))
    assert not opened.mapped
    with pytest.raises(TypeError, match="not to be mapped"):
        opened.view()
    assert not mapping.open(part(0, 0)).mapped, "an empty mapping cannot be made"


def test_an_object_that_shrinks_before_it_is_mapped_is_an_error_of_the_request(
    tmp_path: Path, pattern: bytes
) -> None:
    settings = load(
        None,
        {
            "run.dir": str(tmp_path / "run"),
            "shared_memory.enabled": "true",
            "shared_memory.map_inputs": "true",
        },
        {},
    )
    opened = ClientMemory(settings, torch.device("cpu"), tmp_path).open(part(4096, SIZE - 4096))
    for left in (SIZE - 1, 10):
        os.truncate(tmp_path / "client_a", left)
        with pytest.raises(InvalidInput, match="shrunk below"):
            opened.view()


def test_texts_are_copied_even_where_inputs_are_mapped(mapping: ClientMemory) -> None:
    numbers = TensorInput("A", "FP32", [2], 0, 8, part(0, 8))
    texts = TensorInput("B", "BYTES", [1], 0, 8, part(0, 8))
    payload = Payload(memoryview(b""), mapping)
    read_in_place, copied = payload.read(numbers), payload.read(texts)
    assert isinstance(read_in_place, memoryview) and isinstance(copied, memoryview)
    assert isinstance(read_in_place.obj, mmap.mmap) and not isinstance(copied.obj, mmap.mmap)
    assert read_in_place == copied


def test_an_object_whose_descriptor_is_being_closed_cannot_be_taken_again(
    memory: ClientMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, found = os.close, []

    def closing(fd: int) -> None:
        found.append(memory._open.get("client_a"))
        close(fd)

    monkeypatch.setattr(os, "close", closing)
    opened = memory.open(part(0, 8))
    found.clear()
    del opened
    assert found == [None], "another thread would be given an object that is closed"
