// Entry points of a compiled kernel library: launch, parameter sizes, stack allocation.
#pragma once
#include "machine.h"

namespace machine {

// Reserve address space for the stacks of any launch; untouched pages take no memory.
char* reserve();
// Run a grid; return the error message, or null.
const char* run(Index grid, Index block, size_t dynamic, unsigned seed, char* stacks,
                const std::function<void()>& call);

template <class... A, size_t... I>
UNCHECKED void apply(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  check::active = true;
  kernel(*(A*)args[I]...);
  check::active = false;
}
template <class... A>
const char* launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block,
                   size_t dynamic, unsigned seed, char* stacks, void** args) {
  return run({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, dynamic, seed, stacks,
             [&] { apply(kernel, args, std::index_sequence_for<A...>()); });
}
template <class... A>
int sizes(void (*)(A...), int* out) {
  int i = 0;
  ((out[i++] = sizeof(A)), ...);
  return i;
}

}  // namespace machine
