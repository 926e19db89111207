"""Seconds of a compiled step's instructions, its largest arrays, and the table of several."""

import argparse
from types import SimpleNamespace

import pytest
from commands import SMALL
from rich.console import Console
from test_hlo import CONDS, DONES, STARTS, module

from jaxpipe.config import ConfigError, load
from jaxpipe.lab.gpu import cards, several
from jaxpipe.lab.gpu.program import DeviceCopy, Program
from jaxpipe.lab.gpu.seconds import StepSeconds, estimate_seconds
from jaxpipe.lab.gpu.temporaries import SourceLines, Temporary, read_temporaries
from jaxpipe.planning import arrange
from jaxpipe.runtime.devices import Device

UNEVEN = (
    "model.n_experts=4", "model.experts_per_token=2", "model.d_expert=96",
    "model.first_dense_layers=1", "parallel.pp=2", "parallel.vocab_parallel_pp=false",
)  # fmt: skip
SHEET = Device(flops=1e3, memory=1, link=1, bandwidth=1, cores=1, fp8=2e3)
BANDWIDTH = 1e4


def one(operands, result, rest, *, action="F_chunk0"):
    """Return the module's seconds with one more instruction in a branch of a layer's op."""
    lines = [f"  %in.{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    named = ", ".join(f"%in.{i}" for i in range(len(operands)))
    metadata = f'metadata={{op_name="jit(step)/while/body/{action}/cond/dot"}}'
    lines.append(f"  %made = {result} {rest.replace('OPERANDS', named)}, {metadata}")
    program = Program(module(STARTS + CONDS + DONES, run="\n".join(lines)))
    return estimate_seconds(program, SHEET, BANDWIDTH)


DOT = "dot(OPERANDS), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
KERNEL = 'custom-call(OPERANDS), custom_call_target="mosaic_gpu_v2"'
SCORES = '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["1","2","8","16"]}'
COST = '"exec_time_us":%s,"compute_time_us":0,"memory_access_time_us":1,"name":""'


def gemm(kind=""):
    config = '"lhs_contracting_dimensions":["1"]'
    return f'custom-call(OPERANDS), custom_call_target="__cublas$lt$matmul{kind}", {{{config}}}'


def attention(kind, mask):
    config = f'{SCORES},"mask_type":"{mask}"'
    return f'custom-call(OPERANDS), custom_call_target="__cudnn$fmhaSoftmax{kind}", {{{config}}}'


def fusion(cost):
    return f"fusion(OPERANDS), kind=kLoop, calls=%fusion, backend_config={{{COST % cost}}}"


@pytest.mark.parametrize(
    ("operands", "result", "rest", "seconds"),
    [
        (["bf16[4,8]", "bf16[8,5]"], "(f32[4,5], s8[32])", gemm(), 2 * 160 / 1e3),
        (["f32[4,8]", "f32[8,5]"], "f32[4,5]", DOT, 2 * 160 / 5e2),
        (["f8e4m3fn[4,8]", "f8e5m2[8,5]"], "bf16[4,5]", gemm("$f8"), 2 * 160 / 2e3),
        (["f8e5m2[4,8]", "f8e4m3fn[3,5,8]"], "f32[4,5]", KERNEL, 2 * 160 / 2e3),
        (["bf16[1,8,2,4]"], "bf16[8]", attention("", "CAUSAL"), 2 * 2 * 64 * 16 / 2 / 1e3),
        (["bf16[1,8,2,4]"], "bf16[8]", attention("Backward", "NO"), 5 * 2 * 64 * 16 / 1e3),
        (["f32[100]"], "f32[100]", fusion("9e9"), 800 / 1e4),  # once through memory
        (["f32[100]"], "f32[100]", fusion("50.5"), 50.5e-6),
        (["f32[100]"], "f32[100]", "copy(OPERANDS)", 800 / 1e4),
        (["f32[100]"], "f32[100]", "bitcast(OPERANDS)", 0),
    ],
    ids=[
        "bf16",
        "f32",
        "fp8",
        "grouped",
        "attention",
        "its gradient",
        "dear",
        "cheap",
        "copy",
        "nothing",
    ],
)
def test_an_instruction_takes_its_products_or_its_bytes(operands, result, rest, seconds):
    found = one(operands, result, rest)
    assert found.actions["F"] == pytest.approx(seconds, rel=1e-12)
    plain = one(operands, result, rest, action="head")
    assert plain.actions == {}
    assert plain.embed_head - found.embed_head == pytest.approx(seconds, rel=1e-12)


def test_a_fused_kernel_counts_once_and_what_is_outside_apart():
    inner = "  %copy.3 = f32[100]{0} copy(%a)"
    entry = "  %x.1 = f32[100]{0} parameter(1)\n  %copy.4 = f32[100]{0} copy(%x.1)"
    calls = "  %f = f32[3,8]{1,0} fusion(%t.1), kind=kLoop, calls=%fusion"
    order = STARTS + CONDS + DONES
    fused = Program(module(order, run=calls, fused=inner, entry=entry))
    plain = Program(module(order, run=calls, entry=entry))
    assert estimate_seconds(fused, SHEET, BANDWIDTH) == estimate_seconds(plain, SHEET, BANDWIDTH)
    assert estimate_seconds(plain, SHEET, BANDWIDTH).outside == pytest.approx(800 / 1e4)


def test_an_operand_may_be_one_array_of_a_tuple():
    """`%t.1#0` is 96 bytes of the tuple's 100."""
    order, copy = STARTS + CONDS + DONES, "  %copy.3 = f32[3,8] copy(%t.1#0)"
    copied, plain = (
        estimate_seconds(Program(module(order, run=run)), SHEET, BANDWIDTH).embed_head
        for run in (copy, "")
    )
    assert copied - plain == pytest.approx(2 * 96 / 1e4)


def test_a_product_of_a_slice_counts_where_it_is_launched():
    """XLA wraps a library call in a fusion that computes the addresses of its operands."""
    inside = f"""  %w = bf16[4,8]{{1,0}} parameter(1)
  %product = (bf16[4,5]{{1,0}}, s8[32]{{0}}) {gemm().replace("OPERANDS", "%w, %w")}"""
    call = "  %sliced = (bf16[4,5], s8[32]) fusion(%t.1), kind=kCustom, calls=%fusion"
    order = STARTS + CONDS + DONES
    sliced, plain = (
        estimate_seconds(Program(module(order, run=run, fused=inside)), SHEET, BANDWIDTH).embed_head
        for run in (call, "")
    )
    assert sliced - plain == pytest.approx(2 * 160 / 1e3)


def test_a_loop_over_layers_counts_every_layer():
    """In a branch of the loop over ticks; a loop whose length is unknown counts once."""
    layer = "  %copy.3 = f32[24]{0} copy(%a)"
    loop = "  %layers = (s32[]) while(%t.1), condition=%test, body=%fusion"
    count = ', backend_config={"known_trip_count":{"n":"7"}}'
    order = STARTS + CONDS + DONES
    many, one, none = (
        estimate_seconds(Program(module(order, run=run, fused=layer)), SHEET, BANDWIDTH).embed_head
        for run in (loop + count, loop, "")
    )
    assert many - none == pytest.approx(7 * 192 / 1e4)
    assert one - none == pytest.approx(192 / 1e4)


@pytest.mark.parametrize("settings", [(), UNEVEN], ids=["alike", "dense and sparse"])
def test_a_step_by_the_plans_own_seconds_is_the_plans(settings):
    plan = arrange(load(SMALL, settings))
    ops = plan.seconds
    actions = {op: getattr(ops.layer, op) for op in ("F", "B", "W", "BW")}
    mine = StepSeconds(actions, ops.head, 0.5)
    step, planned = mine.step(plan, 1)
    assert step - 0.5 == pytest.approx(planned)
    assert StepSeconds({"F": 1.0}, 0, 0).step(plan, 1) == (None, planned)


HEAD = """HloModule jit_step

FileNames
1 "/home/of/somebody/jaxpipe/core/executor/buffers.py"
2 "/usr/lib/jax/numpy.py"

FunctionNames
1 "make_ring"

FileLocations
1 {file_name_id=1 function_name_id=1 line=22 end_line=22 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
LIVE = """HloLiveRange (max 9):
  InstructionSequence:
    0:zeros
  BufferLiveRange:
    state.5{18}:4-8
    zeros{}:2-4
    wide{1}:5-6
    x{}:0-9
    dead{}:0-1
    dead.1{}:0-1
  Live ranges at 1 (peak):
    x{}: 640 bytes (cumulative: 640 bytes)
"""
PLACES = """BufferAssignment:
allocation 0: size 640, page 0, parameter 9, shape |f32[160]| at ShapeIndex {}, maybe-live-out:
 value: <1 x @0> (size=640,offset=0): f32[160]{0}
allocation 1: size 200, page 0, preallocated-temp:
 value: <2 state.5{18} (phi) @0> (size=64,offset=96): f32[16]{0}
 value: <3 zeros @0> (size=64,offset=96): f32[16]{0}
 value: <4 wide{1} @0> (size=96,offset=0): bf16[48]{0}
 value: <5 dead @0> (size=96,offset=0): bf16[48]{0}
 value: <6 dead.1 @0> (size=32,offset=160): f32[8]{0}
"""
VALUES = """
 from instruction: %state.5 = (s32[], f32[16]{0}) parameter(0)
 from instruction: %zeros = f32[16]{0} broadcast(%zero), metadata={op_name="a" stack_frame_id=2}
 from instruction: %wide = (f32[], bf16[48]{0}) fusion(%zeros), metadata={source_file="/a/jaxpipe/model/rope.py" source_line=8}
"""  # noqa: E501


def test_the_largest_arrays_at_the_peak_and_who_made_them(tmp_path):
    found = (
        Temporary(96, "bf16[48]", "wide", "jaxpipe/model/rope.py:8"),
        Temporary(
            64, "f32[16]", "zeros", "jaxpipe/core/executor/buffers.py:22"
        ),  # carried as state.5
    )
    assert read_temporaries(tmp_path) == ()
    for name, text in (
        ("-live-range", LIVE),
        ("-buffer-assignment", PLACES),
        ("-buffer-assignment-values", VALUES),
        ("", HEAD),
    ):
        (tmp_path / f"module_1.jit_step.sm_9.0a_gpu_after_optimizations{name}.txt").write_text(text)
    assert read_temporaries(tmp_path) == found
    other = SimpleNamespace(rest="metadata={stack_frame_id=9}")
    assert SourceLines(HEAD).of(other) == SourceLines("").of(other) == ""


def test_several_are_asked_for_at_once():
    requests = several.load_requests(
        SMALL, ["parallel.pp=2"], ["h100", "a100"], [4, 8], ["1f1b", "zb_h1"]
    )
    found = [(o.card, o.plan.config.parallel.dp, o.plan.config.parallel.schedule) for o in requests]
    assert sorted(found) == sorted(
        (card, dp, name)
        for card in ("h100", "a100") for dp in (2, 4) for name in ("1f1b", "zb_h1")
    )  # fmt: skip
    (one,) = several.load_requests(SMALL, [], ["b200"], [], [])
    assert (one.card, one.plan.devices.hardware.device) == ("b200", "B200")
    with pytest.raises(ConfigError, match="multiple of parallel.pp=4"):
        several.load_requests(SMALL, [], ["h100"], [8, 10], [])
    report = SimpleNamespace(
        card="h100", devices=8, bytes=SimpleNamespace(peak=2**30), fits=True, step=(None, 0.25),
        program=SimpleNamespace(hidden=False, buffer_copies=(DeviceCopy("f32[2]", 8, 3),)),
        graphs=None, seconds=12.0, phases=1,
    )  # fmt: skip
    console = Console(width=140)
    with console.capture() as said:
        console.print(several.build_table(requests[:1], [report]))
    _, line = said.get().splitlines()
    assert line.split()[:2] == ["h100", "8"]
    assert line.split()[-8:] == ["GiB", "yes", "NOT", "HIDDEN", "3", "parts", "0.25", "12"]


def test_a_card_is_refused_what_its_devices_lack():
    packed = [
        "data.packing=sequential", "model.attention=cudnn", "model.head_dim=64",
        "train.compute_dtype=bfloat16", "train.seq_len=128",
    ]  # fmt: skip
    assert several.load_requests(SMALL, packed, ["h100"], [], [])
    with pytest.raises(ConfigError, match=r"these have 8\.0: set model\.attention=xla"):
        several.load_requests(SMALL, packed, ["a100"], [], [])


def test_cards_are_named_with_commas():
    assert cards.parse_cards("h100,b200") == ["h100", "b200"]
    with pytest.raises(argparse.ArgumentTypeError, match="'gtx' is none of h100, h200, b200, a100"):
        cards.parse_cards("h100,gtx")
