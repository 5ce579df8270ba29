"""Models that Trainer cannot train over ranks, and how it is said."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_trainer import LONGEST, arguments, example, fresh_accelerate

from paradyse import trainer


def test_what_torch_compile_returned_is_refused(tmp_path: Path) -> None:
    """Its names of weights begin with ``_orig_mod.``, also those in a saved folder."""
    module = example()
    compiled = torch.compile(module.make_model(LONGEST), backend="paradyse")
    names = {"args": arguments(str(tmp_path)), "train_dataset": [], "data_collator": module.pad}
    for args, more in (((compiled,), {}), ((), {"model": compiled})):
        with fresh_accelerate(), pytest.raises(ValueError, match="give the model itself"):
            module.Trainer(*args, **more, **names)


def test_one_process_with_several_gpus_is_refused() -> None:
    """Trainer would copy the model to each, and the copies would call the original."""
    with pytest.raises(ValueError, match=r"one process sees 2 GPUs.*torchrun"):
        trainer._check(SimpleNamespace(n_gpu=2), 1)
    trainer._check(SimpleNamespace(n_gpu=1), 1)
