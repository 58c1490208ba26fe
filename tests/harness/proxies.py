"""The shipped samples of proxies as real processes: their ports and files are the test's, all else is as shipped."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.required_tool import required_tool
from tests.harness.parent import ends_with_parent
from tests.harness.ports import free_port
from tests.harness.server import ROOT, wait_until

SAMPLES = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}
_NGINX = """
daemon off;
pid {place}/nginx.pid;
error_log {place}/nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {place}/body; proxy_temp_path {place}/proxy; fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
    {sample}
}}
"""


@dataclass(frozen=True)
class Proxy:
    """A running proxy; `port` speaks HTTP/1.1, `tls` HTTP/1.1 and HTTP/2 with TLS, `grpc` HTTP/2 without."""

    name: str
    port: int
    tls: int
    grpc: int
    certificate: Path


def write_certificate(place: Path) -> Path:
    """A self-signed certificate of 127.0.0.1; its key lies beside it, and both together in `both.pem`."""
    command = [
        *(
            required_tool("openssl"),
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
        ),
        *(
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
        ),
        *("-keyout", str(place / "key.pem"), "-out", str(place / "cert.pem")),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (place / "both.pem").write_text((place / "cert.pem").read_text() + (place / "key.pem").read_text())
    return place / "cert.pem"


@contextmanager
def proxied(name: str, server_port: int, grpc_address: str, place: Path) -> Iterator[Proxy]:
    """One proxy, with TLS, in front of a server that answers GET /healthz, until the end."""
    proxy = Proxy(name, free_port(), free_port(), free_port(), write_certificate(place))
    sample = (ROOT / "deploy" / "proxy" / SAMPLES[name]).read_text().replace("#tls ", "")
    changes = {
        "maxconn 20000": "maxconn 1000",
        r"(?<=bind |sten )(\*?:)?80\b": f"127.0.0.1:{proxy.port}",
        r"(?<=bind |sten )(\*?:)?443\b": f"127.0.0.1:{proxy.tls}",
        r"(?<=bind |sten )(\*?:)?9001\b": f"127.0.0.1:{proxy.grpc}",
        r"\b127\.0\.0\.1:8080\b": f"127.0.0.1:{server_port}",
        r"\b127\.0\.0\.1:8001\b": grpc_address,
        "/etc/haproxy/penstock.pem": str(place / "both.pem"),
        r"/etc/nginx/penstock\.crt": str(place / "cert.pem"),
        r"/etc/nginx/penstock\.key": str(place / "key.pem"),
    }
    for pattern, value in changes.items():
        sample = re.sub(pattern, value, sample)
    file = place / f"{name}.conf"
    if name == "nginx":
        sample = _NGINX.format(place=place, sample=sample)
        sample = f"user root;{sample}" if os.geteuid() == 0 else sample
    file.write_text(sample)
    flags = ["-db", "-f", str(file)] if name == "haproxy" else ["-p", str(place), "-c", str(file)]
    with (place / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(
            [required_tool(name), *flags], stdout=out, stderr=out, preexec_fn=ends_with_parent()
        )
    try:
        wait_until(lambda: process.poll() is not None or _answers(proxy), what=f"{name} answers")
        assert process.poll() is None, (place / f"{name}.out").read_text()
        yield proxy
    except BaseException:
        sys.stderr.write((place / f"{name}.out").read_text()[-3000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


def _answers(proxy: Proxy) -> bool:
    trusted = ssl.create_default_context(cafile=str(proxy.certificate))
    try:
        url = f"https://127.0.0.1:{proxy.tls}/healthz"
        return bool(urllib.request.urlopen(url, timeout=5, context=trusted).status == 200)
    except OSError:
        return False
