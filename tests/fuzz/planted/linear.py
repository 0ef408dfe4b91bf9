"""Faults in linear attention: sums of decays, resets, states, and what a proof rests on."""

from tests.fuzz.planted.fault import faults

ALL = faults("""
a reset has no difference
lowerings/linear/chunks.py bounded_decays; linear attention: two sums up to a decay of -inf differ by NaN
- g.clamp(min=_LOWEST_WIDE if g.dtype == torch.float64 else _LOWEST)
+ g

decays are differences of sums
lowerings/linear/chunks.py forward; linear attention: a difference of two large sums loses a small decay's digits
- torch.stack([whole, g - whole]).cumsum(-1)
+ torch.stack([g, torch.zeros_like(g)]).cumsum(-1)

a step forgets before it reads
lowerings/linear/chunks.py one_token; linear attention: the delta rule reads the state after its decay
- (v - (state * k.unsqueeze(-1)).sum(-2))
+ (v - (given.first_state * k.unsqueeze(-1)).sum(-2))

a number that is not finite reaches earlier tokens
lowerings/linear/triangles.py contained_of_earlier; linear attention: 0 times NaN is NaN
- (x @ y.masked_fill(is_bad, 0))
+ (x @ y)

what a function reads is in no guard
passes/matching/linear/source.py _followed; linear attention: a call after a change of it takes the graph from before
-         self.reads.append(place)
-         value = place.value
+         value = place.value

a number that a function reads is in no digest
passes/matching/linear/source.py _followed; linear attention: the proof of another number serves
- self.names.append(f"{spelled} = {value!r}")
+ pass

a helper's text is read once
passes/matching/linear/substitutes.py current; linear attention: a helper that was replaced is taken for the first one
- if known.text.holds():
+ if True:

a helper's text is in no digest
passes/matching/linear/source.py add; linear attention: the proof of another helper serves
- self.texts[function] = f"{_tokens(text)} {[repr(value) for value in defaults]}"
+ self.texts[function] = function.__module__

a function may ask whether it is differentiated
passes/matching/linear/vocabulary.py; linear attention: a proof runs with gradients, where it computes another thing
- "shape ndim dtype device mT T".split()
+ "shape ndim dtype device mT T requires_grad".split()
""")
