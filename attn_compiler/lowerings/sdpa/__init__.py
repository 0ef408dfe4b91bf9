"""PyTorch's own attention kernels."""
