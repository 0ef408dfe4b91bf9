"""The entry point of `torch.compile`: PyTorch's registry, the backend, and `explain` and `compare`, which only report."""
