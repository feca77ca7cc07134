// Visits a std::variant with one lambda per alternative.
#pragma once

namespace pccl {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace pccl
