"""Padding that is never computed (`options={"unpad": True}`): real tokens are packed, and outputs are unpacked with 0 at padding.

packing.py makes the packed graph, on a copy. It is matched, recovered and decided for like any graph. Then judging.py accepts all of it in
place of the model's graph, or none.

masks.py: the keys that all attentions leave out. scores.py: additions to their scores. analysis.py: the available forms of each value, by
rules.py (ops that commute with packing) and exits.py (ops for which padding does not count). making.py, indexing.py, packed_sizes.py: the
nodes. facts.py: the questions before each step. outcome.py: the outcome, and zeros at padding. unpadding.py, batches_before.py: the run
time.

sharing.py, agreeing.py: another choice of tokens (`options={"share_prefix": True}`), which rows that begin alike share.
"""
