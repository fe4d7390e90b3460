/*
 * The transforms and products of transforms.h on x86-64 with AVX-512: eight features at once, and 32 registers, which hold
 * the four numbers and the three roots of a node of a transform. The numbers are those of the form for AVX2.
 */
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TARGET __attribute__((target("avx512f,avx512vl")))
#define LANES 8
#define FORM(name) name##_avx512

typedef __m512d vec;
typedef __m512i bits;
typedef __mmask8 lane_mask;

#define v_load _mm512_loadu_pd
#define v_store _mm512_storeu_pd
#define v_broadcast(at) _mm512_set1_pd(*(at))
#define v_zero _mm512_setzero_pd
#define v_add _mm512_add_pd
#define v_sub _mm512_sub_pd
#define v_mul _mm512_mul_pd
#define v_fmadd _mm512_fmadd_pd
#define v_fnmadd _mm512_fnmadd_pd

TARGET INLINE lane_mask first_lanes(int32_t count) {
    return (lane_mask)((1u << count) - 1);
}

TARGET INLINE vec load_whole(const int32_t *at) {
    return _mm512_cvtepi32_pd(_mm256_loadu_si256((const __m256i *)at));
}

TARGET INLINE vec load_partial(const int32_t *at, lane_mask kept) {
    return _mm512_cvtepi32_pd(_mm256_maskz_loadu_epi32(kept, at));
}

/* The second half begins at byte 12; its four bytes before belong to the first. */
TARGET INLINE vec load_packed(const char *at) {
    const __m256i places = _mm256_setr_epi8(-1, 4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15,
                                            -1, 4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15);
    __m256i read = _mm256_loadu2_m128i((const __m128i *)(at + 8), (const __m128i *)(at - 4));
    return _mm512_cvtepi32_pd(_mm256_shuffle_epi8(read, places));
}

TARGET INLINE void store_low_halves(int32_t *out, vec numbers) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi64_epi32(_mm512_castpd_si512(numbers)));
}

TARGET INLINE bits largest_of(bits seen, vec error) {
    return _mm512_max_epu32(seen, _mm512_castpd_si512(_mm512_abs_pd(error)));
}

#include "transforms.h"
