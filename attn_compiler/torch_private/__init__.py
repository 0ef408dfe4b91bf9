"""The only user of PyTorch's private API, and what stands on it."""
