"""Engines of tests in both modes: steps in turn, and steps that begin before the one before has landed.

The trials of linear layers (`workers.adapters.shared.linears`) run once for all layers of one shape in a process, as a
worker remembers them on its machine. They were a sixth of what a load of a tiny model costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from tests.fakes.generating import Modes
from workers.adapters.shared import linears

_chosen = linears._chosen
_trials: dict[Any, str] = {}


def _remembered(layers: Sequence[nn.Linear], rows: Sequence[int], *, may_keep: bool) -> str:
    """The choice of the first trial; each load still checks that both forms give the same numbers."""
    first = layers[0]
    shape = first.in_features, first.out_features, first.weight.dtype, first.bias is None
    facts = (*shape, len(layers), tuple(rows), may_keep)
    if facts not in _trials:
        _trials[facts] = _chosen(layers, rows, may_keep=may_keep)
    choice = _trials[facts]
    return choice if choice == linears.PLAIN or linears._agrees(first) else linears.PLAIN


@pytest.fixture(autouse=True)
def remembered_trials(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are tried once, but in the tests of the trials themselves."""
    if request.path.name != "test_linears.py":
        monkeypatch.setattr(linears, "_chosen", _remembered)


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
