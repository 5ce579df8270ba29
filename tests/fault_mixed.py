"""Faults of batches of mixed lengths (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

PLANS = "tests/mixed/test_step_plan.py::"
BESIDE = "tests/distributed/test_side_by_side.py::"
TRAINING = ("tests/mixed/test_training.py::test_two_ranks[llama]",)

MIXED_FAULTS: tuple[Fault, ...] = (
    Fault(
        "groups filled beyond their memory",
        "paradyse/mixed/packing.py",
        "if self.bins[left[j][1]].tokens <= room:",
        "if True:",
        (f"{PLANS}test_no_plan_is_slower_than_one_degree_for_all[512-64-0.5]",),
    ),
    Fault(
        "more ranks side by side than there are",
        "paradyse/mixed/polish.py",
        "if self._ranks(times, tried[middle]) <= self.num_ranks:",
        "if self._ranks(times, tried[middle]) <= self.num_ranks + 1:",
        (f"{PLANS}test_small_batches_are_planned_as_well_as_possible",),
    ),
    Fault(
        "steps of one degree are not among the candidates",
        "paradyse/mixed/step_plan.py",
        "for p in range(len(ways)) if (s := spread",
        "for p in range(1) if (s := spread",
        (f"{PLANS}test_without_time_the_plan_is_still_whole",),
    ),
    Fault(
        "gradients of a group counted once for each of its ranks",
        "paradyse/mixed/training.py",
        "(count / (num_targets * ranks))",
        "(count / num_targets)",
        TRAINING,
    ),
    Fault(
        "a packed sequence learns the first token of the next",
        "paradyse/mixed/batches.py",
        "            labels[0] = IGNORED\n",
        "            pass\n",
        TRAINING,
    ),
    Fault(
        "positions go on from one packed sequence to the next",
        "paradyse/mixed/batches.py",
        'places = [torch.arange(len(s["input_ids"])) for s in sequences]',
        'places = [torch.arange(len(call["input_ids"]))]',
        TRAINING,
    ),
    Fault(
        "a failure in one group is told to no other",
        "paradyse/distributed/side_by_side.py",
        '            self._ring((failure, ""))\n',
        "            pass\n",
        (f"{BESIDE}test_a_group_that_computes_hears_at_its_next_message",),
    ),
    Fault(
        "seconds of a group's first rank for those of its slowest",
        "paradyse/mixed/step_reports.py",
        "max(taken.get(number, 0.0), seconds)",
        "taken.get(number, seconds)",
        ("tests/mixed/test_mixed_reports.py::test_the_slowest_rank_of_a_group_counts",),
    ),
    Fault(
        "padding of samples is trained on",
        "paradyse/mixed/sequences.py",
        "    row = _without_padding(row, where)\n",
        "",
        ("tests/mixed/test_sequences.py::test_samples_are_taken_apart_as_rows_are",),
    ),
    Fault(
        "calls that stand for none have tokens as labels",
        "paradyse/mixed/batches.py",
        "{name: x[at] for name, x in sequence.items()}",
        '{name: sequence["input_ids"][at] for name in sequence}',
        (
            "tests/mixed/test_sharded_training.py"
            "::test_a_call_that_stands_for_none_has_a_label_of_the_data",
        ),
    ),
    Fault(
        "a step is held to ways that were learnt after it",
        "paradyse/mixed/batches.py",
        "static_steps(step.lengths, step.ways,",
        "static_steps(step.lengths, self.ways,",
        (
            "tests/mixed/test_learnt_ways.py"
            "::test_a_step_is_held_to_the_ways_that_it_was_planned_by",
        ),
    ),
    Fault(
        "a packed call leaves the model its cache",
        "paradyse/mixed/training.py",
        'self._without_cache = {"use_cache": False} if caches and',
        'self._without_cache = {"use_cache": True} if caches and',
        (
            "tests/mixed/test_training.py::test_a_model_that_keeps_a_cache_keeps_sequences_apart[llama]",
        ),
    ),
    Fault(
        "nobody looks whether packed sequences see each other",
        "paradyse/mixed/training.py",
        "if mask is not None and not mask.documents:",
        "if mask is None:",
        ("tests/mixed/test_training.py::test_a_model_that_does_not_find_sequences_is_refused",),
    ),
    Fault(
        "a rank that failed is taken for one that died",
        "paradyse/distributed/together.py",
        "except (DroppedCallError, ValueError):",
        "except ValueError:",
        (
            "tests/mixed/test_training.py::test_a_rank_that_fails_before_its_call_is_told_of_as_failed",
        ),
    ),
    Fault(
        "groups of single ranks compare no weights",
        "paradyse/mixed/training.py",
        "if self._axis.size > 1 and not self._are_equal:",
        "if self._axis.size > 9 and not self._are_equal:",
        ("tests/mixed/test_training.py::test_groups_of_single_ranks_have_the_same_weights",),
    ),
    Fault(
        "graphs that were made before are not looked at",
        "paradyse/mixed/training.py",
        "for c in made or _that_read_positions(self.model) for g",
        "for c in made for g",
        ("tests/mixed/test_training.py::test_a_graph_that_was_made_before_is_looked_at",),
    ),
    Fault(
        "a loop over losses that is left is told to no other",
        "paradyse/distributed/side_by_side.py",
        "return self._failed_in_backward() or Failure(dist",
        "return self._failed_in_backward() and Failure(dist",
        ("tests/distributed/test_side_by_side.py::test_all_hear_of_a_loop_that_is_left[alone]",),
    ),
    Fault(
        "a rank that failed before its call counts on by itself",
        "paradyse/distributed/agreement.py",
        "told if group == self._in_group)\n",
        "told if not self._in_group)\n",
        (
            "tests/distributed/test_side_by_side.py::test_ranks_count_on_together_after_one_has_failed_before_its_call",
        ),
    ),
    Fault(
        "the batch that was given last is given again",
        "paradyse/mixed/batches.py",
        "self._next = epoch, number + 1",
        "self._next = epoch, number",
        ("tests/mixed/test_going_on.py::test_the_rest_is_what_comes_behind[made]",),
    ),
    Fault(
        "batches behind a state have the seeds of the first ones",
        "paradyse/mixed/batches.py",
        "for number in count(first):",
        "for number in count():",
        ("tests/mixed/test_going_on.py::test_the_rest_is_what_comes_behind[made]",),
    ),
    Fault(
        "Trainer goes on with the first batches again",
        "paradyse/trainer.py",
        "            self._batches.load_state_dict(json.loads(file.read_text()))\n",
        "",
        ("tests/mixed/test_going_on.py::test_trainer_goes_on_behind_the_batches_of_before[False]",),
    ),
)
