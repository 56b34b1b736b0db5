/* A stand-in for libnvidia-ml.so.1 that plays the machine which a text file describes, so that the real nvidia-ml-py, and
 * all that is built on it, runs where there is no GPU. tests/fakes/nvml.py compiles it and writes the file.
 *
 * The file (FAKE_NVML_STATE) is read again at each call: whoever renames another over it changes the hardware.
 *   driver VERSION
 *   init CODE                     a session cannot be opened; one that is open is over
 *   hang                          calls about a card do not return while this line is there
 *   procs DIRECTORY               each file there, named as a pid, has lines "UUID BYTES [SM] [draw]", while that process lives
 *   gpu I name=value …            (fields below; memory in bytes, power in mW, energy in mJ)
 *   slice I N name=value …        a MIG slice of card I: uuid total used gi ci sm
 *   proc I PID BYTES [SM]         a process that computes on card I; on slice I.N alike
 *   mps I PID BYTES               a client of MPS
 *   draw I PID BYTES              a process that draws
 *   link I J LEVEL                common ancestor: 0 one board … 50 other socket (else 50)
 *   nvlink I J                    NVLink between the two
 *   xid I CODE SEQUENCE [GI CI]   an error, reported once for each sequence
 * Built with -DWITHOUT_x a function is missing, as in older drivers. Layouts are those that nvidia-ml-py 13 declares. */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int result;
typedef unsigned u32;
typedef unsigned long long u64;
typedef struct card *handle;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, SMALL = 7,
       DRIVER_NOT_LOADED = 9, TIMED_OUT = 10, LOST = 15, UNKNOWN = 999 };
enum { CARDS = 64, PROCESSES = 512, WHOLE = -1 };
enum { COMPUTE, MPS, DRAW };

struct card {
  int on, parent, number;
  char uuid[96], name[96], cc[16];
  double total, reserved, used, util, lag, temp, power, energy, throttle, clock, ecc, pending, failed, lost, sm, mig, gi, ci;
  double nomem, noutil, notemp, noprocmem, noprocs, noenergy, noevents, noset, broken;
};
struct process { int card, kind; u32 pid, sm; double bytes; };

static struct card cards[CARDS], before[CARDS];
static struct process processes[PROCESSES];
static int count, processes_count, sessions, initial, hangs;
static int levels[CARDS][CARDS], nvlinks[CARDS][CARDS];
static char driver[80], directory[512];
static struct { int card; u64 code; long sequence; u32 gi, ci; } xid;
static long xid_seen;
static double written_at;

static double now(void) { struct timespec t; clock_gettime(CLOCK_REALTIME, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

static void set(struct card *c, char *key, char *value) {
#define TEXT(field) if (!strcmp(key, #field)) { snprintf(c->field, sizeof c->field, "%s", value); return; }
#define NUMBER(field) if (!strcmp(key, #field)) { c->field = atof(value); return; }
  TEXT(uuid) TEXT(name) TEXT(cc) NUMBER(total) NUMBER(reserved) NUMBER(used) NUMBER(util) NUMBER(lag) NUMBER(temp)
  NUMBER(power) NUMBER(energy) NUMBER(throttle) NUMBER(clock) NUMBER(ecc) NUMBER(pending) NUMBER(failed) NUMBER(lost)
  NUMBER(sm) NUMBER(mig) NUMBER(gi) NUMBER(ci) NUMBER(nomem) NUMBER(noutil) NUMBER(notemp) NUMBER(noprocmem)
  NUMBER(noprocs) NUMBER(noenergy) NUMBER(noevents) NUMBER(noset) NUMBER(broken)
}

static int card_of(const char *word) { /* "2" is card 2, "2.1" its slice 1 */
  int index = atoi(word);
  char *dot = strchr(word, '.');
  if (!dot) return index >= 0 && index < CARDS ? index : -1;
  for (int i = 0; i < CARDS; i++) if (cards[i].on && cards[i].parent == index && cards[i].number == atoi(dot + 1)) return i;
  return -1;
}

static void add_process(int card, int kind, u32 pid, double bytes, u32 sm) {
  if (card < 0 || processes_count >= PROCESSES) return;
  processes[processes_count++] = (struct process){card, kind, pid, sm, bytes};
}

static void read_directory(void) {
  DIR *dir = opendir(directory);
  if (!dir) return;
  for (struct dirent *entry; (entry = readdir(dir));) {
    char path[1024], line[256], uuid[96], word[16];
    double bytes;
    u32 sm;
    int pid = atoi(entry->d_name);
    snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
    FILE *file = pid > 0 && kill(pid, 0) == 0 ? fopen(path, "r") : NULL;
    if (!file) continue;
    while (fgets(line, sizeof line, file)) {
      *word = sm = 0;
      if (sscanf(line, "%95s %lf %u %15s", uuid, &bytes, &sm, word) < 2) continue;
      for (int i = 0; i < CARDS; i++)
        if (cards[i].on && !strcmp(cards[i].uuid, uuid)) {
          add_process(i, strcmp(word, "draw") ? COMPUTE : DRAW, pid, bytes, sm);
          cards[i].used += bytes;
        }
    }
    fclose(file);
  }
  closedir(dir);
}

static void add_card(char *kind, char *first, char **rest) {
  int index = atoi(first), number = WHOLE;
  if (!strcmp(kind, "slice")) {
    char *word = strtok_r(NULL, " \t\n", rest);
    number = word ? atoi(word) : 0;
    for (index = CARDS - 1; index > 0 && cards[index].on; index--) {}
  }
  struct card *c = &cards[index];
  *c = (struct card){.on = 1, .parent = atoi(first), .number = number, .sm = 132, .clock = 1980, .gi = 0xFFFFFFFF, .ci = 0xFFFFFFFF};
  strcpy(c->cc, "9.0");
  snprintf(c->name, sizeof c->name, "Fake");
  snprintf(c->uuid, sizeof c->uuid, number == WHOLE ? "GPU-fake-%d" : "MIG-fake-%d-%d", index, number);
  if (number == WHOLE && index >= count) count = index + 1;
  for (char *word; (word = strtok_r(NULL, " \t\n", rest));) {
    char *equals = strchr(word, '=');
    if (equals) { *equals = 0; set(c, word, equals + 1); }
  }
}

static result load(void) {
  const char *path = getenv("FAKE_NVML_STATE");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return DRIVER_NOT_LOADED;
  struct stat status;
  fstat(fileno(file), &status);
  double at = status.st_mtim.tv_sec + status.st_mtim.tv_nsec * 1e-9;
  if (at != written_at) { memcpy(before, cards, sizeof cards); written_at = at; }
  memset(cards, 0, sizeof cards);
  memset(levels, -1, sizeof levels);
  memset(nvlinks, 0, sizeof nvlinks);
  memset(&xid, 0, sizeof xid);
  count = processes_count = initial = hangs = 0;
  *directory = 0;
  strcpy(driver, "580.0-fake");
  for (char line[4096]; fgets(line, sizeof line, file);) {
    char *rest, *kind = strtok_r(line, " \t\n", &rest);
    if (!kind || *kind == '#') continue;
    if (!strcmp(kind, "hang")) { hangs = 1; continue; }
    char *first = strtok_r(NULL, " \t\n", &rest);
    if (!first) continue;
    if (!strcmp(kind, "driver")) snprintf(driver, sizeof driver, "%s", first);
    else if (!strcmp(kind, "init")) initial = atoi(first);
    else if (!strcmp(kind, "procs")) snprintf(directory, sizeof directory, "%s", first);
    else if (!strcmp(kind, "gpu") || !strcmp(kind, "slice")) add_card(kind, first, &rest);
    else {
      char *words[4] = {"0", "0", "-1", "-1"};
      for (int i = 0; i < 4; i++) { char *word = strtok_r(NULL, " \t\n", &rest); if (!word) break; words[i] = word; }
      int card = card_of(first), other = atoi(words[0]);
      if (!strcmp(kind, "proc")) add_process(card, COMPUTE, other, atof(words[1]), atoi(words[2]) < 0 ? 0 : atoi(words[2]));
      else if (!strcmp(kind, "mps")) add_process(card, MPS, other, atof(words[1]), 0);
      else if (!strcmp(kind, "draw")) add_process(card, DRAW, other, atof(words[1]), 0);
      else if (card < 0 || other < 0) continue;
      else if (!strcmp(kind, "link") && other < CARDS) levels[card][other] = levels[other][card] = atoi(words[1]);
      else if (!strcmp(kind, "nvlink") && other < CARDS) nvlinks[card][other] = nvlinks[other][card] = 1;
      else if (!strcmp(kind, "xid")) {
        xid.card = card; xid.code = other; xid.sequence = atol(words[1]);
        xid.gi = atoi(words[2]); xid.ci = atoi(words[3]);
      }
    }
  }
  fclose(file);
  if (*directory) read_directory();
  return OK;
}

static result look(handle h, struct card **found) {
  if (!sessions) return UNINITIALIZED;
  result r = load();
  while (!r && hangs) { usleep(20000); r = load(); }
  if (r) return r;
  if (initial) return initial;
  long index = (long)h - 1;
  if (index < 0 || index >= CARDS || !cards[index].on) return INVALID;
  *found = &cards[index];
  int parent = (*found)->number == WHOLE ? index : (*found)->parent;
  return cards[parent].lost ? LOST : cards[parent].broken ? UNKNOWN : OK;
}
#define LOOK(h) struct card *c; result r = look(h, &c); if (r) return r
#define INDEX ((long)h - 1)
#define SLICE (c->number != WHOLE)

/* -- the library, its cards ---------------------------------------------------------------------------------------- */

result nvmlInitWithFlags(u32 flags) { result r = load(); if (!r) r = initial; if (!r) sessions++; return r; }
result nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
result nvmlShutdown(void) { if (!sessions) return UNINITIALIZED; sessions--; return OK; }
const char *nvmlErrorString(result r) {
  return r == OK ? "Success" : r == NOT_SUPPORTED ? "Not Supported" : r == LOST ? "GPU is lost"
       : r == DRIVER_NOT_LOADED ? "Driver Not Loaded" : r == TIMED_OUT ? "Timeout" : "Unknown Error";
}
result nvmlSystemGetDriverVersion(char *s, u32 n) { load(); snprintf(s, n, "%s", driver); return OK; }
result nvmlSystemGetNVMLVersion(char *s, u32 n) { snprintf(s, n, "13.fake"); return OK; }
result nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return OK; }
result nvmlDeviceGetCount_v2(u32 *n) { if (!sessions) return UNINITIALIZED; result r = load(); *n = count; return r ? r : initial; }
result nvmlDeviceGetHandleByIndex_v2(u32 i, handle *h) {
  struct card *c;
  *h = (handle)(long)(i + 1);
  return i < (u32)count ? look(*h, &c) : INVALID;
}
result nvmlDeviceGetHandleByUUID(const char *s, handle *h) {
  load();
  for (int i = 0; i < CARDS; i++) if (cards[i].on && !strcmp(s, cards[i].uuid)) { *h = (handle)(long)(i + 1); return OK; }
  return NOT_FOUND;
}
result nvmlDeviceGetName(handle h, char *s, u32 n) { LOOK(h); snprintf(s, n, "%s", c->name); return OK; }
result nvmlDeviceGetUUID(handle h, char *s, u32 n) { LOOK(h); snprintf(s, n, "%s", c->uuid); return OK; }
result nvmlDeviceGetIndex(handle h, u32 *i) { LOOK(h); *i = INDEX; return OK; }
result nvmlDeviceGetMinorNumber(handle h, u32 *i) { LOOK(h); *i = INDEX; return OK; }
struct pci { char legacy[16]; u32 domain, bus, device, id, sub; char bus_id[32]; };
result nvmlDeviceGetPciInfo_v3(handle h, struct pci *p) {
  LOOK(h);
  if (SLICE) return NOT_SUPPORTED;
  memset(p, 0, sizeof *p);
  p->bus = INDEX + 1;
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
  snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", p->bus);
  return OK;
}
result nvmlDeviceGetCudaComputeCapability(handle h, int *a, int *b) { LOOK(h); return sscanf(c->cc, "%d.%d", a, b) == 2 ? OK : INVALID; }
#ifndef WITHOUT_CORES
result nvmlDeviceGetNumGpuCores(handle h, u32 *n) { LOOK(h); if (SLICE) return NOT_SUPPORTED; *n = c->sm * 128; return OK; }
#endif
struct attributes { u32 multiprocessors, copies, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices; u64 megabytes; };
result nvmlDeviceGetAttributes_v2(handle h, struct attributes *a) {
  LOOK(h);
  if (!SLICE) return NOT_SUPPORTED;
  memset(a, 0, sizeof *a);
  a->multiprocessors = c->sm;
  a->megabytes = c->total / 1048576;
  return OK;
}

/* -- slices -------------------------------------------------------------------------------------------------------- */

result nvmlDeviceGetMigMode(handle h, u32 *current, u32 *pending) { LOOK(h); if (SLICE) return INVALID; *current = *pending = c->mig; return OK; }
result nvmlDeviceGetMaxMigDeviceCount(handle h, u32 *n) { LOOK(h); *n = c->mig ? 7 : 0; return OK; }
result nvmlDeviceGetMigDeviceHandleByIndex(handle h, u32 number, handle *part) {
  LOOK(h);
  for (int i = 0; i < CARDS; i++)
    if (cards[i].on && cards[i].number == (int)number && cards[i].parent == INDEX) { *part = (handle)(long)(i + 1); return OK; }
  return NOT_FOUND;
}
result nvmlDeviceGetGpuInstanceId(handle h, u32 *id) { LOOK(h); if (!SLICE) return NOT_SUPPORTED; *id = c->gi; return OK; }
result nvmlDeviceGetComputeInstanceId(handle h, u32 *id) { LOOK(h); if (!SLICE) return NOT_SUPPORTED; *id = c->ci; return OK; }

/* -- what a card does ---------------------------------------------------------------------------------------------- */

struct memory { u64 total, free, used; };
result nvmlDeviceGetMemoryInfo(handle h, struct memory *m) { /* counts as used what the driver keeps for itself */
  LOOK(h);
  if (c->nomem) return NOT_SUPPORTED;
  m->total = c->total; m->used = c->used + c->reserved; m->free = m->total - m->used;
  return OK;
}
#ifndef WITHOUT_MEMORY_V2
struct memory_v2 { u32 version; u64 total, reserved, free, used; };
result nvmlDeviceGetMemoryInfo_v2(handle h, struct memory_v2 *m) {
  LOOK(h);
  if (c->nomem) return NOT_SUPPORTED;
  m->total = c->total; m->reserved = c->reserved; m->used = c->used; m->free = m->total - m->used - m->reserved;
  return OK;
}
#endif
struct rates { u32 gpu, memory; };
result nvmlDeviceGetUtilizationRates(handle h, struct rates *x) { /* of a moment ago */
  LOOK(h);
  if (c->noutil || SLICE) return NOT_SUPPORTED;
  x->gpu = c->lag && now() - written_at < c->lag ? before[INDEX].util : c->util;
  x->memory = 0;
  return OK;
}
result nvmlDeviceGetTemperature(handle h, int sensor, u32 *t) { LOOK(h); if (c->notemp || SLICE) return NOT_SUPPORTED; *t = c->temp; return OK; }
result nvmlDeviceGetPowerUsage(handle h, u32 *p) { LOOK(h); if (SLICE || !c->power) return NOT_SUPPORTED; *p = c->power; return OK; }
result nvmlDeviceGetTotalEnergyConsumption(handle h, u64 *e) {
  LOOK(h);
  if (c->noenergy || SLICE) return NOT_SUPPORTED;
  double passed = now() - written_at;
  *e = c->energy + c->power * (passed > 0 ? passed : 0);
  return OK;
}
#ifndef WITHOUT_EVENT_REASONS
result nvmlDeviceGetCurrentClocksEventReasons(handle h, u64 *t) { LOOK(h); if (SLICE) return NOT_SUPPORTED; *t = c->throttle; return OK; }
#endif
result nvmlDeviceGetCurrentClocksThrottleReasons(handle h, u64 *t) { LOOK(h); if (SLICE) return NOT_SUPPORTED; *t = c->throttle; return OK; }
result nvmlDeviceGetClockInfo(handle h, int kind, u32 *clock) { LOOK(h); *clock = c->clock; return OK; }
result nvmlDeviceGetMaxClockInfo(handle h, int kind, u32 *clock) { LOOK(h); *clock = 1980; return OK; }
#ifndef WITHOUT_ECC
result nvmlDeviceGetTotalEccErrors(handle h, int kind, int counter, u64 *n) { LOOK(h); *n = kind == 1 ? c->ecc : 0; return OK; }
result nvmlDeviceGetRemappedRows(handle h, u32 *correct, u32 *uncorrect, u32 *pending, u32 *failed) {
  LOOK(h);
  *correct = *uncorrect = 0; *pending = c->pending; *failed = c->failed;
  return OK;
}
#endif

/* -- settings: kept in FAKE_NVML_STATE.INDEX, "LIMIT_MW LOCKED_MHZ", so that they outlive who sets them ------------- */

static void settings_of(int index, u32 *limit, u32 *clock) {
  char path[600];
  snprintf(path, sizeof path, "%s.%d", getenv("FAKE_NVML_STATE"), index);
  *limit = 400000; *clock = 0;
  FILE *file = fopen(path, "r");
  if (file) { if (fscanf(file, "%u %u", limit, clock) != 2) abort(); fclose(file); }
}
static result keep_settings(int index, u32 limit, u32 clock) {
  char path[600], new[700];
  snprintf(path, sizeof path, "%s.%d", getenv("FAKE_NVML_STATE"), index);
  snprintf(new, sizeof new, "%s.%d.new", path, getpid());
  FILE *file = fopen(new, "w");
  fprintf(file, "%u %u\n", limit, clock);
  fclose(file);
  return rename(new, path) ? UNKNOWN : OK;
}
#define SETTINGS(h) LOOK(h); u32 limit, clock; if (SLICE) return NOT_SUPPORTED; settings_of(INDEX, &limit, &clock);
result nvmlDeviceGetPowerManagementLimit(handle h, u32 *mw) { SETTINGS(h); *mw = limit; return OK; }
result nvmlDeviceGetPowerManagementLimitConstraints(handle h, u32 *low, u32 *high) { LOOK(h); *low = 100000; *high = 400000; return OK; }
result nvmlDeviceSetPowerManagementLimit(handle h, u32 mw) {
  SETTINGS(h);
  if (c->noset) return NO_PERMISSION;
  return mw < 100000 || mw > 400000 ? INVALID : keep_settings(INDEX, mw, clock);
}
result nvmlDeviceSetGpuLockedClocks(handle h, u32 low, u32 high) { SETTINGS(h); return c->noset ? NO_PERMISSION : keep_settings(INDEX, limit, high); }
result nvmlDeviceResetGpuLockedClocks(handle h) { SETTINGS(h); return c->noset ? NO_PERMISSION : keep_settings(INDEX, limit, 0); }

/* -- processes ----------------------------------------------------------------------------------------------------- */

struct info_v2 { u32 pid; u64 bytes; u32 gi, ci; };
static result list(handle h, u32 *n, struct info_v2 *array, int kind) {
  LOOK(h);
  if (c->noprocs) return NO_PERMISSION;
  u32 found = 0;
  for (int i = 0; i < processes_count; i++) {
    struct process *p = &processes[i];
    int on = p->card == INDEX || (!SLICE && cards[p->card].number != WHOLE && cards[p->card].parent == INDEX);
    if (p->kind != kind || !on) continue;
    if (array && found < *n) array[found] = (struct info_v2){p->pid, c->noprocmem ? ~0ULL : (u64)p->bytes, ~0u, ~0u};
    found++;
  }
  r = found && (!array || *n < found) ? SMALL : OK;
  *n = found;
  return r;
}
#ifndef WITHOUT_V3
result nvmlDeviceGetComputeRunningProcesses_v3(handle h, u32 *n, struct info_v2 *a) { return list(h, n, a, COMPUTE); }
result nvmlDeviceGetMPSComputeRunningProcesses_v3(handle h, u32 *n, struct info_v2 *a) { return list(h, n, a, MPS); }
result nvmlDeviceGetGraphicsRunningProcesses_v3(handle h, u32 *n, struct info_v2 *a) { return list(h, n, a, DRAW); }
#endif
result nvmlDeviceGetComputeRunningProcesses_v2(handle h, u32 *n, struct info_v2 *a) { return list(h, n, a, COMPUTE); }
result nvmlDeviceGetGraphicsRunningProcesses_v2(handle h, u32 *n, struct info_v2 *a) { return list(h, n, a, DRAW); }
struct sample { u32 pid; u64 at; u32 sm, memory, encoder, decoder; };
result nvmlDeviceGetProcessUtilization(handle h, struct sample *a, u32 *n, u64 since) {
  LOOK(h);
  u32 found = 0;
  for (int i = 0; i < processes_count; i++) if (processes[i].card == INDEX) {
    if (a && found < *n) a[found] = (struct sample){processes[i].pid, (u64)(now() * 1e6), processes[i].sm, 0, 0, 0};
    found++;
  }
  if (!found) return NOT_FOUND;
  r = !a || *n < found ? SMALL : OK;
  *n = found;
  return r;
}

/* -- how near ------------------------------------------------------------------------------------------------------ */

result nvmlDeviceGetTopologyCommonAncestor(handle h, handle other, int *level) {
  LOOK(h);
  int found = levels[INDEX][(long)other - 1];
  *level = found < 0 ? 50 : found;
  return OK;
}
result nvmlDeviceGetP2PStatus(handle h, handle other, int kind, int *status) {
  LOOK(h);
  *status = kind == 2 && nvlinks[INDEX][(long)other - 1] ? 0 : 5;
  return OK;
}
result nvmlDeviceGetNvLinkState(handle h, u32 link, int *state) {
  LOOK(h);
  int any = 0;
  for (int i = 0; i < CARDS; i++) any |= nvlinks[INDEX][i];
  if (!any) return NOT_SUPPORTED;
  *state = link == 1; /* the first one is not in use */
  return link < 18 ? OK : INVALID;
}

/* -- errors that cards report --------------------------------------------------------------------------------------- */

result nvmlEventSetCreate(void **set) { load(); xid_seen = xid.sequence; *set = (void *)1; return OK; } /* what was before is not told */
result nvmlEventSetFree(void *set) { return OK; }
result nvmlDeviceGetSupportedEventTypes(handle h, u64 *kinds) { LOOK(h); *kinds = c->noevents ? 0 : 0xf; return OK; }
result nvmlDeviceRegisterEvents(handle h, u64 kinds, void *set) { LOOK(h); return OK; }
struct event { handle device; u64 kind, data; u32 gi, ci; };
result nvmlEventSetWait_v2(void *set, struct event *e, u32 milliseconds) {
  for (u32 passed = 0;; passed += 20) {
    load();
    if (initial) return initial;
    if (xid.sequence > xid_seen) {
      xid_seen = xid.sequence;
      *e = (struct event){(handle)(long)(xid.card + 1), 8, xid.code, xid.gi, xid.ci};
      return OK;
    }
    if (passed >= milliseconds) return TIMED_OUT;
    usleep(20000);
  }
}
