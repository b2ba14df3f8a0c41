/* The few thread primitives the pool needs, for POSIX and Windows. */
#ifndef FT_THREADS_H
#define FT_THREADS_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
typedef HANDLE ft_thread;
typedef SRWLOCK ft_mutex;
typedef DWORD ft_thread_result;
#define FT_THREAD_CALL WINAPI
static inline void ft_mutex_init(ft_mutex *m) { InitializeSRWLock(m); }
static inline void ft_mutex_destroy(ft_mutex *m) { (void)m; }
static inline void ft_mutex_lock(ft_mutex *m) { AcquireSRWLockExclusive(m); }
static inline void ft_mutex_unlock(ft_mutex *m) { ReleaseSRWLockExclusive(m); }
static inline int ft_thread_start(ft_thread *t, ft_thread_result(WINAPI *fn)(void *), void *arg) {
    *t = CreateThread(NULL, 0, fn, arg, 0, NULL);
    return *t != NULL;
}
static inline void ft_thread_join(ft_thread t) {
    WaitForSingleObject(t, INFINITE);
    CloseHandle(t);
}
static inline int64_t ft_now_ns(void) {
    LARGE_INTEGER now, rate;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&rate);
    return (int64_t)((double)now.QuadPart * 1e9 / (double)rate.QuadPart);
}
#else
#include <pthread.h>
#include <time.h>
typedef pthread_t ft_thread;
typedef pthread_mutex_t ft_mutex;
typedef void *ft_thread_result;
#define FT_THREAD_CALL
static inline void ft_mutex_init(ft_mutex *m) { pthread_mutex_init(m, NULL); }
static inline void ft_mutex_destroy(ft_mutex *m) { pthread_mutex_destroy(m); }
static inline void ft_mutex_lock(ft_mutex *m) { pthread_mutex_lock(m); }
static inline void ft_mutex_unlock(ft_mutex *m) { pthread_mutex_unlock(m); }
static inline int ft_thread_start(ft_thread *t, void *(*fn)(void *), void *arg) {
    return pthread_create(t, NULL, fn, arg) == 0;
}
static inline void ft_thread_join(ft_thread t) { pthread_join(t, NULL); }
static inline int64_t ft_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
#endif

static inline void ft_pause(void) {
#if defined(_WIN32)
    YieldProcessor();
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` is a no-op on most cores; isb waits about as long as pause */
#endif
}

/* Sleep while *word == expected (wakes may be spurious); wake every sleeper on the word. */
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
typedef struct { int unused; } ft_waiter;
static inline void ft_waiter_init(ft_waiter *w) { (void)w; }
static inline void ft_waiter_destroy(ft_waiter *w) { (void)w; }
static inline void ft_wait(ft_waiter *w, atomic_int *word, int expected) {
    (void)w;
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}
static inline void ft_wake(ft_waiter *w, atomic_int *word) {
    (void)w;
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}
#elif defined(_WIN32)
typedef struct { SRWLOCK lock; CONDITION_VARIABLE changed; } ft_waiter;
static inline void ft_waiter_init(ft_waiter *w) {
    InitializeSRWLock(&w->lock);
    InitializeConditionVariable(&w->changed);
}
static inline void ft_waiter_destroy(ft_waiter *w) { (void)w; }
static inline void ft_wait(ft_waiter *w, atomic_int *word, int expected) {
    AcquireSRWLockExclusive(&w->lock);
    if (atomic_load(word) == expected) SleepConditionVariableSRW(&w->changed, &w->lock, INFINITE, 0);
    ReleaseSRWLockExclusive(&w->lock);
}
static inline void ft_wake(ft_waiter *w, atomic_int *word) {
    (void)word;
    AcquireSRWLockExclusive(&w->lock);
    ReleaseSRWLockExclusive(&w->lock);
    WakeAllConditionVariable(&w->changed);
}
#else
typedef struct { pthread_mutex_t lock; pthread_cond_t changed; } ft_waiter;
static inline void ft_waiter_init(ft_waiter *w) {
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
}
static inline void ft_waiter_destroy(ft_waiter *w) {
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->changed);
}
static inline void ft_wait(ft_waiter *w, atomic_int *word, int expected) {
    pthread_mutex_lock(&w->lock);
    if (atomic_load(word) == expected) pthread_cond_wait(&w->changed, &w->lock);
    pthread_mutex_unlock(&w->lock);
}
static inline void ft_wake(ft_waiter *w, atomic_int *word) {
    (void)word;
    pthread_mutex_lock(&w->lock);
    pthread_mutex_unlock(&w->lock);
    pthread_cond_broadcast(&w->changed);
}
#endif

#endif
