"""The manifests as ``kubectl apply -k`` would send them, and the pods that they make."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())
Document = dict[str, Any]


@functools.cache
def rendered(overlay: str) -> str:
    """YAML of all documents of one overlay; skips where kubectl is missing."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, which renders the overlays")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / "k8s/overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(overlay: str) -> list[Document]:
    """Fresh copies of all documents of one overlay."""
    return [document for document in yaml.safe_load_all(rendered(overlay)) if document is not None]


@dataclass(frozen=True)
class Pod:
    """One template of pods in a Ray resource."""

    name: str
    template: Document
    start: dict[str, str] | None
    """Parameters of ``ray start``; None for a pod that is no Ray node."""
    most: int = 1
    """Largest number of such pods."""

    @property
    def spec(self) -> Document:
        found: Document = self.template["spec"]
        return found

    @property
    def container(self) -> Document:
        found: Document = self.spec["containers"][0]
        return found

    @property
    def variables(self) -> dict[str, str]:
        return {row["name"]: row["value"] for row in self.container.get("env", []) if "value" in row}


def clusters(docs: list[Document]) -> Iterator[Document]:
    """Specs of all Ray clusters."""
    for doc in docs:
        spec = doc.get("spec", {})
        if doc["kind"] == "RayCluster":
            yield spec
        elif doc["kind"] == "RayJob":
            yield spec["rayClusterSpec"]
        elif doc["kind"] == "RayCronJob":
            yield spec["jobTemplate"]["rayClusterSpec"]


def pods(docs: list[Document]) -> Iterator[Pod]:
    """All templates of pods."""
    for cluster in clusters(docs):
        head = cluster["headGroupSpec"]
        yield Pod("head", head["template"], head["rayStartParams"])
        for group in cluster["workerGroupSpecs"]:
            yield Pod(group["groupName"], group["template"], group["rayStartParams"], group["maxReplicas"])
    for doc in docs:
        job = (
            doc["spec"]
            if doc["kind"] == "RayJob"
            else doc["spec"]["jobTemplate"]
            if doc["kind"] == "RayCronJob"
            else {}
        )
        if "submitterPodTemplate" in job:
            yield Pod("submitter", job["submitterPodTemplate"], None)


def quantity(text: str | float) -> float:
    """Value of a Kubernetes quantity: ``1500m``, ``4``, ``8Gi``."""
    units = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    text = str(text)
    number = text.rstrip("mkMGTi")
    return float(number) * (units[text[len(number) :]] if len(number) < len(text) else 1)
