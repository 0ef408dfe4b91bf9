"""All models of the table, and the rows of one by its name."""

from __future__ import annotations

import logging
import warnings

from tests.hf.today.decoders import DECODERS
from tests.hf.today.diffusion import DIFFUSION
from tests.hf.today.encoders import ENCODERS
from tests.hf.today.model import Model
from tests.hf.today.multimodal import MULTIMODAL
from tests.hf.today.running import Row, rows

MODELS: tuple[Model, ...] = (*DECODERS, *ENCODERS, *MULTIMODAL, *DIFFUSION)
MODEL = {model.name: model for model in MODELS}


def rows_of(name: str) -> list[Row]:
    """The rows of one model, in a process that serves many."""
    warnings.filterwarnings("ignore")
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    return rows(MODEL[name])


def is_failed(row: Row) -> bool:
    """Whether the model failed, or attention was passed over in silence."""
    return row.status == "error" or row.found + sum(row.misses.values()) < row.total
