"""Programs of which few collectives are behind compute because memory ran short."""

from types import SimpleNamespace

from jaxpipe.runtime.programs.exposed import count_hidden, why_exposed

PROGRAM = """HloModule step, is_scheduled=true

%scattered (p: f32[8]) -> f32[1] {
  %p = f32[8]{0} parameter(0)
  ROOT %scatter = f32[1]{0} reduce-scatter(%p), dimensions={0}
}

ENTRY %main (x: f32[1]) -> f32[8] {
  %x = f32[1]{0} parameter(0)
  %hidden = (f32[1]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  %product = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %hidden-done = f32[8]{0} all-gather-done(%hidden)
  %scatter-start = ((f32[8]{0}), f32[1]{0}) async-start(%product), calls=%scattered
  %scatter-done = f32[1]{0} async-done(%scatter-start)
  %waited = f32[8]{0} all-reduce(%product), to_apply=%add
  %sync = (f32[1]{0}, f32[8]{0}) all-gather-start(%x), backend_config={"is_sync":true}
  %more = f32[8]{0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  ROOT %sync-done = f32[8]{0} all-gather-done(%sync)
}
"""


def test_a_collective_is_hidden_if_something_computes_before_it_ends():
    assert count_hidden(PROGRAM) == (1, 4)


def warning(peak, limit, text=PROGRAM):
    analysis = SimpleNamespace(peak_memory_in_bytes=peak)
    compiled = SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: text)
    stats = None if limit is None else {"bytes_limit": limit}
    return why_exposed(compiled, SimpleNamespace(memory_stats=lambda: stats))


def test_only_a_program_that_nearly_fills_the_memory_is_named():
    assert warning(93, 100).startswith("XLA ran out of memory while scheduling: ")
    assert "only 1 of its 4 collectives" in warning(93, 100)
    assert warning(91, 100) == warning(93, None) == ""
    text = PROGRAM.replace("all-reduce(", "add(").replace('"is_sync":true', "")
    assert warning(93, 100, text) == ""  # two of three are behind compute
