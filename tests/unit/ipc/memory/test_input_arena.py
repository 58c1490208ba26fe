"""The arena for inputs: a block is free exactly when its owner has released it and nobody reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.engine.interface import bytes_of
from ipc.errors import LeaseRevoked, ProtocolError
from ipc.memory.arena import ALIGNMENT, ArenaView, round_up
from ipc.memory.input_arena import InputArena, InputBlock, view_of
from ipc.processes.paths import RunPaths
from ipc.sweep import sweep, sweep_inputs
from ipc.wire.messages import Inputs

NBYTES = 1 << 20


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run directory and a directory for arenas."""
    for name in ("run", "shm"):
        (tmp_path / name).mkdir()
    return RunPaths(tmp_path / "run", "test", tmp_path / "shm")


def reserve(arena: InputArena, nbytes: int) -> InputBlock | None:
    """A block, with a loop of its own."""
    return asyncio.run(arena.reserve(nbytes))


def test_the_file_appears_with_the_first_block_and_goes_at_the_end(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-3", NBYTES)
    assert not paths.arenas()
    block = reserve(arena, 1000)
    assert block is not None and len(block.buffer) == 1000
    [path] = paths.arenas("f3")
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_blocks * 512 >= NBYTES
    arena.close()
    assert not paths.arenas() and reserve(arena, 10) is None


def test_a_worker_reads_what_was_written_until_the_block_is_free(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)
    block = reserve(arena, 5)
    assert block is not None
    block.buffer[:] = b"hello"
    view = view_of(paths, block.inputs)
    ref = block.ref
    block.add_reader()
    block.release()
    assert bytes(view.data(ref.offset, ref.nbytes, ref.generation)) == b"hello"
    block.end_reader()
    with pytest.raises(LeaseRevoked):
        view.data(ref.offset, ref.nbytes, ref.generation)
    arena.close()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "read", "end", "release"]), st.integers(0, 300_000)),
        max_size=60,
    )
)
def test_after_any_life_all_bytes_come_back(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    paths = RunPaths(tmp_path_factory.mktemp("run"), "test", tmp_path_factory.mktemp("shm"))
    arena = InputArena(paths, "frontend-0", NBYTES)
    held: list[InputBlock] = []
    readers: list[InputBlock] = []

    async def live() -> None:
        for step, number in steps:
            if step == "reserve":
                block = await arena.reserve(number)
                if block is not None:
                    held.append(block)
            elif step == "read" and held:
                readers.append(held[number % len(held)])
                readers[-1].add_reader()
            elif step == "end" and readers:
                readers.pop(number % len(readers)).end_reader()
            elif step == "release" and held:
                held.pop(number % len(held)).release()
            arena.verify()
            busy = {block.ref.offset: block.ref.nbytes for block in [*held, *readers]}
            assert arena.used_nbytes == sum(round_up(nbytes + 64) for nbytes in busy.values())

    asyncio.run(live())
    for block in held:
        block.release()
        block.release()
    for block in readers:
        block.end_reader()
    arena.verify()
    assert arena.used_nbytes == 0
    arena.close()


def test_what_does_not_fit_gets_no_block(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)
    assert reserve(arena, arena.capacity_nbytes + 1) is None and not paths.arenas()
    whole = reserve(arena, arena.capacity_nbytes)
    assert whole is not None and reserve(arena, 1) is None
    whole.release()
    assert reserve(arena, 1) is not None
    arena.close()
    off = InputArena(paths, "frontend-1", 0)
    assert reserve(off, 1) is None and not paths.arenas("f1")


def test_many_first_requests_make_one_file(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)

    async def together() -> list[InputBlock | None]:
        return await asyncio.gather(*(arena.reserve(ALIGNMENT) for _ in range(8)))

    blocks = asyncio.run(together())
    assert all(blocks) and len({block.ref.offset for block in blocks if block}) == 8
    assert len(paths.arenas()) == 1
    arena.close()


def test_a_close_while_the_file_is_made_leaves_none(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)

    async def interrupted() -> None:
        first = asyncio.create_task(arena.reserve(10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arena.close()
        assert await first is None

    asyncio.run(interrupted())
    assert not paths.arenas()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{shm}/penstock.test.0.aa",
        "{shm}/../shm/penstock.test.f0.aa",
        "{shm}/penstock.test.f0.aa",
    ],
)
def test_only_an_input_arena_of_this_instance_is_mapped(paths: RunPaths, path: str) -> None:
    for name in ("penstock.test.0.aa", "penstock.test.f0.aa"):
        (paths.shm / name).write_bytes(bytes(70_000))
    with pytest.raises(ProtocolError):
        view_of(paths, Inputs(path.format(shm=paths.shm), "aa"))


def test_a_link_under_such_a_name_is_not_followed(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)
    block = reserve(arena, 10)
    assert block is not None
    real = Path(block.inputs.path)
    link = paths.input_arena("frontend-1", block.inputs.epoch)
    link.symlink_to(real)
    assert isinstance(view_of(paths, block.inputs), ArenaView)
    with pytest.raises(ProtocolError):
        view_of(paths, Inputs(str(link), block.inputs.epoch))
    arena.close()


def test_dead_frontends_are_swept_slot_by_slot(paths: RunPaths) -> None:
    for name in ("frontend-0", "frontend-1", "frontend-10", "bridge-1"):
        paths.input_arena(name, "aa").write_bytes(b"x")
    paths.arena(1, "aa").write_bytes(b"x")
    assert sweep_inputs(paths, "frontend-1") == ["penstock.test.f1.aa"]
    left = {"penstock.test.f0.aa", "penstock.test.f10.aa", "penstock.test.1.aa", "penstock.test.b1.aa"}
    assert set(sweep(paths)) == left


def test_the_bytes_of_a_payload_wherever_they_are(paths: RunPaths) -> None:
    arena = InputArena(paths, "frontend-0", NBYTES)
    block = reserve(arena, 3)
    assert block is not None
    block.buffer[:] = b"abc"
    assert bytes(bytes_of(block)) == b"abc" and bytes_of(b"x") == b"x" and bytes_of(None) == b""
    arena.close()
