#include "pccl/bindings/plain.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pccl::bindings {
namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kDescribed = 3;       // as pccl.tree
constexpr std::size_t kMaxDimensions = 64;  // NumPy has as many

// Looked up once.
struct Python {
  nb::object ndarray = nb::module_::import_("numpy").attr("ndarray");
  // The property of all arrays, and how to get its value: without looking for it in the type.
  nb::object array_struct = ndarray.attr("__array_struct__");
  descrgetfunc get =
      reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(array_struct.ptr()), Py_tp_descr_get));
  nb::object copy = nb::str("copy");
  nb::object shape = nb::str("shape");
  nb::object dtype = nb::str("dtype");
  nb::object new_array = nb::module_::import_("numpy").attr("empty");
  nb::object pooled_array = nb::module_::import_("pccl.result_pool").attr("empty");
  std::size_t pooled = nb::cast<std::size_t>(  // bytes
      nb::module_::import_("pccl.result_pool").attr("POOLED"));
  // Types of other packages, by their names.
  struct Foreign {
    nb::object name;
    DataType type;
  };
  Foreign foreign[3] = {{nb::str("bfloat16"), DataType::bfloat16},
                        {nb::str("float8_e4m3fn"), DataType::float8_e4m3fn},
                        {nb::str("float8_e5m2"), DataType::float8_e5m2}};
};

const Python& python() { return immortal<Python>(); }

const nb::object& maker(std::size_t bytes) {
  return bytes < python().pooled ? python().new_array : python().pooled_array;
}

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* const found = run_python([&] { return PyObject_GetAttr(object.ptr(), name.ptr()); });
  if (found == nullptr) throw nb::python_error();
  return nb::steal(found);
}

// A new array of the shape and type of `array`, which is contiguous. Copying a small one takes a
// third of the time that asking for both takes.
nb::object new_like(nb::handle array, std::size_t bytes) {
  constexpr std::size_t kCopied = 1024;
  if (bytes <= kCopied) return call_with(attribute(array, python().copy));
  return call_with(maker(bytes), attribute(array, python().shape),
                   attribute(array, python().dtype));
}

// The struct that `__array_struct__` points to: NumPy's array interface protocol, version 3. It
// takes half of the time that DLPack takes.
struct ArrayStruct {
  int two;  // the version's mark
  int dimensions;
  char kind;
  int item_bytes;
  int flags;
  std::intptr_t* shape;
  std::intptr_t* strides;
  void* data;
  PyObject* description;

  static constexpr int kContiguous = 0x1;  // in C's order
  static constexpr int kNative = 0x200;    // byte order
  static constexpr int kWritable = 0x400;
};

std::optional<DataType> data_type(char kind, int item_bytes) {
  struct Known {
    char kind;
    int bytes;
    DataType type;
  };
  static constexpr Known kKnown[] = {
      {'f', 4, DataType::float32},   {'f', 8, DataType::float64},    {'f', 2, DataType::float16},
      {'i', 1, DataType::int8},      {'i', 2, DataType::int16},      {'i', 4, DataType::int32},
      {'i', 8, DataType::int64},     {'u', 1, DataType::uint8},      {'u', 2, DataType::uint16},
      {'u', 4, DataType::uint32},    {'u', 8, DataType::uint64},     {'b', 1, DataType::boolean},
      {'c', 8, DataType::complex64}, {'c', 16, DataType::complex128}};
  for (const Known& known : kKnown)
    if (known.kind == kind && known.bytes == item_bytes) return known.type;
  return std::nullopt;
}

// The memory of a NumPy array. `lengths` has `dimensions` values.
struct Seen {
  void* data = nullptr;
  std::size_t size = 0;  // elements
  std::size_t nbytes = 0;
  std::size_t dimensions = 0;
  std::array<std::int64_t, kMaxDimensions> lengths;

  [[nodiscard]] std::span<const std::int64_t> shape() const { return {lengths.data(), dimensions}; }
};

// Fills in `seen` if the array is contiguous, in native byte order and, if asked for, writable. The
// type is nothing for one of another package.
struct Look {
  bool usable = false;
  std::optional<DataType> type;
};
Look look_at(nb::handle array, bool writable, Seen& seen) {
  const auto& py = python();
  const nb::object capsule = nb::steal(
      run_python([&] { return py.get(py.array_struct.ptr(), array.ptr(), py.ndarray.ptr()); }));
  if (!capsule.is_valid()) throw nb::python_error();
  const auto* const found =
      static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (found == nullptr) throw nb::python_error();
  const int needed =
      ArrayStruct::kContiguous | ArrayStruct::kNative | (writable ? ArrayStruct::kWritable : 0);
  if (found->two != 2 || (found->flags & needed) != needed ||
      static_cast<std::size_t>(found->dimensions) > kMaxDimensions)
    return {};
  seen.data = found->data;
  seen.dimensions = static_cast<std::size_t>(found->dimensions);
  seen.size = 1;
  for (std::size_t i = 0; i < seen.dimensions; ++i) {
    seen.lengths[i] = found->shape[i];
    seen.size *= static_cast<std::size_t>(found->shape[i]);
  }
  seen.nbytes = seen.size * static_cast<std::size_t>(found->item_bytes);
  return {true, data_type(found->kind, found->item_bytes)};
}

// Finds an array's memory, and its element type. Never makes a copy: results would go to it.
std::optional<DataType> see(nb::handle given, bool writable, Seen& seen) {
  if (!given.type().is(python().ndarray)) return std::nullopt;
  const Look look = look_at(given, writable, seen);
  if (!look.usable || look.type) return look.type;
  const nb::object name = get_attribute(attribute(given, python().dtype), "name");
  for (const Python::Foreign& foreign : python().foreign) {
    if (name.equal(foreign.name) && seen.nbytes == seen.size * element_size(foreign.type))
      return foreign.type;
  }
  return std::nullopt;
}

void append(std::string& text, std::span<const std::int64_t> shape, std::string_view between) {
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += between;
    std::array<char, 20> digits{};
    text.append(digits.data(),
                std::to_chars(digits.data(), digits.data() + digits.size(), shape[i]).ptr);
  }
}

void append_described(std::string& text, DataType type, std::span<const std::int64_t> shape) {
  text += name(type);
  text += '[';
  append(text, shape, ",");
  text += ']';
}

// As Python's repr, which a key of plain characters does not need.
void append_repr(std::string& text, nb::handle key) {
  if (PyUnicode_CheckExact(key.ptr()) != 0) {
    Py_ssize_t size = 0;
    const char* const chars = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
    if (chars == nullptr) PyErr_Clear();  // a lone surrogate
    const auto plain = [](char c) { return c >= ' ' && c <= '~' && c != '\'' && c != '\\'; };
    if (chars != nullptr && std::all_of(chars, chars + size, plain)) {
      text += '\'';
      text.append(chars, static_cast<std::size_t>(size));
      text += '\'';
      return;
    }
  }
  text += nb::repr(key).c_str();
}

void append_structure(std::string& text, std::string_view path, DataType type,
                      std::span<const std::int64_t> shape) {
  text += path;
  text += ':';
  text += name(type);
  text += ":(";
  append(text, shape, ", ");
  text += shape.size() == 1 ? ",)" : ")";
}

bool add(Plain& plain, nb::handle send, nb::handle recv, const Seen& from, const Seen& to,
         DataType type) {
  if (from.size == 0) return false;
  plain.request.arrays.push_back({from.data, to.data, from.size, type});
  if (plain.in_use.empty()) plain.in_use.reserve(2);
  plain.in_use.emplace_back(nb::borrow(send));
  plain.in_use.emplace_back(nb::borrow(recv));
  return true;
}

struct Range {
  std::uintptr_t begin, end;
  std::size_t index;
};

// Whether each output overlaps no other output, and no input but its own, which it equals.
bool apart(const std::vector<collective::ArrayRef>& arrays) {
  const auto range = [](const void* at, const collective::ArrayRef& array, std::size_t index) {
    const auto begin = reinterpret_cast<std::uintptr_t>(at);
    return Range{begin, begin + array.count * element_size(array.dtype), index};
  };
  std::vector<Range> taken;
  taken.reserve(arrays.size());
  for (std::size_t i = 0; i < arrays.size(); ++i)
    taken.push_back(range(arrays[i].recv, arrays[i], i));
  std::sort(taken.begin(), taken.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < taken.size(); ++i) {
    if (taken[i].begin < taken[i - 1].end) return false;
  }
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const Range sent = range(arrays[i].send, arrays[i], i);
    auto other = std::upper_bound(taken.begin(), taken.end(), sent.begin,
                                  [](std::uintptr_t at, const Range& r) { return at < r.end; });
    for (; other != taken.end() && other->begin < sent.end; ++other) {
      if (other->index != i || other->begin != sent.begin) return false;
    }
  }
  return true;
}

bool add_leaf(Plain& plain, nb::handle node, nb::handle target, const Seen& from, DataType type) {
  if (target.is(node)) return add(plain, node, target, from, from, type);
  Seen to;
  return see(target, true, to) == type && std::ranges::equal(from.shape(), to.shape()) &&
         add(plain, node, target, from, to, type);
}

// Keys of plain trees, which are texts or integers: to compare them calls no Python code.
bool same_key(nb::handle one, nb::handle other) {
  if (one.is(other)) return true;
  if (PyUnicode_CheckExact(one.ptr()) != 0 && PyUnicode_CheckExact(other.ptr()) != 0)
    return PyUnicode_Compare(one.ptr(), other.ptr()) == 0;
  return PyLong_CheckExact(one.ptr()) != 0 && PyLong_CheckExact(other.ptr()) != 0 &&
         PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ) == 1;
}

// Invalid: there is no such key.
nb::object item(nb::handle dict, nb::handle key) {
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::borrow(found);
}

// The result of a walk over a tree, without its arrays. A tree with equal keys in the same order,
// and arrays of the same types and shapes, has the same one.
struct Outline {
  enum class Kind : std::uint8_t { array, none, dict, list, tuple };
  struct Node {
    Kind kind = Kind::none;
    DataType type = DataType::uint8;  // of an array
    std::uint32_t count = 0;          // children; an array's dimensions
    std::size_t first = 0;            // index into `keys` or, of an array, into `lengths`
  };
  std::vector<Node> nodes;            // in the walk's order
  std::vector<nb::object> keys;       // of the dicts, in their own order
  std::vector<std::uint32_t> places;  // by key: where it comes in the walk over its dict
  std::vector<std::int64_t> lengths;
  std::string coding;
  std::uint64_t structure = 0;
  std::string description;
};

// One walk over a tree, in an order that is the same on all members.
class Walk {
 public:
  explicit Walk(std::string_view coding) : coding_(coding), structure_(coding) {}

  // The result's part for `node`: `out`, or a new one where that is null. Invalid: not plain.
  nb::object visit(nb::handle node, nb::handle out, int depth = 0) {
    if (depth > kMaxDepth) return {};
    if (node.is_none()) return none(out);
    if (node.type().is(python().ndarray)) return leaf(node, out);
    if (out.is_valid() && !out.type().is(node.type())) return {};
    if (PyDict_CheckExact(node.ptr()) != 0) return dict(node, out, depth);
    const bool list = PyList_CheckExact(node.ptr()) != 0;
    if (list || PyTuple_CheckExact(node.ptr()) != 0) return sequence(node, out, list, depth);
    return {};
  }

  std::optional<Plain> finish(nb::object result) {
    if (!result.is_valid() || plain_.request.arrays.empty() || !apart(plain_.request.arrays))
      return std::nullopt;
    structure_ += nones_;
    plain_.request.structure = XXH3_64bits(structure_.data(), structure_.size());
    const std::size_t count = plain_.request.arrays.size();
    if (count > kDescribed) {
      plain_.request.description += ", " + std::to_string(count - kDescribed) + " more arrays, " +
                                    std::to_string(elements_) + " elements in all";
    }
    plain_.request.description += named_nones_;
    if (none_count_ > kDescribed)
      plain_.request.description += ", " + std::to_string(none_count_ - kDescribed) + " more None";
    plain_.request.description += coding_;
    plain_.result = Held(std::move(result));
    outline_.coding = coding_;
    outline_.structure = plain_.request.structure;
    outline_.description = plain_.request.description;
    return std::move(plain_);
  }
  // REQUIRES: finish() has returned something.
  [[nodiscard]] Outline outline() { return std::move(outline_); }

 private:
  using Kind = Outline::Kind;

  // None is a part of the structure.
  nb::object none(nb::handle out) {
    if (out.is_valid() && !out.is_none()) return {};
    outline_.nodes.push_back({Kind::none});
    nones_ += '\n' + path_ + ":None";
    if (none_count_++ < kDescribed)
      named_nones_ += (none_count_ == 1 ? ", None at " : ", ") + path_;
    return nb::none();
  }

  nb::object leaf(nb::handle node, nb::handle out) {
    Seen from;
    const std::optional<DataType> type = see(node, out.is(node), from);
    if (!type) return {};
    const nb::object target = out.is_valid() ? nb::borrow(out) : new_like(node, from.nbytes);
    if (!add_leaf(plain_, node, target, from, *type)) return {};
    const auto shape = from.shape();
    outline_.nodes.push_back(
        {Kind::array, *type, static_cast<std::uint32_t>(shape.size()), outline_.lengths.size()});
    outline_.lengths.insert(outline_.lengths.end(), shape.begin(), shape.end());
    if (plain_.request.arrays.size() > 1) structure_ += '\n';
    append_structure(structure_, path_, *type, shape);
    elements_ += from.size;
    if (plain_.request.arrays.size() <= kDescribed) {
      std::string& text = plain_.request.description;
      if (!text.empty()) text += ", ";
      if (!path_.empty()) text += path_ + ' ';
      append_described(text, *type, shape);
    }
    return target;
  }

  nb::object dict(nb::handle node, nb::handle out, int depth) {
    const auto keys = nb::steal<nb::list>(PyDict_Keys(node.ptr()));
    bool strings = true;
    bool integers = true;
    for (const nb::handle key : keys) {
      strings = strings && PyUnicode_CheckExact(key.ptr()) != 0;
      integers = integers && PyLong_CheckExact(key.ptr()) != 0;
    }
    if (!strings && !integers) return {};
    outline_.nodes.push_back(
        {Kind::dict, {}, static_cast<std::uint32_t>(keys.size()), outline_.keys.size()});
    for (const nb::handle key : keys) outline_.keys.push_back(nb::borrow(key));
    if (PyList_Sort(keys.ptr()) != 0) throw nb::python_error();
    note_places(keys);
    if (out.is_valid() && PyDict_Size(out.ptr()) != static_cast<Py_ssize_t>(keys.size())) return {};
    const auto made =
        out.is_valid() ? nb::borrow(out) : nb::steal<nb::object>(PyDict_Copy(node.ptr()));
    const std::size_t stem = path_.size();
    for (const nb::handle key : keys) {
      const nb::object child = item(node, key);
      const nb::object target = out.is_valid() ? item(out, key) : nb::object();
      if (!child.is_valid() || (out.is_valid() && !target.is_valid())) return {};
      path_ += '[';
      append_repr(path_, key);
      path_ += ']';
      const nb::object result = visit(child, target, depth + 1);
      path_.resize(stem);
      if (!result.is_valid()) return {};
      if (!out.is_valid() && PyDict_SetItem(made.ptr(), key.ptr(), result.ptr()) != 0)
        throw nb::python_error();
    }
    return made;
  }

  // Notes the sorted place of each key of the dict whose keys were noted last.
  void note_places(const nb::list& sorted) {
    std::unordered_map<PyObject*, std::uint32_t> places;
    for (const nb::handle key : sorted)
      places.emplace(key.ptr(), static_cast<std::uint32_t>(places.size()));
    for (std::size_t i = outline_.places.size(); i < outline_.keys.size(); ++i)
      outline_.places.push_back(places.at(outline_.keys[i].ptr()));
  }

  nb::object sequence(nb::handle node, nb::handle out, bool list, int depth) {
    // Copied, since another thread may change the list meanwhile.
    const auto children = nb::steal<nb::tuple>(PySequence_Tuple(node.ptr()));
    const auto targets =
        out.is_valid() ? nb::steal<nb::tuple>(PySequence_Tuple(out.ptr())) : nb::tuple();
    if (out.is_valid() && targets.size() != children.size()) return {};
    outline_.nodes.push_back(
        {list ? Kind::list : Kind::tuple, {}, static_cast<std::uint32_t>(children.size())});
    nb::list made;
    const std::size_t stem = path_.size();
    for (std::size_t i = 0; i < children.size(); ++i) {
      path_ += '[' + std::to_string(i) + ']';
      const nb::object result =
          visit(children[i], out.is_valid() ? nb::handle(targets[i]) : nb::handle(), depth + 1);
      path_.resize(stem);
      if (!result.is_valid()) return {};
      if (!out.is_valid()) made.append(result);
    }
    if (out.is_valid()) return nb::borrow(out);
    if (list) return made;
    return nb::tuple(made);
  }

  Plain plain_;
  std::string_view coding_;
  std::string path_;
  std::string structure_;
  std::string nones_;  // of the structure
  std::string named_nones_;
  std::size_t none_count_ = 0;
  std::uint64_t elements_ = 0;
  Outline outline_;
};

// The same walk over a tree that may have a known outline: without sorting, and without texts.
class Retrace {
 public:
  explicit Retrace(const Outline& outline) : outline_(outline) {
    plain_.request.arrays.reserve(outline.nodes.size());
    plain_.in_use.reserve(2 * outline.nodes.size());
  }

  std::optional<Plain> walk(nb::handle tree, nb::handle out) {
    nb::object result = visit(tree, out);
    if (!result.is_valid() || !apart(plain_.request.arrays)) return std::nullopt;
    plain_.request.structure = outline_.structure;
    plain_.request.description = outline_.description;
    plain_.result = Held(std::move(result));
    return std::move(plain_);
  }

 private:
  using Kind = Outline::Kind;

  // As Walk::visit. Invalid: the tree has another outline.
  nb::object visit(nb::handle node, nb::handle out) {
    const Outline::Node& at = outline_.nodes[next_++];
    if (at.kind == Kind::array) return leaf(at, node, out);
    if (at.kind == Kind::none)
      return node.is_none() && (!out.is_valid() || out.is_none()) ? nb::none() : nb::object();
    if (out.is_valid() && !out.type().is(node.type())) return {};
    if (at.kind == Kind::dict) return dict(at, node, out);
    return sequence(at, node, out);
  }

  nb::object leaf(const Outline::Node& at, nb::handle node, nb::handle out) {
    Seen from;
    if (see(node, out.is(node), from) != at.type) return {};
    const auto lengths = std::span(outline_.lengths).subspan(at.first, at.count);
    if (!std::ranges::equal(from.shape(), lengths)) return {};
    nb::object target = out.is_valid() ? nb::borrow(out) : new_like(node, from.nbytes);
    return add_leaf(plain_, node, target, from, at.type) ? std::move(target) : nb::object();
  }

  nb::object dict(const Outline::Node& at, nb::handle node, nb::handle out) {
    if (!has_size(at, node) || (out.is_valid() && !has_size(at, out))) return {};
    const auto children = values(at, node);
    if (!children) return {};
    auto targets = out.is_valid() ? values(at, out) : std::vector<nb::object>(at.count);
    const bool by_key = !targets;  // `out` has another order
    std::vector<nb::handle> keys(at.count);
    for (std::size_t i = 0; i < at.count; ++i)
      keys[outline_.places[at.first + i]] = outline_.keys[at.first + i];
    const auto made =
        out.is_valid() ? nb::borrow(out) : nb::steal<nb::object>(PyDict_Copy(node.ptr()));
    if (!made.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < at.count; ++i) {
      const nb::object target = by_key ? item(out, keys[i]) : std::move((*targets)[i]);
      if (out.is_valid() && !target.is_valid()) return {};
      const nb::object result = visit((*children)[i], target);
      if (!result.is_valid()) return {};
      if (!out.is_valid() && PyDict_SetItem(made.ptr(), keys[i].ptr(), result.ptr()) != 0)
        throw nb::python_error();
    }
    return made;
  }

  static bool has_size(const Outline::Node& at, nb::handle dict) {
    return PyDict_CheckExact(dict.ptr()) != 0 &&
           PyDict_Size(dict.ptr()) == static_cast<Py_ssize_t>(at.count);
  }

  // The dict's values in the order of the walk; nothing if it has other keys, or another order.
  // REQUIRES: has_size().
  std::optional<std::vector<nb::object>> values(const Outline::Node& at, nb::handle dict) const {
    std::vector<nb::object> found(at.count);
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    for (std::size_t i = at.first; PyDict_Next(dict.ptr(), &position, &key, &value) != 0; ++i) {
      if (!same_key(key, outline_.keys[i])) return std::nullopt;
      found[outline_.places[i]] = nb::borrow(value);
    }
    return found;
  }

  nb::object sequence(const Outline::Node& at, nb::handle node, nb::handle out) {
    const bool list = at.kind == Kind::list;
    if ((list ? PyList_CheckExact(node.ptr()) : PyTuple_CheckExact(node.ptr())) == 0) return {};
    const auto children = nb::steal<nb::tuple>(PySequence_Tuple(node.ptr()));
    const auto targets =
        out.is_valid() ? nb::steal<nb::tuple>(PySequence_Tuple(out.ptr())) : nb::tuple();
    if (children.size() != at.count || (out.is_valid() && targets.size() != at.count)) return {};
    nb::list made;
    for (std::size_t i = 0; i < at.count; ++i) {
      const nb::object result =
          visit(children[i], out.is_valid() ? nb::handle(targets[i]) : nb::handle());
      if (!result.is_valid()) return {};
      if (!out.is_valid()) made.append(result);
    }
    if (out.is_valid()) return nb::borrow(out);
    if (list) return made;
    return nb::tuple(made);
  }

  const Outline& outline_;
  std::size_t next_ = 0;  // node
  Plain plain_;
};

// Keeps the outlines of the trees seen last. A program reduces few different ones.
class Outlines {
 public:
  // Those that begin as the tree does, the latest first.
  [[nodiscard]] std::vector<std::shared_ptr<const Outline>> like(nb::handle tree,
                                                                 std::string_view coding) const {
    std::vector<std::shared_ptr<const Outline>> found;
    for (const auto& outline : known_)
      if (outline->coding == coding && begins(*outline, tree)) found.push_back(outline);
    return found;
  }
  void used(const std::shared_ptr<const Outline>& outline) {
    const auto it = std::find(known_.begin(), known_.end(), outline);
    if (it != known_.end()) std::rotate(known_.begin(), it, it + 1);
  }
  // In place of the one that was used least lately.
  void add(Outline outline) {
    constexpr std::size_t kKnown = 8;
    constexpr std::size_t kMostNodes = 100'000;
    if (outline.nodes.size() > kMostNodes) return;
    if (known_.size() == kKnown) known_.pop_back();
    known_.insert(known_.begin(), std::make_shared<const Outline>(std::move(outline)));
  }

 private:
  static bool begins(const Outline& outline, nb::handle tree) {
    const Outline::Node& root = outline.nodes.front();
    const auto size = static_cast<Py_ssize_t>(root.count);
    if (root.kind == Outline::Kind::list)
      return PyList_CheckExact(tree.ptr()) != 0 && PyList_Size(tree.ptr()) == size;
    if (root.kind == Outline::Kind::tuple)
      return PyTuple_CheckExact(tree.ptr()) != 0 && PyTuple_Size(tree.ptr()) == size;
    PyObject* key = nullptr;
    Py_ssize_t position = 0;
    return PyDict_CheckExact(tree.ptr()) != 0 && PyDict_Size(tree.ptr()) == size &&
           PyDict_Next(tree.ptr(), &position, &key, nullptr) != 0 &&
           same_key(key, outline.keys.front());
  }

  std::vector<std::shared_ptr<const Outline>> known_;  // the latest first
};

}  // namespace

std::optional<Plain> plain_pair(nb::handle send, nb::handle recv) {
  Plain plain;
  Seen from;
  Seen to;
  const std::optional<DataType> type = see(send, false, from);
  if (!type || see(recv, true, to) != type || from.size != to.size ||
      !add(plain, send, recv, from, to, *type) || !apart(plain.request.arrays)) {
    return std::nullopt;
  }
  plain.request.structure = XXH3_64bits("", 0);
  append_described(plain.request.description, *type, from.shape());
  plain.result = Held(nb::borrow(recv));
  return plain;
}

std::optional<Plain> plain_parts(collective::Kind kind, std::uint32_t members, nb::handle array,
                                 nb::handle out, bool shaped) {
  using collective::Kind;
  Seen from;
  const std::optional<DataType> type = see(array, false, from);
  if (!type || from.size == 0 || members == 0) return std::nullopt;
  const auto shape = from.shape();
  std::vector<std::int64_t> wanted(shape.begin(), shape.end());
  if (kind == Kind::all_gather) wanted.insert(wanted.begin(), members);
  if (collective::scatters(kind) && shaped && (wanted.empty() || wanted.front() % members != 0))
    return std::nullopt;
  if (kind == Kind::reduce_scatter && shaped) wanted.front() /= members;
  const std::size_t sends = collective::scatters(kind) ? members : 1;
  const std::size_t recvs = collective::gathers(kind) ? members : 1;
  const nb::object result =
      out.is_none() ? call(maker(from.nbytes * recvs / sends), nb::tuple(nb::cast(wanted)),
                           attribute(array, python().dtype))
                    : nb::borrow(out);
  Seen to;
  if (see(result, true, to) != type || from.size * recvs != to.size * sends ||
      from.size % sends != 0 || (shaped && !std::ranges::equal(wanted, to.shape()))) {
    return std::nullopt;
  }
  const auto* const sent = static_cast<const std::uint8_t*>(from.data);
  const auto* const received = static_cast<const std::uint8_t*>(to.data);
  const bool in_place = kind == Kind::broadcast && sent == received;
  if (!in_place && sent < received + to.nbytes && received < sent + from.nbytes)
    return std::nullopt;
  Plain plain;
  peer::OperationRequest& request = plain.request;
  request.kind = kind;
  request.parts = members;
  if (collective::reduces(kind)) {
    request.arrays.push_back({from.data, to.data, to.size, *type});
  } else {
    request.arrays.push_back({from.data, to.data, from.nbytes / sends, DataType::uint8});
  }
  plain.in_use.emplace_back(nb::borrow(array));
  plain.in_use.emplace_back(result);
  std::string structure;
  append_structure(structure, "", *type, shaped ? shape : std::span<const std::int64_t>());
  request.structure = XXH3_64bits(structure.data(), structure.size());
  append_described(request.description, *type, shape);
  plain.result = Held(result);
  return plain;
}

std::optional<Plain> plain_tree(nb::handle tree, nb::handle out, std::string_view coding) {
  const nb::handle target = out.is_none() ? nb::handle() : out;
  Walk walk(coding);
  if (tree.type().is(python().ndarray)) return walk.finish(walk.visit(tree, target));
  static Outlines* outlines = nullptr;  // as `immortal`, but not constant
  if (outlines == nullptr) outlines = new Outlines;
  for (const std::shared_ptr<const Outline>& outline : outlines->like(tree, coding)) {
    std::optional<Plain> plain = Retrace(*outline).walk(tree, target);
    if (!plain) continue;
    outlines->used(outline);
    return plain;
  }
  std::optional<Plain> plain = walk.finish(walk.visit(tree, target));
  if (plain) outlines->add(walk.outline());
  return plain;
}

}  // namespace pccl::bindings
