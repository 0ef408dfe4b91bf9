"""What is counted."""

from __future__ import annotations

import json
from collections import Counter

from tests.fuzz.comparing import Outcome
from tests.fuzz.tally import Tally


def test_tallies_are_joined_printed_and_written() -> None:
    one, other = Tally(), Tally()
    one.compared("views", Outcome(lowered=Counter(reference=2), untouched=1, proved=Counter(Causal=1)))
    other.compared("views", Outcome(missed=1))
    other.left("views", "eager raises: RuntimeError")
    other.wrong("sinks")
    one.join(other)
    assert one.rules["views"]["programs"] == 3
    assert one.total == Counter(
        programs=4, compared=2, matched=1, wrong=1, discarded=1, sites=2, untouched=1, missed=1
    ) + Counter({"left alone": 1})
    assert "sites by lowering: reference 2" in one.table()
    assert "programs by lowering: reference 1" in one.table()
    assert "1  eager raises: RuntimeError" in one.table()
    assert one.discarded == 1 / 4
    assert json.loads(json.dumps(one.plain()))["proved"] == {"Causal": 1}
