# Training on GPUs:
#   docker build -t flow-grpo .
#   docker run --gpus all --shm-size 8g -v "$PWD/logs:/app/logs" flow-grpo \
#       train --config config/grpo.py:tiny_ocr
# The mounted directory must be writable by user 10001. The wheels of torch bring the CUDA libraries.
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

# torch.compile needs a C compiler and Python's headers
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --create-home --uid 10001 trainer
ENV PATH=/opt/venv/bin:$PATH

WORKDIR /src
COPY setup.py pyproject.toml MANIFEST.in LICENSE ./
COPY flow_grpo flow_grpo
COPY reward_server reward_server
COPY scripts scripts
COPY config config
COPY dataset dataset
COPY assets assets
COPY docs/benchmarks docs/benchmarks
RUN pip install --no-cache-dir "/src[ocr,plot,tensorboard,deepspeed]"

WORKDIR /app
RUN chown trainer /app
USER 10001
ENTRYPOINT ["flow-grpo"]
CMD ["--help"]
