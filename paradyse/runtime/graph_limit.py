"""How many graphs one function may have before Dynamo runs it without the backend.

Beyond ``torch._dynamo.config.recompile_limit`` (8 unless set) Dynamo warns and runs the function as
it is: nothing would be split, and no gradient summed or averaged over ranks. Models of transformers
share one function, so that several of them, or a few sets of arguments, get there.
"""

from __future__ import annotations

from paradyse.torch_private import CompileContext, dynamo_config


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
    before = None if compiled is None else compiled.frame_compile_id
    if before is not None and before + 1 >= most:
        raise RuntimeError(
            f"this is graph {most} of one function (TORCH_LOGS=recompiles says why there are so "
            "many), and those behind it would run without the backend: call "
            "torch._dynamo.reset() now and then, or raise "
            "torch._dynamo.config.accumulated_recompile_limit"
        )
