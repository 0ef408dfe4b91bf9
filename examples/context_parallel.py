"""Train a Llama on sequences that ranks share: torchrun --nproc-per-node 4 examples/context_parallel.py [length] [width]

On GPUs if there are any, with a length of 65536, say; else on a CPU, where any number of ranks has the losses of one.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import attn_compiler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(width: int) -> LlamaForCausalLM:
    """Two layers; half as many heads of k and v as of q."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    config = LlamaConfig(hidden_size=width, intermediate_size=3 * width, vocab_size=256, num_hidden_layers=2, **heads)
    return LlamaForCausalLM(config).to(DEVICE)


def main() -> None:
    length, width = (*map(int, sys.argv[1:]), *(200, 128)[len(sys.argv) - 1 :])
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    cp = attn_compiler.ContextParallel(init_device_mesh(DEVICE, (dist.get_world_size(),)))
    model = build(width)
    step = torch.compile(model, backend="attn_compiler", options={"context_parallel": cp}, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(3):
        ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        part = cp.shard(input_ids=ids, labels=ids)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            total = step(**part, use_cache=False, num_items_in_batch=1).loss  # the sum over this rank's tokens
        loss = cp.mean(total, (part["shift_labels"] != -100).sum())
        loss.backward()
        for parameter in model.parameters():  # DDP and FSDP take this average by themselves
            dist.all_reduce(parameter.grad)
            parameter.grad /= cp.size
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {seed}, loss {loss.item():.6f} nats a token")
    if dist.get_rank() == 0:
        print(attn_compiler.reports().details())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
