"""What a site is made of for a kernel: its parts, their intervals and tiles, and the tensors that they need in the graph."""
