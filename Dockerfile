# One image per service: `docker build --target gateway .` and so on. A target holds its extra only,
# so the gateway's image has no torch.
#
# Besides the package index pip looks into `wheels/` (git-ignored, may be missing) and, if given, into
# PIP_FIND_LINKS: a CPU build of torch put there keeps pip from fetching the CUDA build.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ARG PIP_FIND_LINKS
ARG PIP_CERT
ENV PIP_FIND_LINKS="/wheels ${PIP_FIND_LINKS}" PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 \
    PIP_CERT=${PIP_CERT} PYTHONUNBUFFERED=1 GRPC_ENABLE_FORK_SUPPORT=0 VIRTUAL_ENV=/opt/sluiceway PATH=/opt/sluiceway/bin:$PATH
RUN python3 -m venv /opt/sluiceway
WORKDIR /app
COPY pyproject.toml README.md constraints.txt ./
COPY services ./services
RUN pip install -c constraints.txt . && useradd --create-home sluiceway

FROM base AS kvstore
RUN pip install -c constraints.txt '.[kvstore]'
USER sluiceway
ENTRYPOINT ["python", "-m", "services.kvstore"]

FROM base AS scheduler
RUN pip install -c constraints.txt '.[scheduler]'
USER sluiceway
ENTRYPOINT ["python", "-m", "services.scheduler"]

FROM base AS tokenizer
RUN pip install -c constraints.txt '.[tokenizer]'
USER sluiceway
ENTRYPOINT ["python", "-m", "services.tokenizer"]

FROM base AS gateway
RUN pip install -c constraints.txt '.[gateway]'
USER sluiceway
ENTRYPOINT ["python", "-m", "services.gateway"]

FROM base AS worker
# The pattern keeps the line valid when there is no wheels folder.
COPY constraints.txt wheel[s] /wheels/
RUN pip install -c constraints.txt torch==2.13.0 && pip install -c constraints.txt '.[worker]'
# The native CPU library is looked up by its compiler, so the compiler stays.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
USER sluiceway
RUN python -m services.worker.native
ENTRYPOINT ["python", "-m", "services.worker"]

# The one-shot that fills the model volume.
FROM worker AS model
USER root
RUN pip install -c constraints.txt '.[pull]' && mkdir /cache && chown sluiceway /cache
USER sluiceway
ENTRYPOINT ["python", "-m", "services.pull"]
