"""The inputs on which workers and hosts died, as one process knows them (`PoisonList`).

All frontends of a server share the rows of the list, and all hosts of a cluster share what they know:

1. An input has a name: a hash of the model, the call and the raw tensors (`fingerprint`) that hides them.
2. An input is *suspect* when its worker died while the flight record of the arena named its request: a thread of that
   worker was working on it, alone or with others.
3. A suspect on which a worker died in the company of others is *accused*. The next worker computes nothing else in
   those steps, for generated text to its last token.
4. An input is *poison* when a worker died on it while it was suspect and ran alone. Poison is refused.
5. All are rows of the store (`ipc.store`) and end after `limits.poison_ttl_s`. The newest `MOST` rows are kept.
   Frontends read the rows once a second; the frontend that saw the death knows at once. A process without a store, as
   a gateway, keeps its verdicts itself.
6. `on_verdict` is told of each verdict of this host, `learn` takes in those of other hosts. They end
   `limits.poison_ttl_s` after this process has first heard of them: clocks of hosts are not compared.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from ipc.errors import InputRefused
from ipc.store.store import Store, Table
from ipc.wire.field_names import IN_PARAMS
from ipc.wire.messages import Call, GenerateCall, InferCall

log = logging.getLogger(__name__)

Verdict = Literal["suspect", "accused", "poison"]
RANK: Mapping[Verdict, int] = {"suspect": 0, "accused": 1, "poison": 2}
MOST = 4096


def fingerprint(model: str, call: Call, payload: bytes | memoryview = b"") -> str:
    """Hash of an input: model, call and raw tensors.

    The first call of a sequence has the same hash under any sequence id. The route of a call does not matter.
    """
    if isinstance(call, InferCall):
        if call.step is not None and call.step.start:
            call = msgspec.structs.replace(call, step=msgspec.structs.replace(call.step, id=0))
    elif not isinstance(call, GenerateCall):
        call = msgspec.structs.replace(call, names=IN_PARAMS)
    elif call.grammar is not None:
        call = msgspec.structs.replace(call, grammar=msgspec.structs.replace(call.grammar, field=""))
    digest = hashlib.blake2b(msgspec.msgpack.encode((model, call)), digest_size=16)
    digest.update(payload)
    return digest.hexdigest()


class _Judged(msgspec.Struct, frozen=True):
    """State of one input, and its begin in seconds since 1970."""

    verdict: Verdict
    at: float


def _worst(verdicts: Mapping[str, Verdict], others: Mapping[str, _Judged]) -> dict[str, Verdict]:
    """The verdicts, and others where they are worse."""
    worse = {
        name: row.verdict
        for name, row in others.items()
        if name not in verdicts or RANK[row.verdict] > RANK[verdicts[name]]
    }
    return {**verdicts, **worse}


class PoisonList:
    """Suspect and poisonous inputs, as far as this process knows."""

    def __init__(self, store: Store | None, ttl_s: float) -> None:
        self._table = Table(store, "poison", _Judged) if store is not None else None
        self.ttl_s, self._known = ttl_s, dict[str, Verdict]()
        self._others: dict[str, _Judged] = {}
        """Verdicts of other hosts, since this process has first heard of them, also past their time.

        One that was forgotten would begin anew with the next change of any other."""
        self._told: dict[str, Verdict] = {}
        self.on_verdict: Callable[[str, Verdict], None] | None = None
        """Told of each verdict of this host, by the name of the input."""
        self._own: dict[str, _Judged] = {}
        """Verdicts of this frontend of which there is no row yet: they hold here even without one."""

    def refresh(self) -> None:
        """Read the rows of other frontends, and drop rows past their time. Raises `OSError`."""
        oldest = time.time() - self.ttl_s
        self._own = {name: row for name, row in self._own.items() if row.at >= oldest}
        stored = self._table.rows() if self._table is not None else {}
        here = _worst({name: row.verdict for name, row in stored.items() if row.at >= oldest}, self._own)
        self._tell(here)
        self._known = _worst(here, self._present_others)

    @property
    def _present_others(self) -> dict[str, _Judged]:
        oldest = time.time() - self.ttl_s
        return {name: row for name, row in self._others.items() if row.at >= oldest}

    def _tell(self, here: Mapping[str, Verdict]) -> None:
        if self.on_verdict is not None:
            for name, verdict in here.items():
                last = self._told.get(name)
                if last is None or RANK[verdict] > RANK[last]:
                    self.on_verdict(name, verdict)
            self._told = dict(here)

    def learn(self, verdicts: Mapping[str, Verdict]) -> None:
        """Take in all verdicts of the cluster; those that are not among them any more end with the next `refresh`."""
        new = {name: _Judged(verdict, time.time()) for name, verdict in verdicts.items()}
        same = {name: row for name, row in self._others.items() if verdicts.get(name) == row.verdict}
        self._others = new | same
        self._known = _worst(self._known, self._present_others)

    def add(self, model: str, call: Call, payload: bytes | memoryview = b"") -> None:
        """Refuse this input from now on, in every frontend."""
        self._judge(fingerprint(model, call, payload), "poison")

    def suspect(
        self, model: str, call: Call, payload: bytes | memoryview = b"", *, alone: bool = True
    ) -> None:
        """A worker died on this input, which was not run again. `alone`: the input ran in a batch of its own.

        A new input becomes a suspect. A known input becomes poison if the input ran alone, else a suspect is accused.
        """
        name = fingerprint(model, call, payload)
        known = self._known.get(name)
        if known is None:
            self._judge(name, "suspect")
        elif alone:
            self._judge(name, "poison")
        elif known == "suspect":
            self._judge(name, "accused")

    def __bool__(self) -> bool:
        """Whether any input is known; without one, no request needs a fingerprint."""
        return bool(self._known)

    def is_suspect(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether a worker died on this input."""
        return fingerprint(model, call, payload) in self._known

    def is_accused(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether workers died on this input more than once, with others on the device."""
        return self._known.get(fingerprint(model, call, payload)) == "accused"

    def check(self, model: str, call: Call, payload: bytes | memoryview = b"") -> None:
        """Raise `InputRefused` for poison."""
        if self.holds(model, call, payload):
            raise InputRefused("this input ends worker processes and is refused for a while")

    def holds(self, model: str, call: Call, payload: bytes | memoryview = b"") -> bool:
        """Whether this input is poison, and refused."""
        return self._known.get(fingerprint(model, call, payload)) == "poison"

    def _judge(self, name: str, verdict: Verdict) -> None:
        """The request need not wait for the row: this frontend knows already."""
        self._known[name] = verdict
        judged = _Judged(verdict, time.time())
        self._own = dict(list(self._own.items())[1 - MOST :]) | {name: judged}
        if self.on_verdict is not None:
            self._told[name] = verdict
            self.on_verdict(name, verdict)
        if self._table is None:
            return

        def note(rows: dict[str, _Judged]) -> None:
            fresh = [each for each in rows if rows[each].at >= judged.at - self.ttl_s]
            newest = set(sorted(fresh, key=lambda each: rows[each].at)[1 - MOST :])
            for each in rows.keys() - newest:
                del rows[each]
            if name not in rows or RANK[verdict] >= RANK[rows[name].verdict]:
                rows[name] = judged

        def noted(error: Exception | None) -> None:
            if error is None:
                # From now on the row counts, which an operator may delete.
                self._own.pop(name, None)
            else:
                log.error("the other frontends do not know of an input on which a worker died: %s", error)

        self._table.change_soon(note, noted)
