from __future__ import annotations

from benchmarks.bench_held_out import summed_up


def test_the_sum_names_the_slowest_and_counts_what_failed() -> None:
    rows = [
        {"model": "A", "call": "training", "ratio": "2.0"},
        {"model": "B", "call": "prefill padded", "ratio": "0.5"},
        {"model": "C", "call": "training", "ratio": "", "failure": "RuntimeError: no"},
    ]
    assert summed_up(rows) == "2 cases, geometric mean 1.00x, the slowest 0.50x (B, prefill padded), 1 failed"
    assert summed_up(rows[2:]) == "nothing was measured"
