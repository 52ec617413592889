# syntax=docker/dockerfile:1
# docker build -t quire:cpu .                  for machines without a GPU
# docker build -t quire:cuda --target cuda .   with the CUDA libraries that PyTorch's wheel brings
ARG PYTHON=3.13-slim-bookworm

# What changes rarely is a layer below what changes often: PyTorch, then packages, then Quire.
FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN grep '^torch==' constraints.txt > /torch.txt \
    && sed -n 's/^# GPU: //p' constraints.txt > /cuda-torch.txt && python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
print(*project['dependencies'], *extras['gguf'], *extras['otel'], sep='\n')" > /requirements.txt
COPY README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS base
# Everything that is kept between starts lies in the user's home: models, compiled kernels, tables.
RUN useradd --uid 10001 --home-dir /cache --create-home --shell /usr/sbin/nologin quire
ENV HOME=/cache \
    PYTHONUNBUFFERED=1 \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_PORT=8000
WORKDIR /cache
EXPOSE 8000
# A start may download a model; after it, 15 s without readiness are a failure.
HEALTHCHECK --start-period=30m --interval=5s --timeout=4s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['QUIRE_PORT'] + '/ready', timeout=3)"]
ENTRYPOINT ["quire"]
CMD ["serve"]

FROM base AS cuda-torch
COPY --from=wheel /cuda-torch.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/cuda-torch.txt

FROM cuda-torch AS cuda
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton builds the launchers of its kernels with a C compiler. What links across objects is a third of
# the compiler, and not asked for.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /usr/bin/*lto-dump* /usr/lib/gcc/*/*/lto1
COPY --from=wheel /requirements.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001

FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /torch.txt /tmp/
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" -r /tmp/torch.txt
COPY --from=wheel /requirements.txt /tmp/
RUN pip install --no-cache-dir -r /tmp/requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
