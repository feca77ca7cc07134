// The actions that the shell must carry out after an event. All parts of the engine add to the same
// EngineActions.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/log.h"
#include "pccl/link/links.h"
#include "pccl/peer/locality.h"
#include "pccl/peer/trace.h"

namespace pccl::peer {

struct EngineActions {
  std::vector<wire::Bytes> control;  // write to the control connection
  bool dial_control = false;         // connect to a master (again)
  std::uint32_t master = 0;          // at which of the addresses
  bool close_control = false;        // flush, then close
  // Connect to a peer. The answer is on_dialled or on_dial_failed.
  std::vector<link::DialRequest> dials;
  std::vector<std::uint64_t> flush;   // stripes that may have something to write
  std::vector<std::uint64_t> resume;  // stripes that may be read again
  std::vector<std::uint64_t> close;   // write what is queued without waiting, then close
  std::vector<std::pair<LogLevel, std::string>> log;
  std::vector<TraceEvent> trace;
  std::vector<BufferPtr> touch;  // bytes come in here soon: touch it ahead, on another thread
  LocalityActions local;
  bool calls_ended = false;  // wake the threads that wait for a call

  [[nodiscard]] bool empty() const {
    return control.empty() && !dial_control && !close_control && dials.empty() && flush.empty() &&
           resume.empty() && close.empty() && log.empty() && trace.empty() && touch.empty() &&
           local.empty() && !calls_ended;
  }
  void note(LogLevel level, std::string text) { log.emplace_back(level, std::move(text)); }
};

}  // namespace pccl::peer
