/*
 * The transforms and products of transforms.h on x86-64 with AVX2 and FMA, and what is the same for all registers.
 */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2,fma")))
#define TARGET AVX2
#define LANES 4
#define FORM(name) name##_avx2

typedef __m256d vec;
typedef __m256i bits;
typedef __m128i lane_mask; /* lanes of ones where there is a column */

#define v_load _mm256_loadu_pd
#define v_store _mm256_storeu_pd
#define v_broadcast _mm256_broadcast_sd
#define v_zero _mm256_setzero_pd
#define v_add _mm256_add_pd
#define v_sub _mm256_sub_pd
#define v_mul _mm256_mul_pd
#define v_fmadd _mm256_fmadd_pd
#define v_fnmadd _mm256_fnmadd_pd

AVX2 INLINE lane_mask first_lanes(int32_t count) {
    return _mm_cmpgt_epi32(_mm_set1_epi32(count), _mm_setr_epi32(0, 1, 2, 3));
}

AVX2 INLINE vec load_whole(const int32_t *at) {
    return _mm256_cvtepi32_pd(_mm_loadu_si128((const __m128i *)at));
}

AVX2 INLINE vec load_partial(const int32_t *at, lane_mask kept) {
    return _mm256_cvtepi32_pd(_mm_maskload_epi32(at, kept));
}

AVX2 INLINE vec load_packed(const char *at) {
    const __m128i places = _mm_setr_epi8(-1, 4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15);
    return _mm256_cvtepi32_pd(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(at - 4)), places));
}

AVX2 INLINE void store_low_halves(int32_t *out, vec numbers) {
    __m128 low = _mm_castpd_ps(_mm256_castpd256_pd128(numbers)), high = _mm_castpd_ps(_mm256_extractf128_pd(numbers, 1));
    _mm_storeu_ps((float *)out, _mm_shuffle_ps(low, high, 0x88));
}

AVX2 INLINE bits largest_of(bits seen, vec error) {
    return _mm256_max_epu32(seen, _mm256_castpd_si256(_mm256_andnot_pd(_mm256_set1_pd(-0.0), error)));
}

#include "transforms.h"

/* ---- what noise/polynomial/kernels.py calls -------------------------------------------------------------------------------- */

/* Returns the version of these functions' signatures. It grows by one with every change of them, here and in kernels.py. */
int veilbase_masks_version(void) {
    return 6;
}

/* Tells whether processor and operating system have what the rest of this file needs: AVX2 and FMA, and registers saved. */
int veilbase_masks_usable(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX) || !(c & bit_FMA)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
}

/* Tells whether they have what kernels_avx512.c needs, too. */
int veilbase_masks_avx512(void) {
    const unsigned needed = bit_AVX512F | bit_AVX512VL;
    unsigned a, b, c, d, low, high;
    if (!veilbase_masks_usable()) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & needed) == needed;
}

/* ---- errors ----------------------------------------------------------------------------------------------------- */

/* Returns the number of ones in each byte. */
AVX2 INLINE __m256i ones(__m256i bytes) {
    const __m256i counts = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i four_bits = _mm256_set1_epi8(15);
    return _mm256_add_epi8(_mm256_shuffle_epi8(counts, _mm256_and_si256(bytes, four_bits)),
                           _mm256_shuffle_epi8(counts, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), four_bits)));
}

/*
 * Writes to each of `count` bytes the number of ones among its random bits, minus `mean`: one byte of each of `planes`
 * planes of `count` bytes, and `rest` bits (below 8) of the bytes behind the planes, each of which serves 8 / rest
 * samples.
 */
AVX2 void veilbase_count_ones(const uint8_t *drawn, int64_t count, int64_t planes, int64_t rest, int64_t mean, uint8_t *out) {
    int64_t c = 0;
    for (; c + 32 <= count; c += 32) {
        __m256i sum = _mm256_set1_epi8((char)-mean);
        for (int64_t p = 0; p < planes; p++)
            sum = _mm256_add_epi8(sum, ones(_mm256_loadu_si256((const __m256i *)(drawn + p * count + c))));
        _mm256_storeu_si256((__m256i *)(out + c), sum);
    }
    for (; c < count; c++) {
        out[c] = (uint8_t)-mean;
        for (int64_t p = 0; p < planes; p++) out[c] += (uint8_t)__builtin_popcount(drawn[p * count + c]);
    }
    int64_t parts = rest ? 8 / rest : 0, width = rest ? (count + parts - 1) / parts : 0;
    drawn += planes * count;
    for (int64_t part = 0; part < parts; part++, out += width, count -= width) {
        int shift = (int)(part * rest), kept = (1 << rest) - 1;
        int64_t samples = MIN(width, count);
        for (c = 0; c + 32 <= samples; c += 32) {
            __m256i bits = _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(drawn + c)), _mm_cvtsi32_si128(shift));
            bits = _mm256_and_si256(bits, _mm256_set1_epi8((char)kept));
            __m256i *to = (__m256i *)(out + c);
            _mm256_storeu_si256(to, _mm256_add_epi8(_mm256_loadu_si256(to), ones(bits)));
        }
        for (; c < samples; c++) out[c] += (uint8_t)__builtin_popcount((drawn[c] >> shift) & kept);
    }
}
