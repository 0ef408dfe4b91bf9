"""`compare`: this backend beside Inductor's own on one model: times, memory, and distances from the uncompiled model.

compare.py: the call, and sentences for `encode`. sides.py: what runs on each side, and failures of a side. timing.py: interleaved
steps. kept.py: the state of the model and its inputs, saved and restored. results.py: outputs and gradients, and distances between two.
measured.py and comparison.py: the result. rendering.py: the result as text.
"""
