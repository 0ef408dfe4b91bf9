"""What a call of a leaf op does on tensors: by our kernels, by a library, or by definition."""
