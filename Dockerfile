# syntax=docker/dockerfile:1
# One image for head and workers of a KubeRay cluster, for the submitter of jobs, and for trying things out.
#
#   docker buildx bake cpu          planaria:0.1.0-cpu
#   docker buildx bake cuda         planaria:0.1.0-cuda
#   docker build -t planaria:cpu .  the first, without bake; --build-arg DEVICE=cuda for the other
#
# TORCH_INDEX is an index to look into besides PyPI. PyPI's own torch wheels hold CUDA; the CPU image takes the
# much smaller ones from PyTorch's index.
ARG DEVICE=cpu
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04
ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm

FROM ${PYTHON_IMAGE} AS base-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The "+cpu" build of the pinned version satisfies constraints.txt and is preferred over PyPI's.
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX}
RUN python -m venv /opt/planaria

# torch's wheels bring cuBLAS, cuDNN and NCCL; the base image adds the driver hooks and the CUDA runtime.
FROM ${CUDA_IMAGE} AS base-cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Ubuntu 24.04 has Python 3.12 only; uv installs the version that the pins are for.
ENV UV_PYTHON_INSTALL_DIR=/opt/python
# hadolint ignore=DL3008
RUN --mount=from=ghcr.io/astral-sh/uv:0.8.22,source=/uv,target=/usr/local/bin/uv \
    apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && uv venv --no-cache --seed --python 3.11.13 /opt/planaria

# Everything that is installed, with the compilers and caches that it takes; only /opt/planaria goes on from here.
# hadolint ignore=DL3006
FROM base-${DEVICE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/planaria/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/src
# The dependencies first: they change seldom, and make a layer of their own.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY platform/planaria/__init__.py platform/planaria/__init__.py
RUN pip install -c constraints.txt .
COPY platform platform
RUN pip install --no-deps --force-reinstall . \
    && ray --version \
    && planaria --help >/dev/null

# hadolint ignore=DL3006
FROM base-${DEVICE} AS final
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# KubeRay's start scripts and the probes need bash and wget; DeepSpeed's CPU optimizer and Triton's kernels are compiled
# at first use, hence g++; tini reaps the children of killed workers. A login shell, which KubeRay can be told to use,
# resets PATH: profile.d.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash g++ procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && (id -u ubuntu >/dev/null 2>&1 && userdel --remove ubuntu || true) \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray \
    && echo 'export PATH=/opt/planaria/bin:$PATH' >/etc/profile.d/planaria.sh
COPY --from=build /opt/planaria /opt/planaria
COPY jobs /home/ray/jobs
ENV PATH=/opt/planaria/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    RAY_USAGE_STATS_ENABLED=0

# By number, so that Kubernetes can tell that it is not root.
USER 1000:1000
WORKDIR /home/ray
# 6379 GCS, 8265 dashboard and job API, 10001 client, 8080 Ray's metrics, 9464 Planaria's
EXPOSE 6379 8265 10001 8080 9464
# Of a Ray node. In Kubernetes the manifests' probes count, and this is not looked at.
HEALTHCHECK --interval=15s --timeout=10s --start-period=2m --retries=4 \
    CMD ["wget", "-T", "4", "-q", "-O", "/dev/null", "http://localhost:52365/api/local_raylet_healthz"]
ENTRYPOINT ["tini", "-g", "--"]
CMD ["planaria", "--help"]
