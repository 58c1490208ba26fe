"""What protocols call: one method that admits a call, runs it, and ends with the client.

1. Admission: not draining; the model exists and can be loaded in time.
2. The call goes through `frontend.engine.local.client`, as a task that is cancelled when the client disconnects.
3. The answer is a `Reply`, whose lease the protocol ends, or a `PartStream`; its phases are noted in the request's
   context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from frontend.engine.local.channel import Payload
from frontend.engine.local.client import Client, PartStream, Reply
from frontend.engine.recording import Recorder
from frontend.engine.repeats import firsts_of
from frontend.engine.scope import RequestScope
from frontend.http.disconnect import until_disconnect
from frontend.http.rendering import off_loop_if
from frontend.server.drain import Drain
from ipc.catalog.entries import Catalog, ModelEntry, preloaded_names
from ipc.errors import InputRefused, WorkerCrashed
from ipc.settings import Settings
from ipc.wire.messages import Call, InferCall, InputItem, ModelStatus, Work
from ipc.wire.streams import WINDOW

T = TypeVar("T")

STATE_ORDER = ("loaded", "loading", "unloading", "failed", "available")


class Engine:
    """Runs calls of all protocols on the workers of this host."""

    def __init__(
        self, settings: Settings, catalog: Catalog, client: Client, recorder: Recorder, drain: Drain
    ) -> None:
        self.settings, self.catalog, self.client, self.recorder, self.drain = (
            settings,
            catalog,
            client,
            recorder,
            drain,
        )

    def find(self, model: str) -> ModelEntry:
        """Catalog entry of a model name. Raises `ModelNotFound`."""
        return self.catalog.find(model)

    def replicas(self, model: str) -> int:
        """Workers that should have a model once one of them has."""
        return (self.catalog[model].replicas or 1) if model in self.catalog else 1

    def status(self, model: str) -> ModelStatus:
        """State of a model over all workers: loaded when one of them has it, else the state that tells most.

        A model that this frontend has asked for is loading, also before the worker says so.
        """
        found = self._told(model)
        best = min(found, key=lambda s: STATE_ORDER.index(s.state), default=ModelStatus(model, "available"))
        if best.state == "available" and found and self.client.demand.has_asked(model):
            return msgspec.structs.replace(best, state="loading")
        return best

    def _told(self, model: str) -> list[ModelStatus]:
        return [c.models[model] for c in self.client.channels if c.state == "ready" and model in c.models]

    def is_loaded(self, model: str, revision: str = "") -> bool:
        """Whether some worker has the model, with files of that revision (empty: whichever)."""
        told = self._told(model)
        return any(each.state == "loaded" and revision in ("", each.revision) for each in told)

    async def ensure_loaded(self, model: str, deadline_ns: int, others: Collection[str] = ()) -> ModelStatus:
        """Wait until some worker has the model, at most `limits.load_wait_s` and `limits.restart_wait_s`.

        One of `others` will do as well. Raises why the model cannot be had.
        """
        await self.client.ready(model, deadline_ns, others)
        return self.status(model)

    def cost_of(
        self, lengths: list[int], status: ModelStatus, images: int = 0, overflow: str = "truncate"
    ) -> int:
        """Estimated tokens of `images`, and of texts of these characters: four a token, cut at the model's length."""
        most = self.settings.limits.max_chunked_tokens
        longest = most if overflow == "chunk" else status.max_sequence_length or 512
        texts = sum(min(characters // 4 + 2, longest) for characters in lengths)
        return texts + images * status.image_tokens

    async def run(
        self,
        context: RequestScope,
        model: str,
        call: Call,
        cost: int,
        scope: dict[str, Any] | None = None,
        payload: Payload = None,
        lane: str = "",
    ) -> Reply:
        """Run a call. Raises a `PenstockError`; `Cancelled` when the client of `scope` went away.

        `payload` are the raw tensors of an infer call. `lane` empty means the one that fits the cost.

        Without a scope, of a request that is no HTTP request, cancelling the task is what cancels the work.
        """
        work = self._work(context, model, call, cost, lane)
        with self.recorder.in_flight(model, work.lane):
            reply = await self._answered(self.client.call(work, payload), scope)
        self._note(context, reply)
        if not isinstance(call, InferCall) and len(call.items) > 1:
            await self._unify(reply, call.items, work.lane == "bulk")
        return reply

    @staticmethod
    async def _unify(reply: Reply, items: Sequence[InputItem], large: bool) -> None:
        """Equal items get equal results."""
        try:
            firsts = await off_loop_if(large, firsts_of, items, {error.index for error in reply.errors})
            if firsts is not None:
                await off_loop_if(large, reply.repeat, firsts)
                reply.release()
        except BaseException:
            reply.release()
            raise

    @asynccontextmanager
    async def stream(
        self,
        context: RequestScope,
        model: str,
        call: Call,
        cost: int,
        scope: dict[str, Any] | None = None,
        payload: Payload = None,
        lane: str = "",
    ) -> AsyncIterator[PartStream]:
        """Run a call that is answered in parts, as `run`; leaving the context ends the work.

        Entered once the first part is there, or none will come. Waiting for the next part is the caller's to end when
        the client of `scope` goes away.
        """
        work = self._work(context, model, call, cost, lane, WINDOW)
        with self.recorder.in_flight(model, work.lane):
            parts = await self._answered(self.client.stream(work, payload), scope)
            with parts:
                yield parts
                if parts.result is not None:
                    self._note(context, parts.result)

    async def _answered(self, work: Coroutine[Any, Any, T], scope: dict[str, Any] | None) -> T:
        """What `work` gives, unless the client of `scope` goes away; an input that crashes workers is counted."""
        try:
            return await (work if scope is None else until_disconnect(work, scope))
        except WorkerCrashed as error:
            self.recorder.poisoned("refused" if isinstance(error, InputRefused) else "crashed")
            raise

    def _work(
        self, context: RequestScope, model: str, call: Call, cost: int, lane: str, parts: int = 0
    ) -> Work:
        return Work(
            model,
            call,
            context.deadline_ns,
            cost,
            context.request_id,
            context.traceparent,
            lane or ("bulk" if cost > self.settings.batch.bulk_tokens else "interactive"),
            context.grant.caller,
            context.grant.share,
            parts,
            context.start_by_ns,
        )

    @staticmethod
    def _note(context: RequestScope, reply: Reply) -> None:
        if context.span is not None:
            context.span.worker, context.span.trace = reply.worker, reply.trace
        timing = reply.timing
        context.phases |= {
            "tokenize": timing.prepare_ns / 1e6,
            "queue": timing.queue_ns / 1e6,
            "device": timing.device_ns / 1e6,
            "copy": timing.copy_ns / 1e6,
        }

    def ready(self) -> tuple[bool, str]:
        """Whether traffic is accepted, and the reason: a worker is up that has tried all models of the start.

        A failed load of the start is recorded and skipped, unless it is true of all of them.
        """
        if self.drain.draining:
            return False, "draining"
        up = [channel for channel in self.client.channels if channel.responsive]
        if not up:
            return False, "no worker is up"
        if not any(channel.preloaded for channel in up):
            return False, "models are loading"
        chosen = self.settings.catalog
        first = preloaded_names(self.catalog, chosen.preload, chosen.models, chosen.serve_all)
        # PERF: every probe asks this, so one look ends at the first model that has not failed.
        found = (self.status(name) for name in first)
        if first and all(each.error_class and each.state != "loaded" for each in found):
            return False, "no model could be loaded"
        return True, "ok"
