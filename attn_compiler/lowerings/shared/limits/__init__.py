"""What a kernel or a library does not take, as reasons; and what a family takes, as data (takes.py)."""
