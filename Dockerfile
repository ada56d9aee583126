# The project with its locked packages, for CPU:
#
#   docker build -t rl-code .
#   docker run --rm --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#       --security-opt systempaths=unconfined -v "$PWD/runs:/rl-code/runs" rl-code \
#       python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
#
# and for NVIDIA GPUs: --build-arg EXTRAS="requirements/locked/cuda.txt", then docker run --gpus all.
# The options let the sandbox make user namespaces and mount /proc in them. Not built here.
FROM python:3.12-slim
ARG EXTRAS=""
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /rl-code
COPY requirements/locked/ requirements/locked/
RUN for file in requirements/locked/requirements.txt $EXTRAS; do \
        pip install --no-cache-dir --require-hashes -r "$file" || exit 1; \
    done
COPY . .
ENV PYTHONPATH=/rl-code
CMD ["python", "-m", "launch"]
