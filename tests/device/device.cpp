// A device for tests: memory that the host cannot touch, streams that do their work late, in threads of their own.
// SIM_KEY: PrivateUse1, or CUDA or XPU where torch was built without them.
// Only what is used is included: all of torch takes as long again to compile.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef_inl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>
#include <torch/version.h>
#include <sys/mman.h>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <random>
#include <thread>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9  // what later releases declare, and have the same names for
namespace c10 {
using MempoolId_t = std::pair<uint64_t, uint64_t>;
struct AcceleratorError : Error { AcceleratorError(SourceLocation at, int, const std::string& what) : Error(at, what) {} };
struct DeviceAllocator : Allocator {
  virtual bool initialized() = 0;
  virtual void emptyCache(MempoolId_t) = 0;
  virtual void recordStream(const DataPtr&, Stream) = 0;
  virtual CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) = 0;
  virtual void resetAccumulatedStats(DeviceIndex) = 0;
  virtual void resetPeakStats(DeviceIndex) = 0;
  virtual std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) = 0;
};
}
#endif

#ifndef SIM_KEY
#define SIM_KEY PrivateUse1
#endif

namespace py = pybind11;

namespace {
using c10::Device; using c10::Stream; using c10::DataPtr; using at::Tensor;
constexpr auto kType = c10::DeviceType::SIM_KEY;
constexpr auto kKey = c10::DispatchKey::SIM_KEY;
constexpr size_t kGrain = 512;

size_t setting(const char* name, size_t otherwise) {
  const char* said = std::getenv(name);
  return said ? std::strtoull(said, nullptr, 10) : otherwise;
}
const int kDevices = setting("SIM_DEVICES", 2);
const size_t kMemory = setting("SIM_MEMORY", size_t(1) << 30) / kGrain * kGrain;
std::atomic<size_t> pin_limit{setting("SIM_PINNED", size_t(1) << 30)};
std::atomic<int64_t> delay_us{(int64_t)setting("SIM_DELAY", 2000)};
const size_t kSeed = setting("SIM_SEED", 0);  // not 0: each operation is late by a time of its own, up to twice the delay
std::atomic<bool> poison{setting("SIM_POISON", 1) != 0};
std::atomic<int64_t> operations{0}, fallbacks{0}, blocked{0};

// ---- faults, and calls that block their caller

// Strikes once, after so many times that it did not.
struct Fault {
  std::atomic<int64_t> left{-1};
  bool strikes() { auto now = left.load(); while (now >= 0 && !left.compare_exchange_weak(now, now - 1)) {} return now == 0; }
};
Fault copy_fault, memory_fault, loss_fault;
std::atomic<bool> lost{false};
[[noreturn]] void fail(const char* what) { throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 719, what); }
void check_alive() { if (lost) fail("device error: the device is lost"); }  // as CUDA's, it comes out of any later call

// ---- streams and events

class Worker {
 public:
  Worker() : thread_([this] { run(); }) { thread_.detach(); }
  void push(std::function<void()> work, bool is_memory = true) {
    if (is_memory) work = [work = std::move(work)] { if (loss_fault.strikes()) lost = true; if (!lost) work(); };
    { std::lock_guard<std::mutex> hold(mutex_); queue_.push_back(std::move(work)); ++pending_; }
    changed_.notify_all();
  }
  bool idle() { std::lock_guard<std::mutex> hold(mutex_); return pending_ == 0; }
  void drain() {
    { std::unique_lock<std::mutex> hold(mutex_); int64_t until = done_ + pending_; changed_.wait(hold, [&] { return done_ >= until; }); }
    check_alive();
  }
 private:
  void run() {
    static std::atomic<size_t> workers{0};
    std::mt19937_64 dice(kSeed * 1000 + workers++);
    for (;;) {
      std::function<void()> work;
      { std::unique_lock<std::mutex> hold(mutex_); changed_.wait(hold, [&] { return !queue_.empty(); });
        work = std::move(queue_.front()); queue_.pop_front(); }
      auto us = delay_us.load();
      if (kSeed) us = us * int64_t(dice() % 201) / 100;
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      { at::AutoDispatchBelowADInplaceOrView below; work(); }
      ++operations;
      work = nullptr;
      { std::lock_guard<std::mutex> hold(mutex_); --pending_; ++done_; }
      changed_.notify_all();
    }
  }
  std::mutex mutex_; std::condition_variable changed_; std::deque<std::function<void()>> queue_;
  int64_t pending_ = 0, done_ = 0;
  std::thread thread_;
};

struct Event {
  std::mutex mutex; std::condition_variable changed; int64_t asked = 0, reached = 0;
  std::chrono::steady_clock::time_point when;
  c10::DeviceIndex device = 0;
};

std::mutex streams_mutex;
std::map<std::pair<int, int64_t>, Worker*>& workers() { static auto* made = new std::map<std::pair<int, int64_t>, Worker*>; return *made; }
std::atomic<int64_t> next_stream{1};
thread_local c10::DeviceIndex this_device = 0;
thread_local std::map<int, int64_t> current_streams;

Worker& worker(int device, int64_t stream) {
  std::lock_guard<std::mutex> hold(streams_mutex);
  auto& made = workers()[{device, stream}];
  if (!made) made = new Worker;
  return *made;
}
int64_t current_stream(int device) { auto found = current_streams.find(device); return found == current_streams.end() ? 0 : found->second; }
Worker& current_worker(int device) { return worker(device, current_stream(device)); }
void drain_device(int device) {
  std::vector<Worker*> all;
  { std::lock_guard<std::mutex> hold(streams_mutex); for (auto& [key, one] : workers()) if (key.first == device) all.push_back(one); }
  for (auto* one : all) one->drain();
  check_alive();
}
std::shared_ptr<Event>& event_of(void* event) { return *static_cast<std::shared_ptr<Event>*>(event); }

// ---- memory: each device's is mapped twice, where tensors point (no access), and where workers go

struct Block { size_t nbytes; int64_t stream; std::vector<std::shared_ptr<Event>> users; };
struct Arena {
  char* seen = nullptr; char* real = nullptr;
  std::mutex mutex;
  std::map<size_t, size_t> free;
  std::map<size_t, Block> used;
  std::list<std::pair<size_t, Block>> cached;  // let go of, for the same stream at once
  size_t allocated = 0, peak = 0;

  Arena() {
    int file = memfd_create("device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kMemory) == 0, "device: no memory");
    seen = (char*)mmap(nullptr, kMemory, PROT_NONE, MAP_SHARED, file, 0);
    real = (char*)mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "device: no addresses");
    free[0] = kMemory;
  }
  void give_back(size_t at, size_t nbytes) {
    auto after = free.emplace(at, nbytes).first;
    if (auto next = std::next(after); next != free.end() && at + nbytes == next->first) { after->second += next->second; free.erase(next); }
    if (after != free.begin()) if (auto before = std::prev(after); before->first + before->second == after->first) { before->second += after->second; free.erase(after); }
  }
  bool find(size_t nbytes, int64_t stream, size_t& at) {
    for (auto one = cached.rbegin(); one != cached.rend(); ++one) {
      bool waits = false;
      for (auto& user : one->second.users) { std::lock_guard<std::mutex> hold(user->mutex); waits |= user->reached < user->asked; }
      if (one->second.stream != stream || one->second.nbytes < nbytes || waits) continue;
      at = one->first;
      if (one->second.nbytes > nbytes) { one->first += nbytes; one->second.nbytes -= nbytes; }
      else cached.erase(std::next(one).base());
      return true;
    }
    for (auto& [start, size] : free) if (size >= nbytes) {
      size_t rest = size - nbytes; at = start; free.erase(start);
      if (rest) free[at + nbytes] = rest;
      return true;
    }
    return false;
  }
  void drop_cache() { for (auto& [at, block] : cached) give_back(at, block.nbytes); cached.clear(); }
};
Arena& arena(int device) {
  static std::vector<Arena>* all = new std::vector<Arena>(kDevices);
  return (*all)[device];
}
Arena* arena_of(const void* memory) {
  for (int i = 0; i < kDevices; ++i) { auto& one = arena(i); if (memory >= one.seen && memory < one.seen + kMemory) return &one; }
  return nullptr;
}
char* real_of(const void* memory) {
  if (!memory) return nullptr;
  auto* found = arena_of(memory);
  TORCH_CHECK(found, "device: no memory of the device");
  return (char*)memory - found->seen + found->real;
}

struct SimAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t nbytes) override {
    int device = this_device;
    Device where(kType, device);
    check_alive();
    TORCH_CHECK_WITH(OutOfMemoryError, !nbytes || !memory_fault.strikes(), "device out of memory: tried to allocate ", nbytes, " bytes on ", where);
    if (!nbytes) return {nullptr, nullptr, &release, where};
    auto& on = arena(device);
    size_t rounded = (nbytes + kGrain - 1) / kGrain * kGrain, at = 0;
    int64_t stream = current_stream(device);
    std::unique_lock<std::mutex> hold(on.mutex);
    if (!on.find(rounded, stream, at)) {
      hold.unlock(); drain_device(device); hold.lock();
      on.drop_cache();
      TORCH_CHECK_WITH(OutOfMemoryError, on.find(rounded, stream, at), "device out of memory: tried to allocate ", nbytes, " bytes on ",
                       where, ", ", kMemory - on.allocated, " of ", kMemory, " free");
    }
    on.used[at] = {rounded, stream, {}};
    on.allocated += rounded; on.peak = std::max(on.peak, on.allocated);
    hold.unlock();
    if (poison) worker(device, stream).push([to = on.real + at, rounded] { std::memset(to, 0xEE, rounded); });
    return {on.seen + at, on.seen + at, &release, where};
  }
  static void release(void* memory) {
    if (!memory) return;
    auto& on = *arena_of(memory);
    std::lock_guard<std::mutex> hold(on.mutex);
    auto found = on.used.find((char*)memory - on.seen);
    on.allocated -= found->second.nbytes;
    on.cached.emplace_back(found->first, std::move(found->second));
    on.used.erase(found);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(real_of(to), real_of(from), nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int i = 0; i < kDevices; ++i) { drain_device(i); auto& on = arena(i); std::lock_guard<std::mutex> hold(on.mutex); on.drop_cache(); }
  }
  void recordStream(const DataPtr& memory, Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = arena(device).allocated; stats.allocated_bytes[0].peak = arena(device).peak;
    stats.reserved_bytes[0].current = arena(device).allocated;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { arena(device).peak = arena(device).allocated; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return {kMemory - arena(device).allocated, kMemory}; }
};
SimAllocator* allocator() { static auto* made = new SimAllocator; return made; }

std::mutex pinned_mutex;
std::map<char*, size_t>& pinned() { static auto* made = new std::map<char*, size_t>; return *made; }
size_t pinned_nbytes = 0;
bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> hold(pinned_mutex);
  auto after = pinned().upper_bound((char*)memory);
  if (after == pinned().begin()) return false;
  --after;
  return (char*)memory < after->first + after->second;
}
struct PinnedAllocator final : c10::Allocator {
  DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &release, c10::kCPU};
    void* memory = nullptr;
    std::lock_guard<std::mutex> hold(pinned_mutex);
    TORCH_CHECK(pinned_nbytes + nbytes <= pin_limit, "device: no more memory may be pinned");
    TORCH_CHECK(posix_memalign(&memory, 4096, nbytes) == 0, "device: out of memory of the host");
    pinned()[(char*)memory] = nbytes; pinned_nbytes += nbytes;
    return {memory, memory, &release, c10::kCPU};
  }
  static void release(void* memory) {
    if (!memory) return;
    { std::lock_guard<std::mutex> hold(pinned_mutex); auto found = pinned().find((char*)memory);
      std::memset(memory, 0xDD, found->second); pinned_nbytes -= found->second; pinned().erase(found); }
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
PinnedAllocator* pinned_allocator() { static auto* made = new PinnedAllocator; return made; }

// ---- what torch asks of a device

void record(std::shared_ptr<Event> event, Worker& on) {
  int64_t mine;
  { std::lock_guard<std::mutex> hold(event->mutex); mine = ++event->asked; }
  on.push([event, mine] {
    { std::lock_guard<std::mutex> hold(event->mutex); event->reached = std::max(event->reached, mine); event->when = std::chrono::steady_clock::now(); }
    event->changed.notify_all();
  }, false);
}
void wait(std::shared_ptr<Event> event, int64_t until) {
  std::unique_lock<std::mutex> hold(event->mutex);
  event->changed.wait(hold, [&] { return event->reached >= until; });
}
void SimAllocator::recordStream(const DataPtr& memory, Stream stream) {
  auto* on = arena_of(memory.get());
  if (!on) return;
  auto event = std::make_shared<Event>();
  record(event, worker(stream.device_index(), stream.id()));  // roughly: CUDA records when the memory is let go of
  std::lock_guard<std::mutex> hold(on->mutex);
  on->used[(char*)memory.get() - on->seen].users.push_back(event);
}

template <c10::DeviceType T>
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return T; }
  Device exchangeDevice(Device to) const override { Device was(T, this_device); setDevice(to); return was; }
  Device getDevice() const override { return {T, this_device}; }
  void setDevice(Device to) const override { TORCH_CHECK(to.index() < kDevices, "device: invalid device ordinal ", int(to.index())); if (to.index() >= 0) this_device = to.index(); }
  void uncheckedSetDevice(Device to) const noexcept override { if (to.index() >= 0) this_device = to.index(); }
  int at(Device device) const { return device.index() < 0 ? this_device : device.index(); }
  Stream made(int device, int64_t id) const { return Stream(Stream::UNSAFE, {T, (c10::DeviceIndex)device}, id); }
  Stream getStream(Device on) const noexcept override { return made(at(on), current_stream(at(on))); }
  Stream getDefaultStream(Device on) const override { return made(at(on), 0); }
  Stream getStreamFromGlobalPool(Device on, bool) const override { return made(at(on), next_stream++); }
  Stream getNewStream(Device on, int) const override { return made(at(on), next_stream++); }
  Stream exchangeStream(Stream to) const noexcept override { auto was = getStream(to.device()); current_streams[to.device_index()] = to.id(); return was; }
  void* getStreamNativeHandle(const Stream one) const {  // no override: torch 2.6 has none of it
    return &worker(one.device_index(), one.id()); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<std::shared_ptr<Event>*>(event); }
  void record(void** event, const Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new std::shared_ptr<Event>(std::make_shared<Event>());
    ::record(event_of(*event), worker(on.device_index(), on.id()));
  }
  void block(void* event, const Stream& on) const override {
    if (!event) return;
    auto one = event_of(event); int64_t until;
    { std::lock_guard<std::mutex> hold(one->mutex); until = one->asked; }
    worker(on.device_index(), on.id()).push([one, until] { ::wait(one, until); }, false);
  }
  bool queryEvent(void* event) const override { if (!event) return true; auto one = event_of(event); std::lock_guard<std::mutex> hold(one->mutex); return one->reached >= one->asked; }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    ++blocked;
    auto one = event_of(event); int64_t until;
    { std::lock_guard<std::mutex> hold(one->mutex); until = one->asked; }
    ::wait(one, until);
    check_alive();
  }
  bool queryStream(const Stream& one) const override { return worker(one.device_index(), one.id()).idle(); }
  void synchronizeStream(const Stream& one) const override { ++blocked; worker(one.device_index(), one.id()).drain(); }
  void synchronizeDevice(c10::DeviceIndex device) const override { ++blocked; drain_device(device); }
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& on) const override { allocator()->recordStream(memory, on); }
  double elapsedTime(void* a, void* b, c10::DeviceIndex) const override { return std::chrono::duration<double, std::milli>(event_of(b)->when - event_of(a)->when).count(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(SIM_KEY, Guard<kType>)
#if defined(SIM_CUDA) || defined(SIM_XPU)  // the engine of autograd asks the accelerator that torch sees
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard<c10::DeviceType::PrivateUse1>)
#endif

#define SIM_HOOKS                                                                                      \
  bool isBuilt() const { return true; } /* nor of this, */                                             \
  bool isAvailable() const { return true; } /* nor of this */                                          \
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }                             \
  void init() const override {}                                                                        \
  c10::DeviceIndex deviceCount() const override { return kDevices; }                                   \
  void setCurrentDevice(c10::DeviceIndex to) const override { this_device = to; }                   \
  c10::DeviceIndex getCurrentDevice() const override { return this_device; }                        \
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override { return std::exchange(this_device, to); } \
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return std::exchange(this_device, to < 0 ? this_device : to); } \
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }                    \
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }             \
  at::Device getDeviceFromPtr(void* memory) const override {                                           \
    for (int i = 0; i < kDevices; ++i) if (arena_of(memory) == &arena(i)) return {kType, (c10::DeviceIndex)i}; \
    TORCH_CHECK(false, "device: no memory of the device"); }                                           \
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); } \
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  c10::DeviceGuard guard(storage->device());
  size_t keep = std::min(nbytes, storage->nbytes());
  auto fresh = allocator()->allocate(nbytes);
  if (keep) current_worker(storage->device().index()).push([to = real_of(fresh.get()), from = real_of(storage->data()), keep] { std::memcpy(to, from, keep); });
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

// For CUDA and XPU too: pinned memory is asked for here, as their own hooks are made before this library is loaded.
struct Hooks final : at::PrivateUse1HooksInterface {
  SIM_HOOKS
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize_storage(storage.unsafeGetStorageImpl(), nbytes); }
};

// ---- tensors

Tensor seen_by_worker(const Tensor& one) {
  auto* memory = one.device().type() == kType ? (void*)real_of(one.data_ptr()) : one.data_ptr();
  auto made = at::from_blob(memory, one.sizes(), one.strides(), one.options().device(c10::kCPU).requires_grad(false));
  if (one.is_conj()) made._set_conj(true);
  if (one.is_neg()) made._set_neg(true);
  return made;
}
Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || !self.numel()) return self;
  bool to_us = self.device().type() == kType, from_us = src.device().type() == kType;
  TORCH_CHECK((to_us || self.is_cpu()) && (from_us || src.is_cpu()), "device: no copy from ", src.device(), " to ", self.device());
  check_alive();
  if (copy_fault.strikes()) fail("device error: a copy failed");
  if (!non_blocking && to_us != from_us) ++blocked;
  Tensor from = src.sizes() == self.sizes() ? src : src.expand_as(self);
  int device = (to_us ? self : src).device().index();
  auto& on = current_worker(device);
  if (to_us && from_us && self.device() != src.device()) {
    current_worker(src.device().index()).drain(); on.drain();
    seen_by_worker(self).copy_(seen_by_worker(from));
  } else if (to_us && from_us) {
    on.push([to = seen_by_worker(self), what = seen_by_worker(from)]() mutable { to.copy_(what); });
  } else if (to_us) {
    bool late = non_blocking && is_pinned(src.data_ptr());
    Tensor what = late ? from : from.clone();  // plain memory is staged before the call returns
    if (!non_blocking) on.drain();
    on.push([to = seen_by_worker(self), alias = seen_by_worker(what), hold = c10::Storage(what.storage())]() mutable { to.copy_(alias); });
    // What is waited for is the transfer: a kernel that converts comes after it, in the stream's own time.
    if (!non_blocking) { if (self.scalar_type() == src.scalar_type() && self.is_contiguous()) on.drain(); }
  } else {
    on.push([to = seen_by_worker(self), what = seen_by_worker(from), hold = c10::Storage(self.storage())]() mutable { to.copy_(what); });
    if (!non_blocking || !is_pinned(self.data_ptr())) on.drain();
  }
  return self;
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  size_t need = (self.storage_offset() + c10::multiply_integers(size)) * self.itemsize();
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kType)));
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) { return at::native::as_strided_tensorimpl(self, size, stride, offset); }
Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) { copy_(const_cast<Tensor&>(to), self, non_blocking); return to; }
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) resize_(to, self.sizes(), std::nullopt);
  copy_(const_cast<Tensor&>(to), self, true);  // what a kernel computed is there late
  return to;
}
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                   at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  auto here = bias ? std::optional<Tensor>(bias->cpu()) : bias;
  return at::convolution(input.cpu(), weight.cpu(), here, stride, padding, dilation, transposed, output_padding, groups).to(input.device());
}
using Three = std::tuple<Tensor, Tensor, Tensor>;
Three convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                           bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> bias{grad.size(1)};
  auto [a, b, c] = at::convolution_backward(grad.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef(bias), stride, padding, dilation, transposed, output_padding, groups, mask);
  auto there = [&](const Tensor& one) { return one.defined() ? one.to(grad.device()) : one; };
  return {there(a), there(b), there(c)};
}
Three lstm_cell(const Tensor& from_input, const Tensor& from_state, const Tensor& cx, const std::optional<Tensor>& b_ih, const std::optional<Tensor>& b_hh) {
  auto gates = from_input.cpu() + from_state.cpu();
  for (auto& bias : {b_ih, b_hh}) if (bias && bias->defined()) gates = gates + bias->cpu();
  auto part = gates.chunk(4, 1);
  auto i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  auto cy = f * cx.cpu() + i * g;
  auto to = cx.device();
  return {(o * cy.tanh()).to(to), cy.to(to), at::cat({i, f, g, o}, 1).to(to)};
}
Three lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto part = workspace.cpu().chunk(4, 1);
  auto &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  auto there = [&](const std::optional<Tensor>& one) { return one && one->defined() ? one->cpu() : at::zeros_like(i); };
  auto dh = there(grad_hy), t = cy.cpu().tanh(), dc = there(grad_cy) + dh * o * (1 - t * t);
  auto gates = at::cat({dc * g * i * (1 - i), dc * cx.cpu() * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  auto to = cx.device();
  return {gates.to(to), (dc * f).to(to), has_bias ? gates.sum(0).to(to) : Tensor()};
}
at::Scalar item(const Tensor& self) { return self.to(c10::kCPU).item(); }
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Expected storage on ", self.device(), ", not on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  int64_t last = offset;
  for (size_t i = 0; i < size.size(); ++i) last += (size[i] - 1) * impl->stride(i);
  size_t need = self.numel() ? (last + 1) * self.itemsize() : 0;
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}
Tensor& set_all(Tensor& self, at::Storage source) { int64_t count = source.nbytes() / self.itemsize(); return set_storage(self, std::move(source), 0, {count}, {}); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides()); }
Tensor& set_nothing(Tensor& self) { at::Storage none(at::Storage::use_byte_size_t{}, 0, DataPtr(nullptr, self.device()), allocator(), true); return set_storage(self, none, 0, {0}, {}); }
void record_stream(Tensor& self, Stream on) { allocator()->recordStream(self.storage().data_ptr(), on); }
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { ++fallbacks; at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  m.impl("empty.memory_format", empty); m.impl("empty_strided", empty_strided); m.impl("as_strided", as_strided);
  m.impl("view", view); m.impl("_reshape_alias", reshape_alias); m.impl("resize_", resize_); m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from); m.impl("_copy_from_and_resize", copy_from_and_resize); m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage", set_all); m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor); m.impl("set_", set_nothing); m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution); m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell); m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}
TORCH_LIBRARY_IMPL(_, SIM_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kType, allocator(), 100);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", [] { return int(this_device); });
  m.def("set_device", [](int to) { TORCH_CHECK(to < kDevices, "device: invalid device ordinal ", to); if (to >= 0) this_device = to; });
  m.def("synchronize", [](int device) { ++blocked; drain_device(device); }, py::call_guard<py::gil_scoped_release>());
  m.def("mem_get_info", [](int device) { return allocator()->getMemoryInfo(device); });
  m.def("memory_allocated", [](int device) { return arena(device).allocated; });
  m.def("max_memory_allocated", [](int device) { return arena(device).peak; });
  m.def("reset_peak", [](int device) { allocator()->resetPeakStats(device); });
  m.def("empty_cache", [] { allocator()->emptyCache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("set_delay", [](int64_t us) { delay_us = us; });
  m.def("set_pin_limit", [](size_t nbytes) { pin_limit = nbytes; });
  m.def("current_stream", [](int device) { return current_stream(device); });
  m.def("set_stream", [](int device, int64_t stream) { current_streams[device] = stream; });
  m.def("counts", [] { return std::make_pair(operations.load(), fallbacks.load()); });
  m.def("blocked", [] { return blocked.load(); });
  m.def("fail_copy", [](int64_t after) { copy_fault.left = after; });
  m.def("fail_allocation", [](int64_t after) { memory_fault.left = after; });
  m.def("lose", [](int64_t after) { loss_fault.left = after; });
  m.def("heal", [] { copy_fault.left = memory_fault.left = loss_fault.left = -1; lost = false; });
  m.def("pinned_nbytes", [] { return pinned_nbytes; });
}
