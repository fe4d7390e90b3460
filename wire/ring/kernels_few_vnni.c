/*
 * The inner parts of kernels_few.c for processors with AVX-512 and VNNI. kernels_vnni.c says why bytes are exact.
 *
 * A panel has, for each four inner numbers, the four weights of each of STRIP columns: four registers. A product of 3
 * rows and 32 columns holds 24 sums in registers, and its numbers are the four bytes of each row, each byte by itself.
 *
 * Constant time in the numbers: no branch and no address depends on one.
 */
#include "kernels.h"

#include <immintrin.h>
#include <string.h>

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define ROWS 3
#define LANES 16
#define COLUMNS (2 * LANES)
#define QUAD 4              /* inner numbers that one lane takes at a time */
#define BLOCK_K 128         /* inner numbers of a block: a multiple of 64; 192 and 256 take a twentieth longer */
#define PLANES (4 * BLOCK_K)  /* bytes of a row's numbers in a block: the lowest of each, then the next ones */
_Static_assert(BLOCK_K <= LONGEST_INNER && STRIP * BLOCK_K <= PANEL_BYTES, "scratch memory is too small");

/* Splits numbers of each row into bytes, and pads them with zeros to a quad. */
VNNI static void split(void *numbers, const int32_t *const *rows, int64_t count, int64_t start, int64_t inner) {
    uint8_t *out = numbers;
    for (int64_t i = 0; i < count; i++, out += PLANES) {
        for (int64_t k = 0; k < inner; k += LANES) {
            __mmask16 kept = inner - k < LANES ? (__mmask16)((1 << (inner - k)) - 1) : (__mmask16)-1;
            __m512i x = _mm512_maskz_loadu_epi32(kept, rows[i] + start + k);
            _mm_storeu_si128((__m128i *)(out + k), _mm512_cvtepi32_epi8(x));
            _mm_storeu_si128((__m128i *)(out + BLOCK_K + k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
            _mm_storeu_si128((__m128i *)(out + 2 * BLOCK_K + k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 16)));
            _mm_storeu_si128((__m128i *)(out + 3 * BLOCK_K + k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 24)));
        }
    }
}

/* Lays four rows of 64 weights so that each lane has the four weights of a column, in the order of columns. */
VNNI static inline __attribute__((always_inline)) void interleave(__m512i quads[4], const __m512i rows[QUAD]) {
    /* Unpacking works within 128 bits, so four columns of each sixteen are laid side by side first. */
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i a = _mm512_permutexvar_epi32(order, rows[0]), b = _mm512_permutexvar_epi32(order, rows[1]);
    __m512i c = _mm512_permutexvar_epi32(order, rows[2]), d = _mm512_permutexvar_epi32(order, rows[3]);
    __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    quads[0] = _mm512_unpacklo_epi16(ab, cd), quads[1] = _mm512_unpackhi_epi16(ab, cd);
    ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
    quads[2] = _mm512_unpacklo_epi16(ab, cd), quads[3] = _mm512_unpackhi_epi16(ab, cd);
}

/* Packs weights whose rows are contiguous. */
VNNI static void pack_rows(int8_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns) {
    __mmask64 kept = columns < STRIP ? ((__mmask64)1 << columns) - 1 : ~(__mmask64)0;
    for (int64_t k = 0; k < inner; k += QUAD, out += QUAD * STRIP) {
        __m512i rows[QUAD], quads[4];
        #pragma GCC unroll 4
        for (int64_t i = 0; i < QUAD; i++)  /* Past the last row, numbers are zeros. */
            rows[i] = _mm512_maskz_loadu_epi8(kept, w + MIN(k + i, inner - 1) * stride);
        interleave(quads, rows);
        #pragma GCC unroll 4
        for (int v = 0; v < 4; v++) _mm512_store_si512(out + 64 * v, quads[v]);
    }
}

/* Packs 64 or fewer weights of each of 16 or fewer columns, transposed four weights at a time. */
VNNI static void pack_sixteen_columns(int8_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns) {
    __mmask64 kept = inner < 64 ? ((__mmask64)1 << inner) - 1 : ~(__mmask64)0;
    __m512i a[16], b[16];
    #pragma GCC unroll 16
    for (int64_t c = 0; c < 16; c++) a[c] = c < columns ? _mm512_maskz_loadu_epi8(kept, w + c * stride) : _mm512_setzero_si512();
    #pragma GCC unroll 8
    for (int c = 0; c < 16; c += 2) b[c] = _mm512_unpacklo_epi32(a[c], a[c + 1]), b[c + 1] = _mm512_unpackhi_epi32(a[c], a[c + 1]);
    #pragma GCC unroll 4
    for (int c = 0; c < 16; c += 4) {
        a[c] = _mm512_unpacklo_epi64(b[c], b[c + 2]), a[c + 1] = _mm512_unpackhi_epi64(b[c], b[c + 2]);
        a[c + 2] = _mm512_unpacklo_epi64(b[c + 1], b[c + 3]), a[c + 3] = _mm512_unpackhi_epi64(b[c + 1], b[c + 3]);
    }
    /* a[4g + q] has, of columns 4g to 4g + 3, quads q, q + 4, q + 8 and q + 12. */
    #pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        __m512i low = _mm512_shuffle_i32x4(a[q], a[4 + q], 0x88), high = _mm512_shuffle_i32x4(a[8 + q], a[12 + q], 0x88);
        _mm512_store_si512(out + q * QUAD * STRIP, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_store_si512(out + (q + 8) * QUAD * STRIP, _mm512_shuffle_i32x4(low, high, 0xdd));
        low = _mm512_shuffle_i32x4(a[q], a[4 + q], 0xdd), high = _mm512_shuffle_i32x4(a[8 + q], a[12 + q], 0xdd);
        _mm512_store_si512(out + (q + 4) * QUAD * STRIP, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_store_si512(out + (q + 12) * QUAD * STRIP, _mm512_shuffle_i32x4(low, high, 0xdd));
    }
}

static void pack_columns(int8_t *out, const int8_t *w, int64_t stride, int64_t inner, int64_t columns) {
    for (int64_t j = 0; j < (columns + COLUMNS - 1) / COLUMNS * COLUMNS; j += LANES)
        for (int64_t k = 0; k < inner; k += 64)
            pack_sixteen_columns(out + k * STRIP + j * QUAD, w + j * stride + k, stride, inner - k, columns - j);
}

/* Writes, or adds, LANES or fewer sums of one row, given for each byte by itself. */
VNNI static inline __attribute__((always_inline)) void join(block_t b, int64_t row, int64_t c, __m512i s0, __m512i s1, __m512i s2, __m512i s3) {
    int64_t width = b.columns - c < 0 ? 0 : MIN(LANES, b.columns - c);
    __mmask16 kept = (__mmask16)((1 << width) - 1);
    int32_t *to = b.replies[row] + b.column + c;
    __m512i low = _mm512_add_epi32(s0, _mm512_slli_epi32(s1, 8));
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(s2, 16), _mm512_slli_epi32(s3, 24));
    __m512i found = _mm512_add_epi32(low, high);
    if (!b.is_first) found = _mm512_add_epi32(found, _mm512_maskz_loadu_epi32(kept, to));
    _mm512_mask_storeu_epi32(to, kept, found);
}

VNNI static inline __attribute__((always_inline)) __m512i quad_of(const uint8_t *numbers, int l) {
    int32_t quad;
    memcpy(&quad, numbers + l * BLOCK_K, 4);
    return _mm512_set1_epi32(quad);
}

/* Multiplies `count` rows, ROWS or fewer, with COLUMNS columns of a panel. */
VNNI static inline __attribute__((always_inline)) void multiply_panel(block_t b, int64_t row, int64_t c, const int count) {
    const uint8_t *numbers = (const uint8_t *)b.numbers + row * PLANES;
    const int8_t *panel = (const int8_t *)b.panels + c * QUAD;
    __m512i sums[ROWS][4][2];
    #pragma GCC unroll 3
    for (int r = 0; r < count; r++)
        #pragma GCC unroll 4
        for (int l = 0; l < 4; l++) sums[r][l][0] = sums[r][l][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < b.inner; k += QUAD, numbers += QUAD, panel += QUAD * STRIP) {
        if (k % PREFETCH_INNER == 0) prefetch(b.ahead);
        __m512i left = _mm512_load_si512(panel), right = _mm512_load_si512(panel + 64);
        #pragma GCC unroll 3
        for (int r = 0; r < count; r++)
            #pragma GCC unroll 4
            for (int l = 0; l < 4; l++) {
                __m512i quads = quad_of(numbers + r * PLANES, l);
                sums[r][l][0] = _mm512_dpbusd_epi32(sums[r][l][0], quads, left);
                sums[r][l][1] = _mm512_dpbusd_epi32(sums[r][l][1], quads, right);
            }
    }
    #pragma GCC unroll 3
    for (int r = 0; r < count; r++)
        #pragma GCC unroll 2
        for (int v = 0; v < 2; v++)
            join(b, row + r, c + LANES * v, sums[r][0][v], sums[r][1][v], sums[r][2][v], sums[r][3][v]);
}

/* Packs STRIP columns whose rows are contiguous and multiplies the first row with them, by multipliers that packing leaves idle. */
VNNI static void pack_and_multiply_one(block_t b) {
    const uint8_t *numbers = b.numbers;
    const int8_t *w = b.w.data;
    int8_t *panel = b.panels;
    int64_t stride = b.w.row_stride;
    __m512i sums[4][4];
    #pragma GCC unroll 4
    for (int l = 0; l < 4; l++)
        #pragma GCC unroll 4
        for (int v = 0; v < 4; v++) sums[l][v] = _mm512_setzero_si512();
    for (int64_t k = 0; k < b.inner; k += QUAD, numbers += QUAD, panel += QUAD * STRIP, w += QUAD * stride) {
        if (k % PREFETCH_INNER == 0) prefetch(b.ahead);
        __m512i rows[QUAD], quads[4];
        #pragma GCC unroll 4
        for (int i = 0; i < QUAD; i++) rows[i] = _mm512_loadu_si512(w + i * stride);
        interleave(quads, rows);
        #pragma GCC unroll 4
        for (int v = 0; v < 4; v++) _mm512_store_si512(panel + 64 * v, quads[v]);
        #pragma GCC unroll 4
        for (int l = 0; l < 4; l++)
            #pragma GCC unroll 4
            for (int v = 0; v < 4; v++) sums[l][v] = _mm512_dpbusd_epi32(sums[l][v], quad_of(numbers, l), quads[v]);
    }
    #pragma GCC unroll 4
    for (int v = 0; v < 4; v++) join(b, 0, LANES * v, sums[0][v], sums[1][v], sums[2][v], sums[3][v]);
}

VNNI static void multiply(block_t b) {
    int64_t done = 0;
    if (b.w.column_stride != 1) pack_columns(b.panels, b.w.data, b.w.column_stride, b.inner, b.columns);
    else if (b.columns == STRIP && b.inner % QUAD == 0 && b.count > ROWS) {
        pack_and_multiply_one(b);
        done = 1;
    } else pack_rows(b.panels, b.w.data, b.w.row_stride, b.inner, b.columns);
    for (int64_t taken; done < b.count; done += taken) {
        /* Sums of one row are too few to keep the multipliers busy, so four rows are two and two. */
        taken = b.count - done == 4 ? 2 : MIN(ROWS, b.count - done);
        for (int64_t c = 0; c < b.columns; c += COLUMNS)
            if (taken == 3) multiply_panel(b, done, c, 3);
            else if (taken == 2) multiply_panel(b, done, c, 2);
            else multiply_panel(b, done, c, 1);
    }
}

const few_t vnni_few = {BLOCK_K, 1, ROWS, COLUMNS, split, multiply};
