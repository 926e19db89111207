"""Facts read from XLA's text, on a loop small enough to be read by eye."""

import pytest

from jaxpipe.lab.gpu.products import count_products
from jaxpipe.lab.gpu.program import DeviceCopy, Program, read_graph_coverage, shape_bytes

ASYNC = '"is_sync":false'
STARTS = """
  %up-start = ((bf16[1,4]{1,0}), bf16[1,4]{1,0}) collective-permute-start(%y), {"is_sync":false}
  %down-start = ((bf16[1,4]{1,0}), bf16[1,4]{1,0}) collective-permute-start(%dx), {"is_sync":false}
"""
CONDS = """
  %cond.1 = (f32[3,8]{1,0}, f32[]) conditional(%p, %t, %t), true_computation=%run, false_computation=%idle
  %cond.2 = (f32[3,8]{1,0}, f32[]) conditional(%p, %t, %t), true_computation=%run, false_computation=%idle
"""  # noqa: E501
DONES = """
  %up-done = bf16[1,4]{1,0} collective-permute-done(%up-start)
  %down-done = bf16[1,4]{1,0} collective-permute-done(%down-start)
"""


def module(order, *, run="", idle="", fused="", entry=""):
    """Return a loop with body `order`; its state: two messages, a buffer [3,8], weights [8,8]."""
    return f"""HloModule step, is_scheduled=true

%fusion (a: f32[3,8]) -> f32[3,8] {{
  %a = f32[3,8]{{1,0}} parameter(0)
{fused}
}}

%run (t: (f32[3,8], f32[])) -> (f32[3,8], f32[]) {{
  %t.1 = (f32[3,8]{{1,0}}, f32[]) parameter(0)
  %gemm = (f32[8,8]{{1,0}}, s8[32]{{0}}) custom-call(%t.1), custom_call_target="__cublas$lt$matmul"
{run}
}}

%idle (t: (f32[3,8], f32[])) -> (f32[3,8], f32[]) {{
  %t.2 = (f32[3,8]{{1,0}}, f32[]) parameter(0)
{idle}
}}

%body.7 (state: (bf16[1,4], bf16[1,4], f32[3,8], f32[8,8])) -> (bf16[1,4], bf16[1,4], f32[3,8], f32[8,8]) {{
  %state = (bf16[1,4]{{1,0}}, bf16[1,4]{{1,0}}, f32[3,8]{{1,0}}, /*index=3*/f32[8,8]{{1,0}}) parameter(0)
  %weights = f32[8,8]{{1,0}} get-tuple-element(%state), index=3, metadata={{}}
{order}
  %ring = f32[3,8]{{1,0}} get-tuple-element(%cond.2), index=0
  ROOT %out = (bf16[1,4]{{1,0}}, bf16[1,4]{{1,0}}, f32[3,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(%up-done, %down-done, %ring, /*index=3*/%weights)
}}

%test (state.1: (s32[])) -> pred[] {{
  ROOT %less = pred[] compare(%state.1, %state.1), direction=LT
}}

%a_shorter_loop (i: (s32[])) -> (s32[]) {{
  ROOT %i = (s32[]) parameter(0)
}}

ENTRY %main (x: f32[3,8]) -> f32[] {{
  %x = f32[3,8]{{1,0}} parameter(0)
  %first = (s32[]) while(%x), condition=%test, body=%a_shorter_loop
  %loop = (bf16[1,4]{{1,0}}, bf16[1,4]{{1,0}}) while(%x), condition=%test, body=%body.7
{entry}
}}
"""  # noqa: E501


def permutes(order, **parts):
    return Program(module(order, **parts)).permutes


def test_permutes_around_every_conditional_are_hidden():
    program = Program(module(STARTS + CONDS + DONES))
    assert program.loop == "body.7"
    assert program.conditionals == 2
    assert program.permutes == (2, 2)
    assert program.hidden


def test_a_permute_that_is_done_early_is_not_hidden():
    cond_1, cond_2 = CONDS.strip().splitlines()
    up_done, down_done = DONES.strip().splitlines()
    order = "\n".join(f"  {line.strip()}" for line in (cond_1, down_done, cond_2, up_done))
    program = Program(module(f"{STARTS}{order}"))
    assert list(program.permutes) == [2, 1]
    assert not program.hidden
    assert list(permutes(STARTS + DONES + CONDS)) == [0, 0]
    assert list(permutes(CONDS + STARTS + DONES)) == [0, 0]


@pytest.mark.parametrize(
    "where",
    [
        {"order": STARTS.replace(ASYNC, '"is_sync":true', 1) + CONDS + DONES},
        {"order": STARTS + CONDS + DONES, "run": "  %p = bf16[1,4] collective-permute(%t.1)"},
    ],
    ids=["start marked so", "inside a branch"],
)
def test_synchronous_permutes_are_found_anywhere_in_the_loop(where):
    program = Program(module(where.pop("order"), **where))
    assert program.permutes.count(None) == 1
    assert not program.hidden


def test_permutes_outside_the_loop_are_not_counted():
    entry = "  ROOT %p = bf16[1,4] collective-permute(%x)"
    assert Program(module(STARTS + CONDS + DONES, entry=entry)).hidden


def test_a_doubled_body_holds_two_ticks():
    clone = CONDS.replace("%cond.1", "%cond.1.double_buffer_clone").replace("%cond.2 ", "%cond.3 ")
    program = Program(module(STARTS + CONDS + clone + DONES))
    assert (program.ticks, program.conditionals) == (2, 2)
    assert program.hidden


HOST_RING = "  %ring.1 = f32[3,8]{1,0:S(5)} get-tuple-element(%t.1), index=0\n"
FETCH = (
    "((f32[3,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%ring.1, %s), calls=%fusion"
)
PRODUCT = '  %gemm.2 = f32[8,8]{1,0} custom-call(%x), custom_call_target="__cublas$lt$matmul"\n'


@pytest.mark.parametrize(
    ("lines", "hides"),
    [
        (f"  %get = {FETCH}\n{PRODUCT}  %got = f32[1,8]{{1,0}} fusion-done(%get)", [1]),
        (f"{PRODUCT}  %get = {FETCH}\n  %got = f32[1,8]{{1,0}} fusion-done(%get)", [0]),
        ("  %put = f32[3,8]{1,0:S(5)} dynamic-update-slice(%ring.1, %x, %s)", [None]),
        ("  %got = f32[1,8]{1,0} fusion(%ring.1, %s), kind=kLoop, calls=%fusion", [None]),
        ("  %got = f32[1,8]{1,0} negate(%x)", []),
    ],
    ids=["behind a product", "behind nothing", "written at once", "read at once", "none"],
)
def test_copies_with_the_host(lines, hides):
    inside = "  %fused = f32[3,8]{1,0:S(5)} dynamic-update-slice(%a, %b, %c)"  # of one fusion
    order = STARTS + CONDS + DONES
    program = Program(module(order, run=HOST_RING + lines, fused=inside, entry=HOST_RING))
    assert list(program.host_copies) == hides


RING = "  %copy.1 = f32[3,8]{0,1} copy(%ring.1)"


@pytest.mark.parametrize("place", ["run", "idle", "order"])
def test_a_ring_copied_anywhere_in_the_loop_is_found(place):
    parts = {"order": STARTS + CONDS + DONES}
    assert Program(module(**parts)).buffer_copies == ()
    parts[place] = parts.get(place, "") + RING
    assert Program(module(**parts)).buffer_copies == (DeviceCopy("f32[3,8]", 96, 1),)


def test_copies_that_cost_nothing_in_the_loop_are_not_counted():
    weights = "  %copy.2 = f32[8,8]{0,1} copy(%weights)"  # no tick changes them
    fusion = "  %f = f32[3,8]{1,0} fusion(%t.1), kind=kLoop, calls=%fusion"
    inner = "  %copy.3 = f32[3,8]{1,0} copy(%a)\n  ROOT %b = f32[3,8]{1,0} negate(%copy.3)"
    order = STARTS + CONDS + DONES + weights
    program = Program(module(order, run=fusion, fused=inner, entry=RING))
    assert program.buffer_copies == program.message_copies == ()
    root = "  ROOT %copy.3 = f32[3,8]{1,0} copy(%a)"
    (found,) = Program(module(order, run=fusion, fused=root)).buffer_copies
    assert found.count == 1


def test_message_copies_are_counted_apart():
    copies = "  %c = bf16[1,4]{1,0} copy(%y)\n  %d = bf16[1,4]{1,0} copy(%y)"
    program = Program(module(STARTS + copies + CONDS + DONES))
    assert program.message_copies == (DeviceCopy("bf16[1,4]", 8, 2),)
    assert program.buffer_copies == ()


def test_calls_are_counted():
    assert Program(module(CONDS)).custom_calls == {"__cublas$lt$matmul": 1}


def test_a_program_without_a_loop_has_nothing_to_hide_behind():
    program = Program("ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n")
    assert (program.loop, program.permutes, program.buffer_copies) == (None, (), ())


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[]", 4), ("(f8e4m3fn[4]{0}, s4[4])", 6), ("(bf16[2,0], (u32[], pred[3]))", 7)],
)
def test_bytes(shape, size):
    assert shape_bytes(shape) == size


COND = """000: kConditional [source | sink]
{pad}  false_branch:
{pad}    003: kCublasLtMatmul [source | sink] kCublasLtMatmul
{pad}  true_branch:
{pad}    No thunks."""


def dump(body):
    """Return a thunk dump of a loop, as XLA prints labels: the first without its indent."""
    return f"""001: kCustomKernel [source | sink] fusion
002: kWhile [prev=000 (1) | next=000 (1)]
condition:
    003: kCustomKernel [source | sink] compare
  body:
{body}
000: kCommandBuffer [prev=119 (1) | sink]
    690: kWhile [source | sink]
      body:
        691: kCopy [source | sink]
"""


def test_a_tick_that_is_one_graph():
    inside = "    000: kCommandBuffer [source | sink]\n        " + COND.format(pad=" " * 8)
    found = read_graph_coverage(dump(inside))
    assert (found.whole, found.launches, found.stops) == (True, {"kCommandBuffer": 1}, 0)


def test_a_conditional_outside_a_graph_stops_the_host():
    inside = "    000: kCommandBuffer [source | sink]\n        " + COND.format(pad=" " * 8)
    found = read_graph_coverage(dump(f"{inside}\n    {COND.format(pad=' ' * 4)}"))
    assert (found.whole, found.stops) == (False, 1)
    assert found.launches == {"kCommandBuffer": 1, "kConditional": 1}


def test_a_loop_inside_a_graph_is_one_graph():
    body = dump(f"    {COND.format(pad=' ' * 4)}")
    start = body.index("002:")
    shifted = "\n".join(f"    {line}" for line in body[start:].splitlines())
    found = read_graph_coverage(f"000: kCommandBuffer [source | sink]\n{shifted}\n")
    assert (found.whole, found.stops) == (True, 0)


def test_a_loop_over_steps_contains_that_over_ticks():
    """Labels as XLA prints them in a loop inside a loop."""
    inside = """    166: kWhile [prev=000 (1) | next=000 (1)]
condition:
        No thunks.      body:
        000: kCommandBuffer [source | sink]
            167: kCopy [source | sink]
            168: kCopy [source | sink]"""
    found = read_graph_coverage(dump(inside), around=1)
    assert (found.whole, found.launches) == (True, {"kCommandBuffer": 1})
    assert read_graph_coverage(dump(inside)).launches == {"kWhile": 1}


def test_no_loop_no_graph():
    assert read_graph_coverage("001: kCustomKernel [source | sink] fusion\n") is None


def test_products_are_counted_by_op_library_and_dtype():
    call = (
        '  %m.{i} = (bf16[8,8]{{0,1}}, s8[4]{{0}}) custom-call(%x, %w), custom_call_target="{to}", '
        'metadata={{op_name="jit(step)/while/body/{scope}cond/branch_1_fun/dot_general"}}'
    )
    lines = [
        "%body (x: f8e5m2[8,8], w: f8e4m3fn[8,8]) -> bf16[8,8] {",
        "  %x = f8e5m2[8,8]{1,0} parameter(0)",
        "  %w = f8e4m3fn[8,8]{1,0} parameter(1)",
        call.format(i=1, to="__cublas$lt$matmul$f8", scope="B_chunk0/"),
        call.format(i=2, to="__cublas$lt$matmul$f8", scope="B_chunk1/"),
        call.format(i=3, to="__cublas$gemm", scope=""),
        call.format(i=4, to="__cudnn$fmhaSoftmax", scope="F_chunk0/"),
        call.format(i=5, to="__cublas$gemm", scope="F_chunk0+BW_chunk1/"),
        call.format(i=6, to="mosaic_gpu_v2", scope="B_chunk1/"),
        "  ROOT %d = bf16[8,8]{1,0} dot(%w, %x), lhs_contracting_dims={1}",
        "}",
    ]
    operands, swapped = "f8e5m2 x f8e4m3fn", "f8e4m3fn x f8e5m2"
    assert count_products(Program("\n".join(lines))) == (
        ("", "XLA", swapped, 1),
        ("", "__cublas$gemm", operands, 1),
        ("B", "__cublas$lt$matmul$f8", operands, 2),
        ("B", "mosaic_gpu_v2", operands, 1),
        ("F+BW", "__cublas$gemm", operands, 1),
    )
