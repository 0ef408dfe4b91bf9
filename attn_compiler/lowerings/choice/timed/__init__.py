"""Lowerings timed on the machine at hand, for sites without a measured row.

which.py: which sites, and which lowerings. values.py: real tensors in the place of fake ones. eager.py: an emitter that computes at once.
clock.py: microseconds of a GPU. timing.py: all of it for one site. passes/writing/time_kernels.py takes the fastest.
"""

from attn_compiler.lowerings.choice.timed.timing import microseconds
from attn_compiler.lowerings.choice.timed.values import NoValues, SiteTensors
from attn_compiler.lowerings.choice.timed.which import lowerings_for

__all__ = ["NoValues", "SiteTensors", "lowerings_for", "microseconds"]
