"""What Trainer says of an evaluation over ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from harness import RankPool
from test_trainer import LONGEST, arguments, example, fresh_accelerate


def steps_of_evaluation(folder: str, shape: tuple[int, int]) -> list[float]:
    """As they follow from what Trainer logs, returns, and says of predictions."""
    from torch.distributed.device_mesh import init_device_mesh

    module = example()
    torch._dynamo.reset()
    with fresh_accelerate():
        trainer = module.Trainer(
            model=module.make_model(LONGEST),
            args=arguments(folder, prediction_loss_only=True),
            eval_dataset=module.Documents(Path(os.__file__).parent, 40, 5, LONGEST),
            data_collator=module.pad,
            mesh=init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence")),
            backend_options={"inner": "eager"},
        )
        returned = trainer.evaluate()
        (logged,) = trainer.state.log_history
        predicted = trainer.predict(trainer.eval_dataset).metrics

    def steps(metrics: dict[str, Any], name: str) -> float:
        return round(metrics[f"{name}_steps_per_second"] * metrics[f"{name}_runtime"], 1)

    return [steps(returned, "eval"), steps(logged, "eval"), steps(predicted, "test")]


def test_steps_a_second_are_those_of_groups(pool2: RankPool, tmp_path: Path) -> None:
    """Five samples, by twos."""
    for shape, steps in (((1, 2), 3), ((2, 1), 2)):
        found = pool2.run(steps_of_evaluation, str(tmp_path), shape, timeout_s=100)
        assert found == [[steps] * 3] * 2
