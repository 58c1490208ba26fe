"""Assertions of test modules are rewritten before the processes that import the modules begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.harness.rewriting import rewrite_all

SOURCE = "def test_it():\n    found = [1, 2]\n    assert found == [1, 3]\n"


@pytest.fixture
def config(tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> pytest.Config:
    """The configuration of a run of a folder with three modules, one of which pytest imports as it is."""
    if rewrite.assertstate_key not in pytestconfig.stash:
        pytest.skip("this run rewrites no assertions (--assert=plain)")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("test_one.py", "conftest.py", "helper.py"):
        (tmp_path / "part" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "part" / name).write_text(SOURCE)
    monkeypatch.setattr(pytestconfig, "args", [str(tmp_path)])
    return pytestconfig


def kept_of(module: Path) -> Path:
    """Where pytest looks for the bytecode of a module."""
    return rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}"


def test_modules_are_rewritten_once_and_again_where_they_have_changed(
    tmp_path: Path, config: pytest.Config
) -> None:
    assert (rewrite_all(config), rewrite_all(config)) == (2, 0)
    assert not kept_of(tmp_path / "part" / "helper.py").exists()
    (tmp_path / "part" / "test_one.py").write_text(SOURCE.replace("3", "4"))
    assert (rewrite_all(config), rewrite_all(config)) == (1, 0)


def test_what_is_kept_is_what_pytest_runs(tmp_path: Path, config: pytest.Config) -> None:
    rewrite_all(config)
    module = tmp_path / "part" / "test_one.py"
    code = rewrite._read_pyc(module, kept_of(module))
    assert code is not None
    found: dict[str, object] = {}
    exec(code, found)
    with pytest.raises(AssertionError, match=r"\[1, 2\] == \[1, 3\]"):
        found["test_it"]()  # type: ignore[operator]


def test_a_run_of_one_test_rewrites_its_module_alone(
    tmp_path: Path, config: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "args", [f"{tmp_path}/part/test_one.py::test_it[a/b.py::c]"])
    assert rewrite_all(config) == 1


def test_a_module_that_cannot_be_read_is_left_to_the_process_that_imports_it(
    tmp_path: Path, config: pytest.Config
) -> None:
    (tmp_path / "part" / "test_faulty.py").write_text("def test_it(:\n")
    (tmp_path / "part" / "test_latin.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "part" / "test_nul.py").write_bytes(b"x = 1\0\n")
    (tmp_path / "part" / "test_nowhere.py").symlink_to("absent.py")
    assert (rewrite_all(config), rewrite_all(config)) == (2, 0)


def test_folders_that_pytest_does_not_enter_are_left_out(tmp_path: Path, config: pytest.Config) -> None:
    for folder in (".venv", "build", "node_modules"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_one.py").write_text(SOURCE)
    assert rewrite_all(config) == 2
    assert not (tmp_path / ".venv" / "__pycache__").exists()


def test_nothing_is_kept_where_pytest_keeps_nothing(
    tmp_path: Path, config: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(sys, "dont_write_bytecode", True)
        assert rewrite_all(config) == 0
    with monkeypatch.context() as changed:
        # NOTE: as with `--assert=plain`.
        changed.setattr(config, "stash", pytest.Stash())
        assert rewrite_all(config) == 0
    assert not (tmp_path / "part" / "__pycache__").exists()
