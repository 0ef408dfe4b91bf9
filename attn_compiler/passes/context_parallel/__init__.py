"""Attention over a sequence that the ranks of a process group have parts of (`options={"context_parallel": ContextParallel(...)}`).

spreading.py rewrites a graph's attentions for the whole sequence. What comes out is matched and recovered like any graph, and then
agreeing.py compares it with what the other ranks have.

following.py, ops.py: that nothing but attention mixes positions. whole.py: what masks read, of the whole sequence. layout.py and
exchanging.py: the collectives. sites.py: each attention anew; halo.py: with the keys near a rank's queries alone. decoding.py: over a cache
that ranks share.

Every reason to leave something as it was is an error, on every rank: a site that is left alone would attend to a part of the sequence.
"""
