"""The commands and programs of README and docs do what the pages say, on one server with tiny models of the same names.

1. `penstock` lines run in this process; `penstock serve` is checked with its flags instead of started.
2. All other lines of a page run in one bash, in their order; curl fails on an answer that is an error.
3. Python blocks run in this process.

Addresses and directories of the pages are replaced by those of the test.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest

from ipc.protos import trtis_v1_pb2
from penstock.cli import main
from tests.conformance.minilm import DIRECTORY, MODEL
from tests.conformance.required_tool import required_tool
from tests.harness.cluster import gateway_beside
from tests.harness.ports import free_port
from tests.harness.server import Server, serving
from tests.tiny import chat_models, gguf_models, loras, onnx_files
from tests.tiny.models import build
from tests.tiny.pictures import encoded, picture
from tests.tiny.programs import SCRIPTED, write_repository
from tools.source_tree import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "mv /etc/penstock/nats": "writes into the directories of the system; test_nats_configurations.py takes the files",
    "HOST=broker-1 && ": "reads passwords that only a host of the cluster has",
    'echo "$PENSTOCK_BRIDGE_PASSWORD"': "writes into the directories of the system",
    "penstock gateway": "starts a server; tests/process/test_cluster_sdk.py asks one",
    "curl GATEWAY/": "asks a gateway; the test of these lines below starts one",
    "penstock bridge": "starts a bridge; tests/process/test_cluster_sdk.py has one",
    "make test ": "it runs this test",
    "penstock models pull BAAI/bge-m3": "downloads; test_models_command.py pulls from a hub of its own",
    "penstock models pull org/name": "downloads; test_downloads.py copies from a hub of its own",
    "penstock rm": "deletes after a question; test_removal.py",
    "penstock run": "reads the terminal and starts a server; test_run_command.py",
    "penstock status --watch": "runs until it is stopped; test_status_command.py",
    "penstock tune": "starts one server after another, and measures for minutes; test_tune.py",
    "penstock verify": "needs the weights and the reference library; test_verification.py",
    "HF_TOKEN=$(cat": "downloads; test_models_command.py pulls a gated model",
    "HF_HOME=/srv/hub penstock models pull": "downloads",
    "sudo -u penstock HF_HOME": "downloads, as the user of the units",
    "rsync -a": "copies to another machine",
    "penstock serve owner/name": "asks the hub; test_own_models.py",
    "install ": "writes into the directories of the system; test_systemd_units.py checks the files",
    "printf '[Service]": "writes into the directories of the system",
    "cp deploy/proxy": "writes into the proxies' directories; test_proxies.py runs both samples",
    "cp deploy/prometheus": "writes into Prometheus' directory; test_prometheus_rules.py checks the files",
    "promtool check": "reads what the line before wrote",
    "cp deploy/grafana": "writes into Grafana's directories; test_grafana_dashboard.py checks the files",
    "python3 -m venv ": "installs",
    "/opt/penstock/venv/bin/pip install": "installs",
    "pip install ": "installs; the extras are compared with pyproject.toml below",
    "pip wheel ": "builds; test_distributions.py builds both and runs what is installed from the wheel",
    "podman ": "builds and runs containers; test_deployments.py compares the files with the settings",
    "kubectl ": "wants a cluster; test_deployments.py compares the manifests with their schemas",
    "penstock tools ": "runs until it is stopped; test_tool_host_killed.py starts hosts by hand",
    "penstock worker --slot 0": "runs until it is stopped; test_supervise_off.py starts workers by hand",
    "systemctl ": "wants systemd and its units",
    "python3 -m grpc_tools.protoc": "makes a module that this test has",
}
"""Beginnings of lines that are not run, and why."""
PROGRAMS_NOT_RUN = {
    "client.load_model(": "a part of a program; test_loads_that_bring.py loads so",
    'f"data:image/jpeg;base64,{data}"': "asks a chat model that sees; test_seeing_server.py",
    "from haystack": "slow to import; test_unmodified_clients.py",
    "from langchain_cohere": "slow to import; test_unmodified_clients.py",
    "from langchain_huggingface": "slow to import; test_unmodified_clients.py",
    "from langchain_openai": "slow to import; test_unmodified_clients.py",
    "from llama_index": "slow to import; test_unmodified_clients.py",
}
ERRORS_EXPECTED = {"errors.md", "trtis.md"}
"""Pages that show an error as what it is, or whose objects only a client could have made."""
MODELS = {
    "BAAI/bge-m3": ("bge_m3", "bge_m3", "{dense: {}, sparse: {}, multivector: {}, score: {}}", "text"),
    "BAAI/bge-reranker-v2-m3": ("cross_encoder", "rr_xlmr", "{score: {}}", "text"),
    "dslim/bert-base-NER": ("ner", "ner", "{json: {}}", "text"),
    "Qwen/Qwen3-VL-Reranker-2B": ("qwen3_vl_reranker", "qwen3_vl", "{score: {}}", "text, image"),
    "urchade/gliner_multi-v2.1": ("gliner", "gliner", "{json: {}}", "text"),
    "facebook/bart-large-mnli": ("nli_zero_shot", "nli_bart", "{json: {}}", "text"),
    "google/owlv2-base-patch16-ensemble": ("owlv2", "owlv2", "{json: {}}", "image"),
    "naver-clova-ix/donut-base-finetuned-cord-v2": ("donut", "donut", "{json: {}}", "image"),
    "openai/clip-vit-base-patch32": ("clip", "clip", "{dense: {}}", "text, image"),
    "vidore/colqwen2-v1.0-hf": ("colqwen2", "colqwen2", "{multivector: {}, score: {}}", "text, image"),
}
"""Adapter, tiny model, outputs and inputs that stand for the models of the pages."""


CHAT_MODEL = "Qwen/Qwen3-0.6B"
"""The model of text of the pages; a tiny one stands for it."""


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def is_shell(text: str) -> bool:
    """Whether a block without a language, or with a shell's, holds commands."""
    first = text.split("\n", 1)[0]
    words = (
        r"make|curl|penstock|\.venv/bin/penstock|pip|python3|install|cp|podman|kubectl|truncate|export|journalctl|[A-Za-z_]+=\S*"
        r"|\{ printf"
    )
    return re.match(rf"({words})( |$)", first) is not None


def commands(page: Path) -> str:
    """All shell blocks of a page, one after the other; a command that goes on in the next line is one line."""
    texts = [text for text in blocks(page, "", "sh") if is_shell(text)]
    return re.sub(r" \\\n +", " ", "\n".join(texts))


PROGRAMS = [
    pytest.param(page, text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "python"))
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current directory of the commands, with the files that they name."""
    place = tmp_path_factory.mktemp("docs")
    for number, name in enumerate(("photo.jpg", "street.jpg", "picture.jpg", "receipt.png", "pages/1.png")):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(encoded(picture(number, 256, 256), "PNG" if "png" in name else "JPEG"))
    (place / "texts.jsonl").write_text('{"text": "Water turns the wheel."}\n{"text": "It rains."}\n')
    (place / "srv" / "models" / "new").mkdir(parents=True)
    (place / "my-model").symlink_to(DIRECTORY)
    build("plain_bert", place / "my-bert")
    (place / "srv" / "copies" / "BAAI").mkdir(parents=True)
    for name in ("org/name", "BAAI/bge-m3"):
        (place / "srv" / "copies" / name).parent.mkdir(exist_ok=True)
        (place / "srv" / "copies" / name).symlink_to(DIRECTORY)
    (place / "downloads").mkdir()
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "downloads/Qwen3-0.6B-Q8_0.gguf"):
        gguf_models.write(place / name, "qwen3")
    (place / "exported" / "onnx").mkdir(parents=True)
    for name in ("model.onnx", "detector.onnx", "exported/onnx/model.onnx"):
        (place / name).write_bytes(onnx_files.add_sub())
    (place / "keys.yaml").touch(mode=0o600)
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """A server of the demo model, tiny models under the names of the pages, and a repository of tiny programs."""
    required_tool("curl"), required_tool("jq")
    catalog = place / "catalog"
    catalog.mkdir()
    minilm = (ROOT / "config/models/minilm/all-MiniLM-L6-v2.yaml").read_text()
    (catalog / "minilm.yaml").write_text(minilm + "served_name: [text-embedding-3-small, my-model]\n")
    for number, (name, (adapter, tiny, outputs, inputs)) in enumerate(MODELS.items()):
        weights = build(tiny, place / "weights" / tiny)
        text = f"id: {name}\nsource: {{kind: directory, path: {weights}}}\nadapter: {adapter}\n"
        text += f"outputs: {outputs}\ninputs: [{inputs}]\n"
        # The tiny model knows several tasks and does not say which is its own.
        (catalog / f"{number}.yaml").write_text(
            text + "runtime: {task: <s_cord-v2>}\n" * (adapter == "donut")
        )
    chat_models.write_entry(catalog, CHAT_MODEL, chat_models.save("qwen3", place / "weights" / "chat"))
    loras.write(place / "srv" / "loras" / "legal" / "2026-03", DIRECTORY)
    loras.write(place / "srv" / "loras" / "polite", place / "weights" / "chat", ("q_proj", "v_proj"))
    repository = write_repository(place / "srv" / "repository", ["add_sub", "classifier"], SCRIPTED)
    _write_program(repository / "accumulator", "sequences", "sequence_batching {")
    _write_program(repository / "upper", "repository", "TYPE_STRING")
    _write_program(repository / "countdown", "repository", "decoupled: true")
    settings = {
        "repository.dirs": repository,
        "repository.allow_python": "true",
        "catalog.lora_dirs": place / "srv" / "loras",
        "catalog.preload": f"{MODEL},{CHAT_MODEL}",
        "log.format": "json",
        "limits.load_wait_s": 60,
    }
    with serving(place, (MODEL, CHAT_MODEL, *MODELS), settings, catalog) as running:
        yield running


def _write_program(directory: Path, page: str, field: str) -> None:
    """A Python model as a page has it; `field` tells its configuration from others."""
    text = ROOT / "docs" / f"{page}.md"
    (directory / "1").mkdir(parents=True)
    [config] = [block for block in blocks(text, "") if field in block]
    [program] = [block for block in blocks(text, "python") if f"class {directory.name.title()}(" in block]
    (directory / "config.pbtxt").write_text(config)
    (directory / "1" / "model.py").write_text(program)


def here(text: str, place: Path, port: int) -> str:
    """The same commands or program with the addresses and directories of the test."""
    text = re.sub(r"(localhost|127\.0\.0\.1):8080", f"127.0.0.1:{port}", text)
    text = text.replace("/srv/models/add_sub/1/", "/srv/models/new/")
    return re.sub(r"(?<![\w/])/(srv|etc/penstock)\b", rf"{place}/\1", text)


def without_place(line: str) -> bool:
    """Whether a line is one of those that are not run."""
    return any(line.startswith(beginning) for beginning in NOT_RUN)


def in_this_process(line: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Run one `penstock` line, whose output may go to a file, against the server."""
    words = shlex.split(line, comments=True)
    words = words[next(at for at, word in enumerate(words) if word.endswith("penstock")) + 1 :]
    target = None
    if ">>" in words:
        at = words.index(">>")
        words, target = words[:at], Path(words[at + 1])
    if words[0] == "serve":
        words[0] = "check"
    if words[0] in ("bench", "embed", "layout"):
        words += ["--url", server.url]
    if words[0] == "status":
        words += ["--run-dir", str(server.run_dir)]
    capsys.readouterr()
    ends = AssertionError(f"{line}: a command that ends its process cannot run in this one; see NOT_RUN")
    with patch("os._exit", side_effect=ends):
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    printed = capsys.readouterr()
    assert code == 0 or words == ["doctor"], (line, printed.err)
    if target is not None:
        with target.open("a") as file:
            file.write(printed.out)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(
    page: Path,
    server: Server,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    # The ports of a server that is started by hand may be taken.
    monkeypatch.setenv("PENSTOCK_SERVER__BIND", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("PENSTOCK_GRPC__BIND", f"127.0.0.1:{free_port()}")
    script = ["set -eo pipefail", 'curl() { command curl -sS --fail-with-body --max-time 60 "$@"; }']
    if page.name in ERRORS_EXPECTED:
        script[1] = 'curl() { command curl -sS --max-time 60 "$@"; }'
    script.append(f'make() {{ command make -n -C {ROOT} "$@" > /dev/null; }}')
    script.append(f"journalctl() {{ cat {server.log_path}; }}")
    for line in here(commands(page), place, server.port).split("\n"):
        if without_place(line.replace(str(place), "")):
            continue
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?penstock ", line):
            in_this_process(line, server, capsys)
        else:
            script.append(line)
    environment = {**os.environ, "KEY": "none"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=place, env=environment, capture_output=True, text=True, errors="replace", timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.long
def test_what_pages_ask_of_a_gateway_is_answered(server: Server, place: Path) -> None:
    page = ROOT / "docs" / "cluster.md"
    [document] = [text for text in blocks(page, "yaml") if text.startswith("sie_id: ")]
    (place / "model.yaml").write_text(document)
    asked = [line for line in commands(page).split("\n") if line.startswith("curl GATEWAY/")]
    with gateway_beside(place / "beside", server) as near:
        for line in asked:
            words = [word.replace("GATEWAY", near.url) for word in shlex.split(line)[1:]]
            done = subprocess.run(
                ["curl", "-sS", "--fail-with-body", "--max-time", "60", *words],
                cwd=place, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, (line, done.stdout, done.stderr)
    assert asked


def _no_error(answer: httpx.Response) -> httpx.Response:
    """The answer, whose text tells what is wrong with it."""
    assert answer.is_success, answer.text
    return answer


class Enough(Exception):
    """A program that would go on for ever has printed something."""


@pytest.mark.parametrize(("page", "text"), PROGRAMS)
def test_a_program_of_a_page_runs(
    page: Path, text: str, server: Server, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if any(beginning in text for beginning in PROGRAMS_NOT_RUN):
        return
    monkeypatch.chdir(place)
    monkeypatch.setenv("KEY", "none")
    monkeypatch.setitem(sys.modules, "trtis_v1_pb2", trtis_v1_pb2)
    printed: list[object] = []

    def show(*values: object, end: str = "") -> None:
        printed.append(values)
        if "async for" in text:
            raise Enough

    monkeypatch.setattr("httpx.Response.raise_for_status", _no_error)
    program = compile(here(text, place, server.port), f"{page.name}", "exec")
    try:
        exec(program, {"__name__": "__main__", "print": show})
    except Enough:
        pass
    assert printed or "print" not in text


def test_every_exception_is_that_of_a_line_and_of_no_line_more() -> None:
    lines = [line for page in PAGES for line in commands(page).split("\n")]
    programs = [text for page in PAGES for text in blocks(page, "python")]
    unused = {begin for begin in NOT_RUN if not any(line.startswith(begin) for line in lines)}
    unused |= {begin for begin in PROGRAMS_NOT_RUN if not any(begin in text for text in programs)}
    assert unused == set()


def test_extras_that_pages_name_exist() -> None:
    texts = {page.name: page.read_text() for page in PAGES}
    declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for name, text in texts.items():
        for extras in re.findall(r"(?:penstock|penstock-server|'\.|\")\[([\w,]+)\]'?", text):
            assert set(extras.split(",")) <= {*declared, "all"}, name


def test_a_page_that_asks_a_server_says_which_one_to_start() -> None:
    silent = []
    for page in PAGES:
        text = page.read_text()
        asked = re.search(
            r"^```(?:(?!^```).)*?(?:localhost|127\.0\.0\.1):8080", text, re.MULTILINE | re.DOTALL
        )
        if asked and not re.search("penstock serve|make run|systemctl start|podman run", text[: asked.end()]):
            silent.append(page.name)
    assert silent == []
