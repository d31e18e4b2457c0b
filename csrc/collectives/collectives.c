/* The record of collectives in the black box: which communicators there are, how far each has come,
 * and the last calls.
 *
 * Written by any thread of the worker without a lock, read by another process at any time. An entry
 * of the ring belongs to whoever made its mark odd, and to nobody else until the mark is even
 * again: a thread that finds a mark odd (another one stopped for 256 calls while it wrote) leaves
 * its own call out rather than mix the two. Only the table of communicators has a lock; it is taken
 * when one comes or goes.
 *
 * A forked child is no worker, and must not write here. The area is not mapped in it
 * (MADV_DONTFORK), and what leads to the area, this process's own table and its lock with it, is in
 * a page that the kernel empties in the child (MADV_WIPEONFORK): whichever way it was forked, and
 * whatever other threads were doing, the child finds a record that was never started.
 */
#define _GNU_SOURCE /* MADV_WIPEONFORK */
#include "hooks.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define NOT_COMPARABLE (UINT64_C(1) << 63) /* in an id: it says nothing to other ranks */
#define NOWHERE TASKD_COMMUNICATORS

/* What only this process knows of the communicator in the same place of the area. */
struct known {
    _Atomic(void *) handle;  /* NULL: none, or one that has no handle (see) */
    _Atomic uint32_t serial; /* changes whenever the place gets another communicator */
    _Atomic uint32_t steps;  /* splits that all its ranks took part in */
    _Atomic int64_t ranks;   /* -1: not known */
};

struct record {
    _Atomic(struct taskd_collectives *) area; /* NULL: not started */
    _Atomic uint32_t is_claimed;
    _Atomic uint32_t lock;
    _Atomic uint32_t used; /* places from here on are free */
    struct known known[TASKD_COMMUNICATORS];
};

static _Atomic(struct record *) record; /* once made it stays; in a forked child it is empty */

/* In a hooked function: the others that it calls itself are not recorded. */
static _Thread_local bool is_inside;

static const int8_t element_bytes[2][18] = {
    [NCCL] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1},
    [HCCL] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1},
};

/* ---- The table of communicators ------------------------------------------------------------- */

static void lock(struct record *self)
{
    while (atomic_exchange(&self->lock, 1) != 0)
        sched_yield();
}

static void unlock(struct record *self)
{
    atomic_store(&self->lock, 0);
}

static struct taskd_collectives *area_of(struct record *self)
{
    return self == NULL ? NULL : atomic_load(&self->area);
}

/* FNV-1a, and a finish that spreads the bits; never 0, and comparable. */
static uint64_t hash(uint64_t seed, const void *bytes, size_t count)
{
    uint64_t value = seed ^ UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < count; i++)
        value = (value ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
    value = (value ^ (value >> 31)) * UINT64_C(0x9fb21c651e98df25);
    value = (value ^ (value >> 29)) & ~NOT_COMPARABLE;
    return value == 0 ? 1 : value;
}

static uint64_t id_of_unknown(void *handle)
{
    return hash(0, &handle, sizeof handle) | NOT_COMPARABLE;
}

static uint32_t find(struct record *self, void *handle)
{
    uint32_t used = atomic_load(&self->used);
    for (uint32_t place = 0; place < used; place++)
        if (atomic_load(&self->known[place].handle) == handle)
            return place;
    return NOWHERE;
}

/* The place of a communicator by its id; 0: the first that is free. */
static uint32_t find_id(struct taskd_collectives *area, uint64_t id)
{
    uint32_t place = 0;
    while (place < NOWHERE && atomic_load(TASKD_ATOMIC(area->communicators[place].id)) != id)
        place++;
    return place;
}

/* With the lock held. */
static void remove_at(struct record *self, struct taskd_collectives *area, uint32_t place)
{
    struct taskd_communicator *communicator = &area->communicators[place];
    atomic_fetch_add(&self->known[place].serial, 1);
    atomic_store(&self->known[place].handle, NULL);
    atomic_store(TASKD_ATOMIC(communicator->id), 0);
    atomic_store(TASKD_ATOMIC(communicator->entered), 0);
    atomic_store(TASKD_ATOMIC(communicator->left), 0);
    atomic_store(TASKD_ATOMIC(communicator->entered_ns), 0);
}

/* With the lock held. NOWHERE: all places are taken. */
static uint32_t insert(struct record *self, struct taskd_collectives *area, void *handle,
                       uint64_t id, const char *name, int64_t ranks)
{
    uint32_t place = find_id(area, 0);
    if (place == NOWHERE)
        return NOWHERE;
    remove_at(self, area, place); /* nothing is left of whatever was here */
    struct taskd_communicator *communicator = &area->communicators[place];
    strncpy(communicator->name, name, sizeof communicator->name - 1);
    communicator->name[sizeof communicator->name - 1] = '\0';
    atomic_store(&self->known[place].steps, 0);
    atomic_store(&self->known[place].ranks, ranks);
    atomic_store(&self->known[place].handle, handle);
    atomic_store(TASKD_ATOMIC(communicator->id), id);
    if (place >= atomic_load(&self->used))
        atomic_store(&self->used, place + 1);
    return place;
}

static const char *family_name(enum taskd_hook_number hook)
{
    return taskd_hooks[hook].family == NCCL ? "nccl" : "hccl";
}

/* The place of a communicator that is used; made without a hooked call, it gets one here. */
static uint32_t meet(struct record *self, struct taskd_collectives *area, void *handle,
                     enum taskd_hook_number hook)
{
    if (handle == NULL)
        return NOWHERE;
    uint32_t place = find(self, handle);
    if (place != NOWHERE)
        return place;
    lock(self);
    place = find(self, handle);
    if (place == NOWHERE)
        place = insert(self, area, handle, id_of_unknown(handle), family_name(hook), -1);
    unlock(self);
    return place;
}

/* "nccl, 8 ranks" */
static void describe(char name[TASKD_NAME_BYTES], enum taskd_hook_number hook, int64_t ranks)
{
    if (ranks > 0)
        snprintf(name, TASKD_NAME_BYTES, "%s, %" PRId64 " ranks", family_name(hook), ranks);
    else
        strcpy(name, family_name(hook));
}

/* ---- The ring ------------------------------------------------------------------------------- */

/* Adds `call`, whatever mark it has. False: its place is being written by another thread. */
static bool append(struct taskd_collectives *area, const struct taskd_call *call, uint64_t *index)
{
    *index = atomic_fetch_add(TASKD_ATOMIC(area->next), 1);
    _Atomic uint64_t *words = (_Atomic uint64_t *)&area->calls[*index % TASKD_CALLS];
    uint64_t writing = 2 * *index + 1;
    uint64_t mark = atomic_load(&words[0]);
    if (mark % 2 != 0 || mark > writing ||
        !atomic_compare_exchange_strong(&words[0], &mark, writing))
        return false;
    atomic_thread_fence(memory_order_release); /* nobody sees what follows under the old mark */
    uint64_t content[sizeof *call / sizeof(uint64_t)];
    memcpy(content, call, sizeof content);
    for (size_t i = 1; i < sizeof content / sizeof content[0]; i++)
        atomic_store_explicit(&words[i], content[i], memory_order_relaxed);
    atomic_store_explicit(&words[0], writing + 1, memory_order_release);
    return true;
}

static void mark_leave(struct taskd_collectives *area, uint64_t index)
{
    struct taskd_call *call = &area->calls[index % TASKD_CALLS];
    _Atomic uint64_t *mark = TASKD_ATOMIC(call->mark);
    uint64_t complete = 2 * index + 2;
    uint64_t seen = complete;
    if (!atomic_compare_exchange_strong(mark, &seen, complete - 1))
        return; /* 256 calls later: the place belongs to another one */
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(TASKD_ATOMIC(call->leave_ns), taskd_monotonic_ns(), memory_order_relaxed);
    atomic_store_explicit(mark, complete, memory_order_release);
}

/* ---- Calls on their way through ------------------------------------------------------------- */

/* The area if this call is to be recorded. */
static struct taskd_collectives *begin(struct taskd_passage *passage, struct record *self)
{
    passage->is_outermost = passage->is_recorded = false;
    passage->place = NOWHERE;
    passage->id = 0;
    struct taskd_collectives *area = area_of(self);
    if (area == NULL || is_inside)
        return NULL;
    is_inside = true;
    passage->is_outermost = true;
    return area;
}

/* -1: not known. */
static int64_t bytes_of(enum taskd_hook_number hook, int64_t count, int64_t dtype, int64_t ranks,
                        enum taskd_share share)
{
    enum taskd_hook_family family = taskd_hooks[hook].family;
    int64_t size = 0;
    if (dtype >= 0 && dtype < (int64_t)sizeof element_bytes[family])
        size = element_bytes[family][dtype];
    if (share == WHOLE)
        ranks = 1;
    int64_t bytes;
    if (count < 0 || size == 0 || ranks < 0 || __builtin_mul_overflow(count, size, &bytes) ||
        __builtin_mul_overflow(bytes, ranks, &bytes))
        return -1;
    return bytes;
}

void taskd_enter_call(struct taskd_passage *passage, enum taskd_hook_number hook, void *handle,
                      int64_t count, int64_t dtype, int64_t peer, enum taskd_share share)
{
    struct record *self = atomic_load(&record);
    struct taskd_collectives *area = begin(passage, self);
    if (area == NULL)
        return;
    enum taskd_hook_kind kind = taskd_hooks[hook].kind;
    uint32_t place =
        kind == END && handle != NULL ? find(self, handle) : meet(self, area, handle, hook);
    struct taskd_call call = {
        .dtype = dtype, .peer = peer, .bytes = -1, .enter_ns = taskd_monotonic_ns()};
    memcpy(call.name, taskd_hooks[hook].name, sizeof call.name);
    if (place == NOWHERE) {
        call.communicator = handle == NULL ? 0 : id_of_unknown(handle);
        call.bytes = bytes_of(hook, count, dtype, -1, share);
    } else {
        struct taskd_communicator *communicator = &area->communicators[place];
        passage->serial = atomic_load(&self->known[place].serial);
        call.communicator = atomic_load(TASKD_ATOMIC(communicator->id));
        call.bytes = bytes_of(hook, count, dtype, atomic_load(&self->known[place].ranks), share);
        if (kind == COLLECTIVE) {
            atomic_store_explicit(TASKD_ATOMIC(communicator->entered_ns), call.enter_ns,
                                  memory_order_relaxed);
            call.number = atomic_fetch_add(TASKD_ATOMIC(communicator->entered), 1) + 1;
            passage->place = place;
        }
    }
    passage->is_recorded = append(area, &call, &passage->index);
    if (kind == END && place != NOWHERE) {
        /* Before the call: once it is back, the handle may be that of a new communicator. */
        lock(self);
        if (atomic_load(&self->known[place].serial) == passage->serial)
            remove_at(self, area, place);
        unlock(self);
    }
}

void taskd_leave_call(struct taskd_passage *passage)
{
    if (!passage->is_outermost)
        return;
    is_inside = false;
    struct record *self = atomic_load(&record);
    struct taskd_collectives *area = area_of(self);
    if (area == NULL) /* the child of a fork inside the call */
        return;
    /* The communicator may have been aborted meanwhile: that is how calls that hang are ended. */
    if (passage->place != NOWHERE &&
        atomic_load(&self->known[passage->place].serial) == passage->serial)
        atomic_fetch_add(TASKD_ATOMIC(area->communicators[passage->place].left), 1);
    if (passage->is_recorded)
        mark_leave(area, passage->index);
}

static void record_making(struct taskd_passage *passage, struct taskd_collectives *area,
                          enum taskd_hook_number hook, uint64_t id)
{
    struct taskd_call call = {.communicator = id, .bytes = -1, .dtype = -1, .peer = -1};
    call.enter_ns = taskd_monotonic_ns();
    memcpy(call.name, taskd_hooks[hook].name, sizeof call.name);
    passage->id = id;
    passage->is_recorded = append(area, &call, &passage->index);
}

void taskd_enter_init(struct taskd_passage *passage, enum taskd_hook_number hook, const void *key,
                      size_t key_bytes)
{
    struct taskd_collectives *area = begin(passage, atomic_load(&record));
    if (area != NULL)
        record_making(passage, area, hook,
                      key_bytes > 0 && key != NULL ? hash(0, key, key_bytes) : 0);
}

void taskd_enter_split(struct taskd_passage *passage, enum taskd_hook_number hook, void *parent,
                       const void *key, size_t key_bytes, unsigned step)
{
    struct record *self = atomic_load(&record);
    struct taskd_collectives *area = begin(passage, self);
    if (area == NULL)
        return;
    uint32_t place = meet(self, area, parent, hook);
    uint64_t id = 0;
    if (place != NOWHERE) {
        uint64_t parent_id = atomic_load(TASKD_ATOMIC(area->communicators[place].id));
        uint64_t number = step == 0 ? 0 : atomic_fetch_add(&self->known[place].steps, step) + step;
        id = hash(parent_id ^ (number << 32), key, key_bytes) | (parent_id & NOT_COMPARABLE);
    }
    record_making(passage, area, hook, id);
}

void taskd_leave_init(struct taskd_passage *passage, enum taskd_hook_number hook, void *made,
                      int64_t ranks)
{
    struct record *self = atomic_load(&record);
    struct taskd_collectives *area = area_of(self);
    if (passage->is_outermost && area != NULL && made != NULL) {
        char name[TASKD_NAME_BYTES];
        describe(name, hook, ranks);
        lock(self);
        uint32_t before = find(self, made);
        if (before != NOWHERE) /* ended without a hooked call, and its memory is used again */
            remove_at(self, area, before);
        insert(self, area, made, passage->id == 0 ? id_of_unknown(made) : passage->id, name, ranks);
        unlock(self);
    }
    taskd_leave_call(passage);
}

/* ---- The ABI -------------------------------------------------------------------------------- */

/* The one of this process, made by whoever comes first; NULL and *error = -errno. */
static struct record *get_record(int *error)
{
    struct record *self = atomic_load(&record);
    if (self != NULL)
        return self;
    struct record *made =
        mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
        *error = -errno;
        return NULL;
    }
    /* Fails before Linux 4.14: better no record than one that children write to. */
    if (madvise(made, sizeof *made, MADV_WIPEONFORK) != 0)
        *error = -errno;
    else if (atomic_compare_exchange_strong(&record, &self, made))
        return made;
    munmap(made, sizeof *made);
    return self;
}

int taskd_collectives_start(int box_fd)
{
    int error = 0;
    struct record *self = get_record(&error);
    if (self == NULL)
        return error;
    if (atomic_exchange(&self->is_claimed, 1) != 0)
        return -EBUSY;
    struct taskd_collectives *area = NULL;
    struct taskd_box_header *header = taskd_map_header(box_fd, &error); /* it is a black box */
    if (header != NULL) {
        taskd_unmap_header(header);
        area = taskd_map_part(box_fd, TASKD_COLLECTIVES_OFFSET, sizeof *area, &error);
    }
    if (area == NULL) {
        atomic_store(&self->is_claimed, 0);
        return error;
    }
    atomic_store(&self->area, area);
    return taskd_collectives_reset();
}

int taskd_collectives_reset(void)
{
    struct record *self = atomic_load(&record);
    struct taskd_collectives *area = area_of(self);
    if (area == NULL)
        return -ENOENT;
    lock(self);
    for (uint32_t place = 0; place < TASKD_COMMUNICATORS; place++)
        remove_at(self, area, place);
    atomic_store(&self->used, 0);
    unlock(self);
    return 0;
}

/* The table, locked, to look for this communicator in it. */
static int lock_for(uint64_t id, struct record **self, struct taskd_collectives **area)
{
    *self = atomic_load(&record);
    *area = area_of(*self);
    if (*area == NULL)
        return -ENOENT;
    if (id == 0)
        return -EINVAL; /* means a free place */
    lock(*self);
    return 0;
}

int taskd_collectives_see(uint64_t id, const char *name, int64_t entered, int64_t left)
{
    struct record *self;
    struct taskd_collectives *area;
    int error = lock_for(id, &self, &area);
    if (error)
        return error;
    uint32_t place = find_id(area, id);
    if (place == NOWHERE)
        place = insert(self, area, NULL, id, name, -1);
    if (place != NOWHERE) {
        struct taskd_communicator *communicator = &area->communicators[place];
        if (atomic_load(TASKD_ATOMIC(communicator->entered)) != entered)
            atomic_store(TASKD_ATOMIC(communicator->entered_ns), taskd_monotonic_ns());
        atomic_store(TASKD_ATOMIC(communicator->entered), entered);
        atomic_store(TASKD_ATOMIC(communicator->left), left);
    }
    unlock(self);
    return place == NOWHERE ? -ENOSPC : 0;
}

int taskd_collectives_add(uint64_t id, const char *name, int64_t number, int64_t bytes,
                          int64_t enter_ns, int64_t leave_ns)
{
    struct taskd_collectives *area = area_of(atomic_load(&record));
    if (area == NULL)
        return -ENOENT;
    struct taskd_call call = {.communicator = id, .number = number, .bytes = bytes};
    call.dtype = call.peer = -1;
    call.enter_ns = enter_ns;
    call.leave_ns = leave_ns;
    strncpy(call.name, name, sizeof call.name - 1);
    uint64_t index;
    append(area, &call, &index);
    return 0;
}

int taskd_collectives_forget(uint64_t id)
{
    struct record *self;
    struct taskd_collectives *area;
    int error = lock_for(id, &self, &area);
    if (error)
        return error;
    uint32_t place = find_id(area, id);
    if (place != NOWHERE)
        remove_at(self, area, place);
    unlock(self);
    return 0;
}
