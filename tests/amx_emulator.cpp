// AMX for a processor that lacks it, so that the kernels' tiles are tested anywhere: loaded before a program
// (LD_PRELOAD), it computes each AMX instruction when the processor refuses it (SIGILL), says yes where the system is
// asked for tiles, and adds AMX to the flags in /proc/cpuinfo. After Intel's manual, volume 2, but for one thing: it
// keeps subnormal numbers.
//
// What a program gets to see of it: amx_emulator_products(), how many products of tiles it computed.
// AMX_EMULATOR_REFUSES=1: the system grants no tiles; AMX_EMULATOR_WRONG=1: their sums are wrong.
//
//     g++ -O3 -march=native -shared -fPIC tests/amx_emulator.cpp -o amx.so -ldl

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Tile {
    uint8_t row[16][64];
};

struct State { // of a thread
    bool configured;
    uint8_t shapes[64];
    Tile tile[8];

    int row_bytes(int t) const { return shapes[16 + 2 * t] | shapes[17 + 2 * t] << 8; }
    int rows(int t) const { return shapes[48 + t]; }
};
thread_local State state __attribute__((tls_model("initial-exec")));
struct sigaction next_handler;
std::atomic<int64_t> n_products{0};

bool asked_to(const char *what) {
    const char *value = getenv(what);
    return value && !strcmp(value, "1");
}

[[noreturn]] void refuse(const char *why) {
    const std::string line = std::string("amx_emulator: ") + why + "\n";
    (void)!write(2, line.data(), line.size());
    abort();
}

float wide(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void clear_behind(int t, int rows) { // and beyond a row's bytes, as the processor does
    for (int r = 0; r < 16; r++) {
        const int kept = r < rows ? state.row_bytes(t) : 0;
        memset(state.tile[t].row[r] + kept, 0, 64 - kept);
    }
}

// c += a · b over the pairs of bf16 in a's rows.
void multiply_bf16(int c, int a, int b) {
    const int words = state.row_bytes(a) / 4, columns = state.row_bytes(c) / 4;
    for (int m = 0; m < state.rows(c); m++) {
        float sums[2][16] = {}, into[16];
        for (int k = 0; k < words; k++)
            for (int odd = 0; odd < 2; odd++) {
                const float left = wide(state.tile[a].row[m] + 4 * k + 2 * odd);
                for (int n = 0; n < columns; n++)
                    sums[odd][n] = fmaf(left, wide(state.tile[b].row[k] + 4 * n + 2 * odd), sums[odd][n]);
            }
        memcpy(into, state.tile[c].row[m], 64);
        for (int n = 0; n < columns; n++) into[n] += sums[0][n] + sums[1][n];
        memcpy(state.tile[c].row[m], into, 64);
    }
    clear_behind(c, state.rows(c));
}

void multiply_bytes(int c, int a, int b) { // both signed
    const int words = state.row_bytes(a) / 4, columns = state.row_bytes(c) / 4;
    for (int m = 0; m < state.rows(c); m++) {
        uint32_t into[16];
        memcpy(into, state.tile[c].row[m], 64);
        for (int k = 0; k < words; k++)
            for (int n = 0; n < columns; n++)
                for (int i = 0; i < 4; i++)
                    into[n] += (int8_t)state.tile[a].row[m][4 * k + i] * (int8_t)state.tile[b].row[k][4 * n + i];
        memcpy(state.tile[c].row[m], into, 64);
    }
    clear_behind(c, state.rows(c));
}

// The instruction at the program's place, computed; false: it is none of AMX.
bool emulate(greg_t *registers) {
    static const int NAMES[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const uint8_t *at = (const uint8_t *)registers[REG_RIP], *const start = at;
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84)) return false; // VEX, map 0F38, W0, 128 bits
    const int prefix = at[2] & 3, third = ~(at[2] >> 3) & 15, index_high = at[1] & 0x40 ? 0 : 8,
              base_high = at[1] & 0x20 ? 0 : 8;
    const int code = at[3], modrm = at[4], mode = modrm >> 6, t = modrm >> 3 & 7;
    at += 5;
    char *address = nullptr;
    int64_t stride = 0;
    if (mode != 3) {
        int base = modrm & 7;
        if (base == 4) {
            const int sib = *at++, index = (sib >> 3 & 7) | index_high;
            base = sib & 7;
            if (index != 4) stride = (int64_t)registers[NAMES[index]] << (sib >> 6);
        }
        if (base == 5 && mode == 0) { // no base, or the place after the instruction; compilers do not use either here
            if ((modrm & 7) == 4) refuse("an address without a base");
            int32_t offset;
            memcpy(&offset, at, 4);
            at += 4;
            address = (char *)at + offset;
        } else {
            address = (char *)registers[NAMES[base | base_high]];
            int32_t offset = 0;
            if (mode == 1) offset = (int8_t)*at++;
            if (mode == 2) memcpy(&offset, at, 4), at += 4;
            address += offset;
        }
    }
    const bool sums = code == 0x5c || code == 0x5e;
    if (code != 0x49 && !state.configured) refuse("tiles are used before ldtilecfg");
    if (code == 0x49 && mode != 3 && prefix == 0) { // ldtilecfg
        address += stride;
        memcpy(state.shapes, address, 64);
        state.configured = state.shapes[0] == 1;
        if (!state.configured) refuse("no palette but 1 is known");
        for (int i = 0; i < 8; i++)
            if (state.row_bytes(i) > 64 || state.rows(i) > 16) refuse("a tile is too large");
        memset(state.tile, 0, sizeof state.tile);
    } else if (code == 0x49 && modrm == 0xc0 && prefix == 0) { // tilerelease
        state.configured = false;
    } else if (code == 0x49 && mode == 3 && prefix == 3) { // tilezero
        if (!state.configured) refuse("tiles are used before ldtilecfg");
        memset(&state.tile[t], 0, sizeof state.tile[t]);
    } else if (code == 0x4b && mode != 3 && prefix == 3) { // tileloadd
        for (int r = 0; r < state.rows(t); r++) memcpy(state.tile[t].row[r], address + r * stride, state.row_bytes(t));
        clear_behind(t, state.rows(t));
    } else if (code == 0x4b && mode != 3 && prefix == 2) { // tilestored
        for (int r = 0; r < state.rows(t); r++) memcpy(address + r * stride, state.tile[t].row[r], state.row_bytes(t));
    } else if (sums && mode == 3) {
        const int a = modrm & 7, b = third;
        if (b > 7 || t == a || t == b || a == b) refuse("a product of tiles that are not three");
        if (state.row_bytes(a) / 4 != state.rows(b) || state.rows(t) != state.rows(a) ||
            state.row_bytes(t) != state.row_bytes(b))
            refuse("a product of tiles that do not fit");
        n_products.fetch_add(1, std::memory_order_relaxed);
        if (code == 0x5c && prefix == 2)
            multiply_bf16(t, a, b);
        else if (code == 0x5e && prefix == 3)
            multiply_bytes(t, a, b);
        else
            return false;
        static const bool wrong = asked_to("AMX_EMULATOR_WRONG");
        if (wrong) state.tile[t].row[15][63] ^= 1;
    } else {
        return false;
    }
    registers[REG_RIP] += at - start;
    return true;
}

void on_illegal(int number, siginfo_t *info, void *context) {
    const int error = errno;
    if (emulate(((ucontext_t *)context)->uc_mcontext.gregs)) {
        errno = error;
        return;
    }
    if (next_handler.sa_flags & SA_SIGINFO) return next_handler.sa_sigaction(number, info, context);
    if (next_handler.sa_handler != SIG_DFL && next_handler.sa_handler != SIG_IGN)
        return next_handler.sa_handler(number);
    refuse("an instruction that is none of AMX");
}

typedef int Sigaction(int, const struct sigaction *, struct sigaction *);
Sigaction *real_sigaction() { return (Sigaction *)dlsym(RTLD_NEXT, "sigaction"); }

__attribute__((constructor)) void begin() {
    struct sigaction mine = {};
    mine.sa_sigaction = on_illegal;
    mine.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    real_sigaction()(SIGILL, &mine, nullptr);
}

// /proc/cpuinfo with the flags of AMX, as an open file.
int cpuinfo() {
    const int from = (int)syscall(SYS_openat, AT_FDCWD, "/proc/cpuinfo", O_RDONLY), to = memfd_create("cpuinfo", 0);
    std::string text;
    char part[4096];
    for (ssize_t n; (n = read(from, part, sizeof part)) > 0;) text.append(part, n);
    close(from);
    for (size_t at = 0; (at = text.find("\nflags", at)) != std::string::npos;) {
        at = text.find('\n', at + 1);
        text.insert(at, " amx_tile amx_bf16 amx_int8");
    }
    (void)!write(to, text.data(), text.size());
    lseek(to, 0, SEEK_SET);
    return to;
}

int opened(const char *path, int flags, mode_t mode) {
    if (!strcmp(path, "/proc/cpuinfo")) return cpuinfo();
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

} // namespace

extern "C" int64_t amx_emulator_products() { return n_products; }

extern "C" int sigaction(int number, const struct sigaction *now, struct sigaction *before) {
    if (number != SIGILL) return real_sigaction()(number, now, before);
    if (before) *before = next_handler;
    if (now) next_handler = *now;
    return 0;
}

extern "C" long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long x[6];
    for (long &argument : x) argument = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && x[0] == 0x1023) {
        if (!asked_to("AMX_EMULATOR_REFUSES")) return 0;
        errno = EPERM;
        return -1;
    }
    typedef long Syscall(long, ...);
    static Syscall *const real = (Syscall *)dlsym(RTLD_NEXT, "syscall");
    return real(number, x[0], x[1], x[2], x[3], x[4], x[5]);
}

extern "C" int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, int) : 0;
    va_end(list);
    return opened(path, flags, mode);
}
extern "C" int open64(const char *path, int flags, ...) __attribute__((alias("open")));
