"""What the command line says about families agrees with the registry and with the extras of the package."""

from __future__ import annotations

import tomllib

import pytest

from penstock import families
from tools.source_tree import ROOT
from workers.adapters import registry

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NEEDED = {family.extra for family in families.FAMILIES.values()} - {""}


def test_every_built_in_family_is_told_of() -> None:
    assert set(families.FAMILIES) == set(registry.BUILT_IN)


def test_every_extra_of_a_family_is_one_of_the_package() -> None:
    assert set(EXTRAS) >= NEEDED
    assert set(families.PACKAGES) == NEEDED


def test_an_extra_is_installed_when_all_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.PACKAGES, "vision", ("json", "tomllib"))
    assert families.installed("vision")
    monkeypatch.setitem(families.PACKAGES, "vision", ("json", "a_package_that_nobody_has"))
    assert not families.installed("vision")
