"""Where results are written: rows, ragged rows, loose values, and the frames that carry them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.errors import InvalidInput
from ipc.memory import tensors
from ipc.memory.arena import Arena, LeaseTable
from ipc.wire.messages import EncodeCall, InputItem
from tests.fakes.jobs import make_job
from workers.adapters.base import Prepared
from workers.operations.items import Results, ResultTensor
from workers.scheduling import outputs
from workers.scheduling.job import Job, Piece

WIDTH = 4
WIDTHS = [WIDTH, (1 << 18) + 1]
"""Results that one thread sums, and larger ones."""


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[LeaseTable]:
    """A table over an arena of 1 MiB."""
    arena = Arena(tmp_path / "arena", 1 << 20, "0" * 16)
    yield LeaseTable(arena)
    arena.close()


def job_of(rows: list[int]) -> Job:
    """A job whose items give so many token vectors each, all prepared."""
    call = EncodeCall([InputItem("x") for _ in rows], ["dense", "multivector", "sparse"])
    job = make_job(call)
    job.prepared = [Prepared(None, count, rows=count) for count in rows]
    return job


def planned(leases: LeaseTable, rows: list[int], inline_nbytes: int) -> Job:
    """The same with its space reserved."""
    job = job_of(rows)
    parts = [
        ResultTensor("dense", "float32", (len(rows), WIDTH)),
        ResultTensor("multivector", "float32", (sum(rows), WIDTH), rows),
    ]
    outputs.plan_output(job, parts, leases)
    job.output = outputs.reserve_output(job, leases, inline_nbytes)
    assert job.output is not None
    return job


def results_of(pieces: list[Piece], mark: float) -> Results:
    """Values that name the job and the item they belong to."""
    numbers = torch.tensor([mark + piece.index for piece in pieces])
    ragged = torch.cat([torch.full((piece.prepared.rows, WIDTH), mark + piece.index) for piece in pieces])
    return Results(
        rows={"dense": numbers[:, None].expand(-1, WIDTH).contiguous()},
        ragged={"multivector": ragged},
        loose={
            "sparse.indices": [np.arange(piece.index, dtype=np.int32) for piece in pieces],
            "sparse.values": [np.full(piece.index, mark, np.float32) for piece in pieces],
        },
    )


def pieces_of(job: Job, *indices: int) -> list[Piece]:
    """Some items of a job."""
    return [Piece(job, index, job.prepared[index]) for index in indices]


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20], ids=["block", "inline"])
def test_items_of_two_jobs_in_any_order_land_in_their_own_rows(
    leases: LeaseTable, inline_nbytes: int
) -> None:
    one, other = planned(leases, [3, 0, 2, 5], inline_nbytes), planned(leases, [1, 4], inline_nbytes)
    for pieces in (
        [*pieces_of(one, 2, 3), *pieces_of(other, 1)],
        [*pieces_of(other, 0), *pieces_of(one, 0, 1)],
    ):
        parts = [results_of([piece], 100.0 if piece.job is one else 200.0) for piece in pieces]
        joined = Results(
            rows={"dense": torch.cat([part.rows["dense"] for part in parts])},
            ragged={"multivector": torch.cat([part.ragged["multivector"] for part in parts])},
            loose={name: [part.loose[name][0] for part in parts] for name in parts[0].loose},
        )
        outputs.write_results(pieces, joined)
    for job, mark, rows in ((one, 100.0, [3, 0, 2, 5]), (other, 200.0, [1, 4])):
        assert job.output is not None
        np.testing.assert_array_equal(job.output.arrays["dense"][:, 0], mark + np.arange(len(rows)))
        expected = np.repeat(mark + np.arange(len(rows)), rows)
        np.testing.assert_array_equal(job.output.arrays["multivector"][:, 0], expected)
        counts = outputs.rows_of(job)
        assert counts["multivector"] == rows
        assert counts["sparse.indices"] == counts["sparse.values"] == list(range(len(rows)))


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 20], ids=["with a block", "without a block"])
def test_the_frame_holds_inline_tensors_first_and_loose_ones_by_item(
    leases: LeaseTable, inline_nbytes: int
) -> None:
    job = planned(leases, [1, 2, 3], inline_nbytes)
    outputs.write_results(pieces_of(job, 2), results_of(pieces_of(job, 2), 7.0))
    outputs.write_results(pieces_of(job, 0, 1), results_of(pieces_of(job, 0, 1), 7.0))
    refs, frame = outputs.loose_frame(job)
    assert frame is not None and [ref.name for ref in refs] == ["sparse.indices", "sparse.values"]
    views = {ref.name: tensors.view(frame, ref) for ref in refs}
    assert views["sparse.indices"].tolist() == [0, 0, 1]
    assert views["sparse.values"].tolist() == [7.0, 7.0, 7.0]
    if inline_nbytes:
        inline = {ref.name: tensors.view(frame, ref) for ref in job.refs}
        assert inline["dense"][:, 0].tolist() == [7.0, 8.0, 9.0]
        assert all(ref.start >= job.result_nbytes for ref in refs)


def test_items_without_any_loose_value_have_empty_arrays_and_failed_ones_none(leases: LeaseTable) -> None:
    job = planned(leases, [1, 1, 1], 1 << 20)
    empty = Results(loose={"sparse.indices": [np.empty(0, np.int32)]})
    outputs.write_results(pieces_of(job, 1), empty)
    refs, frame = outputs.loose_frame(job)
    assert frame is not None
    assert tensors.view(frame, refs[0]).shape == (0,)
    assert outputs.rows_of(job)["sparse.indices"] == [0, 0, 0]


def test_without_loose_values_only_an_inline_result_has_a_frame(leases: LeaseTable) -> None:
    assert outputs.loose_frame(planned(leases, [1], 0)) == ([], None)
    refs, frame = outputs.loose_frame(planned(leases, [1], 1 << 20))
    assert refs == [] and frame is not None and len(frame) >= 2 * WIDTH * 4


def test_a_result_without_room_waits_and_one_that_never_fits_is_refused(leases: LeaseTable) -> None:
    parts = [ResultTensor("multivector", "float32", (40_000, WIDTH), [40_000])]
    first, second = job_of([40_000]), job_of([40_000])
    for job, placed in ((first, True), (second, False)):
        outputs.plan_output(job, parts, leases)
        assert (outputs.reserve_output(job, leases, 0) is not None) is placed
    with pytest.raises(InvalidInput, match=r"arena\.bytes"):
        outputs.plan_output(
            job_of([1]), [ResultTensor("multivector", "float32", (1 << 20, WIDTH), [1 << 20])], leases
        )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bad", [None, 0, 1, 3])
def test_values_that_are_not_finite_name_their_item(bad: int | None, width: int) -> None:
    rows = [2, 3, 0, 4]
    for kind in ("rows", "ragged", "loose"):
        dense, ragged = torch.ones(4, width), torch.ones(sum(rows), width)
        loose = [np.ones(2, np.float32) for _ in rows]
        if bad is not None:
            dense[bad, 1] = torch.inf if kind == "rows" else 1
            ragged[sum(rows[: bad + 1]) - 1, 2] = torch.nan if kind == "ragged" else 1
            loose[bad][1] = np.nan if kind == "loose" else 1
        found = Results({"dense": dense}, {"multivector": ragged}, {"sparse.values": loose}).finite(rows)
        assert found == [index != bad for index in range(4)], kind


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_that_overflow_do_not_condemn_finite_values(width: int) -> None:
    large = torch.full((4, width), torch.finfo(torch.float32).max)
    assert Results({"dense": large}, {"multivector": large}).finite([1, 1, 1, 1]) == [True] * 4
