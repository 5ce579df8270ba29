"""accelerate's Accelerator, to which a sequence group is one process.

Nothing of accelerate is imported but by methods that it calls. It was tried with accelerate 1.15
(``tests/test_accelerator.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paradyse.distributed.axis import Axis, ranks_of
from paradyse.weights.no_sync import no_sync
from paradyse.weights.sharded_tensor import used_on

_Accelerator: Any = object
"""For the type checker: the class that this one precedes is the user's choice."""


class OverReplicas(_Accelerator):
    """Put before an Accelerator: each sequence group is one process of it.

    A class of its own, since transformers' Trainer makes its Accelerator itself.
    """

    sequence_axis: Axis
    replica_axis: Axis

    @property
    def num_processes(self) -> int:
        """Sequence groups."""
        return self.replica_axis.size

    @property
    def process_index(self) -> int:
        """Number of this rank's sequence group."""
        return self.replica_axis.rank

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, **kwargs: Any
    ) -> nn.Module:
        """``model`` with autocast and without DistributedDataParallel, as accelerate has it for
        evaluation; ``device_placement`` and ``kwargs`` as accelerate's."""
        kwargs["evaluation_mode"] = True
        if lies_on(model, self.device):
            device_placement = False
        return super().prepare_model(model, device_placement, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """``paradyse.no_sync`` of ``model``."""
        return no_sync(model)

    def gather(self, tensor: Any) -> Any:
        """``tensor``, or what is nested in it, of each group once, joined along the first dim."""
        from accelerate.utils import recursively_apply

        if self.replica_axis.size * self.sequence_axis.size == 1:
            return super().gather(tensor)  # numbers stay numbers

        mine = ranks_of(self.replica_axis)  # of each group the rank in this one's place

        def one_of_each_group(everyone: torch.Tensor) -> torch.Tensor:
            apart = everyone.unflatten(0, (dist.get_world_size(), -1))
            return apart[list(mine)].flatten(0, 1)

        return recursively_apply(one_of_each_group, super().gather(tensor))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``tensor``, or what is nested in it, of each group once: the sum, or with ``reduction``
        "mean" the mean; ``scale`` as accelerate's, which knows it on XLA alone."""
        from accelerate.utils import recursively_apply

        if reduction not in ("sum", "mean"):
            return super().reduce(tensor, reduction, scale)
        num = self.sequence_axis.size * (self.num_processes if reduction == "mean" else 1)
        total = super().reduce(tensor, "sum", scale)

        def shared(x: torch.Tensor) -> torch.Tensor:
            return x / num if x.is_floating_point() or x.is_complex() else x // num

        return recursively_apply(shared, total)

    def check_trigger(self) -> bool:
        """accelerate's: whether any rank has called ``set_trigger``, with its group or without."""
        mine = getattr(self, "flag_tensor", None)
        if mine is not None:
            self.flag_tensor: Any = mine * self.sequence_axis.size  # as ``reduce`` divides
        return bool(super().check_trigger())

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``input_data`` of each group once, without what fills up the last batch.

        Args:
            input_data: tensors [B, ...], nested or not; or a list of anything else.
            use_gather_object: the items of ``input_data`` are joined whatever they are.
        """
        from accelerate.utils import recursively_apply

        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object or self.sequence_axis.size == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        of_groups = [input_data] * self.num_processes
        if self.num_processes > 1:
            dist.all_gather_object(of_groups, input_data, group=self.replica_axis.group)
        joined = [x for of_group in of_groups for x in of_group]
        state = self.gradient_state
        return (
            joined[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else joined
        )

    @contextmanager
    def profile(self, profile_handler: Any = None) -> Iterator[Any]:
        """accelerate's, with ``profile_handler`` as there; each rank writes a trace, whose number
        is the rank's."""
        from accelerate.utils import PROFILE_PATTERN_NAME, ProfileKwargs

        quiet = copy(profile_handler or self.profile_handler or ProfileKwargs())
        folder, quiet.output_trace_dir = quiet.output_trace_dir, None
        with super().profile(quiet) as profiler:
            yield profiler
        if folder is not None:
            name = PROFILE_PATTERN_NAME.format(suffix=self.state.process_index)
            Path(folder).mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(Path(folder, name)))
            self.wait_for_everyone()

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of all."""
        return bool(self.state.is_last_process)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """The part of ``inputs`` that is this rank's sequence group's; ``inputs`` and
        ``apply_padding`` as accelerate's."""
        from accelerate.state import PartialState

        split: Any = PartialState.split_between_processes
        found: AbstractContextManager[Any] = split(self, inputs, apply_padding)
        return found


def over_replicas(accelerator: Any, sequence: Axis, replicas: Axis) -> None:
    """Have ``accelerator``, one of accelerate's, take ``sequence`` groups for processes, of which
    there are as many as ``replicas``."""
    kind = type(accelerator)
    if not issubclass(kind, OverReplicas):
        accelerator.__class__ = type(f"Replica{kind.__name__}", (OverReplicas, kind), {})
    accelerator.sequence_axis, accelerator.replica_axis = sequence, replicas
    data = accelerator.dataloader_config
    if data.dispatch_batches is None:
        # Batches of an iterable dataset would be read by rank 0 and split over all ranks.
        data.dispatch_batches = False


def lies_on(model: nn.Module, device: torch.device) -> bool:
    """Whether all of ``model`` is computed on ``device``, so that it need not be moved there:
    PyTorch moves no shard that something refers to weakly, as a call of the model does."""
    to = torch.device("cpu") if device.type == "cpu" else device  # accelerate numbers CPUs
    return all(used_on(x) == to for x in (*model.parameters(), *model.buffers()))
