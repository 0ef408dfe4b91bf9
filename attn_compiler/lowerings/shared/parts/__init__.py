"""Parts of a site that kernels take: their intervals and tiles, and their tensors in the graph."""
