// Products of a group of four waves (wgmma.h) with 64, 128 or 256 columns, of fp16 or bfloat16 (T).
//
//   luce_wgmma_wide<T, N>(c, a, b, adds)       c [64, N] += a b^T, 16 columns of 64 rows at a and of N rows at b; without
//                                              `adds`, a constant, c = a b^T
//   luce_wgmma_wide<T, N>(c, words, b, apart)  c [64, N] += a b, a [16w.., 16] in words, 16 rows at b of N columns: panels of
//                                              64 columns, `apart` bytes from one to the next
// a and b are matrices of luce_wgmma_rows_at, c[i] has columns 8i and on.
#pragma once
#include "wgmma_rows.h"

#if LUCE_WGMMA
#if defined(LUCE_HOST)

template <typename T, int N> LUCE_FN void luce_wgmma_wide(float (*c)[4], luce_rows_t a, luce_rows_t b, bool adds = true) {
    for (int i = 0; i < N / 2 && !adds; i++) c[i / 4][i % 4] = 0.0f;
    for (int i = 0; i < N / 64; i++) luce_wgmma<T>(c + i * 8, (const void*)a, (const void*)(b + i * 64 * 128));
}
template <typename T, int N> LUCE_FN void luce_wgmma_wide(float (*c)[4], const u32 (&a)[4], luce_rows_t b, int apart) {
    for (int i = 0; i < N / 64; i++) luce_wgmma<T>(c + i * 8, a, (const u8*)(b + i * apart));
}

#else

template <typename T, int N> LUCE_FN void luce_wgmma_wide(float (*c)[4], luce_rows_t a, luce_rows_t b, bool adds = true);
template <typename T, int N> LUCE_FN void luce_wgmma_wide(float (*c)[4], const u32 (&a)[4], luce_rows_t b, int apart);
#define LUCE_WGMMA_WIDE(T, name, N, list, a0, b0, p0, w0, w1, w2, w3, v0, q0, ...)                                     \
    template <> LUCE_FN void luce_wgmma_wide<T, N>(float (*c)[4], luce_rows_t a, luce_rows_t b, bool adds) {           \
        asm volatile("{.reg .pred p; .reg .b64 x, y; setp.ne.b32 p, " p0 ", 0; mov.b64 x, {" a0 ", 0x40000040}; "      \
                     "mov.b64 y, {" b0 ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name  \
                     " {" list "}, x, y, p, 1, 1, 0, 0;}"                                                              \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a), "r"(b), "r"((u32)adds));                                                                \
    }                                                                                                                  \
    template <> LUCE_FN void luce_wgmma_wide<T, N>(float (*c)[4], const u32 (&a)[4], luce_rows_t b, int apart) {       \
        asm volatile("{.reg .pred p; .reg .b64 y; setp.ne.b32 p, " q0 ", 0; mov.b64 y, {" v0 ", 0x40000040}; "         \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." name "." name " {" list "}, {" w0 ", " w1 ", "  \
                     w2 ", " w3 "}, y, p, 1, 1, 1;}"                                                                   \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b + ((u32)(apart >> 4) - 1 << 16)), "r"(1));    \
    }
#define LUCE_WGMMA_LIST_16 LUCE_WGMMA_LIST_8 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LUCE_WGMMA_OUT_16(ROW) \
    LUCE_WGMMA_OUT_8(ROW), ROW(c[16]), ROW(c[17]), ROW(c[18]), ROW(c[19]), ROW(c[20]), ROW(c[21]), ROW(c[22]), ROW(c[23]), \
        ROW(c[24]), ROW(c[25]), ROW(c[26]), ROW(c[27]), ROW(c[28]), ROW(c[29]), ROW(c[30]), ROW(c[31])
#define LUCE_WGMMA_WIDE_64(T, name) \
    LUCE_WGMMA_WIDE(T, name, 64, LUCE_WGMMA_LIST_4, "%32", "%33", "%34", "%32", "%33", "%34", "%35", "%36", "%37", \
                    LUCE_WGMMA_OUT_4(LUCE_WGMMA_ROW))
#define LUCE_WGMMA_WIDE_128(T, name) \
    LUCE_WGMMA_WIDE(T, name, 128, LUCE_WGMMA_LIST_8, "%64", "%65", "%66", "%64", "%65", "%66", "%67", "%68", "%69", \
                    LUCE_WGMMA_OUT_8(LUCE_WGMMA_ROW))
#define LUCE_WGMMA_WIDE_256(T, name) \
    LUCE_WGMMA_WIDE(T, name, 256, LUCE_WGMMA_LIST_16, "%128", "%129", "%130", "%128", "%129", "%130", "%131", "%132", "%133", \
                    LUCE_WGMMA_OUT_16(LUCE_WGMMA_ROW))
LUCE_WGMMA_WIDE_64(f16_t, "f16")
LUCE_WGMMA_WIDE_64(bf16_t, "bf16")
LUCE_WGMMA_WIDE_128(f16_t, "f16")
LUCE_WGMMA_WIDE_128(bf16_t, "bf16")
LUCE_WGMMA_WIDE_256(f16_t, "f16")
LUCE_WGMMA_WIDE_256(bf16_t, "bf16")

#endif
#endif
