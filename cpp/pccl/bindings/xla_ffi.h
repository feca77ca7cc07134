// The part of XLA's foreign-function interface that a custom call needs: layouts and numbers of its
// C ABI, version 0.3. With it, pccl builds without jaxlib. XLA calls a handler with a CallFrame,
// which has a table of functions to call back. Every struct begins with its own size and a list of
// extensions. tests/test_jax_ffi.py compares this file with the header that jaxlib installs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pccl::xla {

constexpr int kMajorVersion = 0;
constexpr int kMinorVersion = 3;

// Kinds of extensions.
constexpr std::int32_t kMetadataExtension = 1;

struct Extension {
  std::size_t struct_size;
  std::int32_t kind;
  Extension* next;
};

// The beginning of every struct.
struct Header {
  std::size_t struct_size;
  Extension* extensions;
};

struct Version {
  Header header;
  int major;
  int minor;
};

// XLA asks for it with a MetadataExtension, in the first call of a handler.
struct Metadata {
  std::size_t struct_size;
  Version version;
  std::uint32_t traits;
  std::int64_t state_type;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

// Status codes, as in absl.
enum class Status : std::int32_t {
  cancelled = 1,
  invalid_argument = 3,
  deadline_exceeded = 4,
  failed_precondition = 9,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
};

// Element types that pccl reduces, and that attributes have.
enum class Type : std::int32_t {
  pred = 1,
  s8 = 2,
  s16 = 3,
  s32 = 4,
  s64 = 5,
  u8 = 6,
  u16 = 7,
  u32 = 8,
  u64 = 9,
  f16 = 10,
  f32 = 11,
  f64 = 12,
  c64 = 15,
  bf16 = 16,
  c128 = 18,
  f8e5m2 = 19,
  f8e4m3fn = 20,
};

enum class ValueKind : std::int32_t { buffer = 1 };  // arguments and results
enum class AttributeKind : std::int32_t { array = 1, dictionary = 2, scalar = 3, string = 4 };
enum class Stage : std::int32_t { instantiate = 0, prepare = 1, initialize = 2, execute = 3 };

struct ArrayBuffer {
  Header header;
  Type type;
  void* data;
  std::int64_t rank;
  std::int64_t* extents;
};

struct Text {
  const char* data;
  std::size_t size;
};

struct Scalar {
  Type type;
  void* value;
};

// Arguments, or results: `values` points to ArrayBuffers.
struct Values {
  Header header;
  std::int64_t count;
  ValueKind* kinds;
  void** values;
};

struct Attributes {
  Header header;
  std::int64_t count;
  AttributeKind* kinds;
  Text** names;
  void** values;
};

struct Error;    // owned by whoever receives it
struct Context;  // of one execution
// Set by an asynchronous handler when its work is done. Until then XLA keeps arguments and results
// alive, and goes on with other work.
struct Future;

struct Api;

struct CallFrame {
  Header header;
  const Api* api;
  Context* context;
  Stage stage;
  Values arguments;
  Values results;
  Attributes attributes;
  Future* future;  // set by an asynchronous handler
};

struct CreateError {
  Header header;
  const char* message;
  Status status;
};

struct DestroyError {
  Header header;
  Error* error;
};

struct CreateFuture {
  Header header;
  Future* future;  // out
};

struct SetAvailable {
  Header header;
  Future* future;
};

struct SetError {
  Header header;
  Future* future;
  Error* error;  // XLA's from then on
};

struct GetRun {
  Header header;
  Context* context;
  std::int64_t run;  // out: the same for all devices of one execution
};

struct GetDevice {
  Header header;
  Context* context;
  std::int32_t ordinal;  // out: among this process's devices
};

struct Api {
  using Unused = void (*)();
  Header header;
  Version version;
  const void* internal;
  Error* (*create_error)(CreateError*);
  Unused get_error_message;
  void (*destroy_error)(DestroyError*);
  Unused register_handler;
  Unused get_stream;
  Unused register_type;
  Unused get_context;
  Unused set_state;
  Unused get_state;
  Unused allocate_memory;
  Unused free_memory;
  Unused schedule;
  Unused count_threads;
  Error* (*create_future)(CreateFuture*);
  Error* (*set_available)(SetAvailable*);
  Error* (*set_error)(SetError*);
  Error* (*get_run)(GetRun*);
  Error* (*get_device)(GetDevice*);
};

}  // namespace pccl::xla
