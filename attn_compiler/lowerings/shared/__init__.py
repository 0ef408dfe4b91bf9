"""Code that every family uses. Rooms, each of which may import those before it: ops, parts, limits, kernels, launching, calls."""
