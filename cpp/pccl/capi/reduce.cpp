// pccl.h: reductions.
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/clock.h"
#include "pccl/base/dtype.h"
#include "pccl/capi/communicator.h"

namespace pccl::capi {
namespace {

// The enumerators of pccl.h have the engine's values.
constexpr bool same(int c, DataType engine) { return c == static_cast<int>(engine); }
constexpr bool same(int c, ReduceOp engine) { return c == static_cast<int>(engine); }
static_assert(same(pcclUint8, DataType::uint8) && same(pcclInt8, DataType::int8) &&
              same(pcclInt16, DataType::int16) && same(pcclUint16, DataType::uint16) &&
              same(pcclUint32, DataType::uint32) && same(pcclInt32, DataType::int32) &&
              same(pcclUint64, DataType::uint64) && same(pcclInt64, DataType::int64) &&
              same(pcclFloat16, DataType::float16) && same(pcclBFloat16, DataType::bfloat16) &&
              same(pcclFloat, DataType::float32) && same(pcclDouble, DataType::float64) &&
              same(pcclBool, DataType::boolean) &&
              same(pcclFloat8E4M3FN, DataType::float8_e4m3fn) &&
              same(pcclFloat8E5M2, DataType::float8_e5m2) &&
              same(pcclComplex64, DataType::complex64) &&
              same(pcclComplex128, DataType::complex128) && pcclComplex128 + 1 == kDataTypeCount);
static_assert(same(pcclSum, ReduceOp::sum) && same(pcclAvg, ReduceOp::avg) &&
              same(pcclProd, ReduceOp::prod) && same(pcclMax, ReduceOp::max) &&
              same(pcclMin, ReduceOp::min));

template <class Enum>
bool within(Enum value, Enum most) {
  return static_cast<int>(value) >= 0 && static_cast<int>(value) <= static_cast<int>(most);
}

template <class Enum>
Status unknown(const char* what, Enum value) {
  return refuse("no " + std::string(what) + " " + std::to_string(static_cast<int>(value)));
}

Status check(const pcclReduceDescriptor_t& what) {
  if (!within(what.op, pcclMin)) return unknown("op", what.op);
  if (!within(what.src_descriptor.datatype, pcclComplex128))
    return unknown("datatype", what.src_descriptor.datatype);
  const auto type = static_cast<DataType>(what.src_descriptor.datatype);
  const auto op = static_cast<ReduceOp>(what.op);
  if (!combines(type, op)) return refuse(std::string(name(type)) + " elements have no " + name(op));
  if (!within(what.src_descriptor.distribution_hint, pcclDistributionUniform))
    return unknown("distribution_hint", what.src_descriptor.distribution_hint);
  const pcclQuantizationOptions_t& quantize = what.quantization_options;
  if (!within(quantize.algorithm, pcclQuantZeroPointScale))
    return unknown("quantization algorithm", quantize.algorithm);
  if (quantize.algorithm == pcclQuantNone) return {};
  if (!within(quantize.quantized_datatype, pcclComplex128))
    return unknown("quantized_datatype", quantize.quantized_datatype);
  if (quantize.quantized_datatype != pcclUint8 && quantize.quantized_datatype != pcclInt8)
    return refuse("quantized_datatype is pcclUint8 or pcclInt8");
  if (what.op == pcclProd) return refuse("a product cannot be quantized: errors would multiply");
  return {};
}

// The text that members compare, equal to that of Python's explicit API: " as uint8
// (min_max)".
std::string text_of(const pcclQuantizationOptions_t& quantize) {
  if (quantize.algorithm == pcclQuantNone) return {};
  const char* how = quantize.algorithm == pcclQuantMinMax ? "min_max" : "zero_point_scale";
  return std::string(" as ") + name(static_cast<DataType>(quantize.quantized_datatype)) + " (" +
         how + ")";
}

Result<peer::OperationRequest> request_from(const void* send, void* recv,
                                            const pcclReduceDescriptor_t& what, bool rerun) {
  if (const Status status = check(what); !status) return status.error();
  const auto type = static_cast<DataType>(what.src_descriptor.datatype);
  if (what.count > SIZE_MAX / element_size(type)) return refuse("count is too large").error();
  const std::size_t bytes = what.count * element_size(type);
  if (bytes != 0 && send == nullptr) return refuse("sendbuf is NULL").error();
  if (bytes != 0 && recv == nullptr) return refuse("recvbuf is NULL").error();
  const auto from = reinterpret_cast<std::uintptr_t>(send);
  const auto to = reinterpret_cast<std::uintptr_t>(recv);
  if (send != recv && std::max(from, to) - std::min(from, to) < bytes)
    return refuse("sendbuf and recvbuf overlap").error();
  peer::OperationRequest request;
  request.arrays.push_back({send, recv, what.count, type});
  request.op = static_cast<ReduceOp>(what.op);
  request.tag = what.tag;
  request.rerun = rerun;
  request.alone_is_error = true;
  const std::string quantized = text_of(what.quantization_options);
  request.structure = XXH3_64bits(quantized.data(), quantized.size());
  if (what.quantization_options.algorithm != pcclQuantNone) {
    request.quantization.code = reduce::CodeType::bits8;
    request.quantization.zero_exact =
        what.quantization_options.algorithm == pcclQuantZeroPointScale;
  }
  request.description =
      std::string(name(type)) + "[" + std::to_string(what.count) + "]" + quantized;
  return request;
}

pcclReduceInfo_t info_of(const peer::Call& call) {
  pcclReduceInfo_t info{};
  if (call.record != nullptr)
    info.local_world_size = static_cast<std::uint32_t>(call.record->members.size());
  info.tx_bytes = call.traffic.tx_bytes;
  info.rx_bytes = call.traffic.rx_bytes;
  return info;
}

// The reductions of one call, at most `most` of them in flight.
class Batch {
 public:
  Batch(Connection& connection, const node::Limit& limit, std::size_t most)
      : connection_(connection), limit_(limit), most_(most) {
    if (limit.timeout) deadline_ = clock_now() + *limit.timeout;
  }
  // Waits for all, even after an exception: they use the caller's memory.
  ~Batch() {
    while (!running_.empty()) {
      try {
        finish();
      } catch (...) {  // no memory: the first exception is reported
      }
    }
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  // False once one has failed.
  bool start(peer::OperationRequest request) {
    while (running_.size() >= most_) finish();
    if (!status_) return false;
    Result<peer::CallPtr> call = connection_.peer.start(std::move(request), left());
    if (call) {
      running_.push_back(std::move(*call));
    } else {
      status_ = call.error();
    }
    return status_.ok();
  }
  // The last one's info, with the bytes of all; or the first failure.
  Result<pcclReduceInfo_t> end() {
    while (!running_.empty()) finish();
    if (!status_) return status_.error();
    return info_;
  }

 private:
  // The limit of all, from now on.
  [[nodiscard]] node::Limit left() const {
    if (!deadline_) return limit_;
    return {std::max(Duration::zero(), *deadline_ - clock_now()), limit_.interrupted};
  }
  void finish() {
    const peer::CallPtr call = std::move(running_.front());
    running_.pop_front();
    const Status status = connection_.peer.wait(call, left());
    if (!status && status_) status_ = status;
    if (!status) return;
    pcclReduceInfo_t info = info_of(*call);
    info.tx_bytes += info_.tx_bytes;
    info.rx_bytes += info_.rx_bytes;
    info_ = info;
  }

  Connection& connection_;
  const node::Limit& limit_;
  std::optional<Instant> deadline_;
  const std::size_t most_;
  std::deque<peer::CallPtr> running_;
  Status status_;
  pcclReduceInfo_t info_{};
};

Status reduce_all(Connection& connection, const node::Limit& limit,
                  std::span<const pcclReduceOpDescriptor_t> descriptors, std::size_t most,
                  pcclReduceInfo_t* info_out) {
  std::vector<peer::OperationRequest> requests;
  std::vector<std::uint64_t> tags;
  for (const pcclReduceOpDescriptor_t& one : descriptors) {
    auto request = request_from(one.sendbuf, one.recvbuf, one.descriptor, true);
    if (!request) {
      Error error = request.error();
      error.reason = "descriptor " + std::to_string(requests.size()) + ": " + error.reason;
      return error;
    }
    requests.push_back(std::move(*request));
    tags.push_back(one.descriptor.tag);
  }
  const Tags taken(connection, tags);
  if (!taken.taken()) return taken.taken();
  Batch batch(connection, limit, most);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (!batch.start(std::move(requests[i]))) break;
  }
  Result<pcclReduceInfo_t> info = batch.end();
  if (!info) return info.error();
  if (requests.empty()) {
    const Result<node::View> view = connection.peer.view();
    if (!view) return view.error();
    if (view->record != nullptr)
      info->local_world_size = static_cast<std::uint32_t>(view->record->members.size());
  }
  if (info_out != nullptr) *info_out = *info;
  return {};
}

}  // namespace
}  // namespace pccl::capi

// ---- pccl.h

using namespace pccl;        // NOLINT: this file implements a C header
using namespace pccl::capi;  // NOLINT

pcclResult_t pcclAllReduce(const void* sendbuf, void* recvbuf,
                           const pcclReduceDescriptor_t* descriptor, const pcclComm_t* comm,
                           pcclReduceInfo_t* info_out) {
  return connected(__func__, CallKind::collective, comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     if (descriptor == nullptr) return refuse("descriptor is NULL");
                     auto request = request_from(sendbuf, recvbuf, *descriptor, false);
                     if (!request) return request.error();
                     const std::array tag{descriptor->tag};
                     const Tags taken(connection, tag);
                     if (!taken.taken()) return taken.taken();
                     peer::CallPtr started;
                     const Status status =
                         connection.peer.reduce(std::move(*request), limit,
                                                [&](const peer::CallPtr& call) { started = call; });
                     if (status && info_out != nullptr) *info_out = info_of(*started);
                     return status;
                   });
}

pcclResult_t pcclAllReduceAsync(const void* sendbuf, void* recvbuf,
                                const pcclReduceDescriptor_t* descriptor, const pcclComm_t* comm,
                                pcclAsyncReduceOp_t* op_out) {
  return connected(__func__, CallKind::collective, comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     if (descriptor == nullptr) return refuse("descriptor is NULL");
                     if (op_out == nullptr) return refuse("op_out is NULL");
                     auto request = request_from(sendbuf, recvbuf, *descriptor, false);
                     if (!request) return request.error();
                     const std::array tag{descriptor->tag};
                     Tags taken(connection, tag);
                     if (!taken.taken()) return taken.taken();
                     const auto launched = connection.peer.start(std::move(*request), limit);
                     if (!launched) return launched.error();
                     connection.launched(descriptor->tag, *launched);
                     taken.keep();
                     *op_out = {const_cast<pcclComm_t*>(comm), descriptor->tag};
                     return {};
                   });
}

pcclResult_t pcclAllReduceMultipleWithRetry(const pcclReduceOpDescriptor_t* descriptors,
                                            size_t count, const pcclComm_t* comm,
                                            pcclReduceInfo_t* info_out, int max_in_flight) {
  return connected(__func__, CallKind::collective, comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     if (descriptors == nullptr && count != 0) return refuse("descriptors is NULL");
                     if (max_in_flight < 1) return refuse("max_in_flight is less than 1");
                     return reduce_all(connection, limit, {descriptors, count},
                                       static_cast<std::size_t>(max_in_flight), info_out);
                   });
}

pcclResult_t pcclAwaitAsyncReduce(const pcclAsyncReduceOp_t* op, pcclReduceInfo_t* info_out) {
  return connected(__func__, CallKind::collective, op == nullptr ? nullptr : op->comm,
                   [&](Connection& connection, const node::Limit& limit) -> Status {
                     const auto launched = connection.find(op->tag);
                     if (!launched) return launched.error();
                     const Status status = connection.peer.wait(*launched, limit);
                     connection.awaited(op->tag, *launched);
                     if (status && info_out != nullptr) *info_out = info_of(**launched);
                     return status;
                   });
}
