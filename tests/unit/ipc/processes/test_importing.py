"""Imports during which the garbage collector rests: on again after every one, whatever happens meanwhile."""

from __future__ import annotations

import gc

import pytest

from ipc.processes.starting import importing


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_the_collector_rests_until_the_last_of_several_imports_has_ended(first_to_end: int) -> None:
    assert gc.isenabled()
    imports = [importing(), importing()]
    for each in imports:
        each.__enter__()
    imports.pop(first_to_end).__exit__(None, None, None)
    assert not gc.isenabled(), "the other import goes on"
    imports.pop().__exit__(None, None, None)
    assert gc.isenabled()


def test_the_collector_is_on_again_after_an_import_that_fails_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
