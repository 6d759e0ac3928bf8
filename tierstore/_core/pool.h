/* Parts of a long call, on several threads of which the caller is one. */
#ifndef TS_POOL_H
#define TS_POOL_H

#include <stdint.h>

/* Work on items `begin` to `end` of what `work` describes. Returns `end`, or less: the first item that
   was refused. May run at the same time as other parts of it. */
typedef int64_t (*ts_part)(void *work, int64_t begin, int64_t end);

/* Call `part` for all of n items, which move some `nbytes` of memory, in parts if that is faster.
   Returns when all have ended: n, or the first item that one refused; others went on meanwhile. */
int64_t ts_in_parts(ts_part part, void *work, int64_t n, int64_t nbytes);

#endif
