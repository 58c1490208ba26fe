"""A catalog that shows every feature of a catalog file, over the fake family, whose vectors follow from the texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.fakes.dividing import SALT
from tests.harness.server import FAKE_CATALOG

WEIGHTS = FAKE_CATALOG.parent / "weights"
DIMS = 13
"""Width of `org/odd`: no whole number of bytes when packed to bits."""
BROAD = 65536
TERMS = 300
"""Size of the sparse output of `org/many`, whose token vectors are `DIMS` wide."""
LONGEST = 512
"""Tokens that the models take; the fake family counts four characters as one."""


SALTED = "org/salted"
"""A model with files of its own, which a test may change, and with vectors of chunks."""


def _entry(model: str, dims: int, **fields: Any) -> dict[str, Any]:
    options = {"dims": dims, **fields.pop("loadtime", {})}
    return {
        "id": model,
        "source": {"kind": "directory", "path": str(WEIGHTS)},
        "adapter": "tests.fakes.adapter:FakeAdapter",
        "outputs": {"dense": {"dims": dims}},
        "max_sequence_length": LONGEST,
        "loadtime": options,
        **fields,
    }


ENTRIES = (
    _entry("org/odd", DIMS),
    _entry("plain", 16, dimensions=[4, 8, 16], description="an id without a slash"),
    _entry("org/broad", BROAD),
    _entry(
        "org/many",
        DIMS,
        outputs={"dense": {"dims": DIMS}, "sparse": {"dims": TERMS}, "multivector": {"dims": DIMS}},
        loadtime={"token_dims": DIMS, "vocabulary": TERMS},
        profiles={"fixed": {"runtime": {"muvera": {}}}, "late": {"output_types": ["multivector"]}},
    ),
    _entry(
        "org/late",
        DIMS,
        outputs={"multivector": {"dims": DIMS}},
        loadtime={"dims": 0, "token_dims": DIMS},
        runtime={"muvera": {"final_projection_dim": 64}},
    ),
    _entry("org/small", 16, loadtime={"memory_tokens": 64}),
    _entry(
        "org/profiled",
        16,
        outputs={"dense": {"similarity": "dot"}},
        runtime={"instruction": "from the model"},
        profiles={
            "byte": {"runtime": {"output_dtype": "int8", "instruction": "from the profile"}},
            "wide": {"loadtime": {"dims": 24}, "output_types": ["dense"]},
            "heir": {"extends": "byte"},
        },
    ),
    _entry(SALTED, DIMS, adapter="tests.fakes.dividing:DividingAdapter"),
    _entry("org/broken", 16, loadtime={"fail_load": "UNKNOWN"}),
    _entry("org/lacking", 16, source={"kind": "package", "package": "a_package_that_nobody_has"}),
)


def salt_of(place: Path) -> Path:
    """The file that decides the vectors of `SALTED`, under the directory of the server."""
    return place / "salted" / SALT


def write_catalog(directory: Path) -> list[str]:
    """Write one file per model; returns the ids."""
    directory.mkdir()
    salt = salt_of(directory.parent)
    shutil.copytree(WEIGHTS, salt.parent)
    salt.write_text("first ")
    source = {"kind": "directory", "path": str(salt.parent)}
    for number, entry in enumerate(ENTRIES):
        entry = {**entry, "source": source} if entry["id"] == SALTED else entry
        (directory / f"{number}.yaml").write_text(json.dumps(entry))  # JSON is YAML
    return [entry["id"] for entry in ENTRIES]
