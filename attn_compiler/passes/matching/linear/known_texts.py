"""Texts of functions that a person has read: what they compute does not depend on the length in any way that a test could miss.

A graph with a length that is not known serves every length, and a test runs at some. So only these functions are taken there. A digest is
that of source.py; it depends on no comment, and on no version of Python.
"""

from __future__ import annotations

#: digest -> what it is, and in which releases
READ: dict[str, str] = {
    "898b4196826c994a": "torch_chunk_gated_delta_rule of transformers 5.24: a loop over chunks, and padding with zeros at the end",
    "fd95044c7399bad0": "torch_recurrent_gated_delta_rule of transformers 5.24: a loop over tokens",
    "38e50229a28f9ec8": "chunk_kimi_delta_attention of transformers 5.24: a loop over chunks, and padding with zeros at the end",
    "3a6437d225558956": "recurrent_kimi_delta_attention of transformers 5.24: a loop over tokens",
    "7ad8d0314e997eeb": "mamba2_chunk_scan of transformers 5.24: one product over all pairs of chunks, and padding with zeros at the end",
}
