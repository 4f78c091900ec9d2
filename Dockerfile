# A container for those who want one; `pip install` alone is enough. Not built by .ci/run.
#   docker build -t megatron-vlm . && docker run --gpus all --shm-size 16g -v /data:/data megatron-vlm train --help
FROM python:3.12-slim

# Triton compiles kernels with gcc when a run starts
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron_vlm
COPY . .
# torch's wheels bring the CUDA libraries that they need
RUN pip install --no-cache-dir torch torchvision && pip install --no-cache-dir '.[gpu]'
ENTRYPOINT ["megatron-vlm"]
