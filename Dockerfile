# syntax=docker/dockerfile:1
# g4spec in a container. The last stage is the default, for NVIDIA GPUs; `--target cpu` needs none:
#
#   docker build -t g4spec .
#   docker run --rm --gpus all -p 8080:8080 -v "$PWD:/models" -v g4spec:/cache g4spec \
#       serve -m /models/target.gguf -md /models/draft.gguf --host 0.0.0.0 --api-key KEY
#
# torch's wheels bring the CUDA libraries and kernels are compiled by NVRTC, so no CUDA image is
# needed below, and of the host only the driver (with the NVIDIA container toolkit).
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
RUN useradd --create-home --uid 1000 g4spec && install -d -o g4spec -m 700 /cache
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY g4spec g4spec

FROM base AS cpu
# A registry of their own has the builds of torch without CUDA, a tenth of the size.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install -c constraints.txt --index-url "$TORCH_INDEX" torch \
    && pip install -c constraints.txt '.[serve]'
USER 1000
WORKDIR /models
EXPOSE 8080
VOLUME ["/cache"]
ENTRYPOINT ["g4spec"]
CMD ["--help"]

FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install -c constraints.txt '.[serve,cuda]'
USER 1000
WORKDIR /models
EXPOSE 8080
VOLUME ["/cache"]
ENTRYPOINT ["g4spec"]
CMD ["--help"]
