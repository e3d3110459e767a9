# syntax=docker/dockerfile:1
# One image for head and workers of a KubeRay cluster, for the submitter of jobs, and for trying things out.
#
#   docker build -t planaria:cpu .
#   docker build -t planaria:cuda --build-arg DEVICE=cuda .
#
# TORCH_INDEX is an index to look into besides PyPI. PyPI's own torch wheels hold CUDA; the CPU image takes the
# much smaller ones from PyTorch's index.
ARG DEVICE=cpu
ARG CUDA_VERSION=13.0.1
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS base-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX}
# The "+cpu" build of the pinned version satisfies constraints.txt and is preferred over PyPI's.
RUN python -m venv /opt/planaria

# torch's wheels bring cuBLAS, cuDNN and NCCL; the base image adds the driver hooks and the CUDA runtime.
FROM nvidia/cuda:${CUDA_VERSION}-base-ubuntu24.04 AS base-cuda
ARG PYTHON_VERSION
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Ubuntu 24.04 has Python 3.12 only; uv installs the version that the pins are for.
COPY --from=ghcr.io/astral-sh/uv:0.8 /uv /usr/local/bin/uv
ENV UV_PYTHON_INSTALL_DIR=/opt/python
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && uv venv --seed --python "${PYTHON_VERSION}" /opt/planaria

# hadolint ignore=DL3006
FROM base-${DEVICE} AS final
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# KubeRay's probes and start scripts need wget and bash; DeepSpeed's CPU optimizer is compiled at first use; tini
# reaps the children of killed workers. A login shell, which KubeRay can be told to use, resets PATH: profile.d.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install -y --no-install-recommends bash build-essential procps tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && (id -u ubuntu >/dev/null 2>&1 && userdel --remove ubuntu || true) \
    && groupadd --gid 1000 ray \
    && useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray \
    && echo 'export PATH=/opt/planaria/bin:$PATH' >/etc/profile.d/planaria.sh

ENV PATH=/opt/planaria/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    RAY_USAGE_STATS_ENABLED=0

# The dependencies first: they change seldom, and make a layer of their own.
WORKDIR /opt/src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY platform/planaria/__init__.py platform/planaria/__init__.py
RUN pip install -c constraints.txt .

COPY platform platform
COPY jobs /home/ray/jobs
RUN pip install --no-deps --force-reinstall . \
    && rm -rf /opt/src/build \
    && ray --version \
    && planaria --help >/dev/null

# By number, so that Kubernetes can tell that it is not root.
USER 1000:1000
WORKDIR /home/ray
# 6379 GCS, 8265 dashboard and job API, 10001 client, 8080 Ray's metrics
EXPOSE 6379 8265 10001 8080
ENTRYPOINT ["tini", "-g", "--"]
CMD ["planaria", "--help"]
