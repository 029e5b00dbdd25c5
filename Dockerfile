# Pequod's image. CPU: docker build --build-arg TORCH_INDEX=… .     CUDA: docker build --build-arg DEVICE=cuda .
# docker/README.md tells what to put for TORCH_INDEX, and how to run what comes out.
ARG DEVICE=cpu
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS dependencies
ARG DEVICE
# The package index to take torch from, for a build of torch other than the one that pip's own index has.
ARG TORCH_INDEX=""
# A mirror of the package index for everything else; pip reads it from the environment.
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/pequod
ENV PATH=/opt/pequod/bin:$PATH
WORKDIR /src
# What is needed comes before what changes: an edit in engine/ or server/ leaves the gigabytes of this layer alone.
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && grep '^torch[^a-z]' requirements.txt > torch.txt \
    && if [ -n "$TORCH_INDEX" ]; then pip install --index-url "$TORCH_INDEX" -r torch.txt; fi \
    && pip install -r requirements.txt
RUN if [ "$DEVICE" = cuda ]; then \
        python -c "import sys, torch; sys.exit(0 if torch.version.cuda else 'torch has no CUDA; leave TORCH_INDEX out')"; \
    fi
# The compiler of the CPU kernels stays in this stage. Pequod is installed into a folder of its own and not among its
# dependencies, so that a new version of it is a layer of megabytes on top of an unchanged one of gigabytes.
FROM dependencies AS builder
ARG PIP_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY README.md LICENSE ./
COPY engine engine
COPY server server
COPY pequod.py ./
RUN pip install --no-deps --prefix /opt/install .
# pip hides what the build hook prints, so an image without its kernels would otherwise go unnoticed.
RUN cd /opt/install/lib/python*/site-packages \
    && python -c "from engine.kernels import build; print(build.supported() or build.library(beside=True))"

FROM ${PYTHON_IMAGE} AS runtime-cpu
RUN groupadd --gid 10001 pequod \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin pequod \
    && install --directory --owner=pequod --group=pequod /cache

# torch brings the CUDA libraries along; the driver comes from the host, through the NVIDIA container toolkit.
FROM runtime-cpu AS runtime-cuda
# Triton compiles the launchers of its kernels with gcc; Python's headers are part of the base image.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${DEVICE:-cpu}
COPY --from=dependencies /opt/pequod /opt/pequod
COPY --from=builder /opt/install /opt/pequod
COPY docker/health.py /opt/pequod/health.py
# A checkout under umask 077 has it for its owner alone.
RUN chmod 0644 /opt/pequod/health.py
# The address is set here and not in CMD, so that `docker run IMAGE serve MODEL` is reachable, too.
ENV PATH=/opt/pequod/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PEQUOD_HOST=0.0.0.0
VOLUME ["/cache"]
WORKDIR /cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# /live, not /ready: some orchestrators kill what is unhealthy, and a server that loads or is busy must not be.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["python", "/opt/pequod/health.py", "/live"]
ENTRYPOINT ["pequod"]
CMD ["serve"]
# Last, so that another revision leaves the layers alone.
ARG DEVICE
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="pequod" \
      org.opencontainers.image.description="An OpenAI-compatible LLM inference server ($DEVICE)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
