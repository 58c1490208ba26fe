"""What boundaries of a worker make of errors of code of models, and what the flight record says when one escapes."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest

from ipc.errors import InvalidInput, PenstockError, QueueFull
from ipc.logs import _Writer
from ipc.settings import Settings
from ipc.wire.messages import EncodeCall, InputItem
from tests.fakes.jobs import make_job
from tests.fakes.raising import EXCEPTIONS, LOGGED, WORDS
from tests.fakes.scorer import FakeScorer
from workers import foreign
from workers.device import oom
from workers.device.stepping import Turn
from workers.foreign import ForeignError, TurnEnded, error_of
from workers.loading import failure
from workers.scheduling.executor import Executor
from workers.scheduling.preparing import Preparer

LONE = Settings().worker.prepare_threads
"""The place in the flight record of a job that is prepared in the thread of the caller."""


def in_a_thread(raised: BaseException) -> Exception:
    """`error_of` in a thread, where no interrupt of an operator can come."""
    found: list[Exception] = []
    thread = threading.Thread(target=lambda: found.append(error_of(raised)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_error_becomes_one_that_can_be_read_searched_and_classified(name: str) -> None:
    raised = EXCEPTIONS[name]()
    error = in_a_thread(raised)
    assert isinstance(error, Exception) and isinstance(str(error), str)
    assert error is raised or (isinstance(error, ForeignError) and error.__cause__ is raised)
    assert not oom.is_out_of_memory(error) and not oom.is_device_lost(error)
    oom.forget_frames(error)
    assert failure.classify(error).error_class == "UNKNOWN"


@pytest.mark.parametrize("name", WORDS)
def test_words_for_a_client_stay_words_for_a_client(name: str) -> None:
    error = error_of(WORDS[name]())
    assert isinstance(error, InvalidInput) and error.message.encode()


def test_an_error_that_steers_frontends_does_not_when_a_model_raises_it() -> None:
    assert isinstance(error_of(QueueFull("full", retry_after_s=1)), ForeignError)
    assert isinstance(error_of(InvalidInput("no")), InvalidInput)


def test_an_operators_interrupt_and_the_end_of_a_turn_pass() -> None:
    # The process may have run servers, whose libraries set handlers of their own.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for raised in (KeyboardInterrupt(), TurnEnded()):
            with pytest.raises(type(raised)):
                error_of(raised)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_batch_that_is_dropped_while_it_is_suspended_ends_without_a_word() -> None:
    seen: list[BaseException] = []

    def run(batch: Any) -> int:
        try:
            turn.leave()
        except BaseException as raised:
            seen.append(raised)
            error_of(raised)
        return 0

    turn = Turn()
    turn.switch(SimpleNamespace(first=SimpleNamespace(strategy=SimpleNamespace(run=run))))
    turn.throw()
    assert turn.dead and [type(raised) for raised in seen] == [TurnEnded]


def test_filters_that_make_errors_of_all_warnings_are_taken_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "something of a library")
        warnings.simplefilter("error")
        foreign.settle_warnings()
        warnings.warn("nothing", UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="something"):
            warnings.warn("something of a library", UserWarning, stacklevel=1)


@pytest.mark.parametrize("name", ["Unprintable", "Untrue"])
def test_a_stack_that_cannot_be_formatted_costs_a_record_its_stack_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, lines = _Writer(SimpleNamespace(write=None, flush=None)), list[str]()  # type: ignore[arg-type]
    monkeypatch.setattr(writer, "put", lines.append)
    log = logging.Logger("own")
    log.addHandler(writer)
    log.error("request %s failed", "req", exc_info=ForeignError(EXCEPTIONS[name]()))
    log.error("%d", "no number")
    assert [line.splitlines()[0] for line in lines] == ["request req failed"]


def test_an_error_that_escapes_a_turn_leaves_the_flight_record() -> None:
    def run(batch: Any) -> int:
        raise SystemError("a bug of the worker")

    flights: list[list[tuple[int, int]]] = []
    job = SimpleNamespace(
        tag=7, id=9, model="m", first_run_ns=0, batches=0, strategy=SimpleNamespace(run=run)
    )
    batch: Any = SimpleNamespace(pieces=[SimpleNamespace(job=job)], first=job, turn=None)
    device: Any = SimpleNamespace(
        _queue=SimpleNamespace(begin=lambda batch: None),
        _context=SimpleNamespace(arena=SimpleNamespace(record_flight=flights.append)),
        _touch=lambda model: None,
        _turns=[],
        make_way=lambda: None,
        free_memory=lambda: False,
    )
    with pytest.raises(SystemError):
        Executor.run_turn(device, batch)
    assert flights == [[(7, 9)]]


@pytest.mark.parametrize("name", LOGGED)
def test_whatever_is_raised_in_preparing_ends_the_request(name: str) -> None:
    class Raising(FakeScorer):
        def prepare(self, *_: Any) -> Any:
            raise EXCEPTIONS[name]()

    failures: list[PenstockError] = []
    record: list[tuple[int, ...]] = []
    table: Any = SimpleNamespace(
        claim=lambda job: True, unclaim=lambda job: None, fail=lambda job, error: failures.append(error)
    )
    arena: Any = SimpleNamespace(record_preparing=lambda *of: record.append(of))
    job = make_job(EncodeCall([InputItem("a")], ["dense"]), of=Raising({}, 512))
    context: Any = SimpleNamespace(queue=None, jobs=table, arena=arena, settings=Settings())
    preparer = Preparer(context, lambda job: None)
    preparer.close()
    thread = threading.Thread(target=preparer.prepare_now, args=(job,))
    thread.start()
    thread.join()
    assert [error.code for error in failures] == ["INFERENCE_ERROR"]
    assert record == [(LONE, job.tag, job.id), (LONE, 0, 0)]


def test_an_error_that_escapes_preparing_leaves_the_record() -> None:
    def fail(*_: Any) -> None:
        raise SystemError("a bug of the worker")

    record: list[tuple[int, ...]] = []
    table: Any = SimpleNamespace(claim=lambda job: True, unclaim=lambda job: None, fail=fail)
    arena: Any = SimpleNamespace(record_preparing=lambda *of: record.append(of))
    job = make_job(EncodeCall([InputItem("a")], ["dense"]), of=None)
    context: Any = SimpleNamespace(queue=None, jobs=table, arena=arena, settings=Settings())
    preparer = Preparer(context, lambda job: None)
    preparer.close()
    with pytest.raises(SystemError):
        preparer.prepare_now(job)
    assert record == [(LONE, job.tag, job.id)]


def test_a_greenlet_that_a_model_ends_is_an_error_of_the_batch() -> None:
    assert isinstance(error_of(greenlet.GreenletExit()), ForeignError)
