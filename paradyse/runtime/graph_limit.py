"""How many graphs one function may have before Dynamo runs it without the backend.

Beyond ``torch._dynamo.config.recompile_limit`` (8 unless set) Dynamo warns and runs the function as
it is: nothing would be split, and no gradient summed or averaged over ranks. Models of transformers
share one function, so that several of them, or a few sets of arguments, get there.
"""

from __future__ import annotations

import logging

from paradyse.torch_private import CompileContext, dynamo_config

log = logging.getLogger(__name__)

MANY = (8, 64)
"""Numbers of graphs at which the log says so; the first is Dynamo's own limit."""


def make_room_for_graphs() -> None:
    """Let functions have as many graphs as Dynamo counts at all; called while one is compiled.

    Raises:
        RuntimeError: it is the last one that Dynamo compiles of its function.
    """
    if dynamo_config.fail_on_recompile_limit_hit:  # Dynamo raises an error by itself
        return
    most = dynamo_config.accumulated_recompile_limit
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, most)
    compiled = CompileContext.current_compile_id()
    if compiled is None or compiled.frame_compile_id is None:
        return
    number = compiled.frame_compile_id + 1
    if number in MANY:
        log.warning("graph %d of one function: TORCH_LOGS=recompiles says why so many", number)
    if number >= most:
        raise RuntimeError(
            f"this is graph {number} of one function (TORCH_LOGS=recompiles says why there are so "
            "many), and those behind it would run without the backend: call "
            "torch._dynamo.reset() now and then, or raise "
            "torch._dynamo.config.accumulated_recompile_limit"
        )
