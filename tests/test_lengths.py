"""One program serves all lengths: families whose graphs once said otherwise, heads of other losses,
both lengths of an encoder-decoder, Python numbers that change from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_run import loss_of
from family_table import FAMILIES
from harness import RankPool
from models import check, run_step
from small_models import NUM_SEQUENCES, Row, batch_of, make
from torch import Tensor, nn
from torch.nn import functional as F

from paradyse.runtime.runs import FUSE_AFTER

LENGTHS = (13, 22, 31, 16, *(9 + 4 * i % 37 for i in range(20)))
"""Of 24 steps."""
WARM = 4
"""Steps after which everything is compiled, but for what steady plans have (``FUSE_AFTER``)."""

Batch = dict[str, Any]


def answers(model: Any, n: int, step: int) -> Batch:
    """Token ids [3, n], and where the answer begins and ends in each."""
    batch = batch_of(Row("BertForMaskedLM"), model, n)
    places = torch.randint(n, (2, NUM_SEQUENCES), generator=torch.Generator().manual_seed(step))
    start, end = places.sort(0).values
    return {"input_ids": batch["input_ids"], "start_positions": start, "end_positions": end}


class Weighed(nn.Module):
    """Cross entropy as it stands in the batch's dims, and a second loss times a Python number;
    divided by a number of tokens that is an int, as some trainers give it."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.model = make(row)

    def forward(self, input_ids: Tensor, labels: Tensor, share: float, count: int) -> Any:
        logits = self.model(input_ids=input_ids).logits
        loss = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum") / count
        return {"loss": loss + share * logits.logsumexp(-1).square().mean()}, logits


def weighed(model: Any, n: int, step: int) -> Batch:
    batch = batch_of(FAMILIES["llama"], model.model, n)
    return {
        "input_ids": batch["input_ids"],
        "labels": batch["input_ids"].roll(-1, 1),
        "share": 0.01 + step / 100,
        "count": 3 * n - step,
    }


ROWS = {
    **{n: FAMILIES[n] for n in ("glm4", "cohere", "gptj", "mixtral", "t5", "mpt", "bloom", "xglm")},
    "bert answers": Row("BertForQuestionAnswering"),
    "xlm-roberta answers": Row("XLMRobertaForQuestionAnswering"),
}


def train(name: str) -> tuple[int, list[int]]:
    """Programs, and what was compiled by the end of each step."""
    from paradyse.distributed.axis import resolve_axis
    from paradyse.runtime.registry import captures_of
    from paradyse.strategies.base import VariantCache

    torch._dynamo.reset()
    coefficients = name == "coefficients"
    reference: Any = Weighed(FAMILIES["llama"]) if coefficients else make(ROWS[name])
    model: Any = Weighed(FAMILIES["llama"]) if coefficients else make(ROWS[name])
    options = {"inner": "aot_eager", "plan": "megatron_cz"}
    compiled = torch.compile(model, backend="paradyse", options=options)
    cache = resolve_axis().session.of(VariantCache)
    counts = []
    for step, n in enumerate(LENGTHS):
        if coefficients:
            batch = weighed(reference, n, step)
        elif "answers" in name:
            batch = answers(reference, n, step)
        else:
            batch = batch_of(ROWS[name], reference, n)
        loss: Callable[[Any], Tensor] = (lambda out: out[0]["loss"]) if coefficients else loss_of
        got = run_step(compiled, model, batch, loss)
        if step < WARM or step == len(LENGTHS) - 1:
            check(got, run_step(reference, reference, batch, loss), what=f"{step}: {n}")
        counts.append(cache.num_compiled)
    captures = [*captures_of(compiled), *captures_of(compiled, whole=True)]
    return sum(max(1, len(c.graphs)) for c in captures), counts


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    ["coefficients", *(pytest.param(name, marks=pytest.mark.slow) for name in ROWS)],
)
def test_two_programs_serve_all_lengths(name: str, pool2: RankPool) -> None:
    for programs, counts in pool2.run(train, name, timeout_s=400):
        assert programs <= 2
        assert counts[WARM - 1] == counts[FUSE_AFTER - 1], counts
        assert counts[FUSE_AFTER + WARM] == counts[-1], counts
