"""What holds for all processes of a test run.

1. They keep the bytecode of what they import. A hundred servers start in a run; where `PYTHONDONTWRITEBYTECODE` is set,
   as in many containers, every one of them would compile the same modules again, which is a quarter of its start.
2. One torch thread each: several test processes and their servers share the cores, and teams of threads that share a
   core wait for each other.
3. Hypothesis draws the same examples in every run and does not look at the clock, so that neither luck nor a busy
   machine decides; nor do the constants of the modules that a process has imported, which depend on the tests before.
   The tests marked `fuzz` choose for themselves. The profile `fast` draws fewer (`make test-fast`).
4. Imports of the tests' modules happen without the garbage collector, which took a third of the time of collecting.
   What is alive at the end of a file is left out of later collections, which else cost up to a second each.
5. `--dist loadgroup` gives a process whole files. All tests of a shared server go to one process, so that the server
   starts once, and ends with the last of them: an idle one costs as well. Every second process begins with the last
   files: tests that wait run beside tests that compute.
6. Processes of servers are forked from two that have imported what they need, unless a test asks for `fresh` ones
   (`tests/harness/lives.py`): imports were most of what a server costs. So are the processes of pytest-xdist. The
   process that starts them has rewritten the assertions of all modules by then (`tests/harness/rewriting.py`).
7. Of the cases of a test marked `sample` the default suite runs some: each value of each parameter once, or as many as
   the mark says (`tests/harness/sampling.py`). `make test-long` runs the others.
8. The end of a run tells how many servers were started; `--processor-times` adds the processor time of each file.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _pytest.nodeid import NodeId
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.harness import accounting, sampling
from tests.harness.broker import Broker, broker
from tests.harness.rewriting import rewrite_all

ROOT = Path(__file__).resolve().parents[1]

gc.disable()
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["OMP_NUM_THREADS"] = "1"
settings.register_profile(
    "steady", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fast", settings.get_profile("steady"), max_examples=20)
settings.load_profile("steady")
# NOTE: Hypothesis 6.170 has no setting for that.
providers._get_local_constants = Constants

SHARED_SERVERS = (
    "fakes",
    "families",
    "hostile_server",
    "keyed_server",
    "kserve_server",
    "limited_server",
    "minilm_server",
    "sie",
    "trtis_server",
)
"""Fixtures of scope `session` that start a server for several files."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all tests of a file."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(scope="module")
def one_broker(place: Path) -> Iterator[Broker]:
    """A broker for all tests of a file that needs one."""
    with broker(place / "broker") as one:
        yield one


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option of the whole suite."""
    parser.addoption(
        "--processor-times", action="store_true", help="processor seconds of each file, its servers' included"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Add what a test costs to its file; a shared server counts for the file whose test ends last."""
    began = accounting.processor_seconds()
    try:
        return (yield)
    finally:
        accounting.add(item.path, accounting.processor_seconds() - began)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist hands on what it has counted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["accounting"] = accounting.report()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take in what a process of pytest-xdist has counted, unless the process has died."""
    if hasattr(node, "workeroutput"):
        accounting.take(node.workeroutput["accounting"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the run has cost."""
    for line in accounting.lines(config.getoption("processor_times")):
        terminalreporter.write_line(line)


def _shared_server(item: pytest.Item | None) -> str | None:
    """The shared server of a test."""
    return next((name for name in SHARED_SERVERS if name in getattr(item, "fixturenames", ())), None)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark the cases that are left out as long, and name the shared server of a test behind its id.

    The scheduler looks for the server there, after all others have looked at the items.
    """
    sampling.mark(items)
    yield
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        name = _shared_server(item)
        if name is not None:
            # NOTE: pytest-xdist 3.8 has a mark for groups, but sets an attribute that pytest 9.2 does not read.
            item._id = NodeId.parse(f"{item.nodeid}@{name}")


def pytest_collection_finish() -> None:
    """From here on the garbage collector works, and leaves out what is there by now."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared server behind the last of its tests, which come in a row where a process has whole groups.

    A file leaves imported modules and reports behind; garbage is freed before the rest is left out.
    """
    name = _shared_server(item)
    if hasattr(item.config, "workerinput") and name is not None and name != _shared_server(nextitem):
        for shared in item.session._fixturemanager.getfixturedefs(name, item) or ():
            # NOTE: pytest itself ends a fixture of the session with the session.
            shared.finish(item._request)  # type: ignore[attr-defined]
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the test processes. Their servers come from the same nurseries, but where each is to count its own.

    Nurseries begin at once, so a run of unit tests alone, most of which start no server, begins none.
    """
    if Path.cwd() != ROOT:
        return
    import execnet

    from tests.harness import lives

    with ThreadPoolExecutor(1) as pool:
        rewriting = pool.submit(rewrite_all, config)
        python = lives.fork_tests()
        specs[:] = [
            execnet.XSpec(f"{spec}//id={spec.id}//python={python}") if spec.popen else spec for spec in specs
        ]
        if not config.getoption("processor_times") and any(
            "unit" not in Path(one).parts for one in config.args
        ):
            lives.share()
        rewriting.result()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a shared server by its name, all other tests by file."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class FromBothEnds(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).split("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            is_from_the_end = int(node.gateway.id.removeprefix("gw")) % 2 == 1
            scope, unit = self.workqueue.popitem(last=is_from_the_end)
            self.assigned_work.setdefault(node, {})[scope] = unit
            # PERF: pytest-xdist looks for each test in the list of all, which is half of the controller's time.
            node.send_runtest_some([self._places[nodeid] for nodeid, is_done in unit.items() if not is_done])

        @functools.cached_property
        def _places(self) -> dict[str, int]:
            """Places of all tests in the lists of all processes, which are the same."""
            return {nodeid: place for place, nodeid in enumerate(self.collection or ())}

    return FromBothEnds(config, log)
