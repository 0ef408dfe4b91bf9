"""Gluon kernels for sm90."""
