# An environment in which `attn-compiler doctor` misses nothing that it needs: Python, a C++ compiler, a pinned torch, and the tests.
#   docker build -t attn_compiler . && docker run --rm -it attn_compiler         (with a GPU: docker run --rm -it --gpus all attn_compiler)
FROM python:3.12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /attn_compiler
COPY . .
RUN python -m pip install --no-cache-dir -c constraints.txt torch \
    && python -m pip install --no-cache-dir -c constraints.txt -e '.[models,demo,dev]' \
    && attn-compiler doctor
CMD ["bash"]
