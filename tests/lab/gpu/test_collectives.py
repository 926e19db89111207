"""Collectives that overlap with compute, in a module small enough to be read by eye."""

from pathlib import Path

import pytest

from jaxpipe.lab.gpu.collectives import Collective, Collectives, CollectiveShare, mesh_axes
from jaxpipe.lab.gpu.program import Program

MESH = {"pp": 2, "rp": 1, "dp": 2, "tp": 2}
TEXT = (Path(__file__).parents[2] / "data" / "collectives.hlo").read_text()
PART, SUMS = 2 * 4 * 8, 4 * 4 * 8  # bytes of a gathered parameter in bfloat16, of sums in float32


def shares(text=TEXT):
    return {(one.kind, one.looped): one for one in Collectives(Program(text), MESH).shares}


def test_every_kind_wherever_it_stands():
    found = list(Collectives(Program(TEXT), MESH))
    assert sorted(found) == sorted([
        Collective("all-gather", ("dp",), True, PART, True),
        Collective("all-gather", ("dp",), True, PART, False),  # elementwise work alone
        Collective("reduce-scatter", ("dp",), True, SUMS, False),  # the stream waits
        Collective("all-reduce", ("tp",), True, 4 * 8, True),  # has a separate kernel
        Collective("all-to-all", ("dp",), True, SUMS, False),  # wrapped, done at once
        Collective("collective-permute", ("pp",), True, 8, True),  # a branch has products
        Collective("all-reduce", ("pp", "dp", "tp"), False, 4, True),  # the loop has
        Collective("all-reduce", ("pp", "dp", "tp"), False, 4, False),
    ])  # fmt: skip


def test_shares_add_up_by_kind_axes_and_place():
    assert shares()["all-gather", True] == CollectiveShare(
        "all-gather", ("dp",), True, 2, 2 * PART, PART
    )
    assert shares()["all-reduce", False].hidden == 4
    assert [one.looped for one in Collectives(Program(TEXT), MESH).shares] == [True] * 5 + [False]


def test_bytes_in_a_loop_over_layers_count_in_every_iteration():
    loop = (
        'while(%state), condition=%test, body=%run, backend_config={"known_trip_count":{"n":"3"}}'
    )
    branch = "conditional(%i, %state, %state), true_computation=%run, false_computation=%idle"
    assert branch in TEXT
    looped = shares(TEXT.replace(branch, loop))
    assert looped["all-gather", True][3:6] == (2, 3 * 2 * PART, 3 * PART)
    assert looped["all-reduce", False].size == 8


def test_what_ends_before_the_product_is_not_hidden():
    gemm, done = (line for line in TEXT.splitlines() if "%gemm =" in line or "%whole =" in line)
    early = TEXT.replace(f"{gemm}\n{done}", f"{done}\n{gemm}")
    assert early != TEXT
    assert shares(early)["all-gather", True].hidden == 0


def test_a_conditional_without_products_hides_nothing():
    idle = TEXT.replace("true_computation=%run", "true_computation=%idle")
    assert shares(idle)["collective-permute", True].hidden == 0


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}", ("dp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ("pp",)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ("dp", "tp")),
        ("replica_groups={}, to_apply=%sum", ("pp", "dp", "tp")),
        ("to_apply=%sum", ("pp", "dp", "tp")),
        ("replica_groups={{0},{1}}, to_apply=%sum", ()),
    ],
)
def test_axes(groups, axes):
    assert mesh_axes(f"channel_id=1, {groups}", MESH) == axes
