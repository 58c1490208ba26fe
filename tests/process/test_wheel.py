"""The wheel: one package under a free name, which serves beside other people's modules of the same names as ours."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from ipc.version import VERSION
from tests.harness.server import ROOT, Server, free_port

pytestmark = pytest.mark.long
NAME = "penstock_server"
OTHERS = ("workers", "ipc", "penstock", "frontend")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def run(*command: str | Path, **options: object) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=240, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tree."""
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, ROOT)
    [built] = place.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, this one's packages without the tree, and other people's modules."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    [site] = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in OTHERS:
        (site / f"{name}.py").write_text("raise SystemExit('somebody else')\n")
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert all((site / f"{name}.py").read_text().startswith("raise") for name in OTHERS)
    return place / "bin" / "penstock"


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment without settings, and without places of modules."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    mine.pop("PYTHONPATH", None)
    yield mine | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPT_NOENV": "1"}


def test_the_wheel_holds_one_package_and_says_its_name(wheel: Path) -> None:
    assert wheel.name == f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"{NAME}-{VERSION}.dist-info/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {NAME, f"{NAME}-{VERSION}.dist-info"}
    assert (metadata["Name"], metadata["Version"]) == ("penstock-server", VERSION)
    for file in (
        "gunicorn.conf.py",
        "config/server.yaml",
        "config/models/minilm/all-MiniLM-L6-v2.yaml",
        "frontend/status/assets/page.html",
        "ipc/protos/kserve_v2_pb2.py",
        "workers/main.py",
        "penstock/cli.py",
    ):
        assert f"{NAME}/{file}" in names, file
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_the_command_works_from_any_directory(
    installed: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    there = {"cwd": tmp_path, "env": environment}
    addresses = ("--bind", f"127.0.0.1:{free_port()}", "--set", f"grpc.bind=127.0.0.1:{free_port()}")
    assert run(installed, "version", **there) == f"{VERSION}\n"
    assert MODEL in run(installed, "check", *addresses, **there)
    shown = run(installed, "models", "show", "numind/NuNER_Zero", **there)
    assert f"pip install '{NAME}-{VERSION}-py3-none-any.whl[gliner]'" in shown


def test_the_installed_server_serves(installed: Path, environment: dict[str, str], tmp_path: Path) -> None:
    port, run_dir = free_port(), tmp_path / "run"
    environment |= {
        "PENSTOCK_SERVER__BIND": f"127.0.0.1:{port}",
        "PENSTOCK_SERVER__FRONTENDS": "1",
        "PENSTOCK_GRPC__ENABLED": "false",
        "PENSTOCK_RUN__DIR": str(run_dir),
        "PENSTOCK_RUN__INSTANCE": f"t{port}",
        "PENSTOCK_RUN__SHM_DIR": "/dev/shm",
        "PENSTOCK_WORKER__DEVICE": "cpu",
        "PENSTOCK_ARENA__BYTES": "16MiB",
    }
    server = Server(port, run_dir, tmp_path / "server.log", environment)
    with server.log_path.open("wb") as log:
        server.process = subprocess.Popen(
            [str(installed), "serve"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:
        server.wait_ready(120)
        assert server.encode(MODEL, ["installed"]).status == 200
        assert server.stop() == 0
        server.assert_nothing_left()
    finally:
        server.kill_everything()
