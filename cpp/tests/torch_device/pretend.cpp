// A device of torch that is no CPU to torch, although its memory is: torch.device("pretend"). It
// stands for an accelerator whose package registers it with torch (PrivateUse1).
//
// Its memory is poisoned when it is allocated. Operations run on the CPU, between copies. They wait
// for the work of the calling thread's stream. The only work that waits in a stream is that of
// `torch.ops.pretend.fill_late_`: it is done as late as it may be.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

class PretendAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    void* const memory = c10::alloc_cpu(size);
    if (size != 0) std::memset(memory, 0xEE, size);
    return {memory, memory, &release, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    std::memcpy(to, from, size);
  }

 private:
  static void release(void* memory) { c10::free_cpu(memory); }
};
PretendAllocator allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK(false, "the device has no random numbers");
  }
};
[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// Work that waits in streams. *any thread*
class Streams {
 public:
  c10::StreamId make() {
    const std::lock_guard lock(mutex_);
    return ++made_;
  }
  void add(c10::StreamId stream, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    due_[stream].push_back(std::move(work));
  }
  void wait_for(c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    for (auto& due = due_[stream]; !due.empty(); due.pop_front()) due.front()();
  }

 private:
  std::mutex mutex_;
  c10::StreamId made_ = 0;  // 0 is each thread's first one
  std::map<c10::StreamId, std::deque<std::function<void()>>> due_;
};
Streams streams;
thread_local c10::StreamId current = 0;

// One device. An event is the number of its stream: it is over when the whole stream is.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams.make()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current, next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex,
              c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new c10::StreamId(on.id());
  }
  void block(void* event, const c10::Stream&) const override { synchronizeEvent(event); }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::StreamId*>(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& waited) const override {
    streams.wait_for(waited.id());
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) streams.wait_for(*static_cast<c10::StreamId*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id);
  }
};

// The tensor's memory as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto seen = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                            tensor.options().device(at::kCPU));
  seen._set_conj(tensor.is_conj());
  seen._set_neg(tensor.is_neg());
  return seen;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  streams.wait_for(current);
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void fill_late(const at::Tensor& tensor, const at::Scalar& value) {
  streams.add(current, [tensor, value] { on_cpu(tensor).fill_(value); });
}

void to_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("view", at::native::view);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("resize_", at::native::resize_);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&to_cpu>());
}
TORCH_LIBRARY(pretend, m) { m.def("fill_late_(Tensor(a!) tensor, Scalar value) -> ()"); }
TORCH_LIBRARY_IMPL(pretend, PrivateUse1, m) { m.impl("fill_late_", fill_late); }
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kDevice, &allocator)
