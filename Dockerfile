# autotune for NVIDIA GPUs, with the versions that were measured on GPUs. The host needs a driver for CUDA 13 and the
# NVIDIA Container Toolkit. The folder you start it in is its home: studies and their database lie in runs/ there.
#   docker build --tag autotune . && docker run --rm --gpus all --user "$(id -u):$(id -g)" --volume "$PWD:/work" autotune run --model mistral-7b
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton compiles a small C module for compiled layers, against Python's headers. torch brings the CUDA libraries.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE constraints.txt constraints-gpu.txt /src/
COPY autotune /src/autotune
COPY search_spaces /src/search_spaces
COPY studies/published /src/studies/published
COPY docs/errors.md docs/images.md docs/knobs.md docs/longest.md docs/other-gpus.md /src/docs/
RUN python3 -m venv /opt/autotune \
    && awk -F== 'NR == FNR { measured[$1] } FNR < NR && $1 in measured { next } { print }' \
        /src/constraints-gpu.txt /src/constraints.txt > /src/versions.txt \
    && /opt/autotune/bin/pip install --no-cache-dir --constraint /src/versions.txt "/src[run]" \
    && rm -rf /src

# Any user may run it: with your own, the files of a study are yours. Caches need a home and a name.
RUN useradd --uid 10001 --create-home autotune \
    && chmod 1777 /home/autotune \
    && install --directory --mode 1777 /work
ENV PATH="/opt/autotune/bin:$PATH" HOME=/home/autotune USER=autotune
USER 10001:10001
WORKDIR /work
ENTRYPOINT ["autotune"]
CMD ["--help"]
