# gptworks on CPUs. Build it with `docker build -t gptworks .` or `podman build -t gptworks .`; docs/guide.md runs it.
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++
WORKDIR /source
COPY LICENSE README.md pyproject.toml setup.py ./
COPY src src
RUN GPTWORKS_BUILD_NATIVE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}
# PyPI's torch for Linux brings CUDA, which is 5 GB; this index has the CPU build of the same release.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /wheels/constraints.txt \
    "$(echo /wheels/*.whl)[serve,interop,sources]"
RUN useradd gptworks && install --directory --owner=gptworks /models
USER gptworks
# A home that any user may write to: `docker run --user` has others.
ENV HOME=/tmp
# The folder of recipes and texts; gptworks writes data/ and runs/ into it.
WORKDIR /models
VOLUME /models
ENTRYPOINT ["gptworks"]
CMD ["--help"]
