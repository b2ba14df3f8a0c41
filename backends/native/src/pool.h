/* One pool of threads for every kernel: work is claimed piece by piece, never assigned.
 *
 * The calling thread takes part and finishes alone when no worker shows up, so a core that another
 * program took costs its share and no more. Threads spin for tens of microseconds, then sleep.
 */
#ifndef FT_POOL_H
#define FT_POOL_H

typedef struct ft_pool ft_pool;

/* Work on items [begin, end); `thread` numbers the caller, 0 .. ft_pool_threads() - 1. */
typedef void (*ft_range_fn)(void *arg, int begin, int end, int thread);

ft_pool *ft_pool_new(int threads); /* NULL when out of memory; fewer threads when some cannot start */
void ft_pool_free(ft_pool *pool);
int ft_pool_threads(const ft_pool *pool);

/* One caller at a time may run ranges; a second one waits here. */
void ft_pool_lock(ft_pool *pool);
void ft_pool_unlock(ft_pool *pool);

/* Run fn over [0, n) in pieces of `grain`; returns when all are done. One piece runs inline. */
void ft_pool_ranges(ft_pool *pool, int n, int grain, ft_range_fn fn, void *arg);

#endif
