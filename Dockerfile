# shardwise with DeepSpeed for NVIDIA GPUs, with the versions of constraints.txt:
#   docker build -t shardwise .
#   docker run --rm --gpus all --ipc host -v "$PWD:/workspace" shardwise doctor
# The image has nvcc, with which DeepSpeed compiles its operators when they are first used. Its CUDA must have the
# major version of torch's (13 for torch 2.13).
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential libaio-dev openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/shardwise/bin:$PATH PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt ./
# Layers that change rarely come first. DeepSpeed is built against the torch that is already there.
RUN python3 -m venv /opt/shardwise \
    && pip install setuptools wheel torch numpy packaging psutil py-cpuinfo ninja hjson \
    && DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install '.[train,serve]'

WORKDIR /workspace
ENTRYPOINT ["shardwise"]
CMD ["--help"]
