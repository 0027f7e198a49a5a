/* Counters of the counting build. A range is the bytes of one tensor, or of several that overlap. Everything else that a
   kernel may touch is its own: its stack, its temporaries, its constants. The rest is stray: it is counted, a read of it
   gives poison, and a write to it goes nowhere.
*/
#include <dlfcn.h>

enum { BLOCK = 32 };
#define SEVERAL UINT32_MAX

/* For each unit of a range: the program (counted from 1) that last read it, or SEVERAL; the one that last wrote it. */
struct range {
  uint64_t lo, hi, unit;
  uint32_t *reader, *writer;
  int64_t read, written, read_blocks, written_blocks;
};
struct totals { int64_t stray_read, stray_written, leaked, leaked_bytes, write_write, read_write; };
struct temporary { uint64_t lo, hi; };

static struct range *ranges;
static int64_t range_count;
static struct totals totals;
static struct temporary *temporaries;
static int64_t temporary_count, temporary_room;
static uint32_t program;
static int counting;
static unsigned char poison;
static uint64_t stack_top;
static struct { uint64_t end; int64_t block; } last_run[2];
static char nowhere[64];
/* An access in the kernel's code nearly always meets the temporary that it met before: remembered by the address of the
   code, until any temporary is freed. */
static struct { uint64_t lo, hi, freed; } remembered[1024];
static uint64_t freed = 1;

static void begin_program(uint32_t number) { program = number + 1; }
static void begin_copy(void) { last_run[0].block = last_run[1].block = -1; }

void count_begin(struct range *given, int64_t n, int32_t count, int32_t fill) {
  ranges = given, range_count = n, counting = count, poison = (unsigned char)fill;
  temporary_count = 0, freed++;
  memset(&totals, 0, sizeof totals);
  stack_top = (uint64_t)__builtin_frame_address(0);
}

void count_end(struct totals *out) {
  for (int64_t i = 0; i < temporary_count; i++) {
    totals.leaked_bytes += temporaries[i].hi - temporaries[i].lo;
    free((void *)temporaries[i].lo);
  }
  totals.leaked = temporary_count;
  *out = totals;
  ranges = 0, range_count = temporary_count = 0;
}

void *count_malloc(int64_t n) {
  char *p = malloc(n > 0 ? n : 1);
  if (!p) abort();
  memset(p, poison, n);
  if (temporary_count == temporary_room) {
    temporary_room = temporary_room ? 2 * temporary_room : 1024;
    temporaries = realloc(temporaries, temporary_room * sizeof *temporaries);
    if (!temporaries) abort();
  }
  temporaries[temporary_count++] = (struct temporary){(uint64_t)p, (uint64_t)p + n};
  return p;
}

void count_free(void *p) {
  for (int64_t i = temporary_count - 1; i >= 0; i--)
    if (temporaries[i].lo == (uint64_t)p) {
      temporaries[i] = temporaries[--temporary_count];
      freed++;
      free(p);
      return;
    }
}

static int is_own(uint64_t a, int64_t n) {
  char here;
  if (a >= (uint64_t)&here - 4096 && a + n <= stack_top + 65536) return 1;
  for (int64_t i = temporary_count - 1; i >= 0; i--)
    if (a >= temporaries[i].lo && a + n <= temporaries[i].hi) return 1;
  Dl_info at, self;
  return dladdr((void *)a, &at) && dladdr((void *)count_begin, &self) && at.dli_fbase == self.dli_fbase;
}

static struct range *range_of(uint64_t a, int64_t n) {
  for (int64_t i = 0; i < range_count; i++)
    if (a >= ranges[i].lo && a + n <= ranges[i].hi) return &ranges[i];
  return 0;
}

static void mark(struct range *r, uint64_t a, int64_t n, int write) {
  const uint64_t first = (a - r->lo) / r->unit, last = (a + n - 1 - r->lo) / r->unit;
  for (uint64_t u = first; u <= last; u++) {
    uint32_t *reader = r->reader + u, *writer = r->writer + u;
    if (write) {
      if (*writer && *writer != program) totals.write_write += r->unit;
      if (*reader && *reader != program) totals.read_write += r->unit;
      *writer = program;
    } else {
      if (*writer && *writer != program) totals.read_write += r->unit;
      *reader = *reader && *reader != program ? SEVERAL : program;
    }
  }
}

/* Blocks of a run: it is rounded out to whole ones, and a row that follows the previous one of the same copy without a
   gap continues its run. */
static void account(struct range *r, uint64_t a, int64_t n, int write) {
  int64_t first = a / BLOCK;
  const int64_t last = (a + n - 1) / BLOCK;
  if (last_run[write].block == first && last_run[write].end == a) first++;
  last_run[write].block = last, last_run[write].end = a + n;
  *(write ? &r->written : &r->read) += n;
  *(write ? &r->written_blocks : &r->read_blocks) += (last - first + 1) * BLOCK;
  mark(r, a, n, write);
}

/* Count an access; 0: it is stray. */
static int touch(uint64_t a, int64_t n, int write) {
  struct range *r = range_of(a, n);
  if (r) {
    if (counting) account(r, a, n, write);
    return 1;
  }
  return is_own(a, n);
}

static void stray(int64_t n, int write) { *(write ? &totals.stray_written : &totals.stray_read) += n; }

static void *scalar(void *p, int64_t n, int write, const void *code) {
  const uint64_t a = (uint64_t)p, slot = ((uint64_t)code >> 2) % 1024;
  if (remembered[slot].freed == freed && a >= remembered[slot].lo && a + n <= remembered[slot].hi) return p;
  for (int64_t i = temporary_count - 1; i >= 0; i--)
    if (a >= temporaries[i].lo && a + n <= temporaries[i].hi) {
      remembered[slot].lo = temporaries[i].lo, remembered[slot].hi = temporaries[i].hi, remembered[slot].freed = freed;
      return p;
    }
  begin_copy();
  if (touch((uint64_t)p, n, write)) return p;
  stray(n, write);
  memset(nowhere, poison, sizeof nowhere);
  return nowhere;
}

void *count_load(void *p, int64_t n) { return scalar(p, n, 0, __builtin_return_address(0)); }
void *count_store(void *p, int64_t n) { return scalar(p, n, 1, __builtin_return_address(0)); }

static void copy_run(char *to, const char *from, int64_t n) {
  const int readable = touch((uint64_t)from, n, 0), writable = touch((uint64_t)to, n, 1);
  if (readable && writable) {
    memcpy(to, from, n);
    return;
  }
  for (int64_t i = 0; i < n; i++) { /* a part may still be inside */
    char byte = (char)poison;
    if (readable || touch((uint64_t)from + i, 1, 0)) byte = from[i];
    else stray(1, 0);
    if (writable || touch((uint64_t)to + i, 1, 1)) to[i] = byte;
    else stray(1, 1);
  }
}

void count_copy(char *to, const char *from, int64_t n) {
  begin_copy();
  if (n > 0) copy_run(to, from, n);
}
