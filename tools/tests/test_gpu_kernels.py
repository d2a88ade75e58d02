"""The page of kernels is what the tool reads, and the reader and the arithmetic are right."""

import ast
import re
from collections import Counter

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from bandwidth_model import GPUS, LINK_LATENCY_S, Needs, share
from gpu_kernels import PAGE, Kernel, Row, kernels, page, release, row
from machine_code import Instruction, Reading, instructions, loops, most_in_flight, read_code
from repository import sources

HOPPER, BLACKWELL = GPUS


@pytest.fixture
def text():
    found = PAGE.read_text()
    if f"Triton {release()} compiled" not in found:
        pytest.skip(f"Triton {release()} compiles to other code")
    return found


# One of each package that is compiled in a moment.
@pytest.mark.parametrize(
    ("gpu", "package", "name"),
    [
        (HOPPER, "nvls", "reduce_scatter_kernel"),
        (HOPPER, "inference", "product_kernel"),
        (BLACKWELL, "gdn-cp", "sum_kernel"),
    ],
)
def test_a_few_rows_are_what_the_tool_reads(text, gpu, package, name):
    (one,) = (kernel for kernel in kernels(gpu, [package]) if kernel.name == name)
    table = text.partition(f"## {gpu.name}")[2]
    assert row(one, gpu).text() in table, "run `python tools/gpu_kernels.py`"


@pytest.mark.soak
def test_page_is_what_the_tool_writes(text):
    assert text == page(), "run `python tools/gpu_kernels.py`"


def test_each_kernel_is_there_for_each_gpu():
    """But for the one that has no data."""
    written = {
        node.name
        for path in sources()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any("triton.jit" in ast.unparse(one) for one in node.decorator_list)
    }
    shown = Counter(re.findall(r"^\| [\w-]+ \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert shown == dict.fromkeys(written - {"wait_for_all_kernel"}, len(GPUS))


# -- the reader --------------------------------------------------------------------------------


def code(*lines):
    """Lines as nvdisasm prints them; those that end with a colon are labels."""
    text = ".text.one_kernel:\n"
    for place, line in enumerate(lines):
        guard, _, rest = line.rpartition("@")[2].partition(" ") if "@" in line else ("", "", line)
        guarded = f"@{guard} {rest}" if guard else line
        is_label = line.endswith(":")
        text += f"{line}\n" if is_label else f"        /*{16 * place:04x}*/    {guarded} ;\n"
    return text


def test_loads_that_depend_on_each_other_are_not_on_their_way_together():
    chain = read_code(
        code(
            *(".L_x_0:", "LDG.E.64 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R4.64]"),
            *("FADD R0, R0, R11", "@P0 BRA `(.L_x_0)", "EXIT"),
        )
    )
    assert (chain.loads, chain.in_loop) == ({16: 1}, True)
    both = read_code(
        code(
            *(".L_x_0:", "LDG.E.64 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64+0x10]"),
            *("FADD R0, R4, R11", "@P0 BRA `(.L_x_0)", "EXIT"),
        )
    )
    assert both.loads == {8: 1, 16: 1}
    assert both.num_bytes == 24


def test_the_last_register_of_a_wide_load_is_waited_for_too():
    load, other = "LDG.E.128 R8, desc[UR4][R2.64]", "LDG.E R20, desc[UR4][R2.64]"
    for use, loads in (("FADD R0, R11, R0", {16: 1}), ("FADD R0, R12, R0", {16: 1, 4: 1})):
        assert read_code(code(load, use, other, "EXIT")).loads == loads
    # What stores four registers names the first.
    of_one = "LDG.E R11, desc[UR4][R2.64]"
    for store, loads in (
        ("STG.E.128 desc[UR4][R2.64], R8", {4: 1}),
        ("STG.E.64 desc[UR4][R2.64], R8", {4: 2}),
        ("STG.E.128 desc[UR4][R8.64], R4", {4: 2}),
        ("HMMA.16816.F32.BF16 R4, R8, R16, R4", {4: 1}),
    ):
        assert read_code(code(of_one, store, other, "EXIT")).loads == loads, store


def test_a_load_that_is_used_in_the_next_trip_is_on_its_way_over_the_jump():
    ahead = read_code(
        code(
            *("LDG.E.128 R4, desc[UR4][R2.64]", ".L_x_0:", "LDG.E.128 R8, desc[UR4][R2.64+0x10]"),
            *("FADD R0, R4, R0", "LDG.E.128 R4, desc[UR4][R2.64+0x20]", "FADD R0, R8, R0"),
            *("@!P0 BRA `(.L_x_0)", "EXIT"),
        )
    )
    assert ahead.loads == {16: 2}


@pytest.mark.parametrize(("left", "copies"), [(0, 2), (1, 4), (2, 6)])
def test_groups_of_copies_to_shared_memory_are_on_their_way_until_they_are_waited_for(left, copies):
    copy, group = "LDGSTS.E.BYPASS.128 [R49], desc[UR8][R38.64], !P3", "LDGDEPBAR"
    found = read_code(
        code(
            *(*2 * (copy, copy, group), ".L_x_0:", f"DEPBAR.LE SB0, {left:#x}", "LDS R4, [R5]"),
            *(copy, copy, group, "@P1 BRA `(.L_x_0)", "EXIT"),
        )
    )
    assert (found.loads, found.in_loop) == ({16: copies}, True)


def test_bytes_of_loads():
    widths = {
        "LDG.E": 4, "LDG.E.U8": 1, "LDG.E.S16.CONSTANT": 2, "LDG.E.64": 8, "LD.E.128.STRONG": 16,
        "LDGMC.E.F32ADD.BF16x8.RN.STRONG.SYS": 16, "LDGMC.E.ADD.F32x4.RN.STRONG.SYS": 16,
        "LDGSTS.E": 4, "LDGSTS.E.BYPASS.128": 16,
    }  # fmt: skip
    assert {name: Instruction(name, "").width for name in widths} == widths
    with pytest.raises(ValueError, match="does not say"):
        most_in_flight([], [Instruction("UTMALDG.2D", "[UR8], [UR4]")])


def test_a_division_counts_in_loops_alone():
    call = "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)"
    before, inside = ["I2F.U32.RP R4, R5", call], [".L_x_1:", "FADD R0, R0, R1"]
    end = ["@P0 BRA `(.L_x_1)", "EXIT", "$__internal_0_$__cuda_sm20_div_s64:", "I2F.U64.RP R4, R5"]
    assert read_code(code(*before, *inside, *end)).divisions == ()
    assert read_code(code(*inside, *before, *end)).divisions == ("int32", "int64")
    slow = "@P2 CALL.REL.NOINC `($__internal_1_$__cuda_sm3x_div_rn_noftz_f32_slowpath)"
    assert read_code(code(*inside, slow, *end)).divisions == ("fp32",)
    other = "CALL.REL.NOINC `($__internal_1_$__cuda_sm10x_tcgen05_guardrail_trap)"
    assert read_code(code(*inside, other, "I2F.U32 R4, R5", *end)).divisions == ()


def test_a_jump_back_from_a_piece_that_stands_last_is_no_loop():
    """As ptxas puts what a warp does whose threads went different ways."""
    text = code(
        *("MOV R1, R2", "BRA.DIV UR4, `(.L_x_2)", "SHFL.BFLY PT, R4, R5, 0x1, 0x1f"),
        *(".L_x_1:", "LDG.E R6, desc[UR4][R2.64]", "EXIT"),
        *(".L_x_2:", "MOV R7, R8", "BRA `(.L_x_1)", ".L_x_3:", "BRA `(.L_x_3)"),
    )
    assert loops(instructions(text)) == []
    assert not read_code(text).in_loop


def test_loops_within_loops():
    text = code(
        *("MOV R1, R2", ".L_x_0:", "LDG.E.128 R4, desc[UR4][R2.64]"),
        "LDG.E.128 R8, desc[UR4][R2.64]",
        *(".L_x_1:", "LDG.E R12, desc[UR4][R2.64]", "FADD R0, R12, R4", "@P0 BRA `(.L_x_1)"),
        *("FADD R0, R8, R4", "@P1 BRA `(.L_x_0)", ".L_x_2:", "LDG.E.64 R4, desc[UR4][R2.64]"),
        *("@P1 BRA `(.L_x_2)", "EXIT"),
    )
    assert loops(instructions(text)) == [[3, 4, 5], [*range(1, 8)], [8, 9]]
    # Of the two that have no other within them, the one that loads more.
    assert read_code(text).loads == {8: 1}


def test_what_waits_for_another_rank_is_not_what_loads():
    """It loads again what it looked at until that has come; here four loads before it."""
    looked = [f"LDG.E.128.STRONG.SYS R{n}, desc[UR4][R2.64]" for n in (4, 8, 12)]
    wait = [".L_x_1:", "LDG.E.128.STRONG.SYS R16, desc[UR4][R2.64]"]
    end = ["@P0 BRA `(.L_x_1)", "FADD R0, R4, R8", "@P1 BRA `(.L_x_0)", "EXIT"]
    timed = read_code(code(".L_x_0:", *looked, *wait, "S2UR UR6, SR_GLOBALTIMERLO", *end))
    assert timed.loads == {16: 3}
    # Without a clock it is a loop as any other.
    assert read_code(code(".L_x_0:", *looked, *wait, "MOV R30, R16", *end)).loads == {16: 1}


def test_products_are_named_and_other_words_with_mma_are_not():
    text = code(
        "HGMMA.64x64x8.F32.TF32 R24, R4, gdesc[UR4], R24", "UTCHMMA tmem[UR4]", "WARPSYNC.ALL"
    )
    assert read_code(text).products == ("HGMMA", "UTCHMMA")


# -- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "fit", "limit"),
    [
        (Needs(1, 32), 32, "blocks"),
        (Needs(2, 32), 32, "blocks"),
        (Needs(4, 32), 16, "threads"),
        (Needs(4, 33), 12, "registers"),
        # 40 registers are 1,280 of a warp, and a quarter has 16,384: 12 warps, four times.
        (Needs(4, 40), 12, "registers"),
        # 51 of them fit into all registers, and 48 into four quarters.
        (Needs(2, 40), 24, "registers"),
        (Needs(4, 41), 10, "registers"),
        (Needs(4, 128), 4, "registers"),
        (Needs(4, 129), 3, "registers"),
        (Needs(8, 255), 1, "registers"),
        (Needs(16, 40), 3, "registers"),
        # A KiB of each block is the system's: four blocks of 56 KiB are all of 228.
        (Needs(4, 32, 56 << 10), 4, "shared memory"),
        (Needs(4, 32, (56 << 10) + 1), 3, "shared memory"),
        (Needs(4, 32, 227 << 10), 1, "shared memory"),
        (Needs(4, 32, 0, 128), 4, "tensor memory"),
        (Needs(4, 255, 0, 256), 2, "registers"),
        (Needs(4, 255, 0, 512), 1, "tensor memory"),
    ],
)
def test_blocks_that_fit(needs, fit, limit):
    assert needs.fitting() == (fit, limit)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_what_saturates_memory_is_all_of_it(gpu):
    """As many bytes as NVIDIA says, of all multiprocessors."""
    needs, threads = Needs(8, 32), 8 * 32 * 8
    enough, blocks = gpu.bytes_in_flight // threads, 8 * gpu.multiprocessors
    assert enough * threads == gpu.bytes_in_flight
    assert share(gpu, needs, blocks, enough, over_link=False) == 1
    assert share(gpu, needs, blocks, enough + 4, over_link=False) == 1
    assert share(gpu, needs, blocks, enough // 2, over_link=False) == pytest.approx(0.5)
    # Of a launch that fills a half, and of one that does not fit at a time.
    assert share(gpu, needs, blocks // 2, enough, over_link=False) == pytest.approx(0.5)
    assert share(gpu, needs, 9 * blocks, enough // 2, over_link=False) == pytest.approx(0.5)


def test_over_nvlink_its_own_latency_and_bandwidth_count():
    needs, threads = Needs(16, 32), 16 * 512
    wanted = threads * 64 / LINK_LATENCY_S / HOPPER.link_bytes_per_s
    assert share(HOPPER, needs, 16, 64, over_link=True) == pytest.approx(wanted)
    assert share(BLACKWELL, needs, 16, 64, over_link=True) == pytest.approx(wanted / 2)


def test_a_row_says_what_it_is_held_by():
    kernel = Kernel("gdn-cp", "sum_kernel", 2, compile=None)
    reading = Reading(Counter({16: 3, 4: 1}), True, ("int32",), ("HMMA",))
    few = Row(kernel, HOPPER, Needs(4, 40, 1024), 48, reading)
    assert few.text() == (
        "| gdn-cp | `sum_kernel` | 2 | 4 | 40 | 48 | 1.0 | 12, registers | 3 x 16 + 1 x 4 | yes "
        "| int32 | HMMA | 78 | 0 % |\n"
    )
    assert few.reason() == "52 bytes of a thread, 2 blocks of 128 threads on 132 multiprocessors"
    narrow = few._replace(needs=Needs(4, 255), reading=Reading(Counter({4: 1})))
    assert narrow.reason() == "4 bytes of a thread, 8 of 64 warps for registers"
