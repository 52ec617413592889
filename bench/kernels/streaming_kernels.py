"""Kernels of the streaming gates, in Gluon for Hopper cards.

`exchange_words` runs a chain of exchanges. `stream_layers` also copies weights: one warp keeps a
ring of boxes in shared memory full, and the other warps exchange words and release the boxes. See
`streaming_schedule.py`.

No kernel can hang. A wait for words has a limit of polls. A program that exceeds it sets the error
word, and all programs then stop waiting for words. They still release every box, so that waits for
boxes end with the copies.
"""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.ops.triton.hopper_common import barrier, concat, load_box

POLLS = gl.constexpr(20_000)
"""The most polls of a wait. They take about 10 ms."""
ROOM_ROWS, ROOM_COLUMNS = gl.constexpr(32), gl.constexpr(1024)
"""Words of shared memory that keep a second program off a multiprocessor."""


@gluon.constexpr_function
def field(text: str, entry: int, which: int) -> int:
    """Returns a number of a schedule or of boxes, see their `text`."""
    return int(text.split()[entry].split(":")[which])


@gluon.constexpr_function
def entries(text: str) -> int:
    return len(text.split())


@gluon.constexpr_function
def total(text: str, until: int, which: int) -> int:
    """Returns the sum of a number over the entries before `until`."""
    return sum(int(part.split(":")[which]) for part in text.split()[:until])


@gluon.constexpr_function
def words_layout(bits: int, warps: int) -> gl.BlockedLayout:
    """Returns a layout in which a thread has words of 128 bits in a row."""
    return gl.BlockedLayout([128 // bits], [32], [warps], [0])


@gluon.constexpr_function
def per_thread(words: int, bits: int, warps: int) -> int:
    return max(128 // bits, words // (32 * warps))


@gluon.constexpr_function
def poll_text(words: int, bits: int, load: str, polls: int) -> str:
    """Returns instructions with which a thread polls words until all have the epoch.

    Operands are the payloads; the addresses, the epochs (both `words` times, only the first epoch
    counts) and the address of the error word. The thread looks at the error word at every 64th
    poll."""
    vector = 128 // bits
    epoch, error = f"${2 * words}", f"${3 * words}"
    kind = f"b{bits}"
    lines = [
        "{", ".reg .pred leave, again;", ".reg .b32 polls, missing, differing, low, failed, own;",
        f".reg .{kind} word<{words}>;", "mov.b32 polls, 0;",
        f"and.b32 own, {epoch}, 0xffff;" if bits == 32 else f"mov.b32 own, {epoch};",
        "POLL:", "mov.b32 missing, 0;",
    ]  # fmt: skip
    for at in range(0, words, vector):
        names = ", ".join(f"word{at + i}" for i in range(vector))
        lines.append(f"{load}.v{vector}.{kind} {{{names}}}, [${words + at}];")
    for at in range(words):
        if bits == 32:
            lines.append(f"shr.u32 differing, word{at}, 16;")
        else:
            lines.append(f"mov.b64 {{low, differing}}, word{at};")
        lines += ["xor.b32 differing, differing, own;", "or.b32 missing, missing, differing;"]
    lines += [
        "setp.eq.u32 leave, missing, 0;", "@leave bra DONE;", "add.u32 polls, polls, 1;",
        "and.b32 missing, polls, 63;", "setp.ne.u32 again, missing, 0;", "@again bra POLL;",
        f"ld.relaxed.gpu.global.b32 failed, [{error}];", "setp.ne.u32 leave, failed, 0;",
        "@leave bra DONE;", f"setp.lt.u32 again, polls, {polls};", "@again bra POLL;",
        f"st.relaxed.gpu.global.b32 [{error}], {epoch};", "DONE:",
    ]  # fmt: skip
    for at in range(words):
        if bits == 32:
            lines.append(f"and.b32 ${at}, word{at}, 0xffff;")
        else:
            lines.append(f"mov.b64 {{${at}, low}}, word{at};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def poll_operands(words: int) -> str:
    """Returns the constraints of `poll_text`. No payload shares a register with an input."""
    return ",".join(["=&r"] * words + ["l"] * words + ["r"] * words + ["l"] * words)


@gluon.jit
def multiprocessor():
    """Returns the number of the multiprocessor that runs the program."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def send(
    state, ptr, epoch, WORDS: gl.constexpr, PROGRAMS: gl.constexpr, BITS: gl.constexpr,
    COPIES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Stores the program's share of an exchange in every copy of the buffers."""
    SHARE: gl.constexpr = WORDS // PROGRAMS
    layout: gl.constexpr = words_layout(BITS, gl.num_warps())
    word = gl.program_id(0) * SHARE + gl.arange(0, SHARE, layout=layout)
    mixed = (state + word) * 1664525 + 1013904223
    value = (mixed >> 16) & 0xFFFF
    sent = value | (epoch << 16) if BITS == 32 else value.to(gl.int64) | (epoch.to(gl.int64) << 32)
    for copy in gl.static_range(COPIES):
        gl.store(ptr + copy * STRIDE + word, sent)


@gluon.jit
def window(WORDS: gl.constexpr, READ: gl.constexpr, PROGRAMS: gl.constexpr, BITS: gl.constexpr):
    """Returns the words that the program reads."""
    first = gl.program_id(0) * (WORDS // READ) // PROGRAMS * READ
    return first + gl.arange(0, READ, layout=words_layout(BITS, gl.num_warps()))


@gluon.jit
def poll_by_thread(ptrs, epoch, error_ptr, BITS: gl.constexpr, LOAD: gl.constexpr):
    """Returns the payloads at addresses [READ]. Each thread waits for its own words."""
    COUNT: gl.constexpr = per_thread(ptrs.shape[0], BITS, gl.num_warps())
    return gl.inline_asm_elementwise(
        poll_text(COUNT, BITS, LOAD, POLLS), poll_operands(COUNT),
        [ptrs.to(gl.int64), epoch, error_ptr.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=COUNT,
    )  # fmt: skip


@gluon.jit
def poll_by_program(ptrs, epoch, error_ptr):
    """Returns the payloads at addresses [READ]. All threads poll until every word is there."""
    words = gl.load(ptrs, volatile=True)
    missing = gl.sum(((words >> 32).to(gl.int32) != epoch).to(gl.int32), 0)
    polls = 0
    while missing > 0:
        words = gl.load(ptrs, volatile=True)
        missing = gl.sum(((words >> 32).to(gl.int32) != epoch).to(gl.int32), 0)
        polls += 1
        if missing > 0:
            failed = gl.atomic_add(error_ptr, 0, sem="relaxed") if polls % 64 == 0 else 0
            if polls >= POLLS:
                gl.store(error_ptr, epoch)
                failed = 1
            missing = gl.where(failed != 0, 0, missing)
    return words.to(gl.int32)


@gluon.jit
def await_count(counter_ptr, count, epoch, error_ptr):
    """Waits until a counter has reached a count."""
    missing = gl.atomic_add(counter_ptr, 0, sem="acquire") - count < 0
    polls = 0
    while missing:
        missing = gl.atomic_add(counter_ptr, 0, sem="acquire") - count < 0
        polls += 1
        if polls >= POLLS:
            gl.store(error_ptr, epoch)
        if polls % 64 == 0:
            missing = missing & (gl.atomic_add(error_ptr, 0, sem="relaxed") == 0)


@gluon.jit
def sum_words(values):
    """Returns the sum of values [READ] in the layout of words, behind one barrier if every thread
    has values of its own."""
    WARPS: gl.constexpr = gl.num_warps()
    OWN: gl.constexpr = values.type.layout.size_per_thread[0] * 32
    if values.shape[0] % (OWN * WARPS) == 0:
        TURNS: gl.constexpr = values.shape[0] // (OWN * WARPS)
        by_warp = gl.sum(gl.sum(gl.reshape(values, [TURNS, WARPS, OWN]), 0), 1)
        whole: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
        values = gl.convert_layout(by_warp, whole)
    return gl.sum(values, 0)


@gluon.jit
def exchange(
    state, ptr, signals_ptr, epoch, error_ptr, WORDS: gl.constexpr, READ: gl.constexpr,
    PROGRAMS: gl.constexpr, BITS: gl.constexpr, WAY: gl.constexpr, LOAD: gl.constexpr,
    COPIES: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """Sends the program's words, receives those of others, and returns the next state.

    Args:
        ptr: the exchange's words, in the first of COPIES copies that are STRIDE words apart.
        signals_ptr: int64 [2, PROGRAMS], flags of programs for odd and even epochs. Its first
            element is the counter of arrivals.
        WAY: `thread` or `program`: who polls words with epochs. `flags` and `counter` send plain
            words, and poll a flag of each program or a counter of arrivals.
        LOAD: the instruction that polls.
    """
    send(state, ptr, epoch, WORDS, PROGRAMS, BITS, COPIES, STRIDE)
    own_copy = gl.program_id(0) % COPIES * STRIDE
    ptrs = ptr + own_copy + window(WORDS, READ, PROGRAMS, BITS)
    if WAY == "thread":
        values = poll_by_thread(ptrs, epoch, error_ptr, BITS, LOAD)
    elif WAY == "program":
        values = poll_by_program(ptrs, epoch, error_ptr)
    else:
        barrier()  # All words are stored before the one atomic that signals them.
        if WAY == "flags":
            flags_ptr = signals_ptr + (epoch & 1) * PROGRAMS
            flag = epoch.to(gl.int64) << 32
            gl.atomic_xchg(flags_ptr + gl.program_id(0), flag, sem="release")
            flags = gl.arange(0, PROGRAMS, layout=words_layout(64, gl.num_warps()))
            poll_by_thread(flags_ptr + flags, epoch, error_ptr, 64, LOAD)
        else:
            gl.atomic_add(signals_ptr, 1, sem="release")
            await_count(signals_ptr, epoch.to(gl.int64) * PROGRAMS, epoch, error_ptr)
        barrier()
        values = gl.load(ptrs, cache_modifier=".cg").to(gl.int32)
    return sum_words(values)


@gluon.jit
def run_exchange(
    state, layer, words_ptr, signals_ptr, error_ptr, base, SCHEDULE: gl.constexpr,
    WHICH: gl.constexpr, PROGRAMS: gl.constexpr, BITS: gl.constexpr, WAY: gl.constexpr,
    LOAD: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Runs one exchange of a layer, if it has words. Returns the next state."""
    COUNT: gl.constexpr = entries(SCHEDULE)
    LAYER_WORDS: gl.constexpr = total(SCHEDULE, COUNT, 0)
    if field(SCHEDULE, WHICH, 0) > 0:
        slot = (layer & 1) * LAYER_WORDS + total(SCHEDULE, WHICH, 0)
        state = exchange(
            state, words_ptr + slot, signals_ptr, base + layer * COUNT + WHICH + 1, error_ptr,
            field(SCHEDULE, WHICH, 0), field(SCHEDULE, WHICH, 1), PROGRAMS, BITS, WAY, LOAD,
            COPIES, 2 * LAYER_WORDS,
        )  # fmt: skip
    return state


@gluon.jit(do_not_specialize=["base", "layers"])
def exchange_words(
    words_ptr, signals_ptr, error_ptr, out_ptr, base, layers, SCHEDULE: gl.constexpr,
    PROGRAMS: gl.constexpr, BITS: gl.constexpr, WAY: gl.constexpr, LOAD: gl.constexpr,
    COPIES: gl.constexpr,
):  # fmt: skip
    """Runs the exchanges of some layers.

    Args:
        words_ptr: words of BITS bits, two buffers of a layer's words in each copy.
        error_ptr: int32, 0 until a wait fails.
        out_ptr: int32 [PROGRAMS, 3], the final state, the multiprocessor and 0.
        base: number of epochs of all runs before.
        SCHEDULE: see `Schedule.text`.
    """
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = gl.allocate_shared_memory(gl.int32, [ROOM_ROWS, ROOM_COLUMNS], flat)
    state = base * 0
    for layer in range(layers):
        for which in gl.static_range(entries(SCHEDULE)):
            state = run_exchange(
                state, layer, words_ptr, signals_ptr, error_ptr, base, SCHEDULE, which, PROGRAMS,
                BITS, WAY, LOAD, COPIES,
            )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = room.index(0)
    row.store(gl.zeros([ROOM_COLUMNS], gl.int32, layout))
    own_ptr = out_ptr + gl.program_id(0) * 3
    gl.store(own_ptr, state)
    gl.store(own_ptr + 1, multiprocessor())
    gl.store(own_ptr + 2, gl.sum(row.load(layout), 0))


@gluon.jit
def turn(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage of the ring, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def copy_boxes(
    descs, tiles, full, empty, layers, BOXES: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, DOWN: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Copies the program's boxes of all layers as soon as the ring has room."""
    stage = layers * 0
    phase = layers * 0 + 1  # An empty ring's barriers count as being behind this phase.
    for layer in range(layers):
        for kind in gl.static_range(entries(BOXES)):
            first = (layer * PROGRAMS + gl.program_id(0)) * field(BOXES, kind, 0)
            for box in gl.static_range(field(BOXES, kind, 1) * field(BOXES, kind, 2)):
                row = first + box // field(BOXES, kind, 2) * DOWN
                column = box % field(BOXES, kind, 2) * ACROSS
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), DOWN * ACROSS * 4)
                load_box(descs[kind], [row, column], full.index(stage), tiles.index(stage))
                stage, phase = turn(stage, phase, STAGES)


@gluon.jit
def consume(
    tiles, full, empty, words_ptr, signals_ptr, error_ptr, out_ptr, base, layers,
    SCHEDULE: gl.constexpr, PROGRAMS: gl.constexpr, BITS: gl.constexpr, WAY: gl.constexpr,
    LOAD: gl.constexpr, COPIES: gl.constexpr, STAGES: gl.constexpr, DOWN: gl.constexpr,
    ACROSS: gl.constexpr, READS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Exchanges words and releases boxes, which it sums up before if READS."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    sums = gl.zeros([DOWN, ACROSS], gl.int32, layout)
    state = base * 0
    stage = base * 0
    phase = base * 0
    for layer in range(layers):
        for which in gl.static_range(entries(SCHEDULE)):
            state = run_exchange(
                state, layer, words_ptr, signals_ptr, error_ptr, base, SCHEDULE, which, PROGRAMS,
                BITS, WAY, LOAD, COPIES,
            )  # fmt: skip
            for _ in range(field(SCHEDULE, which, 2)):
                mbarrier.wait(full.index(stage), phase)
                if READS:
                    sums += tiles.index(stage).load(layout)
                # One thread releases the box for all. A thread that is a whole turn of the ring
                # behind would wait for the wrong phase.
                barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = turn(stage, phase, STAGES)
    own_ptr = out_ptr + gl.program_id(0) * 3
    gl.store(own_ptr, state)
    gl.store(own_ptr + 1, multiprocessor())
    gl.store(own_ptr + 2, gl.sum(gl.sum(sums, 1), 0))


@gluon.jit(do_not_specialize=["base", "layers"])
def stream_layers(
    qkv_desc, o_desc, gate_up_desc, down_desc, words_ptr, signals_ptr, error_ptr, out_ptr, base,
    layers, SCHEDULE: gl.constexpr, BOXES: gl.constexpr, PROGRAMS: gl.constexpr,
    BITS: gl.constexpr, WAY: gl.constexpr, LOAD: gl.constexpr, COPIES: gl.constexpr,
    STAGES: gl.constexpr, DOWN: gl.constexpr, ACROSS: gl.constexpr, READS: gl.constexpr,
    SWIZZLE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Streams the boxes of some layers, with exchanges between them. See `exchange_words`.

    Args:
        qkv_desc: weights of all layers, int32, and so on.
        out_ptr: int32 [PROGRAMS, 3], the final state, the multiprocessor and the sum of all boxes.
        BOXES: `Boxes.text` of the kinds.
        STAGES: boxes of the ring, of DOWN rows and ACROSS columns.
        SWIZZLE: bytes of the swizzle of boxes in shared memory.
    """
    tiles = gl.allocate_shared_memory(
        gl.int32, [STAGES, DOWN, ACROSS], gl.NVMMASharedLayout(SWIZZLE, 32, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    barrier()
    descs = (qkv_desc, o_desc, gate_up_desc, down_desc)
    ring = (tiles, full, empty)
    work = (words_ptr, signals_ptr, error_ptr, out_ptr, base, layers)
    copying: gl.constexpr = (BOXES, PROGRAMS, STAGES, DOWN, ACROSS)
    consuming: gl.constexpr = (
        SCHEDULE, PROGRAMS, BITS, WAY, LOAD, COPIES, STAGES, DOWN, ACROSS, READS, WARPS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, concat(concat(ring, work), consuming)),
            (copy_boxes, concat((descs, tiles, full, empty, layers), copying)),
        ],
        [1], [40],
    )  # fmt: skip
