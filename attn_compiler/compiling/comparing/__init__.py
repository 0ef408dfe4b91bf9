"""`compare`: this backend beside Inductor's own on one model: times, memory, and how far each is from the uncompiled model.

compare.py: the call. sides.py: what is run of each side, and what a side may fail of. timing.py: steps that take turns. kept.py: what the
model and its inputs held, and gives it back. results.py: outputs and gradients, and how far two are apart. measured.py and comparison.py:
what is given. rendering.py: it as text.
"""
