"""A backward that is let go of before its end has failed: the others are told, gradients go."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from paradyse.distributed.failures import is_out_of_memory, lacked_memory, num_out_of_memory
from paradyse.distributed.running_backward import ENDED, RUNNING, Backward


@dataclass
class Heard:
    """What stands for the agreement of a call's ranks."""

    told: list[str] = field(default_factory=list)

    def end_backward(self, call: object) -> None:
        self.told.append("ended")

    def fail_backward(self, call: object, out_of_memory: bool) -> None:
        self.told.append("failed")


@dataclass
class Called:
    """What stands for a call."""

    agreement: Heard
    parameters: list[weakref.ref[nn.Parameter]]


def test_one_that_ends_says_so_once_and_keeps_gradients() -> None:
    heard, weight = Heard(), nn.Parameter(torch.ones(2))
    backward = Backward(Called(heard, [weakref.ref(weight)]))
    assert backward.state == RUNNING
    weight.grad = torch.ones(2)
    backward()
    backward.state = ENDED
    backward()
    del backward
    assert heard.told == ["ended"]
    assert weight.grad is not None


def test_one_that_is_let_go_of_says_so_and_takes_back_what_it_was_the_first_to_give() -> None:
    heard, first, second = Heard(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first.grad = torch.ones(2)
    backward = Backward(Called(heard, [weakref.ref(first), weakref.ref(second)]))
    second.grad = torch.ones(2)
    del backward
    assert heard.told == ["failed"]
    assert first.grad is not None
    assert second.grad is None


def test_memory_may_lack_on_any_of_a_process_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    lacked = [1, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_ooms": lacked[device]})
    before = num_out_of_memory()
    assert before == 3 and not lacked_memory(before)
    lacked[1] += 1
    assert lacked_memory(before)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_of_a_gpu_may_lack_beside_the_allocator_of_pytorch(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
