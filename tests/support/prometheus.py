"""A real Prometheus that scrapes one run with the project's rules, and its HTTP interface."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

EVERY = "1s"
"""Between scrapes, and between evaluations of rules."""
MISSING = None if shutil.which("prometheus") else "needs prometheus (Debian and Ubuntu: apt-get install prometheus)"


class Prometheus:
    """Runs while the ``with`` block does; nothing is scraped until :meth:`scrape` names a target.

    Args:
        folder: for its files.
        rules: the file of rules.
        quick: limits of the rules, and what they become, so that a test need not wait as long as a person would.
    """

    def __init__(self, folder: Path, rules: Path, quick: dict[str, str]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        text = rules.read_text(encoding="utf-8")
        for old, new in quick.items():
            assert old in text, f"the rules have no {old!r}"
            text = text.replace(old, new)
        text = re.sub(r"interval: 15s", f"interval: {EVERY}", text)
        (folder / "rules.yaml").write_text(text, encoding="utf-8")
        self._targets = folder / "targets.json"
        self._targets.write_text("[]", encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        job = {
            "job_name": "planaria",
            "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": EVERY}],
        }
        config = {
            "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [job],
        }
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'series'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=1).close()
                return self
            except OSError:
                assert time.monotonic() < deadline, (self._folder / "prometheus.log").read_text()
                time.sleep(0.1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)

    def scrape(self, address: str) -> None:
        """Scrape this address from now on."""
        self._targets.write_text(json.dumps([{"targets": [address]}]), encoding="utf-8")

    def now(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The samples of an expression at a moment, default: now.

        Raises:
            ValueError: Prometheus cannot evaluate it.
        """
        return self._ask("query", query=expr, **({} if at is None else {"time": at}))

    def over(self, expr: str, begin: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression between two moments, as a chart asks for them; see :meth:`now`."""
        return self._ask("query_range", query=expr, start=begin, end=end, step=2)

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {sample["metric"]["alertname"] for sample in self.now('ALERTS{alertstate="firing"}')}

    def problems(self) -> list[str]:
        """Rules whose evaluation failed."""
        with urllib.request.urlopen(f"http://{self._address}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]
        return [
            f"{rule['name']}: {rule['lastError']}"
            for group in groups
            for rule in group["rules"]
            if rule.get("lastError")
        ]

    def _ask(self, what: str, **values: Any) -> list[dict[str, Any]]:
        url = f"http://{self._address}/api/v1/{what}"
        try:
            with urllib.request.urlopen(url, urllib.parse.urlencode(values).encode(), timeout=30) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as error:
            raise ValueError(f"{values['query']}: {error.read().decode()}") from error
