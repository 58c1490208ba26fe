"""R6: code of a model family that raises where a request is taken in costs this request only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.faulty import SECRET
from tests.fault import serving
from tests.harness.lifecycle import ON_DEMAND, Models
from tests.harness.quiet import wait_quiet

MODEL = "org/faulty"


@pytest.mark.long
def test_a_bug_in_the_check_of_a_request_is_its_answer_and_the_worker_goes_on(tmp_path: Path) -> None:
    models = Models(tmp_path / "models")
    entry = {
        "id": MODEL,
        "source": {"kind": "directory", "path": str(models.weights(MODEL, 1 << 10))},
        "adapter": "tests.fakes.faulty:FaultyAdapter",
    }
    models.write_text(MODEL, json.dumps(entry))
    with serving(
        tmp_path, models=(), settings=ON_DEMAND, catalog=models.directory, supervised=False
    ) as server:
        assert server.encode(MODEL, ["before"]).status == 200
        pid = server.worker_pid()
        for _ in range(3):
            answer = server.encode(MODEL, ["x"], options={"bug": True})
            assert (answer.status, answer.json()["detail"]["code"]) == (500, "INFERENCE_ERROR")
            assert SECRET not in answer.body.decode()
        assert server.encode(MODEL, ["after"]).status == 200
        assert server.worker_pid() == pid
        assert SECRET in server.log, "the text of the bug belongs into the log"
        wait_quiet(server)
