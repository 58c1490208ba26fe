"""Finding model families by name."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from workers.adapters import registry
from workers.adapters.base import AdapterSpec
from workers.adapters.dense import DenseAdapter
from workers.adapters.registry import UnknownAdapterError, names, resolve


@pytest.mark.parametrize("module", ["workers.adapters.registry", "workers"])
def test_importing_the_registry_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_built_in_family_resolves_and_bears_its_name() -> None:
    for name in registry.BUILT_IN:
        assert isinstance(resolve(name).spec, AdapterSpec)
        assert resolve(name).spec.family == name
    assert set(registry.BUILT_IN) <= set(names())


def test_a_dotted_path_resolves() -> None:
    assert resolve("workers.adapters.dense:DenseAdapter") is DenseAdapter


def test_the_garbage_collector_rests_while_a_family_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "family_of_this_test.py").write_text(
        "import gc\n\n\nclass Seen:\n    collects = gc.isenabled()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert registry._import_path("family_of_this_test:Seen").collects is False
    with pytest.raises(UnknownAdapterError):
        registry._import_path("family_of_this_test.no_such_module:Seen")
    assert gc.isenabled()


def test_an_entry_point_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "workers.adapters.dense:DenseAdapter", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    assert resolve("mine") is DenseAdapter
    assert "mine" in names()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dens", "did you mean dense"),
        ("zzz", "known families are .*\\bdense\\b"),
        ("no_such_package:Class", "no module named no_such_package"),
        ("workers.adapters.dense:Dance", "has no Dance"),
        ("docling", "no family reads files of documents"),
        ("sie_server.adapters.nemo_colembed:NemoAdapter", "there is no family for .*code of its repository"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UnknownAdapterError, match=hint):
        resolve(name)


def test_a_check_knows_families_and_lets_dotted_paths_pass_unimported() -> None:
    for name in (*names(), "no_such_package:Class"):
        registry.refuse_unknown(name)
    with pytest.raises(UnknownAdapterError, match="did you mean dense"):
        registry.refuse_unknown("dens")


def test_what_is_no_adapter_is_refused() -> None:
    with pytest.raises(TypeError, match="not a subclass"):
        resolve("workers.adapters.base:AdapterSpec")


def test_a_changed_file_of_equal_size_and_time_is_the_new_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python's own import compares the size and the second of a change, and would run the old bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "adapter.py"

    def told(word: str) -> object:
        source = "from workers.adapters.dense import DenseAdapter\n\n\nclass Mine(DenseAdapter):\n    word = WORD\n"
        file.write_text(source.replace("WORD", repr(word)))
        os.utime(file, (1_700_000_000, 1_700_000_000))
        return vars(resolve(f"{file}:Mine", files=True))["word"]

    assert [told("first"), told("other")] == ["first", "other"]
    assert list(tmp_path.iterdir()) == [file]
