"""What every manifest here keeps to. Each policy yields what is wrong, with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.k8s.rendering import Document, Pod, clusters, pods, quantity

Policy = Callable[[list[Document]], Iterator[str]]
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
SECRET_WORDS = ("KEY", "SECRET", "PASSWORD", "TOKEN", "CREDENTIAL")
SPARE_S = 5
"""Between the end of a drain and the kubelet's SIGKILL."""


def _containers(docs: list[Document]) -> Iterator[tuple[str, Document]]:
    for pod in pods(docs):
        for container in [*pod.spec["containers"], *pod.spec.get("initContainers", [])]:
            yield f"{pod.name}/{container['name']}", container
    for cluster in clusters(docs):
        if cluster.get("enableInTreeAutoscaling"):
            yield "head/autoscaler", cluster["autoscalerOptions"]


def bounded(docs: list[Document]) -> Iterator[str]:
    """Requests and limits everywhere; Ray nodes never use memory that was not asked for."""
    for where, container in _containers(docs):
        given = container.get("resources", {})
        for kind in ("requests", "limits"):
            for name in ("cpu", "memory"):
                if name not in given.get(kind, {}):
                    yield f"{where}: no {kind} for {name}"
    for pod in _nodes(docs):
        given = pod.container.get("resources", {})
        for name in ("memory", "nvidia.com/gpu"):
            if given.get("requests", {}).get(name) != given.get("limits", {}).get(name):
                yield f"{pod.name}: requests and limits differ in {name}"
        if "ephemeral-storage" not in given.get("limits", {}):
            yield f"{pod.name}: no limit for ephemeral-storage"


def _nodes(docs: list[Document]) -> Iterator[Pod]:
    return (pod for pod in pods(docs) if pod.start is not None)


def probed(docs: list[Document]) -> Iterator[str]:
    for pod in _nodes(docs):
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "exec" not in pod.container.get(probe, {}):
                yield f"{pod.name}: no {probe}"
        if "/api/version" in str(pod.container):
            yield f"{pod.name}: a probe of /api/version, which wants the token"


def unprivileged(docs: list[Document]) -> Iterator[str]:
    for where, container in _containers(docs):
        given = container.get("securityContext", {})
        wanted: dict[str, Any] = {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for key, value in wanted.items():
            if given.get(key) != value:
                yield f"{where}: securityContext.{key} is {given.get(key)}, not {value}"
    for pod in pods(docs):
        if not pod.spec.get("securityContext", {}).get("runAsUser"):
            yield f"{pod.name}: no runAsUser, so runAsNonRoot refuses an image whose user is a name"
        for host in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(host):
                yield f"{pod.name}: {host}"


def writable(docs: list[Document]) -> Iterator[str]:
    """On a read-only root Ray writes sessions to /tmp and objects to /dev/shm, and libraries write to HOME."""
    for pod in pods(docs):
        mounted = {mount["mountPath"] for mount in pod.container.get("volumeMounts", []) if not mount.get("readOnly")}
        for path in ("/tmp", *(("/dev/shm",) if pod.start is not None else ())):
            if path not in mounted:
                yield f"{pod.name}: nothing to write to at {path}"
        if pod.variables.get("HOME") not in mounted:
            yield f"{pod.name}: HOME is {pod.variables.get('HOME')}, where nothing can be written"
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        for mount in pod.container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{pod.name}: {mount['name']} is mounted, but no volume"


def pinned(docs: list[Document]) -> Iterator[str]:
    for where, container in _containers(docs):
        if where == "head/autoscaler":
            continue  # KubeRay takes the head's image
        tag = container.get("image", "").rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield f"{where}: image {container.get('image')} without a tag, or latest"


def graceful(docs: list[Document]) -> Iterator[str]:
    """The kubelet's patience outlasts Ray's drain, and the end of a job the driver's last checkpoint."""
    for pod in _nodes(docs):
        drain = float(pod.variables.get(DRAIN, 30))
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        if grace < drain + SPARE_S:
            yield f"{pod.name}: grace period {grace} s, but the drain takes up to {drain:g} s"
        if float(pod.variables.get("RAY_JOB_STOP_WAIT_TIME_S", 3)) < 120:
            yield f"{pod.name}: a stopped job is killed before its last checkpoint"
        if "preStop" in pod.container.get("lifecycle", {}):
            yield f"{pod.name}: a preStop hook, which takes its time from the drain"


def roomy(docs: list[Document]) -> Iterator[str]:
    """/dev/shm holds object store and snapshots, and the container's memory, which it counts as, holds it."""
    for pod in _nodes(docs):
        store = float((pod.start or {}).get("object-store-memory", "inf"))
        tier = pod.template["metadata"].get("annotations", {}).get("planaria/snapshot-memory")
        if tier is None and pod.name.startswith("trainers"):
            yield f"{pod.name}: no annotation planaria/snapshot-memory"
        shm = next((v["emptyDir"] for v in pod.spec["volumes"] if v["name"] == "shm"), {})
        size = quantity(shm.get("sizeLimit", 0))
        if shm.get("medium") != "Memory":
            yield f"{pod.name}: /dev/shm is not in memory"
        if size < store + quantity(tier or 0):
            yield f"{pod.name}: /dev/shm of {size:g} bytes is too small for objects {store:g} and snapshots {tier}"
        if quantity(pod.container.get("resources", {}).get("limits", {}).get("memory", 0)) < 1.5 * size:
            yield f"{pod.name}: little memory is left beside a full /dev/shm of {size:g} bytes"


def discreet(docs: list[Document]) -> Iterator[str]:
    for doc in docs:
        if doc["kind"] == "Secret":
            yield f"Secret/{doc['metadata']['name']}: secrets are made outside of the manifests"
    for where, container in _containers(docs):
        for row in container.get("env", []):
            if "value" in row and any(word in row["name"].upper() for word in SECRET_WORDS):
                yield f"{where}: {row['name']} is given in plain"


def guarded(docs: list[Document]) -> Iterator[str]:
    """Token authentication, a network policy, and no account token where none is needed."""
    for cluster in clusters(docs):
        if cluster.get("authOptions", {}).get("mode") != "token":
            yield "cluster: no token authentication"
        if cluster["headGroupSpec"]["rayStartParams"].get("num-cpus") != "0":
            yield "head: takes work"
        if cluster.get("enableInTreeAutoscaling") and cluster.get("autoscalerOptions", {}).get("version") != "v2":
            yield "cluster: autoscaler v1"
        if cluster["headGroupSpec"].get("serviceType") != "ClusterIP":
            yield "head: reachable from outside of the cluster"
    for pod in pods(docs):
        if pod.name != "head" and pod.spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name}: gets a token of the API server"


def connected(docs: list[Document]) -> Iterator[str]:
    """Names that one document uses and another defines; kustomize does not look."""
    names = {
        kind: {doc["metadata"]["name"] for doc in docs if doc["kind"] == kind} for kind in {d["kind"] for d in docs}
    }
    for pod in pods(docs):
        for kind, key in (("PriorityClass", "priorityClassName"), ("ServiceAccount", "serviceAccountName")):
            if pod.spec.get(key) not in names.get(kind, set()):
                yield f"{pod.name}: {key} {pod.spec.get(key)} is not defined"
        for volume in pod.spec.get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            config = volume.get("configMap", {}).get("name")
            if claim is not None and claim not in names.get("PersistentVolumeClaim", set()):
                yield f"{pod.name}: claim {claim} is not defined"
            if config is not None and config not in names.get("ConfigMap", set()):
                yield f"{pod.name}: config map {config} is not defined"
        for constraint in pod.spec.get("topologySpreadConstraints", []):
            wanted = constraint["labelSelector"]["matchLabels"]
            if not wanted.items() <= _labels(pod).items():
                yield f"{pod.name}: spread over pods labelled {wanted}, which it is not"
    for doc in docs:
        if doc["kind"] == "PodDisruptionBudget":
            if not isinstance(doc["spec"].get("minAvailable"), int):
                yield f"{doc['metadata']['name']}: only a number for minAvailable works for pods of a custom resource"
            selector = doc["spec"]["selector"]
        elif doc["kind"] in ("NetworkPolicy", "PodMonitor"):
            selector = doc["spec"]["podSelector" if doc["kind"] == "NetworkPolicy" else "selector"]
        else:
            continue
        if not any(selector["matchLabels"].items() <= _labels(pod).items() for pod in _nodes(docs)):
            yield f"{doc['kind']}/{doc['metadata']['name']}: selects none of the pods"
    ports = {port["name"] for pod in pods(docs) for port in pod.container.get("ports", [])}
    for doc in docs:
        for endpoint in doc["spec"]["podMetricsEndpoints"] if doc["kind"] == "PodMonitor" else []:
            if endpoint["port"] not in ports:
                yield f"PodMonitor: no container has a port {endpoint['port']}"


def _labels(pod: Pod) -> dict[str, str]:
    """Its labels with those that KubeRay adds."""
    kind = "head" if pod.name == "head" else "worker"
    given: dict[str, str] = pod.template["metadata"]["labels"]
    return given | {"ray.io/node-type": kind, "ray.io/group": pod.name}


POLICIES: tuple[Policy, ...] = (
    bounded,
    probed,
    unprivileged,
    writable,
    pinned,
    graceful,
    roomy,
    discreet,
    guarded,
    connected,
)


def problems(docs: list[Document]) -> list[str]:
    """Everything that is wrong."""
    return [f"{policy.__name__}: {problem}" for policy in POLICIES for problem in policy(docs)]
