"""Digests of functions that a person has read: their results depend on the length in no way that a test could miss.

A graph of unknown length serves every length, but a test runs at a few only. So such a graph takes only these functions. source.py makes
the digests; comments and the Python version do not change them.
"""

from __future__ import annotations

#: digest -> the function, and the releases that have it
READ: dict[str, str] = {
    "898b4196826c994a": "torch_chunk_gated_delta_rule of transformers 5.23 and 5.24: a loop over chunks, and padding with zeros at the end",
    "fd95044c7399bad0": "torch_recurrent_gated_delta_rule of transformers 5.23 and 5.24: a loop over tokens",
    "38e50229a28f9ec8": "chunk_kimi_delta_attention of transformers 5.23 and 5.24: a loop over chunks, and padding with zeros at the end",
    "3a6437d225558956": "recurrent_kimi_delta_attention of transformers 5.23 and 5.24: a loop over tokens",
    "7ad8d0314e997eeb": "mamba2_chunk_scan of transformers 5.18 to 5.24: one product over all pairs of chunks, zeros at the end",
    "adbffa8fc8ef2a4c": "torch_chunk_gated_delta_rule of transformers 5.17 to 5.22: as that of 5.24, without heads that share one of k",
    "09b50fe426748317": "torch_recurrent_gated_delta_rule of transformers 5.17 to 5.22: as that of 5.24, without heads that share one of k",
    "1be20a6ea3891669": "chunk_kimi_delta_attention of transformers 5.17 to 5.22: as that of 5.24, but for a type in `l2norm`",
    "1613ed53b80a5924": "recurrent_kimi_delta_attention of transformers 5.17 to 5.22: as that of 5.24, but for a type in `l2norm`",
    "f46fe5a6256e2c2d": "mamba2_chunk_scan of transformers 5.17: as that of 5.24, with sums of products in the place of einsum",
}
