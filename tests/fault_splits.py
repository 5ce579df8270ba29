"""Faults of programs whose tokens lie split along another dim (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

SPLIT_FAULTS: tuple[Fault, ...] = (
    Fault(
        "sequences of a batch counted with the other dims of their tokens",
        "paradyse/planning/splits.py",
        "max(1, tokens // math.prod(lengths))",
        "workload.batch",
        ("tests/planning/test_splits.py",),
    ),
    Fault(
        "a program that there is not asked for again",
        "paradyse/planning/splits.py",
        "                    self.refused[split] = described\n",
        "",
        ("tests/planning/test_splits.py",),
    ),
    Fault(
        "another dim split whatever rows are padding there",
        "paradyse/planning/splits.py",
        "if _padding(lies_along(workload, split)) / now * saved",
        "if saved",
        ("tests/planning/test_splits.py",),
    ),
    Fault(
        "an odd number of rows put together as two chunks",
        "paradyse/distributed/tokens.py",
        "if stacked.shape[dim + 1] % 2:",
        "if False:",
        ("tests/distributed/test_tokens.py", "tests/distributed/test_switch.py"),
    ),
    Fault(
        "heads of an odd number of rows sent as two chunks",
        "kernels/triton_exchange.py",
        "num_ranks == 1 or rows_per_rank % 2 else",
        "num_ranks == 1 else",
        ("tests/kernels/test_interpreter.py",),
    ),
    Fault(
        "the sequence taken for a dim that no block mixes",
        "passes/name_dims.py",
        "    ctx.unsplit = (seq, *(f for f in ctx.unsplit if f is not found), *batch)\n",
        "    ctx.unsplit = (*(f for f in ctx.unsplit if f is not found), *batch)\n",
        ("tests/test_split_along_batch.py::test_blocks_send_nothing_but_weights_and_gradients",),
    ),
    Fault(
        "a length of repeated rows kept",
        "passes/simplify.py",
        'if k != "output_size"}',
        "if k}",
        ("tests/passes/test_simplify.py",),
    ),
)
