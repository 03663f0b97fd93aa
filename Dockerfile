# docker build -t acp_repro . && docker run -v "$PWD/figures:/acp_repro/figures" acp_repro
# A GPU: docker build --build-arg TORCH=cu128 . and docker run --gpus all. TORCH is an index of pytorch.org, such as cpu.
FROM python:3.11-slim-bookworm
ARG TORCH=cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc git libc6-dev make && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/${TORCH}
WORKDIR /acp_repro
COPY pyproject.toml uv.lock Makefile README.md LICENSE ./
COPY acp_repro acp_repro
RUN make setup
COPY . .
CMD ["make", "figure2"]
