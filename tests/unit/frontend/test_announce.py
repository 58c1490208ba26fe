"""The start-up block: a line for what was loaded at the start, one line for the rest, and a request to paste."""

from __future__ import annotations

import io
import json
import logging
import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from frontend import lifespan
from ipc import logs
from ipc.processes.paths import prepare_run_dir
from ipc.settings import Server, Settings, load
from ipc.wire.messages import ModelStatus
from tests.harness.server import wait_until


class Stuck(io.StringIO):
    """A log whose reader stands still until `read` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def write(self, text: str) -> int:
        """Wait for the reader."""
        self.read.wait()
        return super().write(text)


def test_a_reader_of_the_log_that_stands_still_keeps_no_frontend_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(None, {"run.dir": str(tmp_path), "log.format": "text"}, {})
    prepare_run_dir(settings.paths)
    root, stuck = logging.getLogger(), Stuck()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(sys, "stderr", stuck)
    monkeypatch.setattr(lifespan, "block", lambda services, stage: "the block")
    logs.configure(settings.log, "frontend-0", stuck)
    services: Any = SimpleNamespace(settings=settings)
    telling = threading.Thread(target=lifespan.started, args=(services,), daemon=True)
    telling.start()
    telling.join(timeout=20)
    assert not telling.is_alive()
    stuck.read.set()
    wait_until(lambda: stuck.getvalue() == "the block\n", what="the block")


def block(
    states: dict[str, str],
    *,
    closed: bool = False,
    bind: str = "127.0.0.1:8080",
    output: str = "dense",
    stage: lifespan.Stage = "ready",
) -> list[str]:
    """The lines for models in these states; a line that goes on behind a backslash is one."""
    services = services_of(states, closed=closed, bind=bind, output=output)
    return lifespan.block(services, stage).replace("\\\n", "").splitlines()


def services_of(
    states: dict[str, str], *, closed: bool = False, bind: str = "127.0.0.1:8080", output: str = "dense"
) -> Any:
    """Services of a frontend whose one worker has told these states; `failed: OOM` is a failure of that class."""
    entry = SimpleNamespace(outputs=(output,), inputs=("text",))

    def status(name: str) -> ModelStatus:
        state, _, error = states[name].partition(": ")
        why = {"error_class": error, "error_message": "no room", "permanent": error != "OOM"} if error else {}
        return ModelStatus(name, state, "cpu", **why)  # type: ignore[arg-type]

    worker = SimpleNamespace(number=0, responsive=True, device="cpu", threads=2)
    return SimpleNamespace(
        settings=Settings(server=Server(bind=bind)),
        catalog=dict.fromkeys(states, entry),
        directory=SimpleNamespace(status=status, workers=lambda: [worker]),
        access=SimpleNamespace(closed=closed, entries=[1]),
        state=SimpleNamespace(is_full=False),
    )


def test_models_that_wait_to_be_asked_for_share_one_line() -> None:
    lines = block({"org/one": "loaded", "org/two": "available", "org/three": "available"})
    assert "  model      org/one: loaded on cpu" in lines
    assert "  models     2 more in the catalog, loaded when asked for: see /v1/models" in lines
    assert not any("org/two" in line for line in lines)


def test_a_long_list_of_loaded_models_is_cut() -> None:
    states = {f"org/{number}": "loaded" for number in range(lifespan.MOST_MODELS + 3)}
    lines = block(states | {"org/bad": "failed: OOM", "org/waits": "available"})
    assert sum(line.startswith("  model  ") for line in lines) == lifespan.MOST_MODELS
    assert [line for line in lines if line.startswith("  models ")] == [
        "  models     4 more: 3 loaded, 1 failed; see /v1/models",
        "  models     1 more in the catalog, loaded when asked for: see /v1/models",
    ]


def test_the_request_to_paste_is_whole_and_asks_a_loaded_model() -> None:
    [line] = [line for line in block({"org/a": "failed", "org/b": "loaded"}) if line.startswith("  try")]
    words = shlex.split(line)
    assert words[:3] == ["try", "curl", "http://localhost:8080/v1/embeddings"]
    assert json.loads(words[-1]) == {"model": "org/b", "input": "hello"}


def test_a_chat_model_is_asked_by_a_message() -> None:
    [line] = [line for line in block({"org/b": "loaded"}, output="chat") if line.startswith("  try")]
    words = shlex.split(line)
    assert words[2] == "http://localhost:8080/v1/chat/completions"
    assert json.loads(words[-1]) == {"model": "org/b", "messages": [{"role": "user", "content": "hello"}]}


def test_with_keys_the_request_to_paste_has_a_place_for_one() -> None:
    [line] = [line for line in block({"org/b": "loaded"}, closed=True) if line.startswith("  try")]
    assert "Authorization: Bearer KEY" in shlex.split(line)


def test_a_model_of_text_tells_how_tools_are_shown_and_what_bounds_its_texts() -> None:
    services = services_of({"org/b": "loaded"}, output="chat")
    told = ModelStatus(
        "org/b",
        "loaded",
        "cpu",
        max_sequence_length=64,
        tools="system text",
        limited_by="generation.cache_bytes",
    )
    services.directory.status = lambda name: told
    line = "  model      org/b: loaded on cpu; tools by system text; 64 tokens by generation.cache_bytes"
    assert line in lifespan.block(services).splitlines()


def test_without_a_loaded_model_there_is_nothing_to_paste() -> None:
    assert not any(line.startswith("  try") for line in block({"org/b": "available"}))


def test_a_unix_socket_is_shown_as_curl_takes_it() -> None:
    lines = block({"org/one": "loaded"}, bind="unix:/run/penstock.sock")
    assert lines[1] == "  url        --unix-socket /run/penstock.sock http://localhost"
    words = shlex.split(lines[-1])
    assert words[1:5] == ["curl", "--unix-socket", "/run/penstock.sock", "http://localhost/v1/embeddings"]


def test_profiles_are_told_where_their_state_is_another_and_do_not_count_as_models() -> None:
    states = {
        "org/a": "loaded",
        "org/a:x": "loaded",
        "org/a:y": "failed: OOM",
        "org/b": "available",
        "org/b:x": "loaded",
    }
    lines = [line for line in block(states) if line.startswith("  model")]
    assert lines == [
        "  model      org/a: loaded on cpu",
        "  model      org/a:y: failed on cpu (OOM: no room)",
        "  model      org/b:x: loaded on cpu",
        "  models     1 more in the catalog, loaded when asked for: see /v1/models",
    ]
    services = services_of(states)
    assert lifespan.summary(services) == "2/2 models ready, 1 workers up"
    services.state.is_full = True
    room = "The state directory has no room for another file"
    assert lifespan.summary(services).endswith(f", warning: {room}")
    assert lifespan.summary(services_of({"a": "failed: OOM", "a:x": "failed: OOM"})).startswith("0/1 models")


@pytest.mark.parametrize(
    ("failed", "advice"), [("failed: OOM", "tries models that failed"), ("failed: GATED", "start again")]
)
def test_a_start_without_a_model_says_what_failed_and_what_helps(failed: str, advice: str) -> None:
    lines = block({"org/a": failed, "org/a:x": failed}, stage="failure")
    assert lines[0].endswith("is not ready: no model could be loaded")
    assert lines[1].startswith("  url        http://localhost:8080")
    assert sum(failed.partition(": ")[2] in line for line in lines if line.startswith("  model ")) == 1
    [next_] = [line for line in lines if line.startswith("  next")]
    assert advice in next_ and lines[-1].startswith("  help") and not any("curl" in line for line in lines)


def test_the_first_model_that_answers_is_told_with_a_request_to_paste_before_the_others_are_loaded() -> None:
    lines = block({"org/a": "loading", "org/b": "loaded"}, stage="first")
    assert lines[0].endswith("answers; the start goes on with the models that are not loaded yet")
    assert lines[1].startswith("  url        http://localhost:8080")
    assert lines[2:4] == ["  model      org/a: loading on cpu", "  model      org/b: loaded on cpu"]
    [paste] = lines[4:]
    assert json.loads(shlex.split(paste)[-1])["model"] == "org/b"
