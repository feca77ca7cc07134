// All-reduce as a custom call in a program compiled by XLA, for `pccl.allreduce` inside jax.jit.
#include <xxhash.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pccl/base/floats.h"
#include "pccl/bindings/common.h"
#include "pccl/bindings/weighted.h"
#include "pccl/bindings/xla_ffi.h"

namespace pccl::bindings {
namespace {

constexpr const char* kFunction = "allreduce";
constexpr std::size_t kErrorsKept = 256;
constexpr const char* kNotJoined = "no communicator: pccl.init() before the compiled call";
constexpr const char* kClosed = "the communicator of this compiled call is closed";

using Engine = std::shared_ptr<node::Communicator>;

// The communicators, calls and errors of compiled programs. *any thread*
class Registry {
 public:
  std::int64_t next() {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }

  void enlist(std::int64_t number, const Engine& engine) {
    const std::lock_guard lock(mutex_);
    if (engine == nullptr) {
      communicators_.erase(number);
    } else {
      communicators_[number] = {engine, {}};
    }
  }

  void use_by_default(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    default_ = number;
  }

  // A call begins, on the communicator with that number, which 0 becomes: the process's. Calls with
  // one tag are matched with those of the other members by their order. XLA keeps the order of the
  // runs of one call site; the order of two call sites may differ between members, so they must not
  // share a tag.
  Result<Engine> begin(std::int64_t& number, std::uint64_t tag, std::int64_t run,
                       const void* call_site, const std::string& name) {
    Engine engine;  // if this is its last use, it ends after the lock
    const std::lock_guard lock(mutex_);
    const bool chosen = number != 0;
    if (!chosen) number = default_;
    const auto it = communicators_.find(number);
    if (it != communicators_.end()) engine = it->second.engine.lock();
    if (engine == nullptr) {
      return chosen ? Error{Code::invalid_usage, kClosed}
                    : Error{Code::not_initialized, kNotJoined};
    }
    Use& use = it->second.uses[tag];
    if (use.run == run && use.call_site != call_site) {
      return Error{Code::invalid_usage,
                   name +
                       " stands at two places of one compiled program: its function was traced "
                       "once and used twice, or its loop is unrolled; give each place a function "
                       "of its own, and the loop no unroll="};
    }
    if (use.in_flight) {
      return Error{Code::invalid_usage, name + " is in flight already, from another thread"};
    }
    use = {run, call_site, true};
    return engine;
  }

  void end(std::int64_t number, const Engine& engine, std::uint64_t tag) {
    const std::lock_guard lock(mutex_);
    const auto it = communicators_.find(number);
    if (it != communicators_.end() && it->second.engine.lock() == engine)
      it->second.uses[tag].in_flight = false;
  }

  // The tags of which it remembers a call.
  std::size_t tags() {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const auto& [number, communicator] : communicators_) count += communicator.uses.size();
    return count;
  }

  // Keeps an error, since an XLA status cannot carry all of it. Returns its number.
  std::uint64_t remember(const Error& error) {
    const std::lock_guard lock(mutex_);
    errors_.emplace_back(++errors_made_, error);
    if (errors_.size() > kErrorsKept) errors_.pop_front();
    return errors_made_;
  }

  std::optional<Error> recall(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    for (const auto& [made, error] : errors_) {
      if (made == number) return error;
    }
    return std::nullopt;
  }

 private:
  struct Use {
    std::int64_t run = -1;            // the latest of XLA's executions
    const void* call_site = nullptr;  // the custom call in its program
    bool in_flight = false;
  };
  struct Enlisted {
    std::weak_ptr<node::Communicator> engine;
    std::map<std::uint64_t, Use> uses;  // by tag
  };
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::int64_t default_ = 0;
  std::map<std::int64_t, Enlisted> communicators_;
  std::deque<std::pair<std::uint64_t, Error>> errors_;
  std::uint64_t errors_made_ = 0;
};

// Never destroyed, since XLA's threads may outlive static objects.
Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

xla::Status status_of(Code code) {
  switch (code) {
    case Code::invalid_argument:
      return xla::Status::invalid_argument;
    case Code::invalid_usage:
    case Code::not_initialized:
    case Code::mismatched_call:
    case Code::deadlock:
      return xla::Status::failed_precondition;
    case Code::not_supported:
      return xla::Status::unimplemented;
    case Code::timeout:
      return xla::Status::deadline_exceeded;
    case Code::interrupted:
      return xla::Status::cancelled;
    case Code::internal_error:
      return xla::Status::internal;
    default:
      return xla::Status::unavailable;
  }
}

template <class Arguments>
constexpr xla::Header header() {
  return {sizeof(Arguments), nullptr};
}

// An XLA error. The number in its message leads back to the whole error.
xla::Error* to_xla(const xla::Api* api, const Error& error) {
  const std::string message =
      error.reason + " [pccl error " + std::to_string(registry().remember(error)) + "]";
  xla::CreateError create{header<xla::CreateError>(), message.c_str(), status_of(error.code)};
  return api->create_error(&create);
}

// There is nobody to report an error of XLA's own functions to.
void drop(const xla::Api* api, xla::Error* error) {
  if (error == nullptr) return;
  xla::DestroyError destroy{header<xla::DestroyError>(), error};
  api->destroy_error(&destroy);
}

// An element of any type as Python's float() has it.
template <class T>
double number_as(const void* data) {
  return static_cast<double>(*static_cast<const T*>(data));
}

struct Element {
  xla::Type type;
  DataType dtype;
  double (*number)(const void* data);  // null: the adapter widens such weights
};
constexpr Element kElements[] = {{xla::Type::s8, DataType::int8, number_as<std::int8_t>},
                                 {xla::Type::s16, DataType::int16, number_as<std::int16_t>},
                                 {xla::Type::s32, DataType::int32, number_as<std::int32_t>},
                                 {xla::Type::s64, DataType::int64, number_as<std::int64_t>},
                                 {xla::Type::u8, DataType::uint8, number_as<std::uint8_t>},
                                 {xla::Type::u16, DataType::uint16, number_as<std::uint16_t>},
                                 {xla::Type::u32, DataType::uint32, number_as<std::uint32_t>},
                                 {xla::Type::u64, DataType::uint64, number_as<std::uint64_t>},
                                 {xla::Type::f16, DataType::float16, nullptr},
                                 {xla::Type::bf16, DataType::bfloat16, nullptr},
                                 {xla::Type::f32, DataType::float32, number_as<float>},
                                 {xla::Type::f64, DataType::float64, number_as<double>},
                                 {xla::Type::pred, DataType::boolean, nullptr},
                                 {xla::Type::f8e4m3fn, DataType::float8_e4m3fn, nullptr},
                                 {xla::Type::f8e5m2, DataType::float8_e5m2, nullptr},
                                 {xla::Type::c64, DataType::complex64, nullptr},
                                 {xla::Type::c128, DataType::complex128, nullptr}};

// Null: unknown.
const Element* element(xla::Type type) {
  const auto* const found = std::ranges::find(kElements, type, &Element::type);
  return found == std::end(kElements) ? nullptr : found;
}

Error wrong(std::string what) { return {Code::internal_error, std::move(what)}; }

// The attributes of a call, as the JAX adapter writes them.
class Reader {
 public:
  explicit Reader(const xla::Attributes& given) : given_(given) {}

  std::int64_t integer(std::string_view name) { return scalar<std::int64_t>(name, xla::Type::s64); }
  double real(std::string_view name) { return scalar<double>(name, xla::Type::f64); }
  std::string text(std::string_view name) {
    const void* value = find(name, xla::AttributeKind::string);
    if (value == nullptr) return {};
    const auto* found = static_cast<const xla::Text*>(value);
    return {found->data, found->size};
  }
  [[nodiscard]] const std::string& missing() const { return missing_; }  // empty: all were there

 private:
  template <class Number>
  Number scalar(std::string_view name, xla::Type type) {
    const auto* value = static_cast<const xla::Scalar*>(find(name, xla::AttributeKind::scalar));
    if (value == nullptr || value->type != type) {
      missing_ = name;
      return {};
    }
    return *static_cast<const Number*>(value->value);
  }

  const void* find(std::string_view name, xla::AttributeKind kind) {
    for (std::int64_t i = 0; i < given_.count; ++i) {
      const xla::Text& have = *given_.names[i];
      if (std::string_view(have.data, have.size) == name && given_.kinds[i] == kind)
        return given_.values[i];
    }
    missing_ = name;
    return nullptr;
  }

  const xla::Attributes& given_;
  std::string missing_;
};

// A local device that waits for a call, and its memory for the results.
struct Waiting {
  std::int32_t device = 0;
  xla::Future* future = nullptr;
  std::vector<std::span<std::uint8_t>> results;
};

struct Job {
  const xla::Api* api = nullptr;
  std::vector<Waiting> devices;   // the first one's memory is reduced, the others get copies
  std::int64_t communicator = 0;  // its number; 0: the process's
  Engine engine;                  // found when all devices have called
  peer::OperationRequest request;
  std::uint64_t tag = 0;
  Seconds timeout;
  std::shared_ptr<WeightedMean> mean;  // null: no weights
  void* mean_weight = nullptr;         // for the members' mean weight
  bool mean_weight_wide = false;       // float64, else float32
};

// Where a call has its weight, with the numbers of the JAX adapter.
enum class WeightIn : std::int64_t { none = 0, attribute = 1, argument = 2 };

// Whether both may get one result.
bool alike(const Waiting& one, const Waiting& other) {
  return std::ranges::equal(
      one.results, other.results, {}, [](const auto& at) { return at.size(); },
      [](const auto& at) { return at.size(); });
}

// Gathers the calls of several devices with one program and the same operands: together they are
// one operation, which begins with the last call. Devices may come to two call sites of a run in
// different order. *any thread*
class Gathering {
 public:
  // One of `count` devices calls. Returns the operation once all have called. An error is the
  // device's alone.
  Result<std::optional<Job>> gather(std::int64_t run, const void* call_site, std::int64_t count,
                                    Job job) {
    const std::lock_guard lock(mutex_);
    const auto [it, first] = calls_.try_emplace(Key{run, call_site});
    if (first) {
      it->second = std::move(job);
    } else {
      Waiting& added = job.devices.front();
      std::vector<Waiting>& devices = it->second.devices;
      if (!alike(devices.front(), added)) return wrong("devices call with different arrays");
      if (std::ranges::find(devices, added.device, &Waiting::device) != devices.end())
        return wrong("a device calls twice");
      devices.push_back(std::move(added));
    }
    if (static_cast<std::int64_t>(it->second.devices.size()) < count) return std::optional<Job>();
    std::optional<Job> whole = std::move(it->second);
    calls_.erase(it);
    return whole;
  }

 private:
  using Key = std::pair<std::int64_t, const void*>;
  std::mutex mutex_;
  std::map<Key, Job> calls_;
};

Gathering& gathering() {
  static Gathering& all = *new Gathering;  // never destroyed, like the registry
  return all;
}

// Each device of a shard_map takes part in operations of its own, with a tag of its own. The first
// device keeps the call's tag, so that it meets calls that name this tag themselves.
std::uint64_t tag_on(std::uint64_t tag, std::int32_t device) {
  if (device == 0) return tag;
  return XXH3_64bits_withSeed(&tag, sizeof tag, static_cast<XXH64_hash_t>(device));
}

const xla::ArrayBuffer& buffer(const xla::Values& values, std::int64_t i) {
  return *static_cast<const xla::ArrayBuffer*>(values.values[i]);
}

std::uint64_t elements(const xla::ArrayBuffer& array) {
  std::uint64_t count = 1;
  for (std::int64_t axis = 0; axis < array.rank; ++axis)
    count *= static_cast<std::uint64_t>(array.extents[axis]);
  return count;
}

// Arguments: the arrays; the weight, unless it is a constant; a byte. Results: the arrays; with
// weights, the mean weight; a byte. The byte makes the program's next call wait for this one. A
// result is the memory of its argument, or does not overlap it: the call was declared so.
std::optional<Error> read_arrays(const xla::CallFrame& frame, WeightIn where, double weight,
                                 Job& job) {
  const std::int64_t arrays = frame.results.count - (where == WeightIn::none ? 1 : 2);
  const std::int64_t operands = arrays + (where == WeightIn::argument ? 1 : 0);
  if (arrays < 0 || frame.arguments.count < operands) return wrong("arguments and results differ");
  *static_cast<std::uint8_t*>(buffer(frame.results, frame.results.count - 1).data) = 0;
  if (where == WeightIn::argument) {
    const xla::ArrayBuffer& given = buffer(frame.arguments, arrays);
    const Element* const type = element(given.type);
    if (type == nullptr || type->number == nullptr) return wrong("a weight of an unknown type");
    weight = type->number(given.data);
  }
  if (where != WeightIn::none) {
    job.mean = std::make_shared<WeightedMean>(weight);
    const xla::ArrayBuffer& mean_weight = buffer(frame.results, arrays);
    job.mean_weight = mean_weight.data;
    job.devices.front().results.emplace_back(static_cast<std::uint8_t*>(mean_weight.data),
                                             mean_weight.type == xla::Type::f64 ? 8U : 4U);
    job.mean_weight_wide = mean_weight.type == xla::Type::f64;
  }
  for (std::int64_t i = 0; i < arrays; ++i) {
    const xla::ArrayBuffer& from = buffer(frame.arguments, i);
    const xla::ArrayBuffer& to = buffer(frame.results, i);
    const Element* const type = element(from.type);
    if (type == nullptr || to.type != from.type) return wrong("an argument of an unknown type");
    const DataType dtype = type->dtype;
    if (!combines(dtype, job.request.op)) return wrong("an argument of an unfit type");
    const std::uint64_t count = elements(from);
    job.devices.front().results.emplace_back(static_cast<std::uint8_t*>(to.data),
                                             count * element_size(dtype));
    if (job.mean == nullptr) {
      job.request.arrays.push_back({from.data, to.data, count, dtype});
    } else {
      job.mean->add(from.data, to.data, count, dtype);
    }
  }
  return std::nullopt;
}

// A decoded call frame.
struct Call {
  Job job;
  std::string name;
  std::int64_t run = 0;       // of XLA's executions
  std::int64_t gathered = 0;  // this many devices make the call together; 0: this one alone
};

Result<Call> read(const xla::CallFrame& frame) {
  const xla::Api* api = frame.api;
  if (api->header.struct_size < sizeof(xla::Api))
    return Error{Code::not_supported, "this jaxlib is too old for pccl inside jit"};
  xla::GetDevice device{header<xla::GetDevice>(), frame.context, 0};
  drop(api, api->get_device(&device));
  xla::GetRun run{header<xla::GetRun>(), frame.context, 0};
  drop(api, api->get_run(&run));

  Reader attributes(frame.attributes);
  Call call;
  Job& job = call.job;
  job.api = api;
  job.devices.resize(1);
  job.devices.front().device = device.ordinal;
  call.run = run.run;
  job.communicator = attributes.integer("communicator");
  const std::int64_t op = attributes.integer("op");
  call.gathered = attributes.integer("gathered");
  const auto tag = static_cast<std::uint64_t>(attributes.integer("tag"));
  job.tag = call.gathered > 0 ? tag : tag_on(tag, device.ordinal);
  const std::string structure = attributes.text("structure");
  call.name = attributes.text("name");
  if (call.gathered == 0) call.name += ", device " + std::to_string(device.ordinal);
  const double timeout = attributes.real("timeout");
  const auto where = static_cast<WeightIn>(attributes.integer("weighted"));
  const double weight = attributes.real("weight");
  job.request.quantization = {static_cast<reduce::CodeType>(attributes.integer("code")),
                              attributes.integer("zero_exact") != 0,
                              attributes.integer("stochastic") != 0,
                              static_cast<std::uint32_t>(attributes.integer("block"))};
  job.request.description = call.name + ": " + attributes.text("arrays");
  if (!attributes.missing().empty()) return wrong("no attribute " + attributes.missing());
  if (op < 0 || op >= kReduceOpCount) return wrong("no such op");
  if (timeout >= 0) job.timeout = timeout;
  job.request.op = static_cast<ReduceOp>(op);
  job.request.tag = job.tag;
  job.request.rerun = true;
  job.request.structure = XXH3_64bits(structure.data(), structure.size());
  if (auto error = read_arrays(frame, where, weight, job)) return *error;
  return call;
}

Status finish_mean(const Job& job) {
  const Result<double> mean_weight = job.mean->finish();
  if (!mean_weight) return mean_weight.error();
  if (job.mean_weight_wide) {
    *static_cast<double*>(job.mean_weight) = *mean_weight;
  } else {
    *static_cast<float*>(job.mean_weight) = static_cast<float>(*mean_weight);
  }
  return {};
}

Status reduce(Job& job) {
  try {
    if (job.mean != nullptr) job.mean->scale(job.request);
    const Status status = job.engine->reduce(std::move(job.request), {duration(job.timeout), {}},
                                             [](const peer::CallPtr&) {});
    return !status || job.mean == nullptr ? status : finish_mean(job);
  } catch (const std::bad_alloc&) {
    return Status(Code::internal_error, "out of memory");
  }
}

void answer(const xla::Api* api, xla::Future* future, const Status& status) {
  if (status) {
    xla::SetAvailable available{header<xla::SetAvailable>(), future};
    drop(api, api->set_available(&available));
  } else {
    xla::SetError failed{header<xla::SetError>(), future, to_xla(api, status.error())};
    drop(api, api->set_error(&failed));
  }
}

// Answers all waiting devices, each from a thread of its own: XLA may run the device's program on
// this thread, and block there until the other devices come.
void answer_all(const Job& job, const Status& status) {
  for (std::size_t i = 1; i < job.devices.size(); ++i) {
    try {
      std::thread([api = job.api, future = job.devices[i].future, status] {
        answer(api, future, status);
      }).detach();
    } catch (const std::exception&) {  // no memory, no thread
      answer(job.api, job.devices[i].future, status);
    }
  }
  answer(job.api, job.devices[0].future, status);
}

// Runs on a thread of its own: the program's other work needs XLA's threads, even another
// all-reduce that other members begin with. XLA may run the program on this thread, and block. The
// thread ends with the call, so that the deadlock rule never counts an idle thread as one that may
// still call.
void run(Job job) {
  const Status status = [&] {
    const DefaultFloats defaults;
    return reduce(job);
  }();
  registry().end(job.communicator, job.engine, job.tag);
  job.engine.reset();
  if (status) {
    // Copy before the answer: after it the first device's memory belongs to XLA again.
    for (std::size_t i = 1; i < job.devices.size(); ++i) {
      for (std::size_t j = 0; j < job.devices[i].results.size(); ++j)
        std::ranges::copy(job.devices[0].results[j], job.devices[i].results[j].begin());
    }
  }
  answer_all(job, status);
}

// Answers XLA's question for the handler's version of the interface.
bool answer_metadata(const xla::CallFrame& frame) {
  const xla::Extension* extension = frame.header.extensions;
  if (extension == nullptr || extension->kind != xla::kMetadataExtension) return false;
  xla::Metadata& metadata = *reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata;
  metadata.version.major = xla::kMajorVersion;
  metadata.version.minor = xla::kMinorVersion;
  metadata.traits = 0;
  return true;
}

// Begins the operation. Its devices wait for their futures. All of them get the same answer, also
// if the communicator is closed while they come.
void start(Job job, const Call& call, const void* call_site) {
  Result<Engine> engine =
      registry().begin(job.communicator, job.tag, call.run, call_site, call.name);
  if (!engine) return answer_all(job, engine.error());
  job.engine = std::move(*engine);
  try {
    std::thread(run, job).detach();
  } catch (const std::exception& error) {  // no memory, no thread
    registry().end(job.communicator, job.engine, job.tag);
    answer_all(job, wrong(error.what()));
  }
}

xla::Error* handle(xla::CallFrame* frame) {
  if (answer_metadata(*frame) || frame->stage != xla::Stage::execute) return nullptr;
  try {
    Result<Call> call = read(*frame);
    if (!call) return to_xla(frame->api, call.error());
    const void* const call_site = frame->attributes.values;
    xla::CreateFuture create{header<xla::CreateFuture>(), nullptr};
    if (xla::Error* const refused = frame->api->create_future(&create)) return refused;
    call->job.devices.front().future = create.future;
    Result<std::optional<Job>> whole =
        call->gathered == 0
            ? std::optional<Job>(std::move(call->job))
            : gathering().gather(call->run, call_site, call->gathered, std::move(call->job));
    if (!whole) {
      answer(frame->api, create.future, whole.error());
    } else if (*whole) {
      start(std::move(**whole), *call, call_site);
    }
    frame->future = create.future;
    return nullptr;
  } catch (const std::exception& error) {  // no memory
    return to_xla(frame->api, wrong(error.what()));
  }
}

}  // namespace

std::int64_t next_communicator() { return registry().next(); }

void enlist_communicator(std::int64_t number, const std::shared_ptr<node::Communicator>& engine) {
  registry().enlist(number, engine);
}

void bind_xla(nb::module_& m) {
  m.def("xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(&handle)); });
  m.def(
      "use_by_default", [](std::int64_t number) { registry().use_by_default(number); }, "number"_a);
  m.def("xla_tags", [] { return registry().tags(); });
  m.def(
      "with_default_floats",
      [](const nb::callable& called) {
        const DefaultFloats defaults;
        return call(called);
      },
      "call"_a);
  m.def(
      "raise_xla_error",
      [](std::uint64_t number) {
        if (const std::optional<Error> error = registry().recall(number))
          raise(*error, CallKind::collective, kFunction);
      },
      "number"_a);
}

}  // namespace pccl::bindings
