# The worker. TORCH_INDEX says which build of torch: without CUDA by default, compose.gpu.yml names the other one.
FROM python:3.11.13-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/kvatlas \
 && /opt/kvatlas/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0
COPY deploy/requirements ./requirements
RUN /opt/kvatlas/bin/pip install --no-cache-dir --require-hashes --no-deps -r requirements/worker.txt
COPY pyproject.toml README.md LICENSE ./
COPY protos ./protos
COPY service ./service
COPY worker ./worker
COPY kernels ./kernels
COPY dashboard ./dashboard
RUN /opt/kvatlas/bin/pip install --no-cache-dir --no-deps . \
 && /opt/kvatlas/bin/pip check

FROM python:3.11.13-slim-bookworm
# The compiler is used where the image runs: kernels are built for the processor that is there, once.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 kvatlas \
 && useradd --uid 10001 --gid 10001 --create-home kvatlas \
 && install -d -o kvatlas -g kvatlas -m 0700 \
    /models /run/kvatlas /recordings /home/kvatlas/.cache
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/kvatlas \
    KVATLAS_CACHE=/models \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/home/kvatlas/.cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/kvatlas
ENTRYPOINT ["python", "-m", "worker"]
