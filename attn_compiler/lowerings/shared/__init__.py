"""What every family stands on: a site's parts, the tensors that they need, limits, leaf ops and how kernels are launched."""
