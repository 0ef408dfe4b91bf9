"""Attention over a sequence that the ranks of a process group have parts of (`options={"context_parallel": ContextParallel(...)}`).

spreading.py rewrites a graph's attentions for the whole sequence. The result is matched and recovered like any graph. Then agreement.py
compares it with the other ranks' results.

following.py, ops.py: the proof that nothing but attention mixes positions. whole.py: whole tensors for masks. exchanging.py:
the collectives. sites.py: each attention anew; halo.py: with only the keys near a rank's queries. decoding.py: over a cache that ranks
share.

Every reason to leave something as it was is an error, on every rank: a site that is left alone would attend to a part of the sequence.
"""
