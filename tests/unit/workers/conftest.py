"""Engines of tests in both modes: steps in turn, and steps that begin before the one before has landed."""

from __future__ import annotations

import pytest

from tests.fakes.generating import Modes


@pytest.fixture(params=[False, True], ids=["in-turn", "ahead"])
def both_modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engines of this test run ahead."""
    monkeypatch.setattr(Modes, "ahead", request.param)
    return bool(request.param)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["in-turn", "ahead"])
def both_modes_at_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As `both_modes`, where the second mode takes long."""
    monkeypatch.setattr(Modes, "ahead", request.param)
    return bool(request.param)
