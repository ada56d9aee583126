"""FLOPs of compiled programs: products are counted as often as their loops run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from planner.flops import matmul_flops

A = jnp.ones((64, 32))
B = jnp.ones((32, 32))
ONCE = 2 * 64 * 32 * 32


def count(function, *arguments, **options) -> float:
    return matmul_flops(jax.jit(function).lower(*arguments).compile().as_text(), **options)


def chain(a, b, trips):
    return jax.lax.fori_loop(0, trips, lambda _, x: jnp.sin(x @ b), a)


def test_products_count_two_per_multiply_add():
    assert count(lambda a, b: a @ b, A, B) == ONCE
    assert (
        count(lambda a: jnp.einsum("bij,bkj->bik", a, a), jnp.ones((3, 8, 5))) == 2 * 3 * 8 * 8 * 5
    )


def test_bodies_count_once_per_trip():
    assert count(lambda a, b: chain(a, b, 7), A, B) == 7 * ONCE

    def nested(a, b):
        return jax.lax.scan(lambda x, _: (chain(x, b, 3), None), a, None, length=5)[0]

    assert count(nested, A, B) == 15 * ONCE


def test_loops_without_a_known_count_take_the_one_given():
    assert count(chain, A, B, jnp.int32(4), unknown_trips=4.0) == 4 * ONCE


def test_products_that_cublas_computes_count_too():
    settings = '{"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    settings += (
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
    )
    call = f'custom_call_target="__cublas$gemm", backend_config={settings}'
    hlo = f"""HloModule m

ENTRY %main (a: bf16[64,32], b: bf16[32,32]) -> bf16[64,32] {{
  %a = bf16[64,32]{{1,0}} parameter(0)
  %b = bf16[32,32]{{1,0}} parameter(1)
  %c = (bf16[64,32]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), {call}
  ROOT %d = bf16[64,32]{{1,0}} get-tuple-element(%c), index=0
}}
"""
    assert matmul_flops(hlo) == ONCE


CONVOLUTIONS = """HloModule m

ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %c = bf16[2,128,1,64]{3,1,0,2} parameter(2)
  %d = bf16[64,8,24,1]{2,1,0,3} parameter(3)
  %e = bf16[2,128,8,64]{3,1,0,2} parameter(4)
  %f = bf16[1,8,64,24]{3,2,1,0} parameter(5)
  %g = bf16[8,32,16]{2,1,0} parameter(6)
  %h = bf16[8,16,4]{2,1,0} parameter(7)
  ROOT %product = bf16[64,16]{1,0:T(8,128)(2,1)} convolution(%a, %b), dim_labels=bf_io->bf
}
"""
# What a TPU's compiler makes of products: its operands, result, window and labels, and its size.
PRODUCTS = {
    "rows and columns": ("a", "b", "64,16", "", "bf_io->bf", 2 * 64 * 32 * 16),
    # btd,dnh->btnh
    "two axes of columns": (
        *("c", "d", "2,128,8,24", "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, "),
        *("0b1f_i1o0->0b1f", 2 * 256 * 64 * 8 * 24),
    ),
    # btnh,nhd->btd
    "two contracted axes": (
        *("e", "f", "2,128,1,24", "window={size=1x8}, ", "0b1f_01io->0b1f"),
        2 * 256 * 8 * 64 * 24,
    ),
    # gij,gjk->gik
    "an axis of the batch": (
        *("g", "h", "8,32,4", "window={size=8 stride=7 lhs_dilate=8}, ", "0bf_0io->0bf"),
        2 * 8 * 32 * 16 * 4,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_convolutions_count_what_they_multiply(name):
    left, right, result, window, labels, flops = PRODUCTS[name]
    line = (
        f"bf16[{result}]{{0:T(8,128)}} convolution(%{left}, %{right}), {window}dim_labels={labels}"
    )
    *lines, _, _ = CONVOLUTIONS.splitlines()
    hlo = "\n".join([*lines, f"  ROOT %product = {line}", "}"])
    assert matmul_flops(hlo) == flops


# A loop over layers in a loop over micro-batches, as a TPU's compiler writes them.
LOOPS = """HloModule m

%goes_on (p: (s32[], bf16[64,32], bf16[32,32])) -> pred[] {
  %n = s32[]{:T(128)} constant(16)
  %p = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="while/cond/lt"}
}

%layer (q: (s32[], bf16[64,32], bf16[32,32])) -> (s32[], bf16[64,32], bf16[32,32]) {
  %one = s32[]{:T(128)} constant(1)
  %q = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%q), index=1
  %w = bf16[32,32]{1,0} get-tuple-element(%q), index=2
  %next = s32[]{:T(128)} add(%j, %one)
  %y = bf16[64,32]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
  ROOT %made = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%next, %y, %w)
}

%ends (r: (s32[], bf16[64,32], bf16[32,32])) -> pred[] {
  %m = s32[]{:T(128)} constant(3)
  %r = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0}) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%r), index=0
  ROOT %less = pred[]{:T(512)} compare(%k, %m), direction=LT
}

%micro (s: (s32[], bf16[64,32], bf16[32,32])) -> (s32[], bf16[64,32], bf16[32,32]) {
  %zero = s32[]{:T(128)} constant(0)
  %once = s32[]{:T(128)} constant(1)
  %s = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0}) parameter(0)
  %l = s32[]{:T(128)} get-tuple-element(%s), index=0
  %z = bf16[64,32]{1,0} get-tuple-element(%s), index=1
  %v = bf16[32,32]{1,0} get-tuple-element(%s), index=2
  %more = s32[]{:T(128)} add(%l, %once)
  %first = s32[]{:T(128)} copy(%zero), backend_config={}
  %state = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%first, %z, %v)
  %out = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) while(%state), condition=%goes_on, \
body=%layer
  %h = bf16[64,32]{1,0} get-tuple-element(%out), index=1
  ROOT %done = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%more, %h, %v)
}

ENTRY %main (a: bf16[64,32], b: bf16[32,32], c: s32[]) -> (s32[], bf16[64,32], bf16[32,32]) {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,32]{1,0} parameter(1)
  %c = s32[]{:T(128)} parameter(2)
  %none = s32[]{:T(128)} constant(0)
  %at = s32[]{:T(128)} copy(%none)
  %given = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) tuple(%at, %a, %b)
  ROOT %end = (s32[]{:T(128)}, bf16[64,32]{1,0}, bf16[32,32]{1,0}) while(%given), condition=%ends, \
body=%micro
}
"""


@pytest.mark.parametrize(
    "old, new, trips",
    [
        ("", "", 3 * 16),
        # begins at a number that is not known, counts from elsewhere, or may end before
        ("tuple(%at, %a", "tuple(%c, %a", 100 * 16),
        ("%none = s32[]{:T(128)} constant(0)", "%none = s32[]{:T(128)} constant(2)", 100 * 16),
        ("compare(%i, %n), direction=LT", "and(%i, %n)", 3 * 100),
    ],
)
def test_loops_of_a_tpu_are_counted_by_their_conditions(old, new, trips):
    assert matmul_flops(LOOPS.replace(old, new), unknown_trips=100.0) == trips * ONCE


GROUPED = """HloModule m

ENTRY %main (x: bf16[64,32], w: bf16[4,32,16], y: bf16[64,16]) -> bf16[64,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[4,32,16]{2,1,0} parameter(1)
  %y = bf16[64,16]{1,0} parameter(2)
  %t = s32[5,4]{1,0} constant({...})
  %out = bf16[4,32,16]{2,1,0} custom-call(%t, %x, %y), custom_call_target="mosaic_gpu_v2", \
operand_layout_constraints={s32[5,4]{1,0}, bf16[64,32]{1,0}, bf16[64,16]{1,0}}, \
api_version=API_VERSION_TYPED_FFI, metadata={op_name="jit(f)/grouped_outer_product/mpmd_map"}
  %flash = bf16[64,32]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", \
operand_layout_constraints={bf16[64,32]{1,0}, bf16[64,32]{1,0}}, \
metadata={op_name="jit(f)/flash_forward/mpmd_map"}
  ROOT %gmm = bf16[64,16]{1,0:T(8,128)(2,1)} custom-call(%x, %w), \
custom_call_target="tpu_custom_call", \
operand_layout_constraints={bf16[64,32]{1,0}, bf16[4,32,16]{2,1,0}}, frontend_attributes={a={}}, \
metadata={op_name="jit(f)/jvp(grouped_product)/jit(gmm)/pallas_call"}
}
"""


def test_of_kernels_grouped_products_count_each_row_once():
    assert matmul_flops(GROUPED) == 2 * (2 * 64 * 32 * 16)
    assert matmul_flops(GROUPED, filled=0.25) == 2 * 64 * 32 * 16 / 2


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        matmul_flops("hello")
