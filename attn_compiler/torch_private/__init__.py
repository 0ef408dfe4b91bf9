"""The only user of PyTorch's private API, and the code built on it."""
