"""The data that all passes work on: the unit, its mirror of ATen ops, sites, axes, views, and values."""
