/* Counts the bytes that a process has allocated, now and at most, without the pages that the system gave for them: put
   before the C library (LD_PRELOAD), whose own functions do the work. For glibc. */

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long now, most;

static void count(long n_bytes) {
    long after = atomic_fetch_add(&now, n_bytes) + n_bytes, before = atomic_load(&most);
    while (after > before && !atomic_compare_exchange_weak(&most, &before, after)) {
    }
}

static void *counted(void *p) {
    count((long)malloc_usable_size(p)); /* 0 for a null pointer */
    return p;
}

long allocated_now(void) { return atomic_load(&now); }
long allocated_at_most(void) { return atomic_load(&most); }
void forget_the_most(void) { atomic_store(&most, atomic_load(&now)); }

void *malloc(size_t n) { return counted(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return counted(__libc_calloc(n, size)); }
void *memalign(size_t alignment, size_t n) { return counted(__libc_memalign(alignment, n)); }
void *aligned_alloc(size_t alignment, size_t n) { return counted(__libc_memalign(alignment, n)); }

int posix_memalign(void **p, size_t alignment, size_t n) {
    *p = counted(__libc_memalign(alignment, n));
    return *p || !n ? 0 : ENOMEM;
}

void free(void *p) {
    count(-(long)malloc_usable_size(p));
    __libc_free(p);
}

void *realloc(void *p, size_t n) {
    long before = (long)malloc_usable_size(p);
    void *moved = __libc_realloc(p, n);
    if (moved || !n) count((long)malloc_usable_size(moved) - before);
    return moved;
}
