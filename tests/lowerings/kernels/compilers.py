"""Whose machine code is known: how many registers spill is a matter of Triton's release, and so is what Gluon takes."""

from __future__ import annotations

import pytest
import triton

#: releases that the bounds on spilled registers were found with
KNOWN = ("3.6", "3.7")

of_a_known_compiler = pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN), reason=f"Triton {triton.__version__} spills other registers than {KNOWN}"
)
