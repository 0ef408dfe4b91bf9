"""What `torch.compile` calls: the entry in PyTorch's registry, the backend, and `explain` and `compare`, which only report."""
