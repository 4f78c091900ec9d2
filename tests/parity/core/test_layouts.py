"""Every layout computes what a single process computes, and a run continues from its checkpoint as if it had
never stopped, in the same or in another layout.
"""

import launches
import pytest

LAYOUTS = [(2, case) for case in "dp dp_plain tp tp_no_sp pp pp_plain vpp moe_ep".split()]
LAYOUTS += [(4, "tp_pp"), (4, "moe_tp_ep")]
SAME = [(1, "dp"), (1, "dp_plain"), *((2, case) for case in launches.CASES_OF_2)]
CROSS = [(saved, case) for saved, cases in launches.CROSS.items() for case in cases]
LOSS_TOLERANCE = 1e-5
BF16_LOSS_TOLERANCE = 5e-3


def often(cells: list[tuple]) -> list:
    """Those that need a further run of two processes, or four processes, belong to `make test-long`."""
    runs = {cell: cell[0] if isinstance(cell[0], str) else cell[1] for cell in cells}
    long = {cell for cell, run in runs.items() if cell[0] != 1 and run not in launches.OFTEN}
    return [pytest.param(*cell, marks=pytest.mark.long if cell in long else ()) for cell in cells]


@pytest.fixture(scope="module", autouse=True)
def _asked(request):
    """The launches go through the runs that parameters name; the other tests need those of OFTEN."""
    items = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in items if hasattr(item, "callspec")]
    launches.asked = {cell.get("saved", cell.get("case")) for cell in given}
    if len(given) < len(items):
        launches.asked |= {*launches.OFTEN}


@pytest.mark.parametrize(("world_size", "case"), often(LAYOUTS))
def test_losses_equal_those_of_a_single_process(world_size, case):
    reference = "moe_dp" if case.startswith("moe") else "dp"
    expected = launches.first(1)[0][reference]["losses"]
    for rank in launches.first(world_size):
        assert rank[case]["losses"] == pytest.approx(expected, abs=LOSS_TOLERANCE)


def test_training_changes_the_loss():
    """Without this the comparisons above could hold for a model that never moves."""
    losses = launches.first(1)[0]["dp"]["losses"]
    assert max(losses) - min(losses) > 1e-2


@pytest.mark.long
def test_bf16_trains_in_bf16():
    bf16, fp32 = (launches.first(2)[0][case]["losses"] for case in ("dp_bf16", "dp"))
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, abs=0.05)


def test_an_optimizer_knows_which_parameter_its_numbers_are_of():
    """Also where a group has parameters in bf16 and in fp32."""
    for rank in launches.first(2):
        assert {case: found["misnamed"] for case, found in rank.items()} == dict.fromkeys(rank, [])


# ---- from a checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "case"), often(SAME))
def test_continued_run_is_bit_equal(world_size, case):
    """Losses, and the bytes of weights, moments, Adam steps and learning rates of every rank."""
    for before, after in zip(launches.first(world_size), launches.second(world_size), strict=True):
        continued = after[f"{case} -> {case}"]
        assert continued["losses"] == before[case]["losses"][launches.HALF :]
        assert continued["digest"] == before[case]["digest"]


@pytest.mark.parametrize(("saved", "case"), often(CROSS))
def test_continued_in_another_layout(saved, case):
    expected = launches.first(2)[0][saved]["losses"][launches.HALF :]
    tolerance = BF16_LOSS_TOLERANCE if "bf16" in case else LOSS_TOLERANCE
    for rank in launches.second(2):
        assert rank[f"{saved} -> {case}"]["losses"] == pytest.approx(expected, abs=tolerance)


def test_generators_continue_in_the_same_layout():
    for before, after in zip(launches.first(2), launches.second(2), strict=True):
        assert after["tp -> tp"]["draws"] == before["tp"]["draws"]


def test_generators_are_left_alone_in_another_layout():
    before, after = launches.first(2)[0], launches.second(2)[0]
    assert after["tp -> pp"]["draws"] != before["tp"]["draws"]


@pytest.mark.parametrize("case", ["dp -> dp", "dp -> tp"])
def test_loader_states_come_back_in_the_order_of_their_ranks(case):
    states = [rank[case]["state"]["loader_states"] for rank in launches.second(2)]
    assert states == [[{"rank": 0}, {"rank": 1}]] * 2


def test_step_and_extra_come_back():
    resumed = launches.second(2)[1]["vpp -> vpp"]
    assert (resumed["state"]["step"], resumed["extra"]) == (launches.HALF, {"case": "vpp"})


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_changed_bit_is_named_with_its_file_on_every_rank(world_size):
    found = {rank["damaged"] for rank in launches.second(world_size)}
    assert len(found) == 1
    assert f"__{world_size - 1}_0.distcp is not what was saved: its checksum differs" in found.pop()
