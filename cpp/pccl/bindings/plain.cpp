#include "pccl/bindings/plain.h"

#include <nanobind/ndarray.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pccl::bindings {
namespace {

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;

constexpr int kMaxDepth = 64;
constexpr std::size_t kDescribed = 3;  // as pccl.tree

// Looked up once.
struct Python {
  nb::object ndarray = nb::module_::import_("numpy").attr("ndarray");
  nb::object new_array = nb::module_::import_("numpy").attr("empty");
  nb::object pooled_array = nb::module_::import_("pccl.result_pool").attr("empty");
  std::size_t pooled = nb::cast<std::size_t>(  // bytes
      nb::module_::import_("pccl.result_pool").attr("POOLED"));
  // Types of other packages: their names, and types of the same size.
  struct Foreign {
    nb::object name;
    nb::object like;
    DataType type;
  };
  Foreign foreign[3] = {
      {nb::str("bfloat16"), nb::module_::import_("numpy").attr("uint16"), DataType::bfloat16},
      {nb::str("float8_e4m3fn"), nb::module_::import_("numpy").attr("uint8"),
       DataType::float8_e4m3fn},
      {nb::str("float8_e5m2"), nb::module_::import_("numpy").attr("uint8"), DataType::float8_e5m2}};
};

const Python& python() { return immortal<Python>(); }

const nb::object& maker(std::size_t bytes) {
  return bytes < python().pooled ? python().new_array : python().pooled_array;
}

std::optional<DataType> data_type(nb::dlpack::dtype given) {
  using Kind = nb::dlpack::dtype_code;
  struct Known {
    Kind kind;
    unsigned bits;
    DataType type;
  };
  static constexpr Known kKnown[] = {
      {Kind::Float, 32, DataType::float32},     {Kind::Float, 64, DataType::float64},
      {Kind::Float, 16, DataType::float16},     {Kind::Int, 8, DataType::int8},
      {Kind::Int, 16, DataType::int16},         {Kind::Int, 32, DataType::int32},
      {Kind::Int, 64, DataType::int64},         {Kind::UInt, 8, DataType::uint8},
      {Kind::UInt, 16, DataType::uint16},       {Kind::UInt, 32, DataType::uint32},
      {Kind::UInt, 64, DataType::uint64},       {Kind::Bool, 8, DataType::boolean},
      {Kind::Complex, 64, DataType::complex64}, {Kind::Complex, 128, DataType::complex128}};
  for (const Known& known : kKnown) {
    if (given.lanes == 1 && given.bits == known.bits && static_cast<Kind>(given.code) == known.kind)
      return known.type;
  }
  return std::nullopt;
}

// Finds an array's memory, and its element type. No implicit conversion, which would make a copy:
// results would go to the copy.
template <class Array>
std::optional<DataType> see(nb::handle given, Array& seen) {
  if (!given.type().is(python().ndarray)) return std::nullopt;
  if (nb::try_cast(given, seen, false)) return data_type(seen.dtype());
  // NumPy's array interfaces do not carry types of other packages.
  const nb::object name = get_attribute(get_attribute(given, "dtype"), "name");
  for (const Python::Foreign& foreign : python().foreign) {
    if (!name.equal(foreign.name)) continue;
    if (!nb::try_cast(given.attr("view")(foreign.like), seen, false)) return std::nullopt;
    return foreign.type;
  }
  return std::nullopt;
}

template <class Array>
std::span<const std::int64_t> shape_of(const Array& array) {
  return {array.shape_ptr(), array.ndim()};
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

bool add(Plain& plain, nb::handle send, nb::handle recv, const Input& from, const Output& to,
         DataType type) {
  if (from.size() == 0) return false;
  plain.request.arrays.push_back({from.data(), to.data(), from.size(), type});
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
    return std::move(plain_);
  }

 private:
  // None is a part of the structure.
  nb::object none(nb::handle out) {
    if (out.is_valid() && !out.is_none()) return {};
    nones_ += '\n' + path_ + ":None";
    if (none_count_++ < kDescribed)
      named_nones_ += (none_count_ == 1 ? ", None at " : ", ") + path_;
    return nb::none();
  }

  nb::object leaf(nb::handle node, nb::handle out) {
    Input from;
    Output to;
    const std::optional<DataType> type = see(node, from);
    if (!type) return {};
    const nb::object target = out.is_valid()
                                  ? nb::borrow(out)
                                  : call_with(maker(from.nbytes()), get_attribute(node, "shape"),
                                              get_attribute(node, "dtype"));
    const auto shape = shape_of(from);
    if (see(target, to) != type || !std::ranges::equal(shape, shape_of(to)) ||
        !add(plain_, node, target, from, to, *type)) {
      return {};
    }
    if (plain_.request.arrays.size() > 1) structure_ += '\n';
    append_structure(structure_, path_, *type, shape);
    elements_ += from.size();
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
    if (PyList_Sort(keys.ptr()) != 0) throw nb::python_error();
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

  static nb::object item(nb::handle dict, nb::handle key) {
    PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
    return nb::borrow(found);
  }

  nb::object sequence(nb::handle node, nb::handle out, bool list, int depth) {
    // Copied, since another thread may change the list meanwhile.
    const auto children = nb::steal<nb::tuple>(PySequence_Tuple(node.ptr()));
    const auto targets =
        out.is_valid() ? nb::steal<nb::tuple>(PySequence_Tuple(out.ptr())) : nb::tuple();
    if (out.is_valid() && targets.size() != children.size()) return {};
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
};

}  // namespace

std::optional<Plain> plain_pair(nb::handle send, nb::handle recv) {
  Plain plain;
  Input from;
  Output to;
  const std::optional<DataType> type = see(send, from);
  if (!type || see(recv, to) != type || from.size() != to.size() ||
      !add(plain, send, recv, from, to, *type) || !apart(plain.request.arrays)) {
    return std::nullopt;
  }
  plain.request.structure = XXH3_64bits("", 0);
  append_described(plain.request.description, *type, shape_of(from));
  plain.result = Held(nb::borrow(recv));
  return plain;
}

std::optional<Plain> plain_parts(collective::Kind kind, std::uint32_t members, nb::handle array,
                                 nb::handle out, bool shaped) {
  using collective::Kind;
  Input from;
  const std::optional<DataType> type = see(array, from);
  if (!type || from.size() == 0 || members == 0) return std::nullopt;
  const auto shape = shape_of(from);
  std::vector<std::int64_t> wanted(shape.begin(), shape.end());
  if (kind == Kind::all_gather) wanted.insert(wanted.begin(), members);
  if (collective::scatters(kind) && shaped && (wanted.empty() || wanted.front() % members != 0))
    return std::nullopt;
  if (kind == Kind::reduce_scatter && shaped) wanted.front() /= members;
  const std::size_t sends = collective::scatters(kind) ? members : 1;
  const std::size_t recvs = collective::gathers(kind) ? members : 1;
  const nb::object result = out.is_none()
                                ? call(maker(from.nbytes() * recvs / sends),
                                       nb::tuple(nb::cast(wanted)), get_attribute(array, "dtype"))
                                : nb::borrow(out);
  Output to;
  if (see(result, to) != type || from.size() * recvs != to.size() * sends ||
      from.size() % sends != 0 || (shaped && !std::ranges::equal(wanted, shape_of(to)))) {
    return std::nullopt;
  }
  const auto* const sent = static_cast<const std::uint8_t*>(from.data());
  const auto* const received = static_cast<const std::uint8_t*>(to.data());
  const bool in_place = kind == Kind::broadcast && sent == received;
  if (!in_place && sent < received + to.nbytes() && received < sent + from.nbytes())
    return std::nullopt;
  Plain plain;
  peer::OperationRequest& request = plain.request;
  request.kind = kind;
  request.parts = members;
  if (collective::reduces(kind)) {
    request.arrays.push_back({from.data(), to.data(), to.size(), *type});
  } else {
    request.arrays.push_back({from.data(), to.data(), from.nbytes() / sends, DataType::uint8});
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
  Walk walk(coding);
  return walk.finish(walk.visit(tree, out.is_none() ? nb::handle() : out));
}

}  // namespace pccl::bindings
