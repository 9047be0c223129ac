// Runs kernels that were compiled against gpu_host.h: blocks one after another, a block's threads as fibers that meet
// at barriers, shuffles and votes. The kernels are compiled with -fsanitize=thread; the calls that this inserts before
// every load and store land here instead of in the sanitizer's own library, and are checked against the launch's arrays
// and against what the block's other threads did since the last barrier. Debugging: break on `fail`.

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if !defined(__x86_64__) || defined(LUCE_UCONTEXT)
#include <ucontext.h>
#define LUCE_UCONTEXT
#endif

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// --- what Python passes and gets back; the layouts are repeated in emulated.py

struct Region {  // the bytes of one array argument: rows of `run` bytes at nested strides
    u8* base;
    u64 extent, run;
    u64 dims, stride[4], count[4];
    u8* written;       // a flag per byte: 0 nothing was written, else the launch's `step` at that time; null: all hold values
    u64 constant;      // the kernel cannot write through this argument
    u64 granule;       // bytes of the argument's type: 1, 2 or 4
};

struct Launch {
    void (*call)(void**);
    void** arguments;
    Region* regions;
    u64 region_count;
    u8 *shared, *shared_end;
    u64 dynamic;
    u32 grid[3], block[3];
    u32 lanes;
    u32 step;  // 2 to 255: another one after each copy from the host, before which kernels end
};

enum Fault : u32 {
    NONE,
    OUTSIDE,         // no array argument, shared or own local memory there
    CONSTANT,        // a write through a const argument
    MISALIGNED,
    UNWRITTEN,       // global memory that nothing was written to
    UNWRITTEN_SHARED,
    RACE,            // another thread touched the address and no barrier orders the two
    RACE_SHARED,
    DIVERGED,        // threads of a block wait at different places or for gates that nobody opens, or some have ended
    DIVERGED_LANES,  // the same for the lanes of a wave
    NO_LANE,         // a shuffle names a lane outside the wave
    PARTIAL_WAVE,    // a shuffle or vote in a wave that lacks threads
    EARLY,           // before luce_await: a write to global memory, or a read of what a kernel of the step wrote
    UNAWAITED,       // a thread ended without luce_await
    UNREAD,          // a thread ended while a copy of it might still read shared memory
    UNMET,           // a thread sent something to its cluster's leader without luce_cluster_wait, or did not arrive
    UNRECEIVED,      // blocks of a cluster sent another number of bytes than their leader expects, or it did not wait
    FULL,            // a block posted a number to a slot from which nobody had taken the one before
    UNPOSTED,        // a thread takes a number that no block before its own has posted
    UNSHARED,        // a thread arrives at a gate, and products may not see what it wrote to shared memory
    UNAWAITED_BOX,   // a block ended before a box had come to its shared memory
};

enum Access : u32 { READ, WRITE, ATOMIC };

struct Report {
    u32 fault, access;
    u8* address;
    u64 size;
    u64 site, other_site;  // offsets in the kernel's library
    u32 block[3], thread, other_thread, other_block;
};

// --- state of the one launch that runs

struct dim3 {
    u32 x, y, z;
};
extern "C" {
dim3 threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) u8 luce_dynamic[227 * 1024];
}

namespace {

constexpr u64 STACK = 128 * 1024;
constexpr u32 EMPTY_SLOT = 0xffffffff;  // of kernels/posts.h
constexpr u32 POISON = 0x7FF17FF5;  // a NaN as half, float and double; emulated.py fills fresh memory with it

enum Wait : u8 { NEW, READY, AT_SYNC, AT_LANES, AT_GATE, ENDED };
enum LaneOp : u8 { SHUFFLE, BALLOT, SYNC_LANES };

struct Bulk {  // in the kernel's shared memory: the copies of a load, and those so far
    u32 pieces, asked;
};

struct Gate {  // in the kernel's shared memory: arrivals of a turn, those that it lacks, copies of boxes too, and turns that have ended
    uint16_t count, missing, copies, ended;
};

struct Copy {  // of 16 bytes or less that are on their way to shared memory
    u8* to;
    u8 bytes[16];
    u64 size, group, begun;  // begun: the stamp of when it was asked for; group: of a bulk copy its load
    void* site;
    const Bulk* bulk;
    Gate* gate;  // of a box
};

struct Store {  // of 16 bytes that are on their way from shared memory
    u8 *to, *from;
    u8 bytes[16];
    u64 group;
    void* site;
};

struct Sent {  // a word on its way to the shared memory of a cluster's leader
    u8* to;
    u32 bits;
};

struct Fiber {
#if defined(LUCE_UCONTEXT)
    ucontext_t context;
#else
    void* stack_pointer;
#endif
    u8* stack;
    dim3 index;
    void* site;
    u64 value;
    int source;
    const Gate* gate;  // and `source` is the turn
    bool unshared;     // it wrote to shared memory since luce_wgmma_share
    std::vector<Copy> copies;   // that it asked for and did not wait for, the oldest first
    std::vector<Copy> bulk_copies;
    std::vector<Copy> boxes;    // for which others wait, at gates
    u64 group;                  // of the next one
    std::vector<Store> stores;  // the same for copies from shared memory
    u64 store_group;
    bool awaited;
    bool arrived, arrived_behind_reads, met;  // at the cluster's barrier
    u32 joined;  // blocks before this one whose accesses are ordered before what comes, as they sent what it waited for
    Wait wait;
    LaneOp op;
};

// Who touched a piece of memory, in one word. The lowest two bits, of readers and of atomic writers, say whether this
// thread (0), lanes of its wave (1), threads of its block (2) or of several blocks (3) did. Plain integers: note() is
// where the time goes.
using Stamp = u64;
constexpr int ATOMIC_WRITE = 2, THREAD = 3, LANES_EPOCH = 13, EPOCH = 25, BLOCK = 39;
constexpr u64 MANY_MASK = 3, THREAD_MASK = 1023, LANES_EPOCH_MASK = 4095, EPOCH_MASK = 16383;
struct Cell {
    Stamp writer, reader;
};

struct Space {  // overlapping regions, one of them writable, share their cells
    u8 *base, *end;
    Cell* cells;
    int shift;
};

Launch launch;
Report* report;
bool failed;
bool landing;  // the scheduler brings boxes
Fiber fibers[1024];
std::vector<u8*> free_stacks;
u64 stacks;
Fiber* current;
u32 current_thread, wave_end, threads, block_number;
u32 epoch, lanes_epoch[1024 / 32];
int lane_bits;
u8* image[2];
std::vector<Space> spaces;
std::vector<Sent> sent;
u64 expected, received;  // bytes of a cluster's leader
Space shared_space[2];
Region* last_region;
#if defined(LUCE_UCONTEXT)
ucontext_t scheduler;
#else
void* scheduler;
#endif

// Zeroed pages that cost nothing until they are touched.
void* map(u64 size) {
    return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// --- fibers

#if defined(LUCE_UCONTEXT)
void to_scheduler() { swapcontext(&current->context, &scheduler); }
void to_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#else
extern "C" void luce_switch(void** save, void* to);
asm(R"(
    .text
    .type luce_switch, @function
    .hidden luce_switch
luce_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
void to_scheduler() { luce_switch(&current->stack_pointer, scheduler); }
void to_fiber(Fiber& from, Fiber& to) { luce_switch(&from.stack_pointer, to.stack_pointer); }
#endif

void fail(Fault fault, u32 thread, void* site);
bool any(const Copy&);
template <typename Chosen> void land(std::vector<Copy>& copies, const Chosen& chosen);

void fiber_main() {
    launch.call(launch.arguments);
    land(current->copies, any);
    land(current->bulk_copies, any);
    if (!current->stores.empty()) fail(UNREAD, current_thread, current->stores[0].site);
    if (!current->awaited) fail(UNAWAITED, current_thread, reinterpret_cast<void*>(launch.call));
    current->wait = ENDED;
    to_scheduler();
}

bool runs(u32 thread) { return fibers[thread].wait == NEW || fibers[thread].wait == READY; }

// Makes a fiber the current one; what follows switches to it.
void enter(u32 thread) {
    Fiber& fiber = fibers[thread];
    current = &fiber;
    current_thread = thread;
    threadIdx = fiber.index;
    if (fiber.wait == NEW) {
        if (free_stacks.empty()) {
            // Equal distances would put all stacks into the same sets of the caches.
            u64 apart = stacks++ % 64 * 512;
            free_stacks.push_back(static_cast<u8*>(map(STACK + 64 * 512)) + apart);
        }
        fiber.stack = free_stacks.back();
        free_stacks.pop_back();
#if defined(LUCE_UCONTEXT)
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
#else
        // Six registers, the entry, and one word that leaves the stack pointer as a call would.
        u64* top = reinterpret_cast<u64*>(fiber.stack + STACK) - 8;
        top[6] = reinterpret_cast<u64>(fiber_main);
        top[7] = 0;
        fiber.stack_pointer = top;
#endif
    }
    fiber.wait = READY;
}

// The current fiber waits: to the next lane of its wave that can run. Straight, for half of the time goes into switches,
// and since all lanes come from the same place to the same place, the CPU foresees where their calls return to.
void leave() {
    Fiber& waiting = *current;
    for (u32 t = current_thread + 1; t < wave_end; t++)
        if (runs(t)) {
            enter(t);
            return to_fiber(waiting, *current);
        }
    to_scheduler();
}

// Runs a fiber, and those behind it in its wave, until there is none, one ends, or one fails.
void resume(u32 thread) {
    enter(thread);
#if defined(LUCE_UCONTEXT)
    swapcontext(&scheduler, &current->context);
#else
    luce_switch(&scheduler, current->stack_pointer);
#endif
    // The next thread reuses the stack while it is in the cache.
    if (current->wait == ENDED || failed) free_stacks.push_back(current->stack), current->stack = nullptr;
}

u64 offset_in_image(void* site) { return static_cast<u8*>(site) - image[0]; }

// Fills the report; the caller returns to the scheduler, or is it.
__attribute__((noinline)) void fail(Fault fault, u32 thread, void* site) {
    failed = true;
    report->fault = fault;
    report->site = offset_in_image(site);
    report->block[0] = blockIdx.x, report->block[1] = blockIdx.y, report->block[2] = blockIdx.z;
    report->thread = thread;
}

// --- accesses

__attribute__((noinline, cold)) void fail_access(Fault fault, Access access, u8* at, u64 size, void* site,
                                                 Stamp other = 0) {
    report->access = access;
    report->address = at;
    report->size = size;
    report->other_thread = other >> THREAD & THREAD_MASK;
    report->other_block = (other >> BLOCK) - 1;
    fail(fault, current_thread, site);
    if (!landing) to_scheduler();
}

Stamp own_stamp(Access access) {
    u64 in_block = epoch & EPOCH_MASK, in_wave = lanes_epoch[current_thread >> lane_bits] & LANES_EPOCH_MASK;
    return u64{block_number} << BLOCK | in_block << EPOCH | in_wave << LANES_EPOCH | u64{current_thread} << THREAD |
           u64{access == ATOMIC} << ATOMIC_WRITE;
}

bool same_block(Stamp a, Stamp b) { return (a ^ b) >> BLOCK == 0; }
bool same_wave(Stamp a, Stamp b) { return ((a ^ b) >> THREAD & THREAD_MASK) >> lane_bits == 0; }
bool same_thread(Stamp a, Stamp b) { return ((a ^ b) >> THREAD & THREAD_MASK) == 0; }

// Whether every access that `past` stands for is ordered before one by the current thread.
inline bool ordered(Stamp past, Stamp own) {
    u64 many = past & MANY_MASK;
    // Of several blocks the stamp has the first one's number.
    if (many == 3 || !same_block(past, own)) return (past >> BLOCK) + current->joined >= own >> BLOCK;
    if ((past ^ own) >> EPOCH) return true;
    if (many == 2 || !same_wave(past, own)) return false;
    return ((past ^ own) >> LANES_EPOCH & LANES_EPOCH_MASK) || (many == 0 && same_thread(past, own));
}

// Stands for the accesses of `past` that are not ordered before `own`, and for `own`.
inline Stamp merged(Stamp past, Stamp own) {
    if (!past || ordered(past, own)) return own;
    u64 many = !same_block(past, own) ? 3 : !same_wave(past, own) ? 2 : !same_thread(past, own) ? 1 : 0;
    return (past & ~MANY_MASK) | std::max(past & MANY_MASK, many);
}

// Notes an access in the cells of [at, at + size); answers the conflicting one, if any.
inline Stamp note(const Space& space, bool shared, u8* at, u64 size, Access access, bool& unwritten) {
    Stamp own = own_stamp(access);
    Cell* cell = space.cells + ((at - space.base) >> space.shift);
    Cell* end = space.cells + ((at + size - 1 - space.base) >> space.shift) + 1;
    // The bytes of a word mostly have the same history: what the first one became is good for its like.
    Cell before = {~Stamp{0}, 0}, after = {};
    for (; cell < end; cell++) {
        if (cell->writer == before.writer && cell->reader == before.reader) {
            *cell = after;
            continue;
        }
        before = *cell;
        Stamp writer = before.writer, reader = before.reader;
        if (shared) {
            if (!same_block(writer, own)) writer = 0;
            if (!same_block(reader, own)) reader = 0;
            if (access != WRITE && !writer) unwritten = true;
        }
        bool atomics = access == ATOMIC && writer >> ATOMIC_WRITE & 1;
        if (writer && !atomics && !ordered(writer, own)) return writer;
        if (access == READ) {
            cell->reader = merged(reader, own);
        } else {
            if (reader && !ordered(reader, own)) return reader;
            cell->writer = atomics ? merged(writer, own) : own;
            cell->reader = 0;
        }
        after = *cell;
    }
    return 0;
}

bool covers(const Region& region, const u8* at, u64 size) {
    u64 offset = at - region.base;
    if (offset >= region.extent || size > region.extent - offset) return false;
    for (u64 d = 0; d < region.dims; d++) {
        if (offset / region.stride[d] >= region.count[d]) return false;
        offset %= region.stride[d];
    }
    return offset + size <= region.run;
}

Region* find(const u8* at, u64 size) {
    for (u64 i = 0; i < launch.region_count; i++)
        if (covers(launch.regions[i], at, size)) return &launch.regions[i];
    return nullptr;
}

bool holds_poison(const u8* at, u64 size, const u8* written) {
    // The host may have filled the memory behind the kernels' back: then it no longer holds the pattern.
    for (u64 i = 0; i < size; i++)
        if (!written[i] && at[i] == static_cast<u8>(POISON >> 8 * (reinterpret_cast<u64>(at + i) % 4))) {
            // One byte may agree by chance: look at its whole word, as far as it was not written.
            const u8* word = at + i - reinterpret_cast<u64>(at + i) % 4;
            const u8* flags = written + (word - at);
            bool same = true;
            for (int b = 0; b < 4; b++) same &= flags[b] || word[b] == static_cast<u8>(POISON >> 8 * b);
            if (same) return true;
        }
    return false;
}

inline void check(void* address, u64 size, Access access, void* site, u64 alignment) {
    u8* at = static_cast<u8*>(address);
    if (static_cast<u64>(at - current->stack) < STACK) return;
    if (reinterpret_cast<u64>(at) % alignment) return fail_access(MISALIGNED, access, at, size, site);
    for (const Space& space : shared_space)
        if (at >= space.base && at < space.end) {
            if (size > static_cast<u64>(space.end - at)) return fail_access(OUTSIDE, access, at, size, site);
            bool unwritten = false;
            Stamp other = note(space, true, at, size, access, unwritten);
            if (other) return fail_access(RACE_SHARED, access, at, size, site, other);
            if (unwritten) return fail_access(UNWRITTEN_SHARED, access, at, size, site);
            current->unshared |= access == WRITE;
            return;
        }
    Region* region = last_region;
    if (!region || !covers(*region, at, size)) {
        region = find(at, size);
        if (!region) {
            if (at >= image[0] && at < image[1] && access == READ) return;  // a constant table
            return fail_access(OUTSIDE, access, at, size, site);
        }
        last_region = region;
    }
    if (!current->awaited && access != READ) return fail_access(EARLY, access, at, size, site);
    if (region->written) {
        u8* written = region->written + (at - region->base);
        if (!current->awaited && memchr(written, launch.step, size)) return fail_access(EARLY, access, at, size, site);
        if (access != WRITE && holds_poison(at, size, written)) return fail_access(UNWRITTEN, access, at, size, site);
        if (access != READ) memset(written, launch.step, size);
    }
    if (access != READ && region->constant) {
        // Another argument may be the same memory, and writable.
        bool writable = false;
        for (u64 i = 0; i < launch.region_count; i++)
            writable |= !launch.regions[i].constant && covers(launch.regions[i], at, size);
        if (!writable) return fail_access(CONSTANT, access, at, size, site);
    }
    for (const Space& space : spaces)
        if (at >= space.base && at < space.end) {
            bool unwritten;
            Stamp other = note(space, false, at, size, access, unwritten);
            if (other) return fail_access(RACE, access, at, size, site, other);
            return;
        }
}

// --- copies to shared memory in the background: they end when they are waited for, or with their thread, as late as on
// a GPU at worst. Until then nobody may touch the place, and it holds no numbers.

Copy begun_copy(u8* to, const u8* from, u64 size, bool valid, const Bulk* bulk, Gate* gate, void* site) {
    if (valid) check(const_cast<u8*>(from), size, READ, site, size);
    check(to, size, WRITE, site, size);
    const u64 group = bulk ? bulk->asked / bulk->pieces : current->group;
    Copy copy = {to, {}, size, group, own_stamp(WRITE), site, bulk, gate};
    if (valid) memcpy(copy.bytes, from, size);
    memset(to, 0xff, size);
    return copy;
}
void begin_copy(u8* to, const u8* from, u64 size, bool valid, const Bulk* bulk, void* site) {
    const Copy copy = begun_copy(to, from, size, valid, bulk, nullptr, site);
    (bulk ? current->bulk_copies : current->copies).push_back(copy);
}

bool any(const Copy&) { return true; }

// Ends the chosen copies of the current thread.
template <typename Chosen> void land(std::vector<Copy>& copies, const Chosen& chosen) {
    for (const Copy& copy : copies) {
        if (!chosen(copy)) continue;
        for (const Space& space : shared_space)
            if (copy.to >= space.base && copy.to < space.end)
                for (u64 i = 0; i < copy.size; i++) {
                    Cell& cell = space.cells[copy.to + i - space.base];
                    const Stamp other = cell.reader ? cell.reader : cell.writer;
                    if (other != copy.begun) return fail_access(RACE_SHARED, WRITE, copy.to + i, 1, copy.site, other);
                    cell.writer = own_stamp(WRITE);
                }
        memcpy(copy.to, copy.bytes, copy.size);
        current->unshared = true;
    }
    copies.erase(std::remove_if(copies.begin(), copies.end(), chosen), copies.end());
}

// Copies from shared memory: they read it and write when they are waited for.
void begin_store(u8* to, const u8* from, void* site) {
    Store store = {to, const_cast<u8*>(from), {}, current->store_group, site};
    check(store.from, 16, READ, site, 16);
    check(to, 16, WRITE, site, 16);
    memcpy(store.bytes, from, 16);
    current->stores.push_back(store);
}

// Ends the current thread's copies of groups before `end`.
void store(u64 end) {
    std::vector<Store>& stores = current->stores;
    u64 count = 0;
    for (; count < stores.size() && stores[count].group < end; count++) {
        const Store& copy = stores[count];
        check(copy.from, 16, READ, copy.site, 16);
        if (memcmp(copy.from, copy.bytes, 16)) return fail_access(RACE_SHARED, READ, copy.from, 16, copy.site);
        check(copy.to, 16, WRITE, copy.site, 16);
        memcpy(copy.to, copy.bytes, 16);
    }
    stores.erase(stores.begin(), stores.begin() + count);
}

// --- clusters: blocks run one after another, the leader last, so that what they send waits for it

// What has been sent so far reaches the leader's shared memory, where it was written before the last barrier.
void receive(u32 blocks, void* site) {
    current->joined = blocks - 1;
    for (const Sent& word : sent) {
        const Stamp own = own_stamp(WRITE) - (u64{1} << EPOCH);
        for (const Space& space : shared_space)
            if (word.to >= space.base && word.to < space.end)
                for (u64 i = 0; i < sizeof(word.bits); i++) {
                    Cell& cell = space.cells[word.to + i - space.base];
                    for (const Stamp other : {cell.reader, cell.writer})
                        if (same_block(other, own)) return fail_access(RACE_SHARED, WRITE, word.to + i, 1, site, other);
                    cell.writer = own;
                }
        memcpy(word.to, &word.bits, sizeof(word.bits));
        received += sizeof(word.bits);
    }
    sent.clear();
}

Cell* map_cells(u64 count) {
    return static_cast<Cell*>(map(count * sizeof(Cell)));
}

// --- meeting points

u64 meet_lanes(LaneOp op, u64 value, int source, void* site) {
    current->wait = AT_LANES;
    current->op = op;
    current->value = value;
    current->source = source;
    current->site = site;
    leave();
    return current->value;
}

void diverged(Fault fault, u32 first, u32 last) {
    // Names a waiting thread, and one that does not wait at the same place.
    u32 waiting = first;
    while (fibers[waiting].wait == ENDED) waiting++;
    for (u32 other = first; other < last; other++)
        if (fibers[other].wait != fibers[waiting].wait || fibers[other].site != fibers[waiting].site) {
            report->other_thread = other;
            report->other_site = fibers[other].wait == ENDED ? 0 : offset_in_image(fibers[other].site);
            return fail(fault, waiting, fibers[waiting].site);
        }
    report->other_thread = waiting;
    report->other_site = offset_in_image(fibers[waiting].site);
    fail(fault, waiting, fibers[waiting].site);
}

// Runs the lanes [first, last) until all are at a barrier of the block or a gate, or have ended.
void run_wave(u32 first, u32 last) {
    u32 count = last - first;
    wave_end = last;
    for (;;) {
        for (u32 t = first; t < last; t++) {
            if (!runs(t)) continue;
            resume(t);
            if (failed) return;
            t = current_thread;
        }
        u32 meeting = 0;
        bool same = true, gated = false;
        Fiber& leader = fibers[first];
        for (u32 t = first; t < last; t++) {
            meeting += fibers[t].wait == AT_LANES;
            gated |= fibers[t].wait == AT_GATE;
            same &= fibers[t].wait == leader.wait && fibers[t].site == leader.site;
        }
        if (meeting == 0 || gated) return;  // lanes at a gate come to the meeting later
        if (!same) return diverged(DIVERGED_LANES, first, last);
        if (count != launch.lanes && leader.op != SYNC_LANES) return fail(PARTIAL_WAVE, first, leader.site);
        u64 results[64], ballot = 0;
        for (u32 lane = 0; lane < count; lane++) {
            Fiber& fiber = fibers[first + lane];
            ballot |= (fiber.value & 1) << lane;
            if (fiber.op != SHUFFLE) continue;
            if (fiber.source < 0 || fiber.source >= static_cast<int>(count)) {
                report->size = static_cast<u64>(static_cast<int64_t>(fiber.source));
                return fail(NO_LANE, first + lane, fiber.site);
            }
            results[lane] = fibers[first + fiber.source].value;
        }
        for (u32 lane = 0; lane < count; lane++) {
            Fiber& fiber = fibers[first + lane];
            fiber.value = fiber.op == SHUFFLE ? results[lane] : ballot;
            fiber.wait = READY;
        }
        if (leader.op != SYNC_LANES) continue;
        lanes_epoch[first >> lane_bits]++;
        // What one of them wrote before, each of them may tell of at a gate behind.
        const bool unshared = std::any_of(fibers + first, fibers + last, [](const Fiber& fiber) { return fiber.unshared; });
        for (u32 t = first; t < last; t++) fibers[t].unshared = unshared;
    }
}

void end_turn(Gate* gate) {
    if (gate->missing || gate->copies) return;
    gate->missing = gate->count;
    gate->ended++;
}

bool is_open(const Fiber& fiber) { return (fiber.gate->ended & 1) != (fiber.source & 1); }

// Brings the boxes for which threads wait that cannot go on otherwise: as late as on a GPU at worst.
void land_boxes() {
    landing = true;
    for (u32 waiting = 0; waiting < threads; waiting++) {
        const Fiber& fiber = fibers[waiting];
        if (fiber.wait != AT_GATE || is_open(fiber) || !fiber.gate->copies) continue;
        for (u32 t = 0; t < threads && !failed; t++) {
            current = &fibers[t], current_thread = t;
            const auto chosen = [&](const Copy& copy) { return copy.gate == fiber.gate; };
            const u64 count = std::count_if(current->boxes.begin(), current->boxes.end(), chosen);
            // Products see what the copy engine writes.
            const bool unshared = current->unshared;
            land(current->boxes, chosen);
            current->unshared = unshared;
            const_cast<Gate*>(fiber.gate)->copies -= count;
        }
        end_turn(const_cast<Gate*>(fiber.gate));
    }
    landing = false;
}

// Lets threads through whose gate's turn has ended; whether there are any. They come behind everything before the arrivals,
// for no thread passes a gate while others run.
bool open_gates() {
    bool any = false;
    for (u32 t = 0; t < threads; t++) {
        Fiber& fiber = fibers[t];
        if (fiber.wait != AT_GATE || !is_open(fiber)) continue;
        fiber.wait = READY;
        any = true;
    }
    return any;
}

void run_block() {
    u32 t = 0;
    for (u32 z = 0; z < blockDim.z; z++)
        for (u32 y = 0; y < blockDim.y; y++)
            for (u32 x = 0; x < blockDim.x; x++) {
                fibers[t].index = {x, y, z};
                fibers[t].site = nullptr;
                fibers[t].awaited = false;
                fibers[t].arrived = fibers[t].arrived_behind_reads = fibers[t].met = false;
                fibers[t].joined = 0;
                fibers[t].unshared = false;
                fibers[t].copies.clear();
                fibers[t].bulk_copies.clear();
                fibers[t].boxes.clear();
                fibers[t].group = 0;
                fibers[t].stores.clear();
                fibers[t].store_group = 0;
                fibers[t++].wait = NEW;
            }
    epoch = 0;
    for (;;) {
        u32 ended = 0;
        bool same = true;
        for (u32 first = 0; first < threads; first += launch.lanes) {
            run_wave(first, std::min(first + launch.lanes, threads));
            if (failed) return;
        }
        for (t = 0; t < threads; t++) {
            ended += fibers[t].wait == ENDED;
            same &= fibers[t].site == fibers[0].site;
        }
        if (ended == threads) {
            if (received != expected) fail(UNRECEIVED, 0, reinterpret_cast<void*>(launch.call));
            expected = received = 0;
            for (t = 0; t < threads; t++)
                if (!fibers[t].boxes.empty()) return fail(UNAWAITED_BOX, t, fibers[t].boxes[0].site);
            return;
        }
        land_boxes();
        if (failed) return;
        epoch++;
        if (open_gates()) continue;
        if (ended || !same || fibers[0].wait == AT_GATE) return diverged(DIVERGED, 0, threads);
        for (t = 0; t < threads; t++) fibers[t].wait = READY;
    }
}

int find_image(dl_phdr_info* info, size_t, void* code) {
    u8 *low = nullptr, *high = nullptr;
    bool found = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_LOAD) continue;
        u8* start = reinterpret_cast<u8*>(info->dlpi_addr + header.p_vaddr);
        if (!low) low = start;
        high = start + header.p_memsz;
        found |= code >= start && code < high;
    }
    if (found) image[0] = low, image[1] = high;
    return found;
}

void map_spaces() {
    std::vector<Region> sorted(launch.regions, launch.regions + launch.region_count);
    std::sort(sorted.begin(), sorted.end(), [](const Region& a, const Region& b) { return a.base < b.base; });
    for (size_t i = 0; i < sorted.size();) {
        Space space = {sorted[i].base, sorted[i].base, nullptr, 2};
        bool writable = false;
        do {
            writable |= !sorted[i].constant;
            space.end = std::max(space.end, sorted[i].base + sorted[i].extent);
            space.shift = std::min(space.shift, sorted[i].granule == 1 ? 0 : sorted[i].granule == 2 ? 1 : 2);
            i++;
        } while (i < sorted.size() && sorted[i].base < space.end);
        if (!writable) continue;
        space.base -= reinterpret_cast<u64>(space.base) % 4;
        space.cells = map_cells(((space.end - space.base) >> space.shift) + 1);
        spaces.push_back(space);
    }
}

}  // namespace

extern "C" {

u64 luce_host_shuffle(u64 bits, int lane) { return meet_lanes(SHUFFLE, bits, lane, __builtin_return_address(0)); }
u64 luce_host_shuffle_xor(u64 bits, int mask) {
    int lane = static_cast<int>(current_thread % launch.lanes);
    return meet_lanes(SHUFFLE, bits, lane ^ mask, __builtin_return_address(0));
}
u64 luce_host_ballot(bool predicate) { return meet_lanes(BALLOT, predicate, 0, __builtin_return_address(0)); }
void luce_host_await() { current->awaited = true; }
int luce_host_read_now(const int* from) {
    const bool awaited = current->awaited;
    current->awaited = true;
    check(const_cast<int*>(from), sizeof(int), READ, __builtin_return_address(0), sizeof(int));
    current->awaited = awaited;
    return *from;
}
void luce_host_copy16(void* to, const void* from, bool valid) {
    begin_copy(static_cast<u8*>(to), static_cast<const u8*>(from), 16, valid, nullptr, __builtin_return_address(0));
}
void luce_host_copy4(void* to, const void* from) {
    begin_copy(static_cast<u8*>(to), static_cast<const u8*>(from), 4, true, nullptr, __builtin_return_address(0));
}
void luce_host_copy_close() { current->group++; }
void luce_host_copy_wait(int groups) {
    land(current->copies, [&](const Copy& copy) { return copy.group + groups < current->group; });
}
void luce_host_bulk_begin(Bulk* bulk, u32 pieces) {
    check(bulk, sizeof(Bulk), WRITE, __builtin_return_address(0), sizeof(Bulk));
    *bulk = {pieces, 0};
}
void luce_host_bulk_copy16(void* to, const void* from, const Bulk* bulk) {
    begin_copy(static_cast<u8*>(to), static_cast<const u8*>(from), 16, true, bulk, __builtin_return_address(0));
}
void luce_host_bulk_close(Bulk* bulk) {
    check(&bulk->pieces, 4, READ, __builtin_return_address(0), 4);
    check(&bulk->asked, 4, ATOMIC, __builtin_return_address(0), 4);
    bulk->asked++;
}
// Each lane that asked ends its own copies, which the others see behind their next barrier. A wait for the other phase ends
// none, and whoever touches the place of a copy races with it.
void luce_host_bulk_wait(Bulk* bulk, int turn) {
    check(&bulk->pieces, 4, READ, __builtin_return_address(0), 4);
    land(current->bulk_copies, [&](const Copy& copy) { return copy.bulk == bulk && copy.group % 2 == (turn & 1u); });
}
void luce_host_store16(void* to, const void* from) {
    begin_store(static_cast<u8*>(to), static_cast<const u8*>(from), __builtin_return_address(0));
}
void luce_host_store_close() { current->store_group++; }
void luce_host_store_wait(int groups) {
    if (current->store_group > static_cast<u64>(groups)) store(current->store_group - groups);
}
void luce_host_cluster_begin(u32 bytes) { expected = bytes; }
void luce_host_cluster_arrive(bool behind_reads) {
    current->arrived = true;
    current->arrived_behind_reads = behind_reads;
}
void luce_host_cluster_wait(u32 blocks) {
    current->met = current->arrived;
    if (current->arrived_behind_reads) current->joined = blocks - 1;
}
void luce_host_cluster_send(void* to, u32 bits) {
    sent.push_back({static_cast<u8*>(to), bits});
    if (current->met) return;
    fail(UNMET, current_thread, __builtin_return_address(0));
    to_scheduler();
}
void luce_host_cluster_receive(u32 blocks) { receive(blocks, __builtin_return_address(0)); }
void luce_host_post(int* slot, u32 bits) {
    check(slot, sizeof(bits), ATOMIC, __builtin_return_address(0), sizeof(bits));
    if (static_cast<u32>(*slot) != EMPTY_SLOT) {
        fail(FULL, current_thread, __builtin_return_address(0));
        to_scheduler();
    }
    *slot = static_cast<int>(bits);
}
// Blocks run one after another: what has not been posted now is not posted by an earlier block.
u32 luce_host_take(int* slot) {
    check(slot, sizeof(*slot), ATOMIC, __builtin_return_address(0), sizeof(*slot));
    const u32 bits = static_cast<u32>(*slot);
    if (bits == EMPTY_SLOT) {
        fail(UNPOSTED, current_thread, __builtin_return_address(0));
        to_scheduler();
    }
    *slot = static_cast<int>(EMPTY_SLOT);
    return bits;
}
void luce_host_sync_lanes() { meet_lanes(SYNC_LANES, 0, 0, __builtin_return_address(0)); }
void luce_host_sync() {
    current->wait = AT_SYNC;
    current->site = __builtin_return_address(0);
    leave();
}
void luce_host_gate_begin(Gate* gate, int count) {
    check(gate, sizeof(Gate), WRITE, __builtin_return_address(0), sizeof(Gate));
    *gate = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0, 0};
}
static void arrive(Gate* gate, void* site) {
    check(gate, sizeof(Gate), ATOMIC, site, sizeof(Gate));
    if (current->unshared) {
        fail(UNSHARED, current_thread, site);
        to_scheduler();
    }
    gate->missing--;
    end_turn(gate);
}
void luce_host_gate_arrive(Gate* gate) { arrive(gate, __builtin_return_address(0)); }
void luce_host_gate_expect(Gate* gate, u32 bytes) {
    gate->copies += bytes / 16;
    arrive(gate, __builtin_return_address(0));
}
void luce_host_box_copy16(void* to, const void* from, bool valid, Gate* gate) {
    const bool unshared = current->unshared;
    void* const site = __builtin_return_address(0);
    current->boxes.push_back(begun_copy(static_cast<u8*>(to), static_cast<const u8*>(from), 16, valid, nullptr, gate, site));
    current->unshared = unshared;
}
void luce_host_share() { current->unshared = false; }
void luce_host_gate_wait(Gate* gate, int turn) {
    check(gate, sizeof(Gate), ATOMIC, __builtin_return_address(0), sizeof(Gate));
    current->wait = AT_GATE;
    current->gate = gate;
    current->source = turn;
    current->site = __builtin_return_address(0);
    leave();
}

#define LUCE_ACCESS(size)                                                                                              \
    void __tsan_read##size(void* at) { check(at, size, READ, __builtin_return_address(0), size); }                     \
    void __tsan_write##size(void* at) { check(at, size, WRITE, __builtin_return_address(0), size); }                   \
    void __tsan_unaligned_read##size(void* at) { check(at, size, READ, __builtin_return_address(0), 1); }              \
    void __tsan_unaligned_write##size(void* at) { check(at, size, WRITE, __builtin_return_address(0), 1); }
LUCE_ACCESS(1)
LUCE_ACCESS(2)
LUCE_ACCESS(4)
LUCE_ACCESS(8)
LUCE_ACCESS(16)
void __tsan_read_range(void* at, u64 size) { check(at, size, READ, __builtin_return_address(0), 1); }
void __tsan_write_range(void* at, u64 size) { check(at, size, WRITE, __builtin_return_address(0), 1); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Runs a launch; 0, or 1 with `result` filled.
int luce_host_run(const Launch* what, Report* result) {
    launch = *what;
    report = result;
    *report = {};
    failed = false;
    last_region = nullptr;
    lane_bits = launch.lanes == 64 ? 6 : 5;
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    threads = blockDim.x * blockDim.y * blockDim.z;
    dl_iterate_phdr(find_image, reinterpret_cast<void*>(launch.call));
    shared_space[0] = {launch.shared, launch.shared_end, map_cells(launch.shared_end - launch.shared + 1), 0};
    shared_space[1] = {luce_dynamic, luce_dynamic + launch.dynamic, map_cells(launch.dynamic + 1), 0};
    map_spaces();
    sent.clear();
    expected = received = 0;
    block_number = 0;
    for (u32 z = 0; z < gridDim.z && !failed; z++)
        for (u32 y = 0; y < gridDim.y && !failed; y++)
            for (u32 x = 0; x < gridDim.x && !failed; x++) {
                blockIdx = {x, y, z};
                block_number++;
                run_block();
            }
    if (!failed && !sent.empty()) fail(UNRECEIVED, 0, reinterpret_cast<void*>(launch.call));
    for (u32 t = 0; t < threads && failed; t++)  // of threads that a fault left in the middle
        if (fibers[t].stack) free_stacks.push_back(fibers[t].stack), fibers[t].stack = nullptr;
    for (const Space& space : spaces)
        munmap(space.cells, (((space.end - space.base) >> space.shift) + 1) * sizeof(Cell));
    spaces.clear();
    for (const Space& space : shared_space) munmap(space.cells, (space.end - space.base + 1) * sizeof(Cell));
    return failed;
}

}  // extern "C"

template <typename T> static inline T exchange(T* to, T value, bool add, void* site) {
    check(to, sizeof(T), ATOMIC, site, sizeof(T));
    T old = *to;
    *to = add ? static_cast<T>(static_cast<u32>(old) + static_cast<u32>(value)) : std::max(old, value);
    return old;
}
int atomicAdd(int* to, int value) { return exchange(to, value, true, __builtin_return_address(0)); }
u32 atomicAdd(u32* to, u32 value) { return exchange(to, value, true, __builtin_return_address(0)); }
int atomicMax(int* to, int value) { return exchange(to, value, false, __builtin_return_address(0)); }
u32 atomicMax(u32* to, u32 value) { return exchange(to, value, false, __builtin_return_address(0)); }
