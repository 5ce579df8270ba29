"""What is computed on gathered tokens is noted with what it costs, also where no rank exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny import Mixer, Tiny
from torch import Tensor

from paradyse.offline.devices import machine_of, read_cluster
from paradyse.offline.dry_run import dry_run
from paradyse.offline.outlook import look_ahead, notes_on


def on_paper(model_type: type[Tiny], num_ranks: int = 2) -> Any:
    torch._dynamo.reset()
    with torch.device("meta"):
        model = model_type()
        ids = torch.zeros(1, 64, dtype=torch.int64)
    return dry_run(model.train(), {"ids": ids, "labels": ids}, num_ranks, levers=())


@pytest.mark.slow
def test_what_is_gathered_has_its_costs() -> None:
    run = on_paper(Mixer)
    machine = machine_of(read_cluster("a100-80gb"), 2, torch.float32)
    notes = {
        n: notes_on(look_ahead(run, machine, [n], torch.float32, levers=())) for n in (512, 8192)
    }
    sent = {}
    for n, found in notes.items():
        (note,) = [line for line in found if "fft_fft" in line]
        assert f"(at {n} tokens)" in note
        (number, unit) = re.findall(r"and ([0-9.]+) (\w+) sent by a rank, \d+% of a step", note)[0]
        sent[n] = float(number) * {"KiB": 1, "MiB": 1024}[unit]
    # half of a rank's 32 numbers of each of its tokens, back what comes of them, which is complex,
    # and the gradients of both
    assert sent[8192] == pytest.approx(16 * sent[512], rel=0.05)
    assert sent[512] == pytest.approx(2 * 512 / 2 * 32 / 2 * (4 + 8) / 1024, rel=0.05)


class Chunked(Tiny):
    """Cuts its tokens into as many chunks as it takes, which is another graph at each length."""

    def extra(self, x: Tensor) -> Tensor:
        return x + torch.stack([c.cumsum(1) for c in x.split(16, dim=1)], 1).flatten(1, 2)


@pytest.mark.broad
def test_a_graph_of_one_length_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"cannot be computed at .* \(without --gpus"):
        on_paper(Chunked)
