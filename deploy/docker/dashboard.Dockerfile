# The dashboard. It speaks gRPC with the service and nothing else.
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /src
COPY deploy/requirements ./requirements
RUN python -m venv /opt/kvatlas \
 && /opt/kvatlas/bin/pip install --no-cache-dir --require-hashes --no-deps -r requirements/dashboard.txt
COPY pyproject.toml README.md LICENSE ./
COPY protos ./protos
COPY service ./service
COPY worker ./worker
COPY kernels ./kernels
COPY dashboard ./dashboard
RUN /opt/kvatlas/bin/pip install --no-cache-dir --no-deps . \
 && /opt/kvatlas/bin/pip check \
 && /opt/kvatlas/bin/python -c "import importlib.util as u; assert u.find_spec('torch') is None"

FROM python:3.11.13-slim-bookworm
RUN groupadd --gid 10001 kvatlas \
 && useradd --uid 10001 --gid 10001 --create-home kvatlas
COPY --from=build /opt/kvatlas /opt/kvatlas
ENV PATH=/opt/kvatlas/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/kvatlas \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/kvatlas
ENTRYPOINT ["python", "-m", "dashboard"]
