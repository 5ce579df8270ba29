"""Faults that only a GPU would show: grids, copies to it, tables made again."""

from __future__ import annotations

from fault import Fault

LAUNCHES = "tests/kernels/test_launches.py::"
COPIES = (
    f"{LAUNCHES}test_attention_copies_nothing_to_the_device_and_makes_no_table_again",
    f"{LAUNCHES}test_rows_of_weights_by_index_are_found_on_the_device",
)

DEVICE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "heads of all sequences along a grid's second dim",
        "kernels/flash_plan.py",
        "kernel[(mask.table.shape[1] * programs,)](",
        "kernel[(mask.table.shape[1], programs)](",
        (f"{LAUNCHES}test_grids_are_ones_that_a_device_takes",),
    ),
    Fault(
        "head numbers made on the host at each call",
        "kernels/head_slots.py",
        "return _HEAD_IDS.get((self, rank, device, first), make)",
        "return make()",
        COPIES,
    ),
    Fault(
        "bounds of rows copied at each call",
        "kernels/attention_mask.py",
        "            self._copies[device] = copied\n        return self._copies[device]",
        "        return copied",
        COPIES,
    ),
    Fault(
        "rows of a weight by an index of the host's",
        "paradyse/weights/slices.py",
        "            self._indices[key] = index\n",
        "            pass\n",
        COPIES,
    ),
    Fault(
        "tables of segments made at each call",
        "kernels/flash_tiles.py",
        "return self.keep(tile, lambda: self._find_segments(*tile))",
        "return self._find_segments(*tile)",
        COPIES,
    ),
    Fault(
        "a mask that was written to taken for the former one",
        "kernels/kept.py",
        "known.versions != versions",
        "False",
        (
            "tests/kernels/test_kept.py::"
            "test_what_was_made_of_a_tensor_goes_with_it_and_with_what_is_in_it",
        ),
    ),
    Fault(
        "seeds of dropout copied from the host",
        "paradyse/runtime/frame.py",
        "self._seeds = seeds_of(number, blocks, rest, program.device).unbind(0)",
        "self._seeds = torch.tensor([number] * (blocks + rest), device=program.device).unbind(0)",
        ("tests/runtime/test_host_copies.py",),
    ),
    Fault(
        "a window over two stretches of a ring sent to flash attention",
        "kernels/library_attention.py",
        "if len(rows) != 1 or rows != keys or (",
        "if not rows or rows != keys or (",
        (
            "tests/kernels/test_selection.py::"
            "test_what_is_no_window_over_one_stretch_has_no_window_tile",
        ),
    ),
    Fault(
        "parts of the day that are done run again",
        "benchmarks/gpu_day.py",
        'if self.fates.get(part.name, "").startswith(DONE) or left <= 0:',
        "if left <= 0:",
        ("tests/test_gpu_day.py::test_what_is_done_is_passed_over_and_what_failed_runs_again",),
    ),
)
