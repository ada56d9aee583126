"""Launches of programs compiled for a GPU: counted and weighed by hand in a few lines."""

from __future__ import annotations

import pytest

from planner.launches import Launch, launches

# A loop of 4 trips over a stack of two matrices. The first slice is the same in every trip, the
# second is that of the trip. A product by a library has 4 MiB of workspace. One row of 64 is
# gathered from a table of 1,000, and one of 64 written into it.
LOOP = """HloModule m

%sliced (p.1: bf16[2,64,32]) -> bf16[1,64,32] {
  %p.1 = bf16[2,64,32]{2,1,0} parameter(0)
  ROOT %s.1 = bf16[1,64,32]{2,1,0} slice(%p.1), slice={[0:1], [0:64], [0:32]}
}

%of_trip (p.2: bf16[2,64,32], i.2: s32[]) -> bf16[1,64,32] {
  %p.2 = bf16[2,64,32]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  %one.2 = s32[] constant(1)
  %at.2 = s32[] subtract(%i.2, %one.2)
  ROOT %s.2 = bf16[1,64,32]{2,1,0} dynamic-slice(%p.2, %at.2, %zero.2, %zero.2), dynamic_slice_sizes={1,64,32}
}

%row (p.3: f32[1000,64], i.3: s32[1]) -> f32[1,64] {
  %p.3 = f32[1000,64]{1,0} parameter(0)
  %i.3 = s32[1]{0} parameter(1)
  %g.3 = f32[1,64]{1,0} gather(%p.3, %i.3), offset_dims={1}, slice_sizes={1,64}
  ROOT %n.3 = f32[1,64]{1,0} negate(%g.3)
}

%put (p.4: f32[1000,64], x.4: f32[1,64], i.4: s32[]) -> f32[1000,64] {
  %p.4 = f32[1000,64]{1,0} parameter(0)
  %x.4 = f32[1,64]{1,0} parameter(1)
  %i.4 = s32[] parameter(2)
  %zero.4 = s32[] constant(0)
  ROOT %u.4 = f32[1000,64]{1,0} dynamic-update-slice(%p.4, %x.4, %i.4, %zero.4)
}

%next (p.5: s32[]) -> s32[] {
  %p.5 = s32[] parameter(0)
  %one.5 = s32[] constant(1)
  ROOT %a.5 = s32[] add(%p.5, %one.5)
}

%body (t: (s32[], bf16[2,64,32], f32[1000,64], bf16[8,64])) -> (s32[], bf16[2,64,32], f32[1000,64], bf16[8,64]) {
  %t = (s32[], bf16[2,64,32]{2,1,0}, f32[1000,64]{1,0}, bf16[8,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = bf16[2,64,32]{2,1,0} get-tuple-element(%t), index=1
  %table = f32[1000,64]{1,0} get-tuple-element(%t), index=2
  %x = bf16[8,64]{1,0} get-tuple-element(%t), index=3
  %first = ((bf16[2,64,32]{2,1,0}), bf16[1,64,32]{2,1,0}, u32[]) fusion-start(%w), kind=kLoop, calls=%sliced, metadata={op_name="jit(f)/while/body/slice"}
  %first.1 = bf16[1,64,32]{2,1,0} fusion-done(%first)
  %mine = bf16[1,64,32]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%of_trip
  %flat = bf16[64,32]{1,0} bitcast(%mine)
  %call = (bf16[8,32]{1,0}, s8[4194304]{0}) custom-call(%x, %flat), custom_call_target="__cublas$gemm"
  %ids = s32[1]{0} bitcast(%i)
  %row.1 = f32[1,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%row
  %table.1 = f32[1000,64]{1,0} fusion(%table, %row.1, %i), kind=kLoop, calls=%put
  %i.1 = s32[] fusion(%i), kind=kLoop, calls=%next
  ROOT %out = (s32[], bf16[2,64,32]{2,1,0}, f32[1000,64]{1,0}, bf16[8,64]{1,0}) tuple(%i.1, %w, %table.1, %x)
}

%condition (c: (s32[], bf16[2,64,32], f32[1000,64], bf16[8,64])) -> pred[] {
  %c = (s32[], bf16[2,64,32]{2,1,0}, f32[1000,64]{1,0}, bf16[8,64]{1,0}) parameter(0)
  %c.1 = s32[] get-tuple-element(%c), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%c.1, %four), direction=LT
}

ENTRY %main (w.0: bf16[2,64,32], table.0: f32[1000,64], x.0: bf16[8,64]) -> (s32[], bf16[2,64,32], f32[1000,64], bf16[8,64]) {
  %w.0 = bf16[2,64,32]{2,1,0} parameter(0)
  %table.0 = f32[1000,64]{1,0} parameter(1)
  %x.0 = bf16[8,64]{1,0} parameter(2)
  %zero.0 = s32[] constant(0)
  %begin = (s32[], bf16[2,64,32]{2,1,0}, f32[1000,64]{1,0}, bf16[8,64]{1,0}) tuple(%zero.0, %w.0, %table.0, %x.0)
  ROOT %loop = (s32[], bf16[2,64,32]{2,1,0}, f32[1000,64]{1,0}, bf16[8,64]{1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""
SLICE = 64 * 32 * 2


@pytest.fixture(scope="module")
def found() -> dict[str, Launch]:
    return {launch.name: launch for launch in launches(LOOP)}


def test_each_launch_of_a_loop_counts_once_a_trip(found):
    started = {"less", "first", "mine", "call", "row.1", "table.1", "i.1"}
    assert found.keys() == started and {x.times for x in found.values()} == {4.0}
    assert {x.depth for x in found.values()} == {1}


def test_a_copy_that_is_the_same_in_every_trip_is_done_again(found):
    assert [name for name, x in found.items() if x.again] == ["first"]
    first = found["first"]
    assert (first.kind, first.read, first.written) == ("copy", SLICE, SLICE)
    assert first.bytes == 4 * 2 * SLICE and first.source == "jit(f)/while/body/slice"
    # that of the trip needs its number
    assert (found["mine"].kind, found["mine"].read) == ("copy", SLICE + 4)


def test_a_product_has_no_workspace(found):
    call = found["call"]
    assert (call.kind, call.read, call.written) == ("product", 8 * 64 * 2 + SLICE, 8 * 32 * 2)


def test_only_the_rows_that_are_gathered_or_written_count(found):
    assert (found["row.1"].read, found["row.1"].written) == (64 * 4 + 4, 64 * 4)
    assert found["row.1"].kind == "other"
    # the table is updated in place
    assert (found["table.1"].read, found["table.1"].written) == (64 * 4 + 4, 64 * 4)


CHOICE = """HloModule m

%small (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %c.1 = f32[8]{0} copy(%p.1)
}

%large (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %c.2 = f32[8]{0} copy(%p.2)
  ROOT %k.2 = f32[8]{0} custom-call(%c.2), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: f32[8], b: pred[]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = pred[] parameter(1)
  %begun = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%a)
  %done = f32[8]{0} copy-done(%begun)
  ROOT %c = f32[8]{0} conditional(%b, %done, %done), true_computation=%small, false_computation=%large
}
"""


def test_of_a_choice_the_branch_that_moves_more_counts():
    found = launches(CHOICE)
    assert [(x.name, x.kind) for x in found] == [
        ("begun", "copy"),
        ("c.2", "copy"),
        ("k.2", "kernel"),
    ]


def test_a_kernel_moves_what_it_is_said_to():
    found = launches(CHOICE, kernel_bytes=lambda line, shapes: (5.0, 7.0))
    assert [x.bytes for x in found] == [64.0, 64.0, 12.0]
    whole = launches(CHOICE, kernel_bytes=lambda line, shapes: None)
    assert [x.bytes for x in whole] == [64.0, 64.0, 64.0]


def test_what_a_kernel_writes_in_place_does_not_count():
    kernel = 'custom-call(%c.2), custom_call_target="mosaic_gpu_v2"'
    lies_there = f"{kernel}, output_to_operand_aliasing={{{{1}}: (0, {{}})}}"
    pair = "(f32[4]{0}, f32[8]{0})"
    text = CHOICE.replace(f"f32[8]{{0}} {kernel}", f"{pair} {lies_there}")
    (found,) = [x for x in launches(text) if x.name == "k.2"]
    assert (found.read, found.written) == (32.0, 16.0)


def test_a_text_of_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        launches("def main():")
