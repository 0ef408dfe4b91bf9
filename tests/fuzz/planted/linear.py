"""Faults in linear attention: sums of decays, resets, states."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a reset has no difference
lowerings/linear/chunks.py bounded_decays; linear attention: two sums up to a decay of -inf differ by NaN
- g.clamp(min=_LOWEST)
+ g

decays are differences of sums
lowerings/linear/chunks.py forward; linear attention: a difference of two large sums loses a small decay's digits
- torch.stack([whole, g - whole]).cumsum(-1)
+ torch.stack([g, torch.zeros_like(g)]).cumsum(-1)

the decay after a chunk's last token counts
lowerings/linear/chunks.py forward; linear attention: a token does not decay its own write
- end = (exact[..., -1:] - exact)
+ end = (exact[..., -1:] - exact + whole)

a chunk's first token does not decay the state
lowerings/linear/chunks.py backward; linear attention: its decay's gradient is that of the state alone
- (1, 0))
+ (0, 1))

the first state is not read by the delta rule
lowerings/linear/chunks.py _one_chunk; linear attention: what a key reads of the state is not taken off the value
- v if w is None else v - w @ state
+ v

a step forgets before it reads
lowerings/linear/chunks.py one_token; linear attention: the delta rule reads the state after its decay
- (v - (state * k.unsqueeze(-1)).sum(-2))
+ (v - (given.first_state * k.unsqueeze(-1)).sum(-2))
""")
