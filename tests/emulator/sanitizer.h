// The functions that -fsanitize=thread makes the compiler call at each load, store, function entry
// and exit.
#pragma once

extern "C" {
using check::active;
#define ON(kind, size)                                    \
  if (active)                                             \
  check::access(p, size, check::kind, check::me(),        \
                check::place_in_code(__builtin_return_address(0)))
#define BOTH(name, size) \
  void __tsan_read##name(void* p) { ON(READ, size); } \
  void __tsan_write##name(void* p) { ON(WRITE, size); }
BOTH(1, 1) BOTH(2, 2) BOTH(4, 4) BOTH(8, 8) BOTH(16, 16)
#define UNALIGNED(n) \
  void __tsan_unaligned_read##n(void* p) { ON(READ, n); } \
  void __tsan_unaligned_write##n(void* p) { ON(WRITE, n); }
UNALIGNED(2) UNALIGNED(4) UNALIGNED(8) UNALIGNED(16)
void __tsan_read_range(void* p, size_t n) { ON(READ, n); }
void __tsan_write_range(void* p, size_t n) { ON(WRITE, n); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
void __tsan_func_entry(void* from) {
  if (!active) return;
  if (check::actor->depth < check::DEPTH)
    check::actor->calls[check::actor->depth] =
        check::path(check::caller(), check::place_in_code(from));
  ++check::actor->depth;
}
void __tsan_func_exit() {
  if (active && check::actor->depth) --check::actor->depth;
}
}
