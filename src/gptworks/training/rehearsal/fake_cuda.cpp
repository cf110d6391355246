// What a CPU build of torch lacks for autograd over fake CUDA tensors: a device guard, CUDA's hooks and an accelerator,
// for one device that computes nothing. fake_cuda.py preloads this library, so that its definitions of at::accelerator
// replace torch's.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceType KIND = c10::DeviceType::CUDA;

c10::Device device() noexcept { return {KIND, 0}; }
c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, device()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const noexcept override { return KIND; }
  c10::Device exchangeDevice(c10::Device /*to*/) const noexcept override { return device(); }
  c10::Device getDevice() const noexcept override { return device(); }
  void setDevice(c10::Device /*to*/) const noexcept override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*of*/) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device /*of*/) const noexcept override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*of*/, bool /*high*/) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device /*of*/, int /*priority*/) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream /*to*/) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& /*on*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const noexcept override {
    static char all;  // the address of every event
    *event = &all;
  }
  void block(void* /*event*/, const c10::Stream& /*on*/) const noexcept override {}
  bool queryEvent(void* /*event*/) const noexcept override { return true; }
  void destroyEvent(void* /*event*/, c10::DeviceIndex /*index*/) const noexcept override {}
  void synchronizeEvent(void* /*event*/) const noexcept override {}
  bool queryStream(const c10::Stream& /*of*/) const noexcept override { return true; }
  void synchronizeStream(const c10::Stream& /*of*/) const noexcept override {}
  void synchronizeDevice(c10::DeviceIndex /*index*/) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& /*data*/, const c10::Stream& /*on*/) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs /*none*/) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};

// Choose the kernel that CUDA's own choice has for these dtypes and masks: flash attention, the memory-efficient kernel,
// or plain products in float32.
int64_t chosen_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& /*value*/,
                         const std::optional<at::Tensor>& mask, double /*dropout*/, bool /*causal*/,
                         std::optional<double> /*scale*/, bool grouped) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool groups = grouped && query.size(1) != key.size(1);
  if (half && !mask.has_value() && query.size(-1) <= 256) return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  if (!groups) return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

const at::native::RegisterCUDADispatch<at::native::_fused_sdp_choice_stub_DECLARE_DISPATCH_type> CHOICE(
    at::native::_fused_sdp_choice_stub, &chosen_attention);
const c10::impl::DeviceGuardImplRegistrar REGISTERED(KIND, new Guard);  // torch reads the guard until the process ends

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool /*checked*/) { return KIND; }
bool isAccelerator(c10::DeviceType type) { return type == KIND; }
c10::DeviceIndex deviceCount() { return 1; }
void setDeviceIndex(c10::DeviceIndex /*index*/) {}
c10::DeviceIndex getDeviceIndex() { return 0; }
void setCurrentStream(c10::Stream /*to*/) {}
c10::Stream getCurrentStream(c10::DeviceIndex /*index*/) { return stream(); }
void synchronizeDevice(c10::DeviceIndex /*index*/) {}
c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*to*/) { return 0; }
c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*to*/) { return 0; }
}  // namespace at::accelerator

extern "C" int gptworks_fake_cuda() { return 1; }
