"""Manifests of every overlay: rendered, valid, within the policies; and each check finds a planted mistake."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.k8s.policies import problems
from tests.k8s.rendering import OVERLAYS, ROOT, Document, Pod, clusters, documents, pods, quantity

from planaria.config import JobConfig, load

REFERENCE = ROOT.parent / "shared" / "reference"


@pytest.fixture(scope="module")
def validator() -> Any:
    """Checks documents as the API server and KubeRay's operator would, unknown fields included."""
    file = REFERENCE / "validate_crd.py"
    if not file.is_file():
        pytest.skip("no CRDs of KubeRay beside the repository")
    pytest.importorskip("jsonschema", reason="jsonschema is not installed, which the check against the CRDs needs")
    spec = importlib.util.spec_from_file_location("validate_crd", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _invalid(validator: Any, docs: list[Document]) -> list[str]:
    # load_crds parses the whole CRDs, once; core kinds are checked where kubernetes-validate is installed.
    crds = validator.load_crds(str(REFERENCE / "crds"))
    return [
        f"{doc['kind']}{path}: {text}"
        for doc in docs
        for path, text in validator.validate(doc, crds, core=True)
        if not text.startswith("note:")
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_keeps_the_policies(overlay):
    assert problems(documents(overlay)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_valid(overlay, validator):
    assert _invalid(validator, documents(overlay)) == []


def test_all_kinds_of_ray_resources_are_there():
    kinds = {doc["kind"] for overlay in OVERLAYS for doc in documents(overlay)}
    assert kinds >= {"RayCluster", "RayJob", "RayCronJob", "PodMonitor", "LocalQueue"}
    for overlay in OVERLAYS:
        docs = documents(overlay)
        assert len(list(clusters(docs))) == 1, "a RayJob takes the cluster's place, and does not stand beside it"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_clusters_run_the_ray_that_is_tested(overlay):
    pin = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pin is not None
    for cluster in clusters(documents(overlay)):
        assert cluster["rayVersion"] == pin[1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_job_of_an_overlay_fits_its_cluster(overlay, tmp_path, monkeypatch):
    monkeypatch.delenv("PLANARIA_STORAGE", raising=False)
    docs = documents(overlay)
    (config,) = (doc for doc in docs if doc["kind"] == "ConfigMap")
    file = tmp_path / "job.yaml"
    file.write_text(config["data"]["job.yaml"])
    job = load(file)
    places = [(pod, _workers(job, pod)) for pod in pods(docs) if pod.name.startswith("trainers")]
    assert job.elastic.max_workers <= sum(pod.most * workers for pod, workers in places)
    for pod, workers in places:
        assert any(mount["mountPath"] == job.storage for mount in pod.container["volumeMounts"])
        if "nvidia.com/gpu" in pod.container["resources"]["limits"]:
            assert job.data.loader_cpus > 0, "loaders go where a CPU is free"
            assert workers * job.resources.cpus == float((pod.start or {})["num-cpus"]), "and none is beside workers"


def _workers(job: JobConfig, pod: Pod) -> int:
    """Workers that one pod has room for, in Ray's books."""
    gpus = pod.container["resources"]["limits"].get("nvidia.com/gpu")
    if gpus is not None:
        return int(quantity(gpus) / job.resources.gpus)
    return int(float((pod.start or {})["num-cpus"]) / job.resources.cpus)


# Planted mistakes

Mutation = Callable[[list[Document]], Any]


def _cluster(docs: list[Document]) -> Document:
    return next(clusters(docs))


def _group(docs: list[Document]) -> Document:
    found: Document = _cluster(docs)["workerGroupSpecs"][1]
    return found


def _pod(docs: list[Document]) -> Document:
    found: Document = _group(docs)["template"]["spec"]
    return found


def _container(docs: list[Document]) -> Document:
    found: Document = _pod(docs)["containers"][0]
    return found


def _of(docs: list[Document], kind: str) -> Document:
    return next(doc for doc in docs if doc["kind"] == kind)


def _set(row: Document, **values: Any) -> None:
    row.update(values)


def _variable(docs: list[Document], name: str, value: str) -> None:
    rows = _container(docs)["env"]
    rows[:] = [row for row in rows if row["name"] != name] + [{"name": name, "value": value}]


MISTAKES: dict[str, tuple[Mutation, str]] = {
    "no limit": (lambda d: _container(d)["resources"]["limits"].pop("memory"), "bounded: .*no limits for memory"),
    "overcommitted": (lambda d: _set(_container(d)["resources"]["requests"], memory="1Gi"), "bounded: .*differ in mem"),
    "endless disk": (lambda d: _container(d)["resources"]["limits"].pop("ephemeral-storage"), "bounded: .*ephemeral"),
    "bare autoscaler": (lambda d: _cluster(d)["autoscalerOptions"].pop("resources"), "bounded: head/autoscaler"),
    "no probe": (lambda d: _container(d).pop("livenessProbe"), "probed: .*no livenessProbe"),
    "probe of what wants the token": (
        lambda d: _container(d)["readinessProbe"]["exec"]["command"].append("localhost:8265/api/version"),
        "probed: .*token",
    ),
    "root": (lambda d: _container(d)["securityContext"].pop("runAsNonRoot"), "unprivileged: .*runAsNonRoot"),
    "named user": (lambda d: _pod(d)["securityContext"].pop("runAsUser"), "unprivileged: .*no runAsUser"),
    "writable root": (
        lambda d: _set(_container(d)["securityContext"], readOnlyRootFilesystem=False),
        "unprivileged: .*readOnlyRootFilesystem",
    ),
    "capabilities": (lambda d: _container(d)["securityContext"].pop("capabilities"), "unprivileged: .*capabilities"),
    "no seccomp": (lambda d: _container(d)["securityContext"].pop("seccompProfile"), "unprivileged: .*seccomp"),
    "escalation": (
        lambda d: _set(_container(d)["securityContext"], allowPrivilegeEscalation=True),
        "unprivileged: .*allowPrivilegeEscalation",
    ),
    "host network": (lambda d: _set(_pod(d), hostNetwork=True), "unprivileged: .*hostNetwork"),
    "no /tmp": (
        lambda d: _set(_container(d), volumeMounts=[m for m in _container(d)["volumeMounts"] if m["name"] != "tmp"]),
        "writable: .*/tmp",
    ),
    "home on the root": (lambda d: _variable(d, "HOME", "/home/ray"), "writable: .*HOME"),
    "volume left out": (lambda d: _pod(d)["volumes"].pop(), "writable: .*no volume"),
    "latest": (lambda d: _set(_container(d), image="registry:5000/planaria:latest"), "pinned: .*latest"),
    "no tag": (lambda d: _set(_container(d), image="registry:5000/planaria"), "pinned: .*without a tag"),
    "short grace": (lambda d: _set(_pod(d), terminationGracePeriodSeconds=110), "graceful: .*grace period 110"),
    "default grace": (lambda d: _pod(d).pop("terminationGracePeriodSeconds"), "graceful: .*grace period 30"),
    "hasty stop": (lambda d: _variable(d, "RAY_JOB_STOP_WAIT_TIME_S", "3"), "graceful: .*last checkpoint"),
    "hook": (lambda d: _set(_container(d), lifecycle={"preStop": {}}), "graceful: .*preStop"),
    "small shm": (lambda d: _set(_pod(d)["volumes"][0]["emptyDir"], sizeLimit="64Mi"), "roomy: .*too small"),
    "shm on disk": (lambda d: _pod(d)["volumes"][0]["emptyDir"].pop("medium"), "roomy: .*not in memory"),
    "shm as large as the memory": (
        lambda d: _set(_pod(d)["volumes"][0]["emptyDir"], sizeLimit="512Gi"),
        "roomy: .*little memory",
    ),
    "no tier": (lambda d: _group(d)["template"]["metadata"].pop("annotations"), "roomy: .*no annotation"),
    "unbounded objects": (lambda d: _group(d)["rayStartParams"].pop("object-store-memory"), "roomy: .*too small"),
    "secret": (lambda d: d.append({"kind": "Secret", "metadata": {"name": "s3"}}), "discreet: Secret/s3"),
    "key in plain": (lambda d: _variable(d, "AWS_SECRET_ACCESS_KEY", "x"), "discreet: .*in plain"),
    "no token": (lambda d: _cluster(d).pop("authOptions"), "guarded: .*token authentication"),
    "work on the head": (
        lambda d: _set(_cluster(d)["headGroupSpec"]["rayStartParams"], **{"num-cpus": "4"}),
        "guarded: head: takes work",
    ),
    "old autoscaler": (lambda d: _set(_cluster(d)["autoscalerOptions"], version="v1"), "guarded: .*v1"),
    "open to the world": (
        lambda d: _set(_cluster(d)["headGroupSpec"], serviceType="LoadBalancer"),
        "guarded: .*from outside",
    ),
    "account token": (lambda d: _pod(d).pop("automountServiceAccountToken"), "guarded: .*token of the API"),
    "unknown priority": (lambda d: _set(_pod(d), priorityClassName="high"), "connected: .*priorityClassName high"),
    "unknown account": (lambda d: _set(_pod(d), serviceAccountName="me"), "connected: .*serviceAccountName me"),
    "no claim": (lambda d: d.remove(_of(d, "PersistentVolumeClaim")), "connected: .*claim planaria-runs"),
    "no job": (lambda d: d.remove(_of(d, "ConfigMap")), "connected: .*config map"),
    "spread over others": (
        lambda d: _set(_pod(d)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"], a="b"),
        "connected: .*spread",
    ),
    "budget in percent": (
        lambda d: _set(_of(d, "PodDisruptionBudget")["spec"], minAvailable="50%"),
        "connected: .*only a number",
    ),
    "budget for nobody": (
        lambda d: _set(_of(d, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"], a="b"),
        "connected: PodDisruptionBudget/.*none",
    ),
    "policy for nobody": (
        lambda d: _set(_of(d, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"], a="b"),
        "connected: NetworkPolicy/.*none",
    ),
    "unnamed port": (
        lambda d: _set(_of(d, "PodMonitor")["spec"]["podMetricsEndpoints"][0], port="nowhere"),
        "connected: PodMonitor: .*nowhere",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake):
    plant, expected = MISTAKES[mistake]
    docs = documents("gpu-spot")
    plant(docs)
    assert any(re.match(expected, problem) for problem in problems(docs)), problems(docs)


INVALID: dict[str, tuple[str, Mutation]] = {
    "misspelt field": ("gpu-spot", lambda d: _set(_group(d), minReplica=1)),
    "misspelt field of a pod": ("gpu-spot", lambda d: _set(_pod(d), terminationGracePeriod=120)),
    "wrong type": ("gpu-spot", lambda d: _set(_group(d), maxReplicas="8")),
    "restart policy of autoscaler v1": ("gpu-spot", lambda d: _set(_pod(d), restartPolicy="Always")),
    "duplicate group": ("gpu-spot", lambda d: _set(_group(d), groupName="loaders")),
    "long name": ("gpu-spot-job", lambda d: _set(_of(d, "RayJob")["metadata"], name="x" * 48)),
    "unknown mode": ("gpu-spot-job", lambda d: _set(_of(d, "RayJob")["spec"], submissionMode="Local")),
    "no shutdown": ("gpu-spot-job", lambda d: _of(d, "RayJob")["spec"].pop("shutdownAfterJobFinishes")),
    "misspelt field of a template": (
        "evaluation",
        lambda d: _set(_of(d, "RayCronJob")["spec"]["jobTemplate"], entryPoint="x"),
    ),
}


@pytest.mark.parametrize("mistake", INVALID)
def test_an_invalid_manifest_is_found(mistake, validator):
    overlay, plant = INVALID[mistake]
    docs = documents(overlay)
    plant(docs)
    assert _invalid(validator, docs)


def test_nothing_but_kustomizations_and_their_files_lies_there():
    """A file that no kustomization names would be neither rendered nor checked."""
    for folder in (path.parent for path in (ROOT / "k8s").rglob("kustomization.yaml")):
        text = (folder / "kustomization.yaml").read_text()
        for file in folder.glob("*.yaml"):
            assert file.name == "kustomization.yaml" or file.name in text, f"{_relative(file)} is named nowhere"


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))
