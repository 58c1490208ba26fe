"""A catalog in SIE's own layout with an adapter in a file beside it, served by real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fakes.adapter import vector_of
from tests.harness.lifecycle import ON_DEMAND, info, state
from tests.harness.server import serving, wait_until

ENTRY = """
sie_id: org/own
package_backed: true
tasks: {encode: {dense: {dim: DIMS}}}
max_sequence_length: 64
profiles:
  default:
    adapter_path: adapter.py:Mine
    max_batch_tokens: 32
    adapter_options: {loadtime: {dims: DIMS}}
  shout: {extends: default, adapter_path: "adapter.py:Louder"}
"""
ADAPTER = """
from tests.fakes.adapter import FakeAdapter


class Mine(FakeAdapter):
    pass


class Louder(FakeAdapter):
    def _prepared(self, text):
        return super()._prepared(text.upper() + "MARK")
"""


def write(root: Path, dims: int = 16, mark: str = "!") -> Path:
    """The catalog directory."""
    directory = root / "models"
    directory.mkdir(exist_ok=True)
    (directory / "adapter.py").write_text(ADAPTER.replace("MARK", mark))
    (directory / "anything.yaml").write_text(ENTRY.replace("DIMS", str(dims)))
    return directory


def test_code_beside_the_catalog_runs_where_it_is_allowed_and_is_followed(tmp_path: Path) -> None:
    directory = write(tmp_path)
    settings = {**ON_DEMAND, "worker.trust_remote_code": "true"}
    with serving(tmp_path, models=(), settings=settings, catalog=directory, supervised=False) as server:

        def values(model: str) -> np.ndarray:
            answer = server.encode(model, ["hello"])
            assert answer.status == 200, answer.body
            return np.asarray(answer.json()["items"][0]["dense"]["values"], np.float32)

        assert np.allclose(values("org/own"), vector_of("hello", 16), atol=1e-6)
        assert np.allclose(values("org/own:shout"), vector_of("HELLO!", 16), atol=1e-6)
        assert set(info(server, "org/own")["profiles"]) == {"default", "shout"}
        write(tmp_path, mark="?")
        changed = vector_of("HELLO?", 16)
        wait_until(lambda: np.allclose(values("org/own:shout"), changed, atol=1e-6), what="the changed code")


@pytest.mark.parametrize("preload", ["auto", pytest.param("", marks=pytest.mark.long)])
def test_code_beside_the_catalog_is_refused_by_the_setting_that_allows_it(
    tmp_path: Path, preload: str
) -> None:
    directory = write(tmp_path)
    (directory / "adapter.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n" + ADAPTER)
    settings = {**ON_DEMAND, "catalog.preload": preload}
    with serving(tmp_path, models=(), settings=settings, catalog=directory, supervised=False) as server:
        assert state(server, "org/own") == "available"
        answer = server.encode("org/own", ["hello"])
        assert answer.status == 502, answer.body
        detail = answer.json()["detail"]
        assert detail["code"] == "MODEL_LOAD_FAILED" and detail["permanent"] is True
        assert "worker.trust_remote_code" in detail["message"]
        assert not (tmp_path / "ran").exists(), "the code must not have been run"
