"""Padding that is never computed (`options={"unpad": True}`): real tokens are packed, and outputs are unpacked with 0 at padding.

packing.py makes the packed graph, on a copy. It is matched, recovered and decided for like any graph, and then judging.py looks at it:
all of it takes the place of the model's, or nothing does.

masks.py: what all attentions leave out. scores.py: what joins their scores. analysis.py: in which forms each value can be had, by rules.py
(what commutes with packing) and exits.py (where padding does not count). making.py: the nodes. facts.py: what is asked before each step.
"""
