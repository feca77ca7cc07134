// Giving up the GIL for a blocking call and taking it back, also while the interpreter ends.
//
// CPython before 3.14 answers a daemon thread that asks for the GIL while the interpreter is being
// finalised with pthread_exit: an unwinding that no C++ frame may stop, through frames that must
// not throw. It would end the process with SIGABRT. Here such a thread sleeps until the process is
// gone, as it does from 3.14 on.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <utility>

namespace pccl::bindings {

// Runs code that may take the GIL: Python code gives it up and takes it back between any two
// bytecodes. Exceptions of the code pass through. Calls of Python functions are `call`.
//
// REQUIRES: the code has no variables or temporaries that hold Python objects. The unwinding would
// give these up before it comes to here, without the GIL. And no catch block is under way further
// up, in which an unwinding ends the process.
//
// Not dealt with: up to Python 3.11 an allocation may collect garbage, and run Python code so.
template <class Code>
auto run_python(const Code& code) {
#ifdef __GLIBCXX__
  try {
    return code();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  return code();
#endif
}

template <class Take>
auto take_gil(const Take& take) noexcept {
  return run_python(take);
}

// REQUIRES: the GIL.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

class GilAcquire {
 public:
  GilAcquire() : state_(take_gil([] { return PyGILState_Ensure(); })) {}
  ~GilAcquire() { PyGILState_Release(state_); }
  GilAcquire(const GilAcquire&) = delete;
  GilAcquire& operator=(const GilAcquire&) = delete;

 private:
  PyGILState_STATE state_;
};

// Calls a Python function with these objects. REQUIRES: the GIL.
template <class... Objects>
nanobind::object call_with(nanobind::handle function, const Objects&... objects) {
  PyObject* const made = run_python([&] {
    return PyObject_CallFunctionObjArgs(function.ptr(), objects.ptr()...,
                                        static_cast<PyObject*>(nullptr));
  });
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

// Calls a Python function with these values. REQUIRES: the GIL.
template <class... Values>
nanobind::object call(nanobind::handle function, const Values&... values) {
  return call_with(function, nanobind::cast(values)...);
}

// REQUIRES: the GIL. The attribute may be a property that is written in Python.
inline nanobind::object get_attribute(nanobind::handle object, const char* name) {
  PyObject* const found = run_python([&] { return PyObject_GetAttrString(object.ptr(), name); });
  if (found == nullptr) throw nanobind::python_error();
  return nanobind::steal(found);
}

// A reference whose end may run Python code: the memory of large results goes back to a pool that
// is written in Python. REQUIRES, for all: the GIL.
class Held {
 public:
  Held() = default;
  explicit Held(nanobind::object object) : object_(std::move(object)) {}
  ~Held() { drop(); }
  Held(Held&& other) noexcept : object_(std::move(other.object_)) {}
  Held& operator=(Held&& other) noexcept {
    if (this != &other) {
      drop();
      object_ = std::move(other.object_);
    }
    return *this;
  }
  [[nodiscard]] const nanobind::object& get() const { return object_; }
  [[nodiscard]] nanobind::object take() { return std::move(object_); }

 private:
  void drop() noexcept {
    PyObject* const object = object_.release().ptr();
    if (object == nullptr) return;
    run_python([object] { Py_DECREF(object); });
  }

  nanobind::object object_;
};

}  // namespace pccl::bindings
