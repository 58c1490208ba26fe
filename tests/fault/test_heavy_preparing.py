"""Inputs that are heavy before they reach the device: long texts, and results that exceed a crowded arena."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.fault import serving
from tests.harness.server import ROOT

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.long
def test_a_few_huge_texts_neither_kill_the_worker_nor_hold_up_others(tmp_path: Path) -> None:
    settings = {"catalog.dirs": ROOT / "config" / "models"}
    with serving(tmp_path, models=(MINILM,), settings=settings) as server:
        pid = server.worker_pid()
        huge = "word " * ((1 << 20) // 5)
        answers: list[int] = []
        heavy = threading.Thread(
            target=lambda: answers.append(server.encode(MINILM, [huge] * 4, timeout_s=60).status)
        )
        heavy.start()
        while heavy.is_alive():
            assert server.encode(MINILM, ["short"], timeout_s=10).status == 200
        heavy.join()
        assert answers == [200]
        assert server.worker_pid() == pid


@pytest.mark.long
def test_a_result_larger_than_the_arena_is_refused_while_others_wait_for_room(tmp_path: Path) -> None:
    settings = {"arena.bytes": 4 << 20, "arena.lease_copy_after_s": 0.2}
    with serving(tmp_path, models=("fake/wide",), settings=settings) as server:
        pid = server.worker_pid()
        waiting = [
            threading.Thread(target=server.encode, args=("fake/wide", ["a", "b", "c"]), daemon=True)
            for _ in range(4)
        ]
        for thread in waiting:
            thread.start()
        for _ in range(5):
            answer = server.encode("fake/wide", ["x"] * 64)
            assert answer.status == 400
            assert "arena.bytes" in answer.json()["detail"]["message"]
        for thread in waiting:
            thread.join(60)
        assert server.worker_pid() == pid
