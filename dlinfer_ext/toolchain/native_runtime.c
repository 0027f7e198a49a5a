/* The host side of a native kernel. What is written for each kernel is put before this text: `call_program`, which calls
   the kernel for one program. With -DCOUNT every access of the kernel goes through the functions at the end.
*/
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static void call_program(const union argument *a, const int32_t *grid, int32_t x, int32_t y, int32_t z);

#ifdef COUNT
static void copy_run(char *to, const char *from, int64_t n);
static void begin_copy(void);
static void begin_program(uint32_t number);
#else
static void copy_run(char *to, const char *from, int64_t n) { memcpy(to, from, n); }
static void begin_copy(void) {}
static void begin_program(uint32_t number) { (void)number; }
#endif

/* The programs of a grid, one after the other. */
void native_launch(const union argument *a, int32_t gx, int32_t gy, int32_t gz) {
  const int32_t grid[3] = {gx, gy, gz};
  uint32_t number = 0;
  for (int32_t z = 0; z < gz; z++)
    for (int32_t y = 0; y < gy; y++)
      for (int32_t x = 0; x < gx; x++) {
        begin_program(number++);
        call_program(a, grid, x, y, z);
      }
}

/* --- what MLIR's lowering calls ----------------------------------------------------------------------------------- */

struct descriptor { char *base, *data; int64_t offset; int64_t sizes_then_strides[]; };
struct unranked { int64_t rank; struct descriptor *d; };

static void copy_dimension(int64_t element, int64_t rank, int64_t d, const char *from, const int64_t *from_stride,
                           char *to, const int64_t *to_stride, const int64_t *size) {
  if (d == rank) {
    copy_run(to, from, element);
  } else if (d == rank - 1 && from_stride[d] == 1 && to_stride[d] == 1) {
    copy_run(to, from, element * size[d]);
  } else {
    for (int64_t i = 0; i < size[d]; i++)
      copy_dimension(element, rank, d + 1, from + i * from_stride[d] * element, from_stride,
                     to + i * to_stride[d] * element, to_stride, size);
  }
}

void memrefCopy(int64_t element, struct unranked *from, struct unranked *to) {
  const int64_t rank = from->rank, *size = from->d->sizes_then_strides;
  for (int64_t d = 0; d < rank; d++)
    if (size[d] <= 0) return; /* a tile that its mask leaves empty */
  begin_copy();
  copy_dimension(element, rank, 0, from->d->data + from->d->offset * element, size + rank,
                 to->d->data + to->d->offset * element, to->d->sizes_then_strides + rank, size);
}

/* libgcc has this only from 13 on. A __bf16 is returned in the low half of xmm0. Round to nearest even; NaN stays. */
__attribute__((weak)) float __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000)
    bits = bits >> 16 | 0x40;
  else
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  memcpy(&value, &bits, 4);
  return value;
}

/* The names that CANN's device library gives to functions of tl.extra. */
#define DEVICE_NAME(name) float __hmf_##name##f(float x) { return name##f(x); }
DEVICE_NAME(tanh) DEVICE_NAME(tan) DEVICE_NAME(atan) DEVICE_NAME(asin) DEVICE_NAME(acos) DEVICE_NAME(sinh)
DEVICE_NAME(cosh) DEVICE_NAME(log1p) DEVICE_NAME(expm1) DEVICE_NAME(rint)
