"""Faults of messages that are under way while blocks compute (``fault_table.py``)."""

from __future__ import annotations

from fault import Fault

LANES = "tests/distributed/test_lanes.py::"
FAILURES = "tests/distributed/test_failures.py::"
HELD = "tests/distributed/test_held.py::"
LINEARS = "tests/distributed/test_token_linears.py::"
COMING = "tests/weights/test_coming_gradient.py::"
IN_TURNS = "tests/strategies/test_attention_ranks.py::"
ULYSSES = "paradyse/strategies/attention/ulysses.py"
WHOLE = "tests/test_whole_on_every_rank.py::"

OVERLAP_FAULTS: tuple[Fault, ...] = (
    Fault(
        "lanes on one process group",
        "paradyse/distributed/lanes.py",
        "replace(axis, group=make_group(), lane=purpose)",
        "replace(axis, group=axis.group, lane=purpose)",
        (f"{LANES}test_messages_of_one_lane_do_not_wait_for_those_of_another",),
    ),
    Fault(
        "a rank that is behind takes part on the axis alone",
        "paradyse/distributed/collectives.py",
        "x.device.type, root, axis.lane, counts",
        'x.device.type, root, "", counts',
        (f"{LANES}test_a_rank_that_is_behind_takes_part_on_all_lanes",),
    ),
    Fault(
        "who is behind takes part in what is left of the messages",
        "paradyse/distributed/failures.py",
        "if missing > len(latest):",
        "if missing < 0:",
        (f"{FAILURES}test_who_is_behind_by_more_than_is_remembered_does_not_take_part_in_some",),
    ),
    Fault(
        "groups of some ranks split off the world",
        "paradyse/distributed/control.py",
        "with _unbound() if local else nullcontext():",
        "with nullcontext():",
        ("tests/distributed/test_control.py::test_a_group_of_some_ranks_is_no_split_of_the_world",),
    ),
    Fault(
        "nobody listens while the host waits for a device",
        "paradyse/distributed/host_numbers.py",
        "            watch(axis)\n",
        "            pass\n",
        (
            "tests/distributed/test_host_numbers.py::"
            "test_who_waits_for_a_device_hears_of_a_rank_that_failed",
        ),
    ),
    Fault(
        "hooks given gradients that are under way",
        "paradyse/torch_private.py",
        "if leaf is None or has_gradient_hooks(leaf):",
        "if leaf is None:",
        (f"{COMING}test_a_hook_sees_the_values",),
    ),
    Fault(
        "all scatters under way at once",
        "paradyse/weights/unshard.py",
        "        self.sync.finish_scatters()",
        "        self.sync",
        (f"{COMING}test_a_scatter_is_waited_for_a_block_later",),
    ),
    Fault(
        "sums of gradients where backward ends",
        "paradyse/weights/gradients.py",
        "if ends and (is_last or num_bytes >= enough):",
        "if is_last:",
        (f"{COMING}test_weights_are_joined_from_the_last_used_on",),
    ),
    Fault(
        "no look-ahead where a block runs again",
        "paradyse/runtime/frame.py",
        "                    gathered.fetch_before()",
        "                    pass",
        ("tests/weights/test_unshard.py",),
    ),
    Fault(
        "messages that cross over one group",
        "paradyse/distributed/crossing.py",
        "split(from_above, to_below, *down, group=downward)",
        "split(from_above, to_below, *down, group=axis.group)",
        ("tests/distributed/test_crossing.py",),
    ),
    Fault(
        "weights that come for a neighbour are in nobody's memory",
        "paradyse/planning/costs.py",
        "coming = max(ahead[i], ahead[i + 2])",
        "coming = 0",
        ("tests/planning/test_solver.py::test_what_comes_for_a_block_is_beside_its_neighbours",),
    ),
    Fault(
        "predictions wrong of no part",
        "paradyse/planning/time_ratios.py",
        "    return common + of_parts",
        "    return common",
        ("tests/planning/test_time_ratios.py",),
    ),
    Fault(
        "all ids taken for those of experts",
        "passes/fold_experts.py",
        "<= num_experts)",
        "<= 1 << 40)",
        ("tests/passes/test_fold_experts.py::test_ids_of_a_top_k_are_of_experts_that_there_are",),
    ),
    Fault(
        "messages of tokens hidden behind blocks too",
        "paradyse/planning/prior.py",
        "min(parts.weights_s, computed_s - behind_attention_s)",
        "min(parts.weights_s + parts.exchange_s, computed_s - behind_attention_s)",
        ("tests/planning/test_costs.py::test_weights_travel_while_blocks_compute",),
    ),
    Fault(
        "ring: own share of the gradients of keys lost",
        "paradyse/strategies/attention/ring.py",
        "unflatten(kept.add_(gradients_under_way.wait()), shapes)",
        "unflatten(gradients_under_way.wait(), shapes)",
        ("tests/strategies/test_attention_ranks.py",),
    ),
    Fault(
        "gradients of keys from the first part of a window's blocks",
        "kernels/alike_tiles.py",
        "for begin in range(0, tile.num_keys, step):",
        "for begin in range(0, step, step):",
        ("tests/kernels/test_alike_tiles.py",),
    ),
    Fault(
        "gradients that every rank computes whole are left as they are",
        "paradyse/runtime/joined.py",
        "            return self._read_alone()",
        "            return {}",
        (f"{WHOLE}test_all_ranks_go_on_from_the_same_bits",),
    ),
    Fault(
        "the whole on every rank whatever it takes",
        "paradyse/planning/alone.py",
        "return fits and alone_s * (1 + planner.options.smoothing) < time_s",
        "return True",
        ("tests/planning/test_alone.py",),
    ),
    Fault(
        "backward of the whole on every rank told of by itself",
        "paradyse/runtime/backward.py",
        "at_once=not compares or state != AT_ONCE",
        "at_once=True",
        (f"{WHOLE}test_backward_is_told_of_with_its_gradients",),
    ),
    Fault(
        "other sums of bits taken for the same",
        "paradyse/distributed/agreement.py",
        "if row[0] == self._leader}) == 1",
        "if row[0] == self._leader}) > 0",
        (f"{WHOLE}test_all_ranks_go_on_from_the_same_bits",),
    ),
    Fault(
        "gradients of a block's last group are waited for",
        "paradyse/strategies/weight_stream.py",
        "            if group == self.groups[-1]:",
        "            if group is None:",
        (
            "tests/strategies/test_weight_stream.py::"
            "test_the_last_group_s_gradients_are_under_way_behind_the_block",
        ),
    ),
    Fault(
        "gradients that differ taken for the same",
        "paradyse/weights/same_gradients.py",
        "(sums != sums[0]).any(2)",
        "(sums != sums[:1, :1]).all(2)",
        ("tests/weights/test_same_gradients.py", f"{WHOLE}test_all_ranks_go_on_from_the_same_bits"),
    ),
    Fault(
        "sums of bits without those of squares",
        "paradyse/distributed/checksums.py",
        "torch.dot(words, words) if on_host",
        "words.sum() if on_host",
        ("tests/distributed/test_checksums.py",),
    ),
    Fault(
        "own summand of tokens lost where it is computed apart",
        "paradyse/distributed/token_linears.py",
        "(total if mine is None else total + mine)",
        "total",
        (f"{LINEARS}test_values_and_gradients",),
    ),
    Fault(
        "own share of a weight's gradient lost where it is computed apart",
        "paradyse/distributed/token_linears.py",
        "add(mine.narrow(1, at, n), start, n)",
        "pass",
        (f"{LINEARS}test_values_and_gradients",),
    ),
    Fault(
        "tokens waited for before own ones are multiplied",
        "paradyse/distributed/token_linears.py",
        "    coming = collectives.start_all_gather(x, of.axis, block_id)",
        "    coming = collectives.start_all_gather(x, of.axis, block_id)\n    coming.wait()",
        (f"{LINEARS}test_own_tokens_are_multiplied_while_messages_are_under_way",),
    ),
    Fault(
        "weights on their way from the start of a block that waits for a message",
        "paradyse/weights/unshard.py",
        "start_gather(shards, block_id, held and self.holds)",
        "start_gather(shards, block_id)",
        (f"{HELD}test_weights_start_behind_the_first_message_of_a_block",),
    ),
    Fault(
        "backward's next weights on their way before a block's first message",
        "paradyse/weights/unshard.py",
        "before.block_id, self.holds)",
        "before.block_id)",
        (f"{HELD}test_weights_that_backward_needs_next_start_behind_that_message_too",),
    ),
    Fault(
        "what a mix takes taken for what its variants do among their like",
        "paradyse/planning/planner.py",
        "mixed = MIXED * self.mixes(plan)",
        'mixed = ""',
        ("tests/planning/test_steady.py",),
    ),
    Fault(
        "numbers that are inputs tell blocks apart",
        "paradyse/runtime/describe.py",
        "structure(step.piece, scope.names, of_one, numbers=True)",
        "structure(step.piece, scope.names, of_one)",
        ("tests/runtime/test_describe.py",),
    ),
    Fault(
        "ulysses: bias of the first turn's heads",
        ULYSSES,
        "self.slots.head_ids(self.axis.rank, device, first)",
        "self.slots.head_ids(self.axis.rank, device)",
        (f"{IN_TURNS}test_heads_go_in_turns[3]",),
    ),
    Fault(
        "ulysses: gradient of the bias of the last turn alone",
        ULYSSES,
        "total.add_(part)",
        "part",
        (f"{IN_TURNS}test_heads_go_in_turns[3]",),
    ),
    Fault(
        "ulysses: a turn's heads sent when they are asked for",
        ULYSSES,
        """        coming = start(i + 1) if i + 1 < len(turns) else []
        if not coming:
            start_held(own.axis)
        yield [receive_tokens(came.pop(0)) for _ in parts[i]]
""",
        """        if i + 1 == len(turns):
            start_held(own.axis)
        yield [receive_tokens(came.pop(0)) for _ in parts[i]]
        coming = start(min(i + 1, len(turns) - 1))
""",
        (f"{IN_TURNS}test_a_turns_heads_travel_while_attention_is_computed",),
    ),
)
