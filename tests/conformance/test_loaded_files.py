"""The worker that has loaded a model of every family maps none of their files."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.conftest import Families


def test_no_file_of_a_loaded_model_is_mapped(families: Families) -> None:
    models = families.server.get("/v1/models").json()["models"]
    assert [model["name"] for model in models if model["state"] == "loaded"]
    mapped = Path(f"/proc/{families.server.worker_pid()}/maps").read_text()
    of_models = [line for line in mapped.splitlines() if str(families.place) in line]
    assert [line for line in of_models if str(families.server.run_dir) not in line] == []
    assert "its library maps" not in families.server.log
