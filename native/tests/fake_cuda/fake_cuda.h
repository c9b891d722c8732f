/* How tests arrange and watch the fake CUDA driver, libfake_cuda.so: a test double that keeps the
 * order that CUDA promises, and no other.
 *
 * Device memory is host memory that was allocated or declared here. Work in different streams runs
 * at any time and in any order unless events order it; a copy reads its source and writes its
 * destination piece by piece while it runs, with pauses in between: a program that changes the one,
 * or reads the other, too early, finds wrong bytes.
 *
 * Functions that return int return an error code of the driver (0: success). Any thread may call
 * any of them, but for fake_cuda_reset. `stream` is a handle of the driver's; 0 is the legacy
 * default stream of `device`. Plain C, for ctypes. */

#ifndef DATASTATES_FAKE_CUDA_H
#define DATASTATES_FAKE_CUDA_H

#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* As loaded: stops the threads, and forgets all work, memory, handles, counts and arrangements.
 * Handles of before are invalid from then on; who retained a context before may still release it,
 * which ends no context of afterwards. No other thread may be in a call, but for those who
 * wait in one: they get an error. Not from within a kernel. */
void fake_cuda_reset(void);

/* How many devices there are (2 unless set), what pseudo-random choices begin with, how late work
 * may be, and how many bytes are copied between pauses (65536 unless set). 0: leave as it is; a
 * delay of UINT32_MAX microseconds: none. */
void fake_cuda_configure(int devices, uint64_t seed, uint32_t max_delay_us, uint64_t piece_nbytes);

/* The CUDA version that the driver says it is (13000 unless set), and beyond which it has no
 * functions; and an attribute of all devices, by the driver's number. */
void fake_cuda_set_version(int version);
void fake_cuda_set_attribute(int attribute, int value);

/* --- memory --- */

/* Memory of a device, of undefined content; NULL if there is none. Freed by `fake_cuda_free`, or a
 * reset. (A device's memory is not a context: this creates none.) */
void* fake_cuda_alloc(int device, uint64_t nbytes);
int fake_cuda_free(void* data);

/* From now on these bytes of the caller's are memory of `device`; until disowned, by where they
 * begin. Ranges may overlap, and one that is adopted twice is disowned twice. */
int fake_cuda_adopt(int device, void* data, uint64_t nbytes);
int fake_cuda_disown(void* data);

/* True if all of these bytes are pinned host memory. */
int fake_cuda_is_registered(const void* data, uint64_t nbytes);

/* --- the training process: work that is not the engine's --- */

/* Creates a context on `device` if there is none, as frameworks do with the first use of a device;
 * it stays until the reset. The stream is not counted in "live_streams". A foreign one belongs to
 * another context of the device: events of the primary context cannot be recorded there. */
int fake_cuda_create_stream(int device, int blocking, uintptr_t* stream);
int fake_cuda_create_foreign_stream(int device, uintptr_t* stream);
int fake_cuda_destroy_stream(uintptr_t stream);

/* Enqueues a kernel: a function that is called by a thread of the driver. It may call the driver.
 */
int fake_cuda_launch(int device, uintptr_t stream, void (*kernel)(void*), void* argument);

/* Enqueues a kernel that writes `nbytes` to device memory piece by piece. What it writes is taken
 * from `from` now. */
int fake_cuda_write(int device, uintptr_t stream, void* to, const void* from, uint64_t nbytes);

/* Waits until all that was enqueued in the stream, or on all devices, has run. 600 if that takes
 * longer than `timeout_s`. */
int fake_cuda_synchronize(int device, uintptr_t stream, double timeout_s);
int fake_cuda_synchronize_all(double timeout_s);

/* --- capture into graphs --- */

/* `mode`: 0 global, 1 thread-local, 2 relaxed. Work captured is not run, and not kept. `end`
 * returns what the driver would: 901 if the capture was invalidated, 904 if a stream that joined it
 * has not been joined back. */
int fake_cuda_begin_capture(int device, uintptr_t stream, int mode);
int fake_cuda_end_capture(int device, uintptr_t stream);
/* True if a capture is under way that some call has invalidated. */
int fake_cuda_capture_invalidated(int device, uintptr_t stream);

/* --- failures --- */

/* After `skip` more calls, the next one to `symbol` (as exported: "cuMemcpyDtoHAsync_v2") does
 * nothing and returns `code`. May be called again, for one after that. 500 if there is no such
 * symbol. */
int fake_cuda_fail_next(const char* symbol, int code, int skip);

/* A sticky error: work is dropped, and every call that concerns a device returns `code` until told
 * 0. With 4 (deinitialized) the driver is as gone as at the end of a process. */
void fake_cuda_poison(int code);

/* 1: nothing begins to run, and copies stop between two pieces; 0: all goes on. */
void fake_cuda_stall(int on);

/* --- hostility: what real drivers do to a training process --- */

/* Makes the driver as bad as a real one in one way, from now on; 0: no longer. A driver that is
 * loaded while the environment variable FAKE_CUDA_HOSTILE is "1" is hostile in all ways, and so it
 * is after a reset. 500 if there is no such way.
 *
 * - lock: one lock is held through every call, those of the training process too, however long it
 * takes
 * - queue: a device's streams together hold this many commands; a call that has more waits for
 * room, with the lock
 * - drain: cuMemHostUnregister, and the end of a context, wait for all work of the device
 * - pin_ns: pinning takes this long for each page of 4 KiB that is not faulted in, and a tenth of
 * it for each page
 * - lie_us: event queries still say "not ready" for this long after the event
 * - context: cuThreadExchangeStreamCaptureMode wants a context
 * - engines: a device has one copy engine for each direction: copies are made one after the other,
 * those of the stream whose turn it is first
 * - all: 1: all of these, with values like a real driver's */
int fake_cuda_be_hostile(const char* way, uint64_t value);

/* `held` tells whether the calling thread holds the lock of an interpreter (PyGILState_Check);
 * NULL: not asked. */
void fake_cuda_watch_interpreter(int (*held)());

/* cuGetProcAddress does not know `symbol` (without suffix: "cuMemcpyDtoHAsync"). */
void fake_cuda_hide(const char* symbol);

/* 1: what copies touch is shown to ThreadSanitizer, which else sees nothing of it. */
void fake_cuda_show_accesses(int on);

/* --- what happened --- */

/* By name; UINT64_MAX if there is no such count. Calls of the driver's functions, by their exported
 * names, and:
 *
 * - bytes_to_host, bytes_to_device: copied by the driver's calls
 * - copies: in all
 * - pageable_copies: from or to memory not registered; their caller waited
 * - violations: copies refused for their pointers
 * - early_unregistrations: of memory that a copy was to use
 * - live_streams, live_events, live_registrations
 * - pending: work enqueued and not done
 * - captured: work captured
 * - training_wait_us: the longest time that a call of the training process waited behind one of the
 * engine's
 * - held_interpreter: the engine's calls in a thread that held the lock of an interpreter
 * - pages_faulted_in: by pinning
 * - hasty_pins: that began sooner after the one before than that had taken
 * - near_pins: by threads that prefer memory of one NUMA node
 * - most_commands: of the engine, in the queue of a device at a time
 * - most_bytes: of the engine's copies, in the queue of a device at a time */
uint64_t fake_cuda_count(const char* what);

/* References to the primary context of `device`; 0: it does not exist. */
int fake_cuda_context_references(int device);

/* How often the primary context of `device` was created. */
uint64_t fake_cuda_contexts_created(int device);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
