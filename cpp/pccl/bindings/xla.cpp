#include "pccl/bindings/xla.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cfenv>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/bindings/weighted.h"
#include "pccl/bindings/xla_ffi.h"

namespace pccl::bindings {
namespace {

constexpr const char* kFunction = "allreduce";
constexpr std::size_t kErrorsKept = 256;
constexpr const char* kNotJoined = "no communicator: pccl.init() before the compiled call";

using Engine = std::shared_ptr<node::Communicator>;

// What compiled calls share, by number or by tag. *any thread*
class Desk {
 public:
  std::int64_t next() {
    const std::lock_guard lock(mutex_);
    return ++last_;
  }

  void enlist(std::int64_t number, const Engine& engine) {
    const std::lock_guard lock(mutex_);
    if (engine == nullptr) {
      engines_.erase(number);
    } else {
      engines_[number] = engine;
    }
  }

  void use_by_default(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    default_ = number;
  }

  // Zero: the process's communicator.
  Engine find(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto it = engines_.find(number == 0 ? default_ : number);
    return it == engines_.end() ? nullptr : it->second.lock();
  }

  // A call begins. Calls of one tag meet those of the other members by their order, which only a
  // program's own order of one place gives: anything else could pair them differently there.
  Status begin(const Engine& engine, std::uint64_t tag, std::int64_t run, const void* place,
               const std::string& name) {
    const std::lock_guard lock(mutex_);
    Use& use = uses_[{engine.get(), tag}];
    if (use.run == run && use.place != place) {
      return Status(Code::invalid_usage,
                    name +
                        " stands at two places of one compiled program (its function was traced "
                        "once and used twice); give each place a function of its own");
    }
    if (use.in_flight) {
      return Status(Code::invalid_usage, name + " is in flight already, from another thread");
    }
    use = {run, place, true};
    return {};
  }

  void end(const Engine& engine, std::uint64_t tag) {
    const std::lock_guard lock(mutex_);
    uses_[{engine.get(), tag}].in_flight = false;
  }

  // Keeps what a status of XLA's cannot carry; returns its number.
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
    std::int64_t run = -1;        // of XLA's executions, the latest
    const void* place = nullptr;  // the custom call in its program
    bool in_flight = false;
  };
  std::mutex mutex_;
  std::int64_t last_ = 0;
  std::int64_t default_ = 0;
  std::map<std::int64_t, std::weak_ptr<node::Communicator>> engines_;
  std::map<std::pair<const void*, std::uint64_t>, Use> uses_;
  std::deque<std::pair<std::uint64_t, Error>> errors_;
  std::uint64_t errors_made_ = 0;
};

// Never destroyed: threads of XLA's may outlive static objects.
Desk& desk() {
  static Desk& all = *new Desk;
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

// An error as XLA has them. Its number leads back to the whole one.
xla::Error* to_xla(const xla::Api* api, const Error& error) {
  const std::string message =
      error.reason + " [pccl error " + std::to_string(desk().remember(error)) + "]";
  xla::CreateError create{header<xla::CreateError>(), message.c_str(), status_of(error.code)};
  return api->create_error(&create);
}

// What the API's own functions complain of cannot be told to anybody.
void drop(const xla::Api* api, xla::Error* error) {
  if (error == nullptr) return;
  xla::DestroyError destroy{header<xla::DestroyError>(), error};
  api->destroy_error(&destroy);
}

std::optional<DataType> data_type(xla::Type type) {
  switch (type) {
    case xla::Type::s8:
      return DataType::int8;
    case xla::Type::s16:
      return DataType::int16;
    case xla::Type::s32:
      return DataType::int32;
    case xla::Type::s64:
      return DataType::int64;
    case xla::Type::u8:
      return DataType::uint8;
    case xla::Type::u16:
      return DataType::uint16;
    case xla::Type::u32:
      return DataType::uint32;
    case xla::Type::u64:
      return DataType::uint64;
    case xla::Type::f16:
      return DataType::float16;
    case xla::Type::bf16:
      return DataType::bfloat16;
    case xla::Type::f32:
      return DataType::float32;
    case xla::Type::f64:
      return DataType::float64;
  }
  return std::nullopt;
}

Error wrong(std::string what) { return {Code::internal_error, std::move(what), {}, {}}; }

// The attributes of a call, which adapters/jax/traced.py has written.
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

// A local device that waits for a call, and where it wants the results.
struct Waiting {
  xla::Future* future = nullptr;
  std::vector<std::span<std::uint8_t>> results;
};

struct Job {
  const xla::Api* api = nullptr;
  std::vector<Waiting> devices;  // the first one's memory is reduced, the others get copies
  Engine engine;
  peer::OperationRequest request;
  std::uint64_t tag = 0;
  Seconds timeout;
  std::shared_ptr<WeightedMean> mean;  // null: no weights
  void* mean_weight = nullptr;         // for the members' mean weight
  bool mean_weight_wide = false;       // float64, else float32
};

// Where a call has its weight, by the numbers that adapters/jax/traced.py writes.
enum class WeightIn : std::int64_t { none = 0, attribute = 1, argument = 2 };

// The calls of devices that have one program and the same operands: one operation, which begins
// when the last of them has come. *any thread*
class Lobby {
 public:
  // One of `count` devices has come with `job`. Returns the operation once all are here.
  std::optional<Job> gather(std::int64_t run, std::int64_t count, Job job) {
    const std::lock_guard lock(mutex_);
    const Key key{job.engine.get(), job.tag, run};
    const auto [it, first] = here_.try_emplace(key);
    if (first) {
      it->second = std::move(job);
    } else {
      it->second.devices.push_back(std::move(job.devices.front()));
    }
    if (static_cast<std::int64_t>(it->second.devices.size()) < count) return std::nullopt;
    Job whole = std::move(it->second);
    here_.erase(it);
    return whole;
  }

 private:
  using Key = std::tuple<const void*, std::uint64_t, std::int64_t>;
  std::mutex mutex_;
  std::map<Key, Job> here_;
};

Lobby& lobby() {
  static Lobby& all = *new Lobby;  // as the desk
  return all;
}

// Each device of a shard_map is a member of operations of its own: its tag is the call's, but for
// the first device's, which may meet calls that name the tag themselves.
std::uint64_t tag_on(std::uint64_t tag, std::int32_t device) {
  if (device == 0) return tag;
  return XXH3_64bits_withSeed(&tag, sizeof tag, static_cast<XXH64_hash_t>(device));
}

const xla::Buffer& buffer(const xla::Values& values, std::int64_t i) {
  return *static_cast<const xla::Buffer*>(values.values[i]);
}

// An element of any type as Python's float() has it.
template <class T>
std::optional<double> number_as(const void* data) {
  return static_cast<double>(*static_cast<const T*>(data));
}

std::uint64_t elements(const xla::Buffer& array) {
  std::uint64_t count = 1;
  for (std::int64_t axis = 0; axis < array.rank; ++axis)
    count *= static_cast<std::uint64_t>(array.extents[axis]);
  return count;
}

std::optional<double> number(const xla::Buffer& scalar) {
  switch (scalar.type) {
    case xla::Type::s8:
      return number_as<std::int8_t>(scalar.data);
    case xla::Type::s16:
      return number_as<std::int16_t>(scalar.data);
    case xla::Type::s32:
      return number_as<std::int32_t>(scalar.data);
    case xla::Type::s64:
      return number_as<std::int64_t>(scalar.data);
    case xla::Type::u8:
      return number_as<std::uint8_t>(scalar.data);
    case xla::Type::u16:
      return number_as<std::uint16_t>(scalar.data);
    case xla::Type::u32:
      return number_as<std::uint32_t>(scalar.data);
    case xla::Type::u64:
      return number_as<std::uint64_t>(scalar.data);
    case xla::Type::f32:
      return number_as<float>(scalar.data);
    case xla::Type::f64:
      return number_as<double>(scalar.data);
    case xla::Type::f16:  // the adapter widens them
    case xla::Type::bf16:
      break;
  }
  return std::nullopt;
}

// Results are the arguments' own memory, or apart from it: the call was declared so. After the
// arrays come, with weights, the weight among the arguments, if it is no constant, and the mean
// weight among the results; then in both a byte, which the program's next call has from this one.
std::optional<Error> read_arrays(const xla::CallFrame& frame, WeightIn where, double weight,
                                 Job& job) {
  const std::int64_t arrays = frame.results.count - (where == WeightIn::none ? 1 : 2);
  const std::int64_t operands = arrays + (where == WeightIn::argument ? 1 : 0);
  if (arrays < 0 || frame.arguments.count < operands) return wrong("arguments and results differ");
  *static_cast<std::uint8_t*>(buffer(frame.results, frame.results.count - 1).data) = 0;
  if (where == WeightIn::argument) {
    const std::optional<double> given = number(buffer(frame.arguments, arrays));
    if (!given) return wrong("a weight of an unknown type");
    weight = *given;
  }
  if (where != WeightIn::none) {
    job.mean = std::make_shared<WeightedMean>(weight);
    const xla::Buffer& mean_weight = buffer(frame.results, arrays);
    job.mean_weight = mean_weight.data;
    job.devices.front().results.emplace_back(static_cast<std::uint8_t*>(mean_weight.data),
                                             mean_weight.type == xla::Type::f64 ? 8U : 4U);
    job.mean_weight_wide = mean_weight.type == xla::Type::f64;
  }
  for (std::int64_t i = 0; i < arrays; ++i) {
    const xla::Buffer& from = buffer(frame.arguments, i);
    const xla::Buffer& to = buffer(frame.results, i);
    const std::optional<DataType> type = data_type(from.type);
    if (!type || to.type != from.type) return wrong("an argument of an unknown type");
    const std::uint64_t count = elements(from);
    job.devices.front().results.emplace_back(static_cast<std::uint8_t*>(to.data),
                                             count * element_size(*type));
    if (job.mean == nullptr) {
      job.request.arrays.push_back({from.data, to.data, count, *type});
    } else {
      job.mean->add(from.data, to.data, count, *type);
    }
  }
  return std::nullopt;
}

// A decoded call frame.
struct Call {
  Job job;
  std::string name;
  std::int64_t run = 0;       // of XLA's executions
  std::int64_t gathered = 0;  // so many devices make it together; 0: this one alone
};

Result<Call> read(const xla::CallFrame& frame) {
  const xla::Api* api = frame.api;
  if (api->header.struct_size < sizeof(xla::Api))
    return Error{Code::not_supported, "this jaxlib is too old for pccl inside jit", {}, {}};
  xla::GetDevice device{header<xla::GetDevice>(), frame.context, 0};
  drop(api, api->get_device(&device));
  xla::GetRun run{header<xla::GetRun>(), frame.context, 0};
  drop(api, api->get_run(&run));

  Reader attributes(frame.attributes);
  Call call;
  Job& job = call.job;
  job.api = api;
  job.devices.resize(1);
  call.run = run.run;
  const std::int64_t communicator = attributes.integer("communicator");
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
  job.engine = desk().find(communicator);
  if (job.engine == nullptr) return Error{Code::not_initialized, kNotJoined, {}, {}};
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

// All that wait. Each on a thread of its own: XLA may go on with the device's program on it, and
// block there until the other devices come.
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

// On a thread of its own: XLA's are needed for the program's other work, and be it another
// all-reduce that the others begin with. XLA may go on with the program on it, and block. It ends
// with the call, so that a thread that does nothing never counts as one that may still call.
void run(Job job) {
  // XLA's threads, and what they start, take tiny numbers for zero. We do not.
  std::fenv_t theirs;
  std::fegetenv(&theirs);
  std::fesetenv(FE_DFL_ENV);
  const Status status = reduce(job);
  std::fesetenv(&theirs);
  desk().end(job.engine, job.tag);
  job.engine.reset();
  if (status) {
    // First all copies: with its future the first device's memory is XLA's again.
    for (std::size_t i = 1; i < job.devices.size(); ++i) {
      for (std::size_t j = 0; j < job.devices[i].results.size(); ++j)
        std::ranges::copy(job.devices[0].results[j], job.devices[i].results[j].begin());
    }
  }
  answer_all(job, status);
}

// XLA asks which version of its interface the handler has.
bool answer_metadata(const xla::CallFrame& frame) {
  const xla::Extension* extension = frame.header.extensions;
  if (extension == nullptr || extension->kind != xla::kMetadataExtension) return false;
  xla::Metadata& metadata = *reinterpret_cast<const xla::MetadataExtension*>(extension)->metadata;
  metadata.version.major = xla::kMajorVersion;
  metadata.version.minor = xla::kMinorVersion;
  metadata.traits = 0;
  return true;
}

// The operation begins; its devices wait for their futures.
void start(Job job, const Call& call, const void* place) {
  Status status = desk().begin(job.engine, job.tag, call.run, place, call.name);
  if (status) {
    try {
      std::thread(run, job).detach();
      return;
    } catch (const std::exception& error) {  // no memory, no thread
      desk().end(job.engine, job.tag);
      status = wrong(error.what());
    }
  }
  answer_all(job, status);
}

xla::Error* handle(xla::CallFrame* frame) {
  if (answer_metadata(*frame) || frame->stage != xla::Stage::execute) return nullptr;
  try {
    Result<Call> call = read(*frame);
    if (!call) return to_xla(frame->api, call.error());
    xla::CreateFuture create{header<xla::CreateFuture>(), nullptr};
    if (xla::Error* const refused = frame->api->create_future(&create)) return refused;
    call->job.devices.front().future = create.future;
    if (call->gathered == 0) {
      start(std::move(call->job), *call, frame->attributes.values);
    } else if (std::optional<Job> whole =
                   lobby().gather(call->run, call->gathered, std::move(call->job))) {
      start(std::move(*whole), *call, frame->attributes.values);
    }
    frame->future = create.future;
    return nullptr;
  } catch (const std::exception& error) {  // no memory
    return to_xla(frame->api, wrong(error.what()));
  }
}

}  // namespace

std::int64_t next_communicator() { return desk().next(); }

void enlist_communicator(std::int64_t number, const std::shared_ptr<node::Communicator>& engine) {
  desk().enlist(number, engine);
}

void bind_xla(nb::module_& m) {
  m.def("xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(&handle)); });
  m.def(
      "use_by_default", [](std::int64_t number) { desk().use_by_default(number); }, "number"_a);
  m.def(
      "raise_xla_error",
      [](std::uint64_t number) {
        if (const std::optional<Error> error = desk().recall(number))
          raise(*error, CallKind::collective, kFunction);
      },
      "number"_a);
}

}  // namespace pccl::bindings
