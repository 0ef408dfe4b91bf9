"""What the decode kernels take is a part of what our kernels do."""

from __future__ import annotations

import pytest

from attn_compiler.lowerings.decode.takes import OF_LATENT, TAKES
from attn_compiler.lowerings.shared.limits import kernel_limits
from attn_compiler.lowerings.shared.limits.takes import Takes, refused
from attn_compiler.lowerings.shared.parts.site_parts import ADDED
from attn_compiler.spec.scores import Sinks, Softcap
from tests.lowerings.specs import CAUSAL, make_spec


@pytest.mark.parametrize("takes", [TAKES, OF_LATENT])
def test_they_take_a_part_of_what_our_kernels_do(takes: Takes) -> None:
    more = kernel_limits.TAKES
    assert takes.parts < more.parts
    assert (takes.dtypes, takes.changes, takes.sms) == (more.dtypes, more.changes, more.sms)
    assert not takes.gradients
    assert not takes.dropout


def test_documents_are_intervals_of_keys_there() -> None:
    """The plan makes bounds for each query of whatever is one piece of keys. Documents are none."""
    assert kernel_limits.TAKES.parts - TAKES.parts == {"documents"}


def test_nothing_is_added_to_a_latent_by_distance() -> None:
    assert OF_LATENT.parts.isdisjoint({"documents", "distances", "slopes"})
    assert OF_LATENT.parts & ADDED == {"bias"}
    assert OF_LATENT.head_dims is None


@pytest.mark.parametrize("takes", [TAKES, OF_LATENT])
def test_training_and_dropout_are_refused(takes: Takes) -> None:
    served = make_spec(mask=CAUSAL, needs_grad=False, changes=(Softcap(cap=30.0), Sinks(requires_grad=False)))
    assert refused(takes, served) == []
    for changed in ({"needs_grad": True}, {"needs_grad": False, "dropout_p": 0.1}):
        assert refused(takes, make_spec(mask=CAUSAL, **changed)) != []
