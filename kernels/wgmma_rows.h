// Products of a group of four waves (wgmma.h) with as many rows of the second matrix as a tile has, in steps of 16.
//
//   luce_wgmma_rows_at(b)            a matrix of N rows at the address b
//   luce_wgmma_rows_further(b, n)    the same, n bytes further; n a multiple of 16
//   luce_wgmma_rows<N>(c, words, b)  c [64, N] += a b^T, a [16w.., 16] in words, 16 columns of the N rows; c[i] has
//                                    columns 8i and on
//   luce_wgmma_rows<N>(c, words, b, adds)  the same, or without `adds`, a constant, c = a b^T
//   luce_wgmma_bytes<N>(c, a, b)     c [64, N] += a b^T in int32, 32 columns of int8: 64 rows at a, N at b, both in rows of
//                                    128 columns; exact
#pragma once
#include "wgmma.h"

#if LUCE_WGMMA
#if defined(LUCE_HOST)

typedef u64 luce_rows_t;
LUCE_FN luce_rows_t luce_wgmma_rows_at(const void* at) { return (u64)at; }
LUCE_FN luce_rows_t luce_wgmma_rows_further(luce_rows_t rows, int bytes) { return rows + bytes; }
template <int N> LUCE_FN void luce_wgmma_rows(float (*c)[4], const u32 (&a)[4], luce_rows_t b, bool adds = true) {
    for (int i = 0; i < N / 2 && !adds; i++) c[i / 4][i % 4] = 0.0f;
    const int g = luce_lane() / 4, t = luce_lane() % 4 * 2;
    for (int k = 0; k < 16; k++) {
        const int word = k / 8 * 2, lane = g * 4 + k % 8 / 2, shift = k % 2 * 16;
        const float upper = luce_f32(f16_t{(u16)(luce_shfl(a[word], lane) >> shift)});
        const float lower = luce_f32(f16_t{(u16)(luce_shfl(a[word + 1], lane) >> shift)});
        for (int i = 0; i < N / 4; i++) {
            const float right = luce_wgmma_element<f16_t>((const void*)b, i / 2 * 8 + t + i % 2, k);
            c[i / 2][i % 2] = fmaf(upper, right, c[i / 2][i % 2]);
            c[i / 2][i % 2 + 2] = fmaf(lower, right, c[i / 2][i % 2 + 2]);
        }
    }
}
LUCE_FN i32 luce_wgmma_four(luce_rows_t from, int row, int word) {
    u64 at = from + row * 128 + word * 4;
    at ^= (at / 128 & 7) * 16;
    return *reinterpret_cast<const i32*>(at);
}
template <int N> LUCE_FN void luce_wgmma_bytes(i32 (*c)[4], luce_rows_t a, luce_rows_t b) {
    const int g = luce_wave() % 4 * 16 + luce_lane() / 4, t = luce_lane() % 4 * 2;
    for (int k = 0; k < 8; k++) {
        const i32 upper = luce_wgmma_four(a, g, k), lower = luce_wgmma_four(a, g + 8, k);
        for (int i = 0; i < N / 4; i++) {
            const i32 right = luce_wgmma_four(b, i / 2 * 8 + t + i % 2, k);
            c[i / 2][i % 2] = luce_dot4(upper, right, c[i / 2][i % 2]);
            c[i / 2][i % 2 + 2] = luce_dot4(lower, right, c[i / 2][i % 2 + 2]);
        }
    }
}

#else

// The lower half of a matrix's descriptor (luce_wgmma_matrix); the upper half is the same for all.
typedef u32 luce_rows_t;
LUCE_FN luce_rows_t luce_wgmma_rows_at(const void* at) {
    return ((u32)__cvta_generic_to_shared(at) >> 4 & 0x3fff) | 1u << 16;
}
LUCE_FN luce_rows_t luce_wgmma_rows_further(luce_rows_t rows, int bytes) { return rows + (bytes >> 4); }
template <int N> LUCE_FN void luce_wgmma_rows(float (*c)[4], const u32 (&a)[4], luce_rows_t b, bool adds = true);
#define LUCE_WGMMA_ROWS(N, list, a0, a1, a2, a3, b0, p0, ...)                                                     \
    template <> LUCE_FN void luce_wgmma_rows<N>(float (*c)[4], const u32 (&a)[4], luce_rows_t b, bool adds) {     \
        asm volatile("{.reg .pred p; .reg .b64 d; setp.ne.b32 p, " p0 ", 0; mov.b64 d, {" b0 ", 0x40000040}; "    \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" list "}, "                        \
                     "{" a0 ", " a1 ", " a2 ", " a3 "}, d, p, 1, 1, 0;}"                                          \
                     : __VA_ARGS__                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((u32)adds));                       \
    }
#define LUCE_WGMMA_LIST_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LUCE_WGMMA_LIST_2 LUCE_WGMMA_LIST_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LUCE_WGMMA_LIST_3 LUCE_WGMMA_LIST_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LUCE_WGMMA_LIST_4 LUCE_WGMMA_LIST_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LUCE_WGMMA_LIST_5 LUCE_WGMMA_LIST_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LUCE_WGMMA_LIST_6 LUCE_WGMMA_LIST_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LUCE_WGMMA_LIST_7 LUCE_WGMMA_LIST_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LUCE_WGMMA_LIST_8 LUCE_WGMMA_LIST_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
// Of a row's macro, the registers of 16 columns for each step.
#define LUCE_WGMMA_OUT_1(ROW) ROW(c[0]), ROW(c[1])
#define LUCE_WGMMA_OUT_2(ROW) LUCE_WGMMA_OUT_1(ROW), ROW(c[2]), ROW(c[3])
#define LUCE_WGMMA_OUT_3(ROW) LUCE_WGMMA_OUT_2(ROW), ROW(c[4]), ROW(c[5])
#define LUCE_WGMMA_OUT_4(ROW) LUCE_WGMMA_OUT_3(ROW), ROW(c[6]), ROW(c[7])
#define LUCE_WGMMA_OUT_5(ROW) LUCE_WGMMA_OUT_4(ROW), ROW(c[8]), ROW(c[9])
#define LUCE_WGMMA_OUT_6(ROW) LUCE_WGMMA_OUT_5(ROW), ROW(c[10]), ROW(c[11])
#define LUCE_WGMMA_OUT_7(ROW) LUCE_WGMMA_OUT_6(ROW), ROW(c[12]), ROW(c[13])
#define LUCE_WGMMA_OUT_8(ROW) LUCE_WGMMA_OUT_7(ROW), ROW(c[14]), ROW(c[15])
LUCE_WGMMA_ROWS(16, LUCE_WGMMA_LIST_1, "%8", "%9", "%10", "%11", "%12", "%13", LUCE_WGMMA_OUT_1(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(32, LUCE_WGMMA_LIST_2, "%16", "%17", "%18", "%19", "%20", "%21", LUCE_WGMMA_OUT_2(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(48, LUCE_WGMMA_LIST_3, "%24", "%25", "%26", "%27", "%28", "%29", LUCE_WGMMA_OUT_3(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(64, LUCE_WGMMA_LIST_4, "%32", "%33", "%34", "%35", "%36", "%37", LUCE_WGMMA_OUT_4(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(80, LUCE_WGMMA_LIST_5, "%40", "%41", "%42", "%43", "%44", "%45", LUCE_WGMMA_OUT_5(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(96, LUCE_WGMMA_LIST_6, "%48", "%49", "%50", "%51", "%52", "%53", LUCE_WGMMA_OUT_6(LUCE_WGMMA_ROW))
LUCE_WGMMA_ROWS(128, LUCE_WGMMA_LIST_8, "%64", "%65", "%66", "%67", "%68", "%69", LUCE_WGMMA_OUT_8(LUCE_WGMMA_ROW))

template <int N> LUCE_FN void luce_wgmma_bytes(i32 (*c)[4], luce_rows_t a, luce_rows_t b);
#define LUCE_WGMMA_INTEGERS(c) "+r"((c)[0]), "+r"((c)[1]), "+r"((c)[2]), "+r"((c)[3])
#define LUCE_WGMMA_BYTES(N, list, a0, b0, ...)                                                                    \
    template <> LUCE_FN void luce_wgmma_bytes<N>(i32 (*c)[4], luce_rows_t a, luce_rows_t b) {                     \
        asm volatile("{.reg .b64 d, e; mov.b64 d, {" a0 ", 0x40000040}; mov.b64 e, {" b0 ", 0x40000040}; "        \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" list "}, d, e, 1;}"                 \
                     : __VA_ARGS__                                                                                \
                     : "r"(a), "r"(b));                                                                           \
    }
LUCE_WGMMA_BYTES(16, LUCE_WGMMA_LIST_1, "%8", "%9", LUCE_WGMMA_OUT_1(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(32, LUCE_WGMMA_LIST_2, "%16", "%17", LUCE_WGMMA_OUT_2(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(48, LUCE_WGMMA_LIST_3, "%24", "%25", LUCE_WGMMA_OUT_3(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(64, LUCE_WGMMA_LIST_4, "%32", "%33", LUCE_WGMMA_OUT_4(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(80, LUCE_WGMMA_LIST_5, "%40", "%41", LUCE_WGMMA_OUT_5(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(96, LUCE_WGMMA_LIST_6, "%48", "%49", LUCE_WGMMA_OUT_6(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(112, LUCE_WGMMA_LIST_7, "%56", "%57", LUCE_WGMMA_OUT_7(LUCE_WGMMA_INTEGERS))
LUCE_WGMMA_BYTES(128, LUCE_WGMMA_LIST_8, "%64", "%65", LUCE_WGMMA_OUT_8(LUCE_WGMMA_INTEGERS))

#endif
#endif
