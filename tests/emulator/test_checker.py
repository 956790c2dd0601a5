"""The race checker reports the fault of small wrong kernels, and nothing for the corrected ones."""

from pathlib import Path

import pytest
import torch

from tests.emulator import kernels

RELEASE = """
        __shared__ float s[32];
        __shared__ u64 ready;
        if (t == 0) mbarrier_init(&ready, GOOD ? 32 : 1);
        __syncthreads();
        if (t < 32) {{
          s[t] = x[t];
          {sync}
          if (GOOD || t == 0) mbarrier_arrive(&ready);
        }} else {{
          mbarrier_wait(&ready, 0);
          y[t] = s[t - 32];
        }}
        """
# Kernel body (correct if GOOD is 1, wrong if 0), and text of the report for the wrong one. Block
# of 64 threads; x and y hold 256 floats.
CASES = {
    "barrier": (
        """
        __shared__ float s[64];
        s[t] = x[t];
        if (GOOD) __syncthreads();
        y[t] = s[63 - t];
        """,
        "race in declared shared memory",
    ),
    "more registers than others gave": (
        """
        if (t < 32) setmaxnreg_dec<GOOD ? 96 : 128>();
        else setmaxnreg_inc<232>();
        y[t] = x[t];
        """,
        "waits for registers",
    ),
    "within a warp": (
        """
        __shared__ float s[64];
        s[t] = x[t];
        const float other = __shfl_xor_sync(FULL_MASK, x[t], 1);
        if (GOOD) __syncwarp();
        y[t] = s[t ^ 1] + other;
        """,
        "race in declared shared memory",
    ),
    "some warps": (
        """
        __shared__ float s[64];
        if (t < 32) {
          s[t] = x[t];
          named_barrier_sync(2, 64);
        } else {
          if (GOOD) named_barrier_sync(2, 64);
          y[t] = s[t - 32];
          if (!GOOD) named_barrier_sync(2, 64);
        }
        """,
        "race in declared shared memory",
    ),
    "a copy's end": (
        """
        __shared__ float4 s[64];
        cp_async16(s + t, x + t * 4);
        cp_async_commit();
        if (GOOD) cp_async_wait_group<0>();
        y[t] = s[t].x;
        """,
        "its copy",
    ),
    "copies of others": (
        """
        __shared__ float4 s[2][64];
        cp_async16(s[0] + t, x + t * 4);
        cp_async_commit();
        cp_async16(s[1] + t, x + t * 4);
        cp_async_commit();
        if (GOOD) cp_async_wait_group<0>();
        else cp_async_wait_group<1>();
        __syncthreads();
        y[t] = s[1][63 - t].x;
        """,
        "its copy",
    ),
    "a ring": (
        """
        __shared__ float4 s[2][16];
        __shared__ u64 full[2], empty[2];
        if (t == 0) {
          for (int i = 0; i < 2; ++i) mbarrier_init(full + i, 1), mbarrier_init(empty + i, 1);
          mbarrier_init_fence();
        }
        __syncthreads();
        if (t == 32)
          for (int i = 0; i < 4; ++i) {
            if (GOOD) mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2);
            mbarrier_arrive_expect_tx(full + i % 2, 256);
            cp_async_bulk(s[i % 2], x + i * 64, 256, full + i % 2);
            if (!GOOD) mbarrier_wait(full + i % 2, i / 2 % 2);
          }
        if (t < 32)
          for (int i = 0; i < 4; ++i) {
            mbarrier_wait(full + i % 2, i / 2 % 2);
            if (t < 16) y[i * 16 + t] = s[i % 2][t].x;
            __syncwarp();
            if (t == 0) mbarrier_arrive(empty + i % 2);
            if (!GOOD) break;
          }
        """,
        "a bulk copy",
    ),
    "a release by one lane": (RELEASE.format(sync=""), "race in declared shared memory"),
    "a release by one lane for its warp": (
        RELEASE.format(sync="__syncwarp();"),
        "race, as racecheck has it, in declared shared memory",
    ),
    "copies that arrive": (
        """
        __shared__ float4 s[32];
        __shared__ u64 ready;
        if (t == 0) mbarrier_init(&ready, GOOD ? 32 : 1);
        __syncthreads();
        if (t < 32) {
          cp_async16(s + t, x + t * 4);
          if (GOOD || t == 0) cp_async_mbarrier_arrive(&ready);
        } else {
          mbarrier_wait(&ready, 0);
          y[t] = s[t - 32].x;
        }
        """,
        "its copy",
    ),
    "a barrier's beginning": (
        """
        __shared__ u64 ready;
        if (t == 0) mbarrier_init(&ready, 1);
        if (GOOD) __syncthreads();
        else __syncwarp();
        if (t == 0) mbarrier_arrive(&ready);
        if (!GOOD && t >= 32) for (int i = 0; i < 50; ++i) load_acquire((const u32*)y);
        mbarrier_wait(&ready, 0);
        """,
        "race in declared shared memory",
    ),
    "two blocks": (
        """
        u32* flag = (u32*)y + 255;
        if (blockIdx.x == 0) {
          y[t] = x[t];
          __syncthreads();
          if (t == 0 && GOOD) atomic_add_release(flag, 1);
          if (t == 1 && !GOOD) atomicAdd(flag, 1u);
        } else {
          if (t == 0) while (load_acquire(flag) != 1) {}
          __syncthreads();
          y[64 + t] = y[t];
        }
        """,
        "race in tensor 1",
    ),
    "stores": (
        """
        y[t + (GOOD ? 0 : 193)] = x[t];
        """,
        "out of bounds, 4 bytes, no memory of this launch",
    ),
    "loads of shared memory": (
        """
        extern __shared__ __align__(16) float all[];
        all[t] = x[t];
        __syncthreads();
        if (GOOD || t) y[t] = all[t];
        else y[t] = all[80];
        """,
        "out of bounds, 4 bytes, shared memory + 320",
    ),
    "copies' ends": (
        """
        __shared__ u64 full;
        extern __shared__ __align__(16) float all[];
        if (t == 0) {
          mbarrier_init(&full, 1);
          mbarrier_arrive_expect_tx(&full, 64);
          cp_async_bulk(all, x + (GOOD ? 240 : 244), 64, &full);
          mbarrier_wait(&full, 0);
        }
        """,
        "out of bounds, 64 bytes, tensor 0 + 976",
    ),
    "products": (
        """
        extern __shared__ __align__(1024) u8 tile[];
        for (int i = threadIdx.x; i < 2048; i += blockDim.x) ((u32*)tile)[i] = 0;
        fence_proxy_async_shared();
        __syncthreads();
        float d[32] = {};
        wgmma_fence();
        wgmma_m64n64_ss(d, smem_descriptor(tile, 0), smem_descriptor(tile, 0), 0);
        wgmma_commit();
        if (GOOD) wgmma_wait<0>();
        __syncthreads();
        ((u32*)tile)[t] = 1;
        if (!GOOD) wgmma_wait<0>();
        y[t] = d[0];
        """,
        "a product",
    ),
    "a product of what was stored": (
        """
        extern __shared__ __align__(1024) u8 tile[];
        for (int i = threadIdx.x; i < 2048; i += blockDim.x) ((u32*)tile)[i] = 0;
        if (GOOD) fence_proxy_async_shared();
        __syncthreads();
        if (!GOOD && t < 64) fence_proxy_async_shared();
        float d[32] = {};
        wgmma_fence();
        wgmma_m64n64_ss(d, smem_descriptor(tile, 0), smem_descriptor(tile, 0), 0);
        wgmma_commit();
        wgmma_wait<0>();
        y[t] = d[0];
        """,
        "a product",
    ),
    "a bulk copy over what was stored": (
        """
        __shared__ float4 s[64];
        __shared__ u64 full;
        if (t == 0) mbarrier_init(&full, 1);
        s[t] = {x[t]};
        __syncthreads();
        y[t] = s[63 - t].x;
        __syncthreads();
        if (t == 0) {
          if (GOOD) fence_proxy_async_shared();
          cp_async_bulk(s, x, 1024, &full);
          mbarrier_arrive_expect_tx(&full, 1024);
        }
        mbarrier_wait(&full, 0);
        y[t + 64] = s[t].x;
        """,
        "a bulk copy",
    ),
}


def launched(folder: Path, name: str, good: bool) -> None:
    file = folder / "case.cu"
    file.write_text(
        f'#include "mbarrier.cuh"\n#include "wgmma.cuh"\n#define GOOD {int(good)}\n'
        "__global__ void run(const float* x, float* y) {\n"
        f"  const int t = threadIdx.x;\n{CASES[name][0]}}}\n"
    )
    x, y = torch.rand(256), torch.zeros(256)
    kernel = kernels.Emulated(str(file), "run", "sm_90a", checked=True)
    blocks = 2 if name == "two blocks" else 1
    product = "product" in name
    kernel(blocks, 128 if product else 64, x=x, y=y, shared=8192 if product else 320)


@pytest.mark.parametrize("name", CASES)
def test_correct_kernel_passes(name: str, tmp_path: Path) -> None:
    launched(tmp_path, name, True)


@pytest.mark.parametrize("name", CASES)
def test_wrong_kernel_is_reported(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"case\.cu: run: ") as error:
        launched(tmp_path, name, False)
    assert CASES[name][1] in str(error.value)
    if "race" in CASES[name][1]:
        assert "case.cu:" in str(error.value).split("run: ", 1)[1], "the report names the line"
