#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "pool.h"

#include "threads.h"

/* Spinning longer than a wake-up costs nobody anything; a preempted thread needs the core instead. */
#define SPIN_NS 50000
/* When workers are often late (another program has a core), one sits out: a thread less than cores
 * loses 1 / threads of the speed, waiting for a preempted one loses more. Measured with one of two
 * cores taken: 41 % of the idle decode rate waiting, 60 % sitting out. */
#define WINDOW_NS 20000000
#define SHORT_BENCH_NS 100000000
#define LONG_BENCH_NS 2000000000
#define TRIAL_NS 500000000 /* after a call back: benched again at half the lateness, for twice as long */
#define NEXT_BITS 20
#define NEXT_MASK ((UINT64_C(1) << NEXT_BITS) - 1)

typedef struct ft_worker {
    ft_pool *pool;
    int number;
    ft_thread thread;
} ft_worker;

/* The claim word holds generation (24 bits), number of pieces (20) and next piece (20), so that a
 * late worker can never claim a piece of a job it did not read: the compare-and-swap fails. */
struct ft_pool {
    _Alignas(64) _Atomic uint64_t claim;
    _Alignas(64) atomic_int done;   /* pieces finished of the current job */
    _Alignas(64) atomic_int wakes;  /* what sleeping workers watch */
    _Alignas(64) atomic_int active; /* threads that take part, the caller included */
    atomic_int sleepers;
    atomic_int caller_sleeps;
    atomic_int stop;
    _Alignas(64) ft_range_fn fn;
    void *arg;
    int n, grain;
    int threads;
    uint32_t generation;
    int64_t window_ns, late_ns;  /* start of the window; time spent in it waiting for late workers */
    int64_t benched_ns, bench_ns; /* when a worker was last benched or called back; for how long */
    ft_mutex lock;
    ft_waiter waiter;
    ft_worker *workers;
};

static uint32_t generation_of(uint64_t claim) { return (uint32_t)(claim >> (2 * NEXT_BITS)); }
static uint64_t pieces_of(uint64_t claim) { return (claim >> NEXT_BITS) & NEXT_MASK; }
static uint64_t next_of(uint64_t claim) { return claim & NEXT_MASK; }

static void run_piece(ft_pool *pool, int piece, int thread) {
    int begin = piece * pool->grain;
    int end = pool->n - begin > pool->grain ? begin + pool->grain : pool->n;
    pool->fn(pool->arg, begin, end, thread);
}

/* Claim and run pieces of job `generation` until none is left, then report them done. */
static void work(ft_pool *pool, uint32_t generation, int thread) {
    int finished = 0;
    uint64_t claim = atomic_load(&pool->claim);
    while (generation_of(claim) == generation && next_of(claim) < pieces_of(claim)) {
        if (!atomic_compare_exchange_weak(&pool->claim, &claim, claim + 1)) continue;
        run_piece(pool, (int)next_of(claim), thread);
        finished++;
        claim = atomic_load(&pool->claim);
    }
    if (finished == 0) return;
    atomic_fetch_add(&pool->done, finished);
    if (thread != 0 && atomic_load(&pool->caller_sleeps)) ft_wake(&pool->waiter, &pool->done);
}

/* Wait for a job after `seen`; its generation. */
static uint32_t next_job(ft_pool *pool, uint32_t seen) {
    int64_t until = ft_now_ns() + SPIN_NS;
    for (int turn = 1;; turn++) {
        uint32_t generation = generation_of(atomic_load(&pool->claim));
        if (generation != seen || atomic_load(&pool->stop)) return generation;
        ft_pause();
        if (turn % 16 != 0 || ft_now_ns() < until) continue;
        int wakes = atomic_load(&pool->wakes);
        atomic_fetch_add(&pool->sleepers, 1);
        if (generation_of(atomic_load(&pool->claim)) == seen && !atomic_load(&pool->stop))
            ft_wait(&pool->waiter, &pool->wakes, wakes);
        atomic_fetch_sub(&pool->sleepers, 1);
        until = ft_now_ns() + SPIN_NS;
    }
}

/* Sleep while this worker is benched. */
static void sit_out(ft_pool *pool, int number) {
    int active;
    while ((active = atomic_load(&pool->active)) <= number && !atomic_load(&pool->stop))
        ft_wait(&pool->waiter, &pool->active, active);
}

static ft_thread_result FT_THREAD_CALL worker_main(void *arg) {
    ft_worker *worker = arg;
    ft_pool *pool = worker->pool;
    uint32_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        sit_out(pool, worker->number);
        seen = next_job(pool, seen);
        if (worker->number < atomic_load(&pool->active)) work(pool, seen, worker->number);
    }
    return 0;
}

static void wake_workers(ft_pool *pool) {
    if (atomic_load(&pool->sleepers) == 0) return;
    atomic_fetch_add(&pool->wakes, 1);
    ft_wake(&pool->waiter, &pool->wakes);
}

/* ---- which threads take part ---- */

static void bench_worker(ft_pool *pool, int64_t now) {
    pool->bench_ns = now - pool->benched_ns >= TRIAL_NS ? SHORT_BENCH_NS : 2 * pool->bench_ns;
    if (pool->bench_ns > LONG_BENCH_NS) pool->bench_ns = LONG_BENCH_NS;
    pool->benched_ns = now;
    atomic_fetch_sub(&pool->active, 1);
}

static void call_back(ft_pool *pool) {
    const int64_t now = ft_now_ns();
    if (now - pool->benched_ns < pool->bench_ns) return;
    pool->benched_ns = pool->window_ns = now;
    pool->late_ns = 0;
    atomic_fetch_add(&pool->active, 1);
    ft_wake(&pool->waiter, &pool->active);
}

static void count_late(ft_pool *pool, int64_t waited) {
    const int64_t now = ft_now_ns(), elapsed = now - pool->window_ns;
    const int is_trial = now - pool->benched_ns < TRIAL_NS;
    pool->late_ns += waited;
    if (elapsed < (is_trial ? WINDOW_NS / 2 : WINDOW_NS)) return;
    const int is_costly = pool->late_ns * 5 * pool->threads > elapsed * (is_trial ? 2 : 4);
    if (is_costly && elapsed < 4 * WINDOW_NS && atomic_load(&pool->active) > 1) bench_worker(pool, now);
    pool->window_ns = now;
    pool->late_ns = 0;
}

static void wait_done(ft_pool *pool, int pieces) {
    const int64_t start = ft_now_ns();
    for (int turn = 1; atomic_load(&pool->done) != pieces; turn++) {
        ft_pause();
        if (turn % 16 != 0 || ft_now_ns() - start < SPIN_NS) continue;
        /* Blocking frees this core, so that the scheduler can move a preempted worker here. */
        int done;
        atomic_store(&pool->caller_sleeps, 1);
        while ((done = atomic_load(&pool->done)) != pieces) ft_wait(&pool->waiter, &pool->done, done);
        atomic_store(&pool->caller_sleeps, 0);
        count_late(pool, ft_now_ns() - start);
        return;
    }
}

void ft_pool_ranges(ft_pool *pool, int n, int grain, ft_range_fn fn, void *arg) {
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    if ((n - 1) / grain + 1 > (int)NEXT_MASK) grain = (n - 1) / (int)NEXT_MASK + 1;
    int pieces = (n - 1) / grain + 1;
    if (pieces == 1 || pool->threads == 1) {
        fn(arg, 0, n, 0);
        return;
    }
    if (atomic_load(&pool->active) < pool->threads) call_back(pool);
    pool->fn = fn;
    pool->arg = arg;
    pool->n = n;
    pool->grain = grain;
    atomic_store(&pool->done, 0);
    pool->generation = (pool->generation + 1) & 0xffffff;
    atomic_store(&pool->claim, ((uint64_t)pool->generation << (2 * NEXT_BITS)) |
                                   ((uint64_t)pieces << NEXT_BITS));
    wake_workers(pool);
    work(pool, pool->generation, 0);
    wait_done(pool, pieces);
}

static void start_workers(ft_pool *pool, int wanted) {
    for (int number = 1; number < wanted; number++) {
        ft_worker *worker = &pool->workers[number - 1];
        worker->pool = pool;
        worker->number = number;
        if (!ft_thread_start(&worker->thread, worker_main, worker)) return;
        pool->threads = number + 1;
    }
}

ft_pool *ft_pool_new(int threads) {
    if (threads < 1) threads = 1;
    void *memory = calloc(1, sizeof(ft_pool) + 64);
    if (memory == NULL) return NULL;
    /* calloc promises 16 bytes only: align by hand and keep the start just before the pool. */
    ft_pool *pool = (ft_pool *)(((uintptr_t)memory + 64) & ~(uintptr_t)63);
    ((void **)pool)[-1] = memory;
    ft_mutex_init(&pool->lock);
    ft_waiter_init(&pool->waiter);
    pool->threads = 1;
    pool->workers = calloc((size_t)threads, sizeof(ft_worker));
    atomic_store(&pool->active, threads);
    if (pool->workers != NULL) start_workers(pool, threads);
    atomic_store(&pool->active, pool->threads);
    return pool;
}

void ft_pool_free(ft_pool *pool) {
    if (pool == NULL) return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->wakes, 1);
    ft_wake(&pool->waiter, &pool->wakes);
    atomic_fetch_add(&pool->active, pool->threads);
    ft_wake(&pool->waiter, &pool->active);
    for (int i = 0; i < pool->threads - 1; i++) ft_thread_join(pool->workers[i].thread);
    ft_waiter_destroy(&pool->waiter);
    ft_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(((void **)pool)[-1]);
}

int ft_pool_threads(const ft_pool *pool) { return pool->threads; }
void ft_pool_lock(ft_pool *pool) { ft_mutex_lock(&pool->lock); }
void ft_pool_unlock(ft_pool *pool) { ft_mutex_unlock(&pool->lock); }
