// A libnvidia-ml for machines without a GPU: two GPUs, whose faults come out of files in $FAKE_NVML.
// `events` is a pipe: a line "1 79" is Xid 79 of the second. `action-1` has what the driver asks for of it: the number
// of a recovery action, or "-15" for a call that fails with that error. Only what Holdfast calls is here.
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <fcntl.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } Event;
typedef struct { unsigned field, scope; long long at, late; unsigned type, result; unsigned long long value; } Field;

static int gpus[2] = {0, 1};
static int pipe_fd = -1;

static void path_of(char *out, size_t size, const char *name) { snprintf(out, size, "%s/%s", getenv("FAKE_NVML"), name); }

unsigned nvmlInit_v2(void) { return getenv("FAKE_NVML") ? 0 : 9; }
unsigned nvmlShutdown(void) { return 0; }
unsigned nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
unsigned nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) { *gpu = &gpus[index]; return 0; }
unsigned nvmlDeviceGetPciInfo_v3(int *gpu, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = *gpu ? 0x5E : 0x3B;
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return 0;
}
unsigned nvmlDeviceGetUUID(int *gpu, char *uuid, unsigned size) { snprintf(uuid, size, "GPU-fake-%d", *gpu); return 0; }
unsigned nvmlDeviceGetFieldValues(int *gpu, int count, Field *field) {
    char name[32], path[512];
    int said = 0;
    snprintf(name, sizeof name, "action-%d", *gpu);
    path_of(path, sizeof path, name);
    FILE *file = fopen(path, "r");
    if (count != 1 || field->field != 230) return 2;
    field->result = file && fscanf(file, "%d", &said) == 1 ? 0 : 3;  // not told: not supported
    field->value = said;
    if (file) fclose(file);
    return said < 0 ? -said : 0;
}
unsigned nvmlEventSetCreate(void **set) {
    char path[512];
    path_of(path, sizeof path, "events");
    pipe_fd = open(path, O_RDWR | O_NONBLOCK);
    *set = &pipe_fd;
    return pipe_fd < 0 ? 999 : 0;
}
unsigned nvmlDeviceRegisterEvents(int *gpu, unsigned long long types, void *set) { return types == 8 && set ? 0 : 2; }
unsigned nvmlEventSetWait_v2(int *set, Event *event, unsigned timeout_ms) {
    char line[32] = {0};
    int gpu, number;
    struct pollfd ready = {*set, POLLIN, 0};
    if (poll(&ready, 1, timeout_ms) < 1) return 10;
    for (size_t at = 0; at < sizeof line - 1 && read(*set, line + at, 1) == 1 && line[at] != '\n'; at++) {}
    if (sscanf(line, "%d %d", &gpu, &number) != 2) return 999;
    memset(event, 0, sizeof *event);
    event->device = &gpus[gpu];
    event->type = 8;
    event->data = number;
    return 0;
}
