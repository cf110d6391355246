// The system services that the kernels need in WebAssembly: memory, text formatting and threads.

#include "../entry.h"
#include "../threads.h"

#include <cstdio>

using namespace kernels;

extern "C" char __heap_base; // set by the linker: start of the free memory

namespace {

// Memory is given out in blocks of 64 · 2^k bytes. Each size has a list of the freed blocks, which are reused.
constexpr size_t LINE = 64, HEADER = LINE, SIZES = 26;

struct Block {
    size_t size_class;
    Block *next;
};

char *top = nullptr;
Block *waiting[SIZES];

// A lock that is held while a block is taken or freed. Threads spin, because no thread waits long.
struct Held {
    static std::atomic<int32_t> taken;
    Held() {
        while (taken.exchange(1)) {
        }
    }
    ~Held() { taken.store(0); }
};
std::atomic<int32_t> Held::taken{0};

// Returns new memory that begins at a multiple of LINE, or null if there is none. The caller holds the lock, so this
// function must not trap: the lock would stay held.
char *more(size_t n) {
    if (!top) top = &__heap_base + (LINE - (uintptr_t)&__heap_base % LINE) % LINE;
    char *const at = top;
    const uint64_t end = (uint64_t)(uintptr_t)at + (n + LINE - 1) / LINE * LINE;
    const uint64_t pages = (end + 65535) / 65536, has = __builtin_wasm_memory_size(0);
    if (pages > 65535 || (pages > has && __builtin_wasm_memory_grow(0, pages - has) == (size_t)-1)) return nullptr;
    top = (char *)(uintptr_t)end;
    return at;
}

template<class T> T *granted(T *memory) {
    if (!memory) fail(NO_MEMORY, "the browser grants no more memory");
    return memory;
}

Block *block_of(size_t size_class) {
    const Held held;
    Block *const block = waiting[size_class];
    if (!block) return (Block *)more(HEADER + (LINE << size_class));
    waiting[size_class] = block->next;
    return block;
}

void *take(size_t n) {
    size_t size_class = 0;
    while (size_class < SIZES && (LINE << size_class) < n) size_class++;
    if (size_class == SIZES) fail(NO_MEMORY, "a block of memory is too large");
    Block *const block = granted(block_of(size_class));
    block->size_class = size_class;
    return (char *)block + HEADER;
}

void give_back(void *at) {
    if (!at) return;
    Block *const block = (Block *)((char *)at - HEADER);
    const Held held;
    block->next = waiting[block->size_class];
    waiting[block->size_class] = block;
}

// Writes a number in decimal to the end of `digits`; returns its first character.
const char *decimal(long long x, char (&digits)[24]) {
    char *at = digits + sizeof digits - 1;
    *at = 0;
    unsigned long long rest = x < 0 ? 0 - (unsigned long long)x : x;
    do *--at = '0' + rest % 10;
    while (rest /= 10);
    if (x < 0) *--at = '-';
    return at;
}

} // namespace

void *operator new(size_t n) { return take(n); }
void *operator new[](size_t n) { return take(n); }
void operator delete(void *at) noexcept { give_back(at); }
void operator delete[](void *at) noexcept { give_back(at); }
void operator delete(void *at, size_t) noexcept { give_back(at); }
void operator delete[](void *at, size_t) noexcept { give_back(at); }

// The compiler calls this function for 64-bit products that are checked for overflow.
extern "C" __int128 __multi3(__int128 a, __int128 b) {
    const auto parts = [](uint64_t x) { return std::pair<uint64_t, uint64_t>(x & 0xffffffff, x >> 32); };
    const auto [a0, a1] = parts((uint64_t)a);
    const auto [b0, b1] = parts((uint64_t)b);
    const uint64_t low = a0 * b0, middle = a1 * b0 + (low >> 32), other = (middle & 0xffffffff) + a0 * b1;
    const uint64_t high = a1 * b1 + (middle >> 32) + (other >> 32) + (uint64_t)a * (uint64_t)(b >> 64) +
                          (uint64_t)(a >> 64) * (uint64_t)b;
    return (__int128)((unsigned __int128)high << 64 | (other << 32) | (low & 0xffffffff));
}

extern "C" int __cxa_thread_atexit(void (*)(void *), void *, void *) { return 0; } // no thread ends

// Formats %s, %lld and %zu, the only conversions that the kernels use.
int std::vsnprintf(char *to, size_t room, const char *format, va_list values) {
    size_t n = 0;
    const auto put = [&](const char *text) {
        for (; *text; text++, n++)
            if (n + 1 < room) to[n] = *text;
    };
    for (; *format; format++) {
        char digits[24], one[2] = {*format, 0};
        if (*format != '%') {
            put(one);
            continue;
        }
        format++;
        if (*format == 's')
            put(va_arg(values, const char *));
        else if (*format == 'z')
            format += 1, put(decimal(va_arg(values, size_t), digits));
        else
            format += 2, put(decimal(va_arg(values, long long), digits));
    }
    if (room) to[n + 1 < room ? n : room - 1] = 0;
    return (int)n;
}

int std::snprintf(char *to, size_t room, const char *format, ...) {
    va_list values;
    va_start(values, format);
    const int n = vsnprintf(to, room, format, values);
    va_end(values);
    return n;
}

// ------------------------------------------------------------------------------------------------------------ threads

// Work runs on the page's thread, which may not sleep, and on helpers. A helper is a worker with its own instance of
// the module over the same memory. It polls for work for a while, then sleeps.
namespace {

constexpr int64_t AWAKE = 1 << 19, PATIENT = 1 << 16; // numbers of polls, a nanosecond or two each
constexpr int64_t NAP_NANOSECONDS = 50'000;

struct {
    std::atomic<int32_t> n_helpers{0}, turn{0}; // turn: number of the current work
    std::atomic<int32_t> n_busy{0};             // helpers that are still working
    std::atomic<int32_t> lost{0};               // a thread failed: nobody waits for it any more
    Work work;
    int64_t n_threads;
    Barrier *barrier;
    Alarm *alarm;
} job;

thread_local bool helps = false;

} // namespace

void kernels::parallel(int64_t n_threads, const Work &work) {
    Barrier barrier;
    Alarm alarm;
    const int32_t n_helpers = job.lost.load() ? 0 : std::min<int64_t>(n_threads - 1, job.n_helpers.load());
    if (n_helpers) {
        job.work = work, job.n_threads = 1 + n_helpers, job.barrier = &barrier, job.alarm = &alarm;
        job.n_busy.store(n_helpers);
        job.turn.fetch_add(1);
        __builtin_wasm_memory_atomic_notify((int *)&job.turn.x, n_helpers);
    }
    work.function(work.with, {0, 1 + n_helpers, &barrier, &alarm});
    while (job.n_busy.load() && !job.lost.load()) {
    }
    if (n_helpers && job.lost.load()) fail(FAILED, "a thread of this page failed; the next try uses one thread");
}

void Barrier::wait(int64_t n_threads, const Alarm &) {
    const int64_t mine = turn.load();
    if (arrived.fetch_add(1) == n_threads - 1) {
        arrived.store(0);
        turn.store(mine + 1);
        return;
    }
    for (int64_t looks = 0; turn.load() == mine; looks++) {
        if (job.lost.load()) fail(FAILED, "a thread of this page failed; the next try uses one thread");
        if (helps && looks > PATIENT) __builtin_wasm_memory_atomic_wait64((long long *)&turn.x, mine, NAP_NANOSECONDS);
    }
}

// Makes the calling worker a helper. Never returns.
extern "C" void gptworks_help() {
    helps = true;
    int32_t seen = job.turn.load();
    const int64_t thread = 1 + job.n_helpers.fetch_add(1);
    while (true) {
        for (int64_t looks = 0; job.turn.load() == seen; looks++)
            if (looks > AWAKE) __builtin_wasm_memory_atomic_wait32((int *)&job.turn.x, seen, -1);
        seen = job.turn.load();
        job.work.function(job.work.with, {thread, job.n_threads, job.barrier, job.alarm});
        job.n_busy.fetch_add(-1);
    }
}

// Called after a trap ended a thread.
extern "C" void gptworks_lost() {
    if (job.n_busy.load()) job.lost.store(1), job.n_busy.store(0);
}

extern "C" int32_t gptworks_threads() { return job.lost.load() ? 1 : 1 + job.n_helpers.load(); }

// Returns memory for the page to fill with a model's image or a step's arguments. It is never freed.
extern "C" void *gptworks_room(size_t n) {
    char *at;
    {
        const Held held;
        at = more(n);
    }
    return granted(at);
}
