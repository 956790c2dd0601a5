// The warps of experts.cu that copy: weights of a CTA's products, and the rows that are multiplied by them,
// into the slots of the ring (moe_schedule.cuh).
#pragma once
#include "moe_schedule.cuh"

template <class S>
struct WeightProducer {
  using C = typename S::Base;
  const MoeStep& w;
  RingCursor<S> at;
  int lane;
  int ahead = 0;  // index of the product after the next one

  // Take the next product from the list; the latest was `i`. Takes one ahead, to hide the latency of
  // the atomic.
  DEVICE int next(int i) {
    if constexpr (!C::MANY) return i + gridDim.x;
    if (at.taken == 0) {
      griddep_wait();  // the preceding layer's last kernel zeroes the counter
      ahead = take();
    }
    i = ahead;
    ahead = take();
    if (ARCH >= 900 || lane == 0) at.s.queue.push(at.taken, i);
    ++at.taken;
    return i;
  }
  DEVICE int take() const {
    int i = 0;
    if (ARCH >= 900 || lane == 0) i = gridDim.x + atomicAdd(w.taken(), 1u);
#if ARCH < 900
    i = __shfl_sync(FULL_MASK, i, 0);
#endif
    return i;
  }

  // Fill the next slot with `bytes` bytes; none: it is for activations only, or padding.
  DEVICE void fill(const u8* from, int bytes) {
    mbarrier_wait(at.empty(), at.phase ^ 1);
#if ARCH >= 900
    if (bytes > 0) {
      // The slot may hold activations written by cp.async: order them before the bulk copy.
      fence_proxy_async_shared();
      cp_async_bulk_evict_first(at.slot(), from, bytes, at.full());
      mbarrier_arrive_expect_tx(at.full(), bytes);
    } else {
      mbarrier_arrive(at.full());
    }
#else
    for (int b = lane * 16; b < bytes; b += 512) cp_async16(at.slot() + b, from + b);
    cp_async_mbarrier_arrive(at.full());
#endif
    at.next();
  }

  // `n`: tiles of rows. Two take two slots per team and turn, see `MathWarps::multiply_two_tiles`.
  template <class F>
  DEVICE void stream(const u8* matrix, i64 group, int k, int n) {
    constexpr int UNITS = C::template UNITS<F>;
    const int units = k / F::UNIT;
    matrix += group * units * F::UNIT_BYTES;
    if (S::TILES > 1 && n > 1) {
      for (int u = 0; u < units; u += UNITS * C::TEAMS)
        for (int i = 0; i < 2 * C::TEAMS; ++i) {
          const int unit = u + i * UNITS;
          fill(matrix + unit * F::UNIT_BYTES,
               i < C::TEAMS ? min(UNITS, units - unit) * F::UNIT_BYTES : 0);
        }
      return;
    }
    for (int u = 0; u < units; u += UNITS)
      fill(matrix + u * F::UNIT_BYTES, min(UNITS, units - u) * F::UNIT_BYTES);
  }

  DEVICE int expert(int visit) const { return at.s.visits.visits[visit].expert; }
  DEVICE void route() { mbarrier_wait(&at.s.routed, 0); }
  DEVICE void dense_up(int, int n, int group) {
    stream<typename C::DenseUp>(w.dense_up, group, w.width, n);
  }
  DEVICE void up(int visit, int n, int group) {
    stream<typename C::Up>(w.up, expert(visit) * w.groups() + group, w.width, n);
  }
  DEVICE void dense_down(int, int n, int group) {
    stream<typename C::DenseDown>(w.dense_down, group, w.dense_channels, n);
  }
  DEVICE void down(int visit, int n, int group) {
    stream<typename C::Down>(w.down, expert(visit) * w.out_groups() + group, w.channels, n);
  }
};

template <class S>
struct ActivationProducer {
  using C = typename S::Base;
  static_assert(S::STAGES % 2 == 0, "a slot always belongs to the same warp");
  const MoeStep& w;
  RingCursor<S> at;
  int lane, parity;

  DEVICE int next(int i) { return at.next_product(i, lane); }

  // Fill this warp's slots with n tiles of rows: store(slot, unit) for the units of each slot. The rows
  // of one tile follow the weights, those of two have a slot of their own.
  template <class F, class Store>
  DEVICE void fill(int units, int n, Store store) {
    constexpr int UNITS = C::template UNITS<F>;
    const auto fill_slot = [&](int offset, int unit, bool stores) {
      if (at.stage % 2 == parity) {
        mbarrier_wait(at.empty(), at.phase ^ 1);
        if (stores) store(at.slot() + offset, unit);
        cp_async_mbarrier_arrive(at.full());
      }
      at.next();
    };
    if (S::TILES > 1 && n > 1) {
      for (int u = 0; u < units; u += UNITS * C::TEAMS)
        for (int i = 0; i < 2 * C::TEAMS; ++i)
          fill_slot(0, u + i % C::TEAMS * UNITS, i >= C::TEAMS);
      return;
    }
    for (int u = 0; u < units; u += UNITS) fill_slot(UNITS * F::UNIT_BYTES, u, true);
  }

  // Copy n tiles of packed rows as a group, each tile once `needed` products have computed it (0: all exist).
  template <class F>
  DEVICE void copy(const u8* rows, const u32* arrived, int n, u32 needed, int k) {
    constexpr int UNITS = C::template UNITS<F>, BLOCKS = C::template BLOCKS<F>;
    const int units = k / F::UNIT;
    if (needed && lane == 0)
      for (int tile = 0; tile < n; ++tile)
        while (load_acquire(arrived + tile) < needed) {
        }
    __syncwarp();
    const TilePlaces at_tile(lane);
    fill<F>(units, n, [&](u8* to, int unit) {
      const int bytes = min(UNITS, units - unit) * BLOCKS;
      const u8* from = rows + unit * BLOCKS;
      if (S::TILES == 1 || n == 1) {
        for (int b = lane * 16; b < bytes; b += 512) cp_async16(to + b, from + b);
        return;
      }
      for (int tile = 0; tile < 2; ++tile, from += units * BLOCKS)
        for (int b = 0; b < bytes; b += ACT_BYTES) at_tile.copy(to + 2 * b, from + b, tile);
    });
  }

  // Where a lane puts the parts of 8 bytes that it copies from a block of one tile to a block of two.
  struct TilePlaces {
    int from, halves, sums, sums_of_tile;

    DEVICE TilePlaces(int lane) : from(lane * 8), halves(lane % 2 * 512 + lane / 2 * 16) {
      const bool floats = lane / 8 == 2;  // SUMS32: two rows in 8 bytes
      const int row = floats ? lane % 4 * 2 : lane % 8,
                word = floats ? 4 + lane / 4 % 2 : lane / 8 * 2;
      sums = sum_word_offset(2, row, word);
      sums_of_tile = sum_word_offset(2, TILE_ROWS + row, word) - sums;
    }
    DEVICE void copy(u8* to, const u8* block, int tile) const {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        cp_async<8>(to + halves + tile * 8 + (i / 2 * 1024 + i % 2 * 256), block + from + i * 256);
      cp_async<8>(to + sums + tile * sums_of_tile, block + from + SPLIT16);
    }
  };

  // Gather rows row(tile, 0) .. row(tile, count(tile) - 1) of an input in groups of 8 into a group of n
  // tiles of 8. A tile's other rows keep old data; their results are not used.
  template <class F, class Count, class Row>
  DEVICE void gather(const u8* rows, int n, Count count, Row row) {
    constexpr int BLOCKS = C::template UNITS<F> * F::UNIT / 64, PIECES = (BLOCKS * 8 + 31) / 32;
    static_assert(S::TILES * TILE_ROWS <= 32, "a lane knows one row");
    // A row has 8 pieces of 16 bytes, two k16 steps, and 8 words of sums in a block: offsets for row 0.
    const int piece = lane % 8, pitch = sum_word_offset(1, 1, piece) - sum_word_offset(1, 0, piece);
    const int halves = (piece / 4 * 32 + piece % 4) * 16, sums = sum_word_offset(1, 0, piece);
    const int sums_to = sum_word_offset(n, 0, piece);
    const int all = w.width / 64, of_tile = lane / TILE_ROWS, of_column = lane % TILE_ROWS;
    const int own = of_tile < n && of_column < count(of_tile) ? row(of_tile, of_column) : 0;
    fill<F>(w.width / F::UNIT, n, [&](u8* to, int unit) {
      const int first = unit * (F::UNIT / 64);
      for (int tile = 0; tile < n; ++tile) {
        const int columns = count(tile);
#pragma unroll
        for (int column = 0; column < TILE_ROWS; ++column) {
          if (column >= columns) break;
          const int m = __shfl_sync(FULL_MASK, own, tile * TILE_ROWS + column);
          const u8* from = rows + (m / TILE_ROWS * all + first) * ACT_BYTES;
#pragma unroll
          for (int j = 0; j < PIECES; ++j) {
            const int block = j * 4 + lane / 8;
            if (block >= BLOCKS || first + block >= all) continue;
            const u8* of = from + block * ACT_BYTES;
            u8* to_block = to + block * (n * ACT_BYTES);
            copy_piece(to_block + column * 64, of + halves + m % 8 * 64, piece, tile, n);
            cp_async<4>(to_block + sums_to + (tile * TILE_ROWS + column) * pitch,
                        of + sums + m % 8 * pitch);
          }
        }
      }
    });
  }

  // Copy a row's piece into a block of n tiles in the fragment layout; `to`: its row 0 at this column.
  static DEVICE void copy_piece(u8* to, const u8* from, int piece, int tile, int n) {
    if (S::TILES == 1 || n == 1) {
      cp_async<16>(to + (piece / 4 * 32 + piece % 4) * 16, from);
    } else {
      to += (piece / 4 * 64 + piece % 4) * 16 + tile * 8;
      cp_async<8>(to, from), cp_async<8>(to + 32 * 16, from + 8);
    }
  }

  DEVICE void route() { mbarrier_wait(&at.s.routed, 0); }
  DEVICE void dense_up(int first, int n, int) {
    copy<typename C::DenseUp>(w.dense_rows + first * (w.width / 64) * ACT_BYTES, nullptr, n, 0,
                              w.width);
  }
  DEVICE void up(int visit, int n, int) {
    const Visit* v = at.s.visits.visits + visit;
    gather<typename C::Up>(
        w.rows, n, [=](int tile) { return v[tile].count; },
        [=](int tile, int i) { return v[tile].pair[i] / C::K; });
  }
  DEVICE void dense_down(int tile, int n, int) {
    copy<typename C::DenseDown>(w.dense_hidden + tile * w.dense_groups() * ACT_BYTES,
                                w.tile_arrived(tile), n, w.dense_groups(), w.dense_channels);
  }
  DEVICE void down(int visit, int n, int) {
    copy<typename C::Down>(w.hidden + visit * w.groups() * ACT_BYTES, w.visit_arrived(visit), n,
                           w.groups(), w.channels);
  }
};
