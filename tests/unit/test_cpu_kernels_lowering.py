"""The instructions that add products, as LLVM emits them for CPUs that need not be this one."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from luce.cpu_kernels.lowering import BYTE_LANES, DOTS, INT_LANES, PAIR_LANES, PAIRED

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def assembly(name: str, triple: str, cpu: str, features: str) -> str:
    """The code of a function that adds to a vector in memory."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    weights = PAIR_LANES if name in PAIRED else BYTE_LANES
    kinds = INT_LANES.as_pointer(), weights.as_pointer(), weights.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "sums")
    builder = ir.IRBuilder(function.append_basic_block())
    total, weight, x = (builder.load(each) for each in function.args)
    builder.store(DOTS[name][1](builder, total, weight, x), function.args[0])
    builder.ret_void()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize(
    ("name", "triple", "cpu", "features", "instruction", "times"),
    [
        ("AVX-512 VNNI", X86, "znver4", "", "vpdpbusd", 1),
        ("AVX-VNNI", X86, "alderlake", "", "vpdpbusd", 2),
        ("AVX2", X86, "haswell", "", "vpmaddwd", 2),
        ("Arm i8mm", ARM, "generic", "+i8mm,+neon", "usdot", 4),
    ],
)
def test_one_instruction_for_each_register(
    name: str, triple: str, cpu: str, features: str, instruction: str, times: int
) -> None:
    assert assembly(name, triple, cpu, features).count(f"\t{instruction}\t") == times
