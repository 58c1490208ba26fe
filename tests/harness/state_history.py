"""Clients that store, read, continue, cancel and delete objects at several gateways, and what must hold of them.

1. Each client has objects of its own, and does one thing after another at a gateway drawn by chance. So the client
   knows what each answer must be: what was acknowledged is read at each gateway, until a removal was acknowledged.
2. What failed is uncertain: a removal without an answer may have removed, and a response whose storing a broker missed
   is answered all the same (`Keeper.keep`).
3. A client notes what it did not expect, with the faults that would excuse that (`Surprise`). `violations` tells those
   without such a fault. Without a broker a gateway reads from its copy, which may be old.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.harness.history import PATIENCE_S, History

BROKER = "broker"
LARGE_NBYTES = 300_000
"""Of a content that needs several messages."""
BOUNDARY = "boundary"


@dataclass(slots=True)
class Surprise:
    """What was not expected of a call, in whose time one of the faults `excuses` may explain it."""

    what: str
    began_s: float
    ended_s: float
    excuses: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """An answer; `status` 0 for none."""

    gateway: str
    began_s: float
    ended_s: float
    status: int = 0
    data: bytes = b""
    retry_after: str = ""

    @property
    def value(self) -> Any:
        """The body as JSON."""
        return json.loads(self.data)


@dataclass(slots=True)
class StoredFile:
    """A file; `gone`: no, maybe, yes."""

    id: str
    content: bytes
    gone: str = "no"


@dataclass(slots=True)
class StoredResponse:
    """A response as its client had it; `made` is the answer to the request for it. `end`: its last state, if known."""

    id: str
    text: str
    made: Answer
    output: Any = None
    end: str = ""


@dataclass
class StateHistory:
    """What all clients have done. `history` has the faults."""

    history: History
    surprises: list[Surprise] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)
    """Calls by gateway that gave what was expected."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def violations(self) -> list[str]:
        """What must not have happened, a line each."""
        return [
            f"{each.what} ({each.ended_s - each.began_s:.2f} s, excused by {each.excuses or 'nothing'})"
            for each in self.surprises
            if not any(self.history.overlaps(what, each.began_s, each.ended_s) for what in each.excuses)
        ]


class StateClient:
    """One client with objects of its own."""

    def __init__(
        self, history: StateHistory, gateways: dict[str, int], model: str, seed: int, number: int
    ) -> None:
        """`gateways`: port by name."""
        self._history, self._gateways, self._model = history, gateways, model
        self._name, self._chance = f"seed {seed} client {number}", random.Random(f"{seed} {number}")
        self._turn = 0
        self.files: list[StoredFile] = []
        self.responses: list[StoredResponse] = []

    def act(self) -> None:
        """Do one thing."""
        self._turn += 1
        acts: list[Callable[[str], None]] = [self._upload, self._create, self._begin]
        if self.files:
            acts += [self._read_any, self._read_any, self._delete]
        if self.responses:
            acts += [self._get_any, self._get_any, self._continue, self._cancel]
        self._chance.choice(acts)(self._chance.choice(sorted(self._gateways)))

    def look_at_all(self) -> None:
        """Read all objects at each gateway."""
        for gateway in self._gateways:
            for file in self.files:
                self._read(file, gateway)
            for response in self.responses:
                self._get(response, gateway)

    # Calls.

    def _call(
        self, gateway: str, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        answer = Answer(gateway, time.monotonic(), 0.0)
        connection = http.client.HTTPConnection("127.0.0.1", self._gateways[gateway], timeout=2 * PATIENCE_S)
        try:
            connection.request(method, path, data, {"Content-Type": kind} if data is not None else {})
            response = connection.getresponse()
            answer.data = response.read()
            answer.status, answer.retry_after = response.status, response.getheader("Retry-After", "")
        except (OSError, http.client.HTTPException) as error:
            answer.data = repr(error).encode()
        finally:
            connection.close()
        answer.ended_s = time.monotonic()
        return answer

    def _surprise(self, answer: Answer, what: str, *excuses: str) -> None:
        with self._history.lock:
            self._history.surprises.append(
                Surprise(f"{self._name} at {answer.gateway}: {what}", answer.began_s, answer.ended_s, excuses)
            )

    def _is_ok(self, answer: Answer, what: str) -> bool:
        """Whether an answer is 200. A 404 is for the caller to judge; of all else is told."""
        if answer.status == 200:
            with self._history.lock:
                self._history.done[answer.gateway] = self._history.done.get(answer.gateway, 0) + 1
            return True
        gateway = f"gateway {answer.gateway}"
        said = f"{what}: {answer.status} {answer.data[:300]!r}"
        if answer.status == 0:
            self._surprise(answer, said, gateway)
        elif answer.status == 503 and answer.retry_after:
            self._surprise(answer, said, BROKER, gateway)
        elif answer.status != 404:
            self._surprise(answer, said)
        return False

    def _is_new(self, answer: Answer, id_: str) -> None:
        with self._history.lock:
            is_known = id_ in self._history.ids
            self._history.ids.add(id_)
        if is_known:
            self._surprise(answer, f"the id {id_} was given twice")

    # Files.

    def _upload(self, gateway: str) -> None:
        content = f"{self._name} turn {self._turn}".encode()
        if self._chance.random() < 0.2:
            content = content.ljust(LARGE_NBYTES, b".")
        head = (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--{BOUNDARY}\r\n'
            f'Content-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
        )
        body = head.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()
        answer = self._call(gateway, "POST", "/v1/files", body, f"multipart/form-data; boundary={BOUNDARY}")
        if self._is_ok(answer, "an upload"):
            id_ = answer.value["id"]
            self._is_new(answer, id_)
            self.files.append(StoredFile(id_, content))
        elif answer.status == 404:
            self._surprise(answer, f"an upload got 404: {answer.data[:300]!r}")

    def _read_any(self, gateway: str) -> None:
        self._read(self._chance.choice(self.files), gateway)

    def _read(self, file: StoredFile, gateway: str) -> None:
        answer = self._call(gateway, "GET", f"/v1/files/{file.id}/content")
        if self._is_ok(answer, "a download"):
            if answer.data != file.content:
                self._surprise(answer, f"the file {file.id} has another content")
            if file.gone == "yes":
                self._surprise(answer, f"the deleted file {file.id} is there", BROKER)
        elif answer.status == 404:
            if file.gone == "no":
                self._surprise(answer, f"the file {file.id} is lost")
            file.gone = "yes"

    def _delete(self, gateway: str) -> None:
        file = self._chance.choice(self.files)
        answer = self._call(gateway, "DELETE", f"/v1/files/{file.id}")
        if self._is_ok(answer, "a removal"):
            if file.gone == "yes":
                self._surprise(answer, f"the file {file.id} was deleted twice")
            file.gone = "yes"
        elif answer.status == 404:
            if file.gone == "no":
                self._surprise(answer, f"the file {file.id} was lost before its removal")
            file.gone = "yes"
        elif file.gone == "no":
            file.gone = "maybe"

    # Responses.

    def _asked(self, gateway: str, what: str, **more: Any) -> tuple[Answer, StoredResponse | None]:
        text = f"{self._name} turn {self._turn}"
        body = {"model": self._model, "input": text, "max_output_tokens": 4, **more}
        answer = self._call(gateway, "POST", "/v1/responses", body)
        if not self._is_ok(answer, what):
            return answer, None
        value = answer.value
        self._is_new(answer, value["id"])
        response = StoredResponse(value["id"], text, answer)
        if not more.get("background"):
            response.output, response.end = value["output"], value["status"]
        self.responses.append(response)
        return answer, response

    def _create(self, gateway: str) -> None:
        answer, _ = self._asked(gateway, "a response")
        if answer.status == 404:
            self._surprise(answer, f"a response got 404: {answer.data[:300]!r}")

    def _begin(self, gateway: str) -> None:
        answer, _ = self._asked(
            gateway, "a response in the background", background=True, max_output_tokens=40
        )
        if answer.status == 404:
            self._surprise(answer, f"a response in the background got 404: {answer.data[:300]!r}")

    def _continue(self, gateway: str) -> None:
        before = self._chance.choice(self.responses)
        if before.end not in ("completed", "incomplete"):
            return
        answer, response = self._asked(gateway, "a continuation", previous_response_id=before.id)
        if answer.status == 404:
            self._lost(before, answer)
        elif response is not None and answer.value["previous_response_id"] != before.id:
            self._surprise(answer, f"the response {response.id} goes on with another one")

    def _lost(self, response: StoredResponse, answer: Answer) -> None:
        """A response is not there. A broker may have missed to keep one that was answered in the foreground."""
        is_foreground = response.output is not None
        self.responses.remove(response)
        late_s = answer.began_s - response.made.ended_s
        where = f"the response {response.id} is lost at {answer.gateway} {late_s:.2f} s later: {answer.data[:300]!r}"
        self._surprise(response.made, where, *([BROKER] if is_foreground else []))

    def _get_any(self, gateway: str) -> None:
        response = self._chance.choice(self.responses)
        if self._get(response, gateway) and self._chance.random() < 0.3:
            answer = self._call(gateway, "GET", f"/v1/responses/{response.id}/input_items")
            if self._is_ok(answer, "the input of a response"):
                found = [item["content"][0]["text"] for item in answer.value["data"]]
                if found != [response.text]:
                    self._surprise(answer, f"the input of {response.id} is {found}")

    def _get(self, response: StoredResponse, gateway: str) -> bool:
        answer = self._call(gateway, "GET", f"/v1/responses/{response.id}")
        if answer.status == 404:
            if response in self.responses:
                self._lost(response, answer)
            return False
        if not self._is_ok(answer, "a response that is read"):
            return False
        self._told(response, answer)
        return True

    def _told(self, response: StoredResponse, answer: Answer) -> None:
        value = answer.value
        status, output = value["status"], value["output"]
        if value["id"] != response.id:
            self._surprise(answer, f"the response {response.id} is {value['id']}")
        if not response.end and status not in ("queued", "in_progress"):
            response.end = status
            response.output = output
        elif response.end and status != response.end:
            self._surprise(answer, f"the response {response.id} was {response.end} and is {status}", BROKER)
        elif response.end and output != response.output:
            self._surprise(answer, f"the response {response.id} has another output")
        if status == "failed":
            self._surprise(answer, f"the response {response.id} failed: {value.get('error')}", BROKER)

    def _cancel(self, gateway: str) -> None:
        response = self._chance.choice(self.responses)
        if response.end:
            return
        answer = self._call(gateway, "POST", f"/v1/responses/{response.id}/cancel", {})
        if answer.status == 404 and b"has ended, nothing is left to cancel" in answer.data:
            if self._get(response, gateway) and not response.end:
                self._surprise(
                    answer, f"the response {response.id} goes on, and was said to have ended", BROKER
                )
        elif answer.status == 404:
            self._lost(response, answer)
        elif self._is_ok(answer, "a cancel"):
            self._told(response, answer)
            if not response.end:
                self._surprise(answer, f"the response {response.id} goes on behind its cancellation")


class StateClients:
    """Clients that act until the block ends, and then look at all objects at all gateways."""

    def __init__(
        self, history: StateHistory, gateways: dict[str, int], model: str, count: int, seed: int
    ) -> None:
        self._end = threading.Event()
        self.clients = [StateClient(history, gateways, model, seed, number) for number in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(client,), daemon=True) for client in self.clients
        ]

    def _run(self, client: StateClient) -> None:
        while not self._end.is_set():
            client.act()

    def __enter__(self) -> StateClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(PATIENCE_S * 4)
            assert not thread.is_alive(), "a client hangs"
        for client in self.clients:
            client.look_at_all()
