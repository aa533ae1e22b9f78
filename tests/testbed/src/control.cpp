// Knobs, counters and messages, and the C functions by which a test turns and reads them (m8d_bed_*).
#include <nccl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "bed.h"

extern "C" char** environ;

namespace bed {
namespace {

// values: what it may be. "" = a whole number, "*" = any text, else the words allowed, between bars.
struct KnobRule {
  const char *name, *values, *otherwise;
};

const KnobRule KNOBS[] = {
    {"ABORT_HANG_MS", "", ""},
    {"ABORT_HANG_PHASE", "|before|after|", "before"},
    {"ABORT_LOCK_MS", "", ""},
    {"ABORT_RESULT", "", ""},
    {"ABORT_WRITES", "", ""},
    {"AFTER_END", "|nccl|die|say|", "nccl"},
    {"ASYNC_ERROR", "", ""},
    {"COMM", "*", ""},
    {"DESTROY_HANG_MS", "", ""},
    {"DETECT_DELAY_MS", "", ""},
    {"DEVICES", "", "8"},
    {"DEVICE_ERROR", "", "710"},
    {"DEVICE_ERROR_FROM", "", ""},
    {"ENQUEUE_FAIL_FROM", "", ""},
    {"ENQUEUE_FAIL_KIND", "|Send|Recv|AllReduce|Broadcast|AllGather|Reduce|ReduceScatter|AlltoAll|Gather|Scatter|", ""},
    {"ENQUEUE_RESULT", "", ""},
    {"GROUPEND_RESULT", "", ""},
    {"GRAPHS_ALIVE", "", ""},
    {"HANG_FROM_OP", "", ""},
    {"INIT_HANG_MS", "", ""},
    {"INIT_RESULT", "", ""},
    {"KERNELS", "|error|ignore|", "error"},
    {"LAUNCH_HANG_MS", "", ""},
    {"LAZY_CONNECT", "", ""},
    {"MEM_MB", "", "8192"},
    {"NCCL_RULES", "", ""},
    {"NONBLOCKING_MS", "", ""},
    {"NO_DETECT", "", ""},
    {"NO_THREADS", "", ""},
    {"REMOTE_RESULT", "", "6"},
    {"TRACE", "", ""},
    {"WARN", "", "1"},
};
constexpr char PREFIX[] = "M8D_BED_";

struct Setting {
  std::string value;
  long generation = 0;  // how often it was set
};

// Never destroyed: threads that are still at work when the process ends must not meet a dead map.
struct State {
  std::mutex mutex;
  bool environment_read = false, environment_good = true;
  std::map<std::string, Setting> environment, set;
  std::map<std::string, std::function<long()>> computed;
  std::map<std::string, long> counters;
  std::vector<std::string> stubs;
};
State& state() {
  static auto* it = new State;
  return *it;
}
std::atomic<int> tracing{-1};  // -1: not known yet

const KnobRule* rule_of(const std::string& name) {
  for (auto& rule : KNOBS)
    if (name == rule.name) return &rule;
  return nullptr;
}

bool is_number(const std::string& text) {
  char* end = nullptr;
  strtol(text.c_str(), &end, 0);
  return end && !*end;
}

bool allowed(const KnobRule& rule, const std::string& value) {
  if (value.empty() || !strcmp(rule.values, "*")) return true;
  if (!*rule.values) return is_number(value);
  return value.find('|') == std::string::npos && strstr(rule.values, ("|" + value + "|").c_str());
}

void write_line(const char* format, va_list args) {
  char line[1024];
  int head = snprintf(line, sizeof line, "m8d-bed[%d]: ", getpid());
  int body = vsnprintf(line + head, sizeof line - head - 1, format, args);
  size_t length = std::min(sizeof line - 2, static_cast<size_t>(head + std::max(body, 0)));
  line[length++] = '\n';
  if (write(STDERR_FILENO, line, length) < 0) return;  // nobody listens
}

void read_environment(State& s) {  // s.mutex is held
  if (s.environment_read) return;
  s.environment_read = true;
  s.environment_good = true;
  s.environment.clear();
  for (char** entry = environ; entry && *entry; entry++) {
    if (strncmp(*entry, PREFIX, sizeof PREFIX - 1)) continue;
    std::string text = *entry + sizeof PREFIX - 1, name = text.substr(0, text.find('='));
    std::string value = text.size() > name.size() ? text.substr(name.size() + 1) : "";
    auto* rule = rule_of(name);
    if (rule && allowed(*rule, value)) {
      s.environment[name].value = value;
      continue;
    }
    s.environment_good = false;
    if (rule)
      say("%s%s is '%s'; it takes %s. Every CUDA and NCCL call of this process fails. Correct or unset it.", PREFIX,
          name.c_str(), value.c_str(), *rule->values ? rule->values : "a whole number");
    else
      say("the environment names a knob that does not exist: %s%s. Every CUDA and NCCL call of this process fails. "
          "The knobs are listed in src/control.cpp; correct or unset it.", PREFIX, name.c_str());
  }
}

Setting setting(const char* name) {
  auto* rule = rule_of(name);
  if (!rule) {
    say("bug: the bed asks for a knob that it does not have: %s", name);
    abort();
  }
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  read_environment(s);
  for (auto* from : {&s.set, &s.environment}) {
    auto it = from->find(name);
    if (it == from->end()) continue;
    Setting found = it->second;
    if (found.value.empty()) found.value = rule->otherwise;
    return found;
  }
  return {rule->otherwise, 0};
}

std::atomic<bool> used{false}, used_before_fork{false};

__attribute__((constructor)) void on_load() {
  // The lock is held across a fork, so that the child finds it free. The environment may change before the child's
  // first call.
  pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); },
                 [] {
                   state().environment_read = false;
                   state().mutex.unlock();
                   tracing = -1;
                   if (used) used_before_fork = true;
                 });
}

int copy_out(const std::string& text, char* out, int size) {
  if (out && size > 0) {
    auto length = std::min<size_t>(text.size(), size - 1);
    memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return static_cast<int>(text.size());
}

long stub(const char* name, long result) {
  say("STUB %s", name);
  count("stubs");
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  bool known = false;
  for (auto& hit : s.stubs) known = known || hit == name;
  if (!known) s.stubs.push_back(name);
  return result;
}

Counters names({"comms_made", "aborts", "enqueues", "kernels_filled", "kernels_refused",
                "launches", "stubs"});

}  // namespace

std::string knob(const char* name) { return setting(name).value; }

long knob_number(const char* name, long otherwise) {
  std::string value = knob(name);
  return value.empty() || !is_number(value) ? otherwise : strtol(value.c_str(), nullptr, 0);
}

bool usable() {
  if (used_before_fork) {
    static std::atomic<bool> said{false};
    if (!said.exchange(true)) say("this process was forked from one that had used the device: CUDA is lost in it");
    return false;
  }
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  read_environment(s);
  return s.environment_good;
}

void note_used() { used = true; }

bool From::hit() {
  Setting now = setting(knob_);
  long from = now.value.empty() ? 0 : strtol(now.value.c_str(), nullptr, 0);
  std::lock_guard<std::mutex> hold(state().mutex);
  if (now.generation != generation_) {
    generation_ = now.generation;
    calls_ = 0;
  }
  return from > 0 && ++calls_ >= from;
}

void count(const char* counter, long by) {
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  s.counters[counter] += by;
}

long counted(const char* counter) {
  State& s = state();
  std::function<long()> reading;
  {
    std::lock_guard<std::mutex> hold(s.mutex);
    auto number = s.counters.find(counter);
    auto computed = s.computed.find(counter);
    if (computed == s.computed.end()) return number == s.counters.end() ? -1 : number->second;
    reading = computed->second;
  }
  return reading();  // without the lock: it may take others
}

void register_counter(const char* name, std::function<long()> reading) {
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  s.computed[name] = std::move(reading);
}

void say(const char* format, ...) {
  va_list args;
  va_start(args, format);
  write_line(format, args);
  va_end(args);
}

void trace(const char* format, ...) {
  if (tracing < 0) {
    tracing = knob_number("TRACE") > 0;
    if (tracing > 0) say("this is a test bed: CUDA %d and NCCL %d without hardware", CUDART_VERSION, NCCL_VERSION_CODE);
  }
  if (tracing <= 0) return;
  va_list args;
  va_start(args, format);
  write_line(format, args);
  va_end(args);
}

}  // namespace bed

using namespace bed;

extern "C" {

int m8d_bed_set(const char* name, const char* value) {
  auto* rule = rule_of(name);
  if (!rule) return -1;
  if (!allowed(*rule, value ? value : "")) return -2;
  {
    State& s = state();
    std::lock_guard<std::mutex> hold(s.mutex);
    auto& entry = s.set[name];
    entry.value = value ? value : "";
    entry.generation++;
  }
  if (!strcmp(name, "TRACE")) tracing = -1;
  trace("%s = '%s'", name, value ? value : "");
  return 0;
}

int m8d_bed_get(const char* name, char* out, int size) { return rule_of(name) ? copy_out(knob(name), out, size) : -1; }

long m8d_bed_count(const char* counter) { return counted(counter); }

int m8d_bed_stubs(char* out, int size) {
  State& s = state();
  std::lock_guard<std::mutex> hold(s.mutex);
  std::string all;
  for (auto& name : s.stubs) all += (all.empty() ? "" : "\n") + name;
  copy_out(all, out, size);
  return static_cast<int>(s.stubs.size());
}

int m8d_bed_info(char* out, int size) {
  std::string knobs, counters;
  for (auto& rule : KNOBS) knobs += (knobs.empty() ? "\"" : ", \"") + std::string(rule.name) + "\"";
  {
    State& s = state();
    std::lock_guard<std::mutex> hold(s.mutex);
    std::map<std::string, int> all;
    for (auto& entry : s.counters) all[entry.first];
    for (auto& entry : s.computed) all[entry.first];
    for (auto& entry : all) counters += (counters.empty() ? "\"" : ", \"") + entry.first + "\"";
  }
  auto number = [](long value) { return std::to_string(value); };
  return copy_out("{\"cuda\": " + number(CUDART_VERSION) + ", \"nccl\": " + number(NCCL_VERSION_CODE) +
                      ", \"headers\": \"CUDA " + number(CUDART_VERSION / 1000) + "." +
                      number(CUDART_VERSION % 1000 / 10) + ", NCCL " + number(NCCL_MAJOR) + "." + number(NCCL_MINOR) +
                      "." + number(NCCL_PATCH) + "\", \"usable\": " + (usable() ? "true" : "false") +
                      ", \"knobs\": [" + knobs + "], \"counters\": [" + counters + "]}",
                  out, size);
}

long m8d_bed_cuda_stub(const char* name) { return stub(name, cudaErrorNotSupported); }
long m8d_bed_nccl_stub(const char* name) { return stub(name, ncclInvalidUsage); }
}
