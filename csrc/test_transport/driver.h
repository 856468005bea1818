// The CUDA driver, loaded when it is needed: the self-test runs without one. Types and constants are those of cuda.h.
#pragma once
#include <dlfcn.h>

#include <type_traits>

#include "basics.h"

namespace test_transport {

struct Driver {
  using Result = int;
  using Address = unsigned long long;
  using Handle = void*; // a context or a stream
  static constexpr Result kSuccess = 0, kNotReady = 600;
  static constexpr int kMemoryType = 2;     // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  static constexpr unsigned kHostMemory = 1; // CU_MEMORYTYPE_HOST
  static constexpr unsigned kPortable = 1, kNonBlocking = 1;
  static constexpr int kRelaxedCapture = 2;

  Handle context = nullptr;
  Result (*get_current)(Handle*) = nullptr;
  Result (*set_current)(Handle) = nullptr;
  Result (*create_stream)(Handle*, unsigned, int) = nullptr;
  Result (*query_stream)(Handle) = nullptr;
  Result (*destroy_stream)(Handle) = nullptr;
  Result (*copy_to_device)(Address, const void*, size_t, Handle) = nullptr;
  Result (*copy_to_host)(void*, Address, size_t, Handle) = nullptr;
  Result (*pin)(void*, size_t, unsigned) = nullptr;
  Result (*unpin)(void*) = nullptr;
  Result (*get_attribute)(void*, int, Address) = nullptr;
  Result (*exchange_capture_mode)(int*) = nullptr;
  Result (*get_error_name)(Result, const char**) = nullptr;

  void open() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) fatal("libcuda.so.1", dlerror());
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) fatal("libcuda.so.1 has no function", name);
    };
    find(get_current, "cuCtxGetCurrent");
    find(set_current, "cuCtxSetCurrent");
    find(create_stream, "cuStreamCreateWithPriority");
    find(query_stream, "cuStreamQuery");
    find(destroy_stream, "cuStreamDestroy_v2");
    find(copy_to_device, "cuMemcpyHtoDAsync_v2");
    find(copy_to_host, "cuMemcpyDtoHAsync_v2");
    find(pin, "cuMemHostRegister_v2");
    find(unpin, "cuMemHostUnregister");
    find(get_attribute, "cuPointerGetAttribute");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(get_error_name, "cuGetErrorName");
  }
  const char* name(Result result) {
    const char* text = nullptr;
    return get_error_name(result, &text) == kSuccess && text ? text : "unknown error";
  }
  void check(Result result, const char* what) {
    if (result != kSuccess) fatal(what, name(result));
  }
  bool is_host(uint64_t address) {
    unsigned type = 0;
    // An address that CUDA does not know is ordinary host memory.
    return get_attribute(&type, kMemoryType, address) != kSuccess || type == kHostMemory;
  }
  // Prepares a thread of ours: it copies on its own stream, also while another thread captures a CUDA graph.
  Handle enter_thread() {
    check(set_current(context), "cuCtxSetCurrent");
    int mode = kRelaxedCapture;
    check(exchange_capture_mode(&mode), "cuThreadExchangeStreamCaptureMode");
    Handle stream = nullptr;
    check(create_stream(&stream, kNonBlocking, -5), "cuStreamCreateWithPriority"); // clamped to the highest priority
    return stream;
  }
};

} // namespace test_transport
