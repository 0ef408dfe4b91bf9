"""What makes the documentation's generated pages: of codes, of what is supported, of benchmarks. mkdocs calls hooks.py."""
