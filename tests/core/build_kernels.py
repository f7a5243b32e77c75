"""Compile every kernel in each of its forms for an H100 or H200. It does not need a GPU.

In each, a thread must read whole blocks 16 bytes at a time.
"""

from itertools import product

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from surrogap.core.fused import kernels

TYPES = {
    **dict.fromkeys(("v_table", "g_table", "w_table", "p_table", "plan"), "*i64"),
    **dict.fromkeys(("num_blocks", "num_sums", "first"), "i32"),
    **dict.fromkeys(("eta", "eps"), "fp32"),
    **dict.fromkeys(("sums", "scale"), "*fp32"),
}
NUMBERS = ("rho", "a_0", "b_0", "a_1", "b_1")
COPIES = ("g_copy", "w_copy")


def build(kernel: triton.JITFunction, dtype: tl.dtype, **constants: object) -> None:
    constants = {"dtype": dtype, "size": 4096, "padded": 1024, **constants}
    types = {
        **TYPES,
        **dict.fromkeys(COPIES, f"*{dtype}"),
        **dict.fromkeys(NUMBERS, "*fp64" if constants["on_device"] else "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(index,): constants[name] for index, name in enumerate(names) if name in constants},
    )
    options = {"num_warps": 8, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "ld.global.v4.b32" in built.asm["ptx"], names


if __name__ == "__main__":
    for name in ("climb", "combine", "copy", "products", "restore"):
        for dtype, is_low, on_device in product(
            (tl.float32, tl.bfloat16), (False, True), (False, True)
        ):
            kernel = getattr(kernels, f"{name}_kernel")
            for is_along_g in (False, True) if name == "copy" else (True,):
                flags = {"is_low": is_low, "on_device": on_device, "is_along_g": is_along_g}
                build(kernel, dtype, **flags)
        print(name)
