"""1-bit optimizers on 2 and 4 processes over gloo; the work of the processes is in tests/onebit.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import onebit, onebit_gpt
from tests.ranks import spawn

pytestmark = pytest.mark.xdist_group("distributed")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def all_found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    """Return what each rank of two and of four found. Each number of ranks resumes a run of the other."""
    folder = tmp_path_factory.mktemp("states")
    found = {}
    for ranks, work in ((2, onebit.everything), (4, onebit.everything), (2, onebit.resumed_from_four)):
        results = spawn(work, ranks, tmp_path_factory.mktemp("ranks"), folder)
        if ranks in found:
            results = [old | new for old, new in zip(found[ranks], results, strict=True)]
        found[ranks] = results
    return found


@pytest.fixture(params=[2, 4])
def found(request: pytest.FixtureRequest, all_found: dict[int, Found]) -> Found:
    return all_found[request.param]


def test_an_exchange_keeps_exactly_what_it_left_out(found: Found) -> None:
    for rank in (each["exchanges"] for each in found):
        assert rank["is_exact"], "e = x - s q"
        assert rank["are_equal"], "results of all ranks"
        assert rank["empty"] == [True, True]
        assert not torch.cat(rank["padding"]).any()


def test_results_sum_up_to_the_inputs_less_the_last_errors(found: Found) -> None:
    ranks = [each["exchanges"] for each in found]
    steps = range(len(ranks[0]["inputs"]))
    for parameter in range(3):
        inputs = [sum(rank["inputs"][step][parameter] for rank in ranks) / len(ranks) for step in steps]
        results = [ranks[0]["results"][step][parameter].double() for step in steps]
        error = 0.0 if parameter == 1 else ranks[0]["errors"][parameter // 2]
        torch.testing.assert_close(sum(results), sum(inputs) - error, rtol=0, atol=2e-5)
        if parameter == 1:  # vectors are sent as they are
            torch.testing.assert_close(results, inputs, rtol=1e-6, atol=1e-7)


def test_a_compressed_step_sends_a_fifteenth_in_two_collectives(found: Found) -> None:
    for rank in (each["counted"] for each in found):
        for calls, sent in rank["steps"][3:]:
            assert len(calls) == 2
            assert calls[0] == "all_to_all_single"
            assert sent <= rank["plain"] / 15
        total = sum(sent for _, sent in rank["steps"])
        assert total <= len(rank["steps"]) * rank["plain"] / 4.5
        # the first step compares weights among the ranks; else the warm-up sends what DDP does
        assert [sent for _, sent in rank["steps"][:3]] == [rank["plain"]] * 3


def test_the_warm_up_is_bitwise_torchs_adam(found: Found) -> None:
    for rank in (each["warm_up"] for each in found):
        assert set(rank) == {"Adam", "options", "AdamW"}
        assert all(all(steps) for steps in rank.values()), rank


def test_ranks_stay_equal_and_learn(found: Found) -> None:
    for rank in (each["each_optimizer"] for each in found):
        assert len(rank) == 6
        for name, result in rank.items():
            before, after = result["losses"]
            assert result["frozen"], name
            assert result["are_equal"], name
            assert after < 0.8 * before, (name, before, after)
            assert result["unused"] or "weight_decay" in name, name
            assert result["state"] == {torch.float32}, name


def test_ranks_stay_equal_in_every_way_to_use_ddp(found: Found) -> None:
    for rank in (each["plain_ways"] for each in found):
        assert all(all(steps) for steps in rank.values()), rank


def test_a_step_without_register_is_right_and_noticed(found: Found) -> None:
    for rank in (each["without_register"] for each in found):
        weights, messages = rank["weights"], rank["messages"]
        if len(found) == 2:  # four numbers are summed up in an order that depends on the buffer
            assert torch.equal(weights["registered"], weights["alone"])
        ends = [message for message in messages if message.endswith(("True", "False"))]
        assert ends == ["registered True", "alone True", "forgotten True"]
        (warning,) = [message for message in messages if message not in ends]
        assert "call OneBitAdam.register(ddp_model)" in warning


def test_an_infinity_on_one_rank_skips_the_step_on_all(found: Found) -> None:
    for rank in (each["scaled"] for each in found):
        assert all(rank["skipped"])
        assert all(rank["are_equal"])
        assert rank["steps"] == 10


def test_all_elements_used_a_scalar_and_a_parameter_without_elements(found: Found) -> None:
    for rank in (each["small"] for each in found):
        for name, losses in rank.items():
            assert sum(losses[-4:]) < sum(losses[:4]), name


def test_local_steps_decay_weights_as_adamw_and_follow_the_rate(found: Found) -> None:
    for rank in (each["zero_one"] for each in found):
        assert rank["decay"] < 1e-3  # of a step
        assert rank["low rate"] < 100  # eight steps; errors of the rate before would be 1e6


def test_differences_among_ranks_are_refused(found: Found) -> None:
    for rank in (each["refused"] for each in found):
        assert "leave out ZeroRedundancyOptimizer" in rank["ZeRO"]
        assert rank["join"].startswith("expected ranks with equally many batches, got Distrib")
        assert rank["weights"].startswith("expected the same weights on every rank, got others")


def test_a_rank_resumes_bitwise_from_its_own_state(found: Found) -> None:
    for rank in (each["saved"] for each in found):
        assert rank == dict.fromkeys(onebit.MAKES, True)


def test_an_earlier_state_repeats_its_steps_bitwise(found: Found) -> None:
    for rank in (each["rolled_back"] for each in found):
        assert all(rank.values()), rank


def test_a_compiled_step_changes_nothing(found: Found) -> None:
    assert all(rank["compiled"] for rank in found)


def test_another_number_of_ranks_resumes_with_all_errors(found: Found) -> None:
    for rank in (each["resumed"] for each in found):
        for name, result in rank.items():
            before, after = result["losses"]
            assert result["are_equal"], name
            assert after < before, name
            matrices = [(old["errors"], new["errors"]) for old, new in result["errors"] if "errors" in old]
            assert len(matrices) == 4, name
            for (old_worker, old_server), (new_worker, new_server) in matrices:
                torch.testing.assert_close(new_worker, old_worker)
                assert torch.equal(new_server, old_server)
                assert old_server[1:].any() or name == "ZeroOneAdam"


def test_a_distributed_checkpoint_resumes_bitwise(found: Found) -> None:
    for rank in (each["checkpointed"] for each in found):
        assert len(rank) == len(onebit.SAVED)
        for name, (is_state_equal, is_run_equal) in rank.items():
            assert is_state_equal, name
            # a new DDP's first step has other buckets, and four numbers are summed up in another order
            assert is_run_equal or (len(found) == 4 and name.endswith("4")), name


def test_a_distributed_checkpoint_resumes_on_another_number_of_ranks(found: Found) -> None:
    before = onebit.losses_of(onebit.net())
    for rank in (each["resumed_from_checkpoint"] for each in found):
        assert len(rank) == len(onebit.SAVED)
        for name, (are_equal, after) in rank.items():
            assert are_equal, name
            assert after < 0.8 * before, name


def test_other_ranks_of_a_state_start_without_errors(found: Found) -> None:
    for rank, each in enumerate(found):
        assert each["loaded_from_rank_0"] == (rank == 0)


@pytest.mark.integration  # eight trainings
def test_a_gpt_learns_as_with_adam(tmp_path: Path) -> None:
    """300 steps on the standard library's sources: as far from Adam's mean as its own runs are apart."""
    losses = spawn(onebit_gpt.losses, 2, tmp_path)[0]
    adam, plain = (torch.tensor(losses[name]) for name in ("Adam", "compressed gradients"))
    noise = adam.max() - adam.min()
    for name in ("OneBitAdam", "ZeroOneAdam"):
        assert (torch.tensor(losses[name]).mean() - adam.mean()).abs() <= noise, name
    assert plain.min() > adam.max() + noise
