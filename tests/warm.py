"""Imported in the process that ranks are forked from: they start with what a first compilation
imports and traces.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from tiny import Tiny, tokens

with warnings.catch_warnings(), contextlib.suppress(Exception):  # tests tell what is wrong
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Forward alone: AOTAutograd compiles backward with it, and no autograd thread may be forked.
    torch.compile(Tiny(layers=1), backend="paradyse", options={"inner": "aot_eager"})(
        tokens(2, 5), tokens(2, 5)
    )
    torch._dynamo.reset()
