// Every PCCL_* variable the engine obeys, read in one place. Variables that stand for an argument
// of `pccl.init` (PCCL_MASTER, PCCL_MIN_PEERS, PCCL_PORT, PCCL_ADVERTISE, PCCL_SECRET) are read by
// the Python layer, and some by capi/environment.h.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/base/log.h"

namespace pccl {

// Who fills the 64-bit checksum of a data frame.
enum class Checksum : std::uint8_t {
  automatic,  // "auto": frames that leave the host, unless the link is encrypted
  always,     // "always": every frame
  never,      // "never": none; for measuring what it costs
};

// What a user can tune from outside. Read once when a communicator or master is made and handed
// down as const: a later change of the environment concerns only later objects. Tests and the
// simulator fill in their own. Durations are float seconds in the environment; an empty variable
// counts as unset.
struct Settings {
  // PCCL_LOG_LEVEL: least level printed: TRACE DEBUG INFO WARN ERR FATAL NONE, in any case.
  LogLevel log_level = LogLevel::warn;

  // PCCL_BIND: local address (literal or host name, no port) a peer listens on. Empty: all
  // interfaces.
  std::string bind_address;

  // PCCL_HEARTBEAT_INTERVAL: seconds between signs of life on the control connection and on every
  // link in use.
  Duration heartbeat_interval = std::chrono::seconds(1);

  // PCCL_HEARTBEAT_TIMEOUT: silence after which a pair is reported to the master. More than
  // PCCL_LINK_TIMEOUT, so that a cut that heals in time costs nobody its membership.
  Duration heartbeat_timeout = std::chrono::seconds(6);

  // PCCL_RECONNECT_TIMEOUT: how long a control connection that broke alone is re-dialled before the
  // master counts as lost.
  Duration reconnect_timeout = std::chrono::seconds(10);

  // PCCL_LINK_TIMEOUT: how long a connection to another peer is dialled or re-dialled before it is
  // reported.
  Duration link_timeout = std::chrono::seconds(3);

  // PCCL_STRAGGLER_TIMEOUT: a master evicts members that most of the others have waited for this
  // long in one call, and ends calls to which most have not come by then. "none": never.
  std::optional<Duration> straggler_timeout = std::chrono::minutes(30);

  // PCCL_REPLAN_INTERVAL: a master makes a new plan for what transfers have shown at most so often.
  Duration replan_interval = std::chrono::seconds(30);
  // PCCL_MEASURE_AFTER: when an operation took so long and links were never measured, a master has
  // them measured at the next admission point. Zero: never.
  Duration measure_after = std::chrono::seconds(1);

  // PCCL_RELAY: 1 or 0: whether a master relays between peers that no plan can keep apart and that
  // cannot connect.
  bool relay = true;
  // PCCL_RELAY_RATE: bytes per second that a master relays at most, all together. 0: no limit.
  std::uint64_t relay_rate = 0;

  // PCCL_BUFFER_BYTES: bound of this process's receive buffers that were promised to senders as
  // credit. At least four segments.
  std::size_t buffer_bytes = std::size_t{256} << 20;

  // PCCL_SEGMENT_BYTES: unit in flight: checked, acknowledged and sent again as a whole. A multiple
  // of 64, so that no element of any type is split; 4 KiB to 16 MiB.
  std::size_t segment_bytes = std::size_t{512} << 10;

  // PCCL_STRIPES: connections per link, 0 to 255. 0: the library decides.
  unsigned stripes = 0;

  // PCCL_TCP_CONGESTION: congestion control of connections between peers on different hosts. Empty:
  // the system's.
  std::string tcp_congestion;

  // PCCL_SHM: 1 or 0: whether peers on one host reduce in shared memory.
  bool shm = true;

  // PCCL_HOST_ID: peers with different texts count as being on different hosts, whatever they
  // share.
  std::string host_id;

  // PCCL_LOCAL_RANK: this process's number, set by `pccl run`: peers that found a group together
  // are ranked by it. Unset: in the order in which they joined.
  unsigned local_rank = 0xffffffff;

  // PCCL_TIMEOUT: seconds for a call that was given no timeout of its own; "none": waits while
  // members make progress.
  std::optional<Duration> timeout;

  // PCCL_CHECKSUM: auto, always or never.
  Checksum checksum = Checksum::automatic;

  // PCCL_KEY_UPDATE_RECORDS: so many TLS records are sent under one key. 64 GiB by default, where
  // they are full; AES-GCM stands for six times as much (RFC 8446, 5.5).
  std::uint64_t key_update_records = std::uint64_t{1} << 22;

  // A sentence for each of these variables' names that begins as ours do and that nobody reads.
  [[nodiscard]] static std::vector<std::string> unknown(const std::vector<std::string>& names);

  // Reads the process's environment; the first time it also warns of unknown variables. Text that
  // does not parse or is out of range is invalid_argument and names the variable. Not to be called
  // while another thread changes the environment.
  [[nodiscard]] static Result<Settings> from_environment();

  // The same from any source: `lookup(name)` returns the text, or nullptr when unset.
  using Lookup = std::function<const char*(const char* name)>;
  [[nodiscard]] static Result<Settings> from(const Lookup& lookup);
};

}  // namespace pccl
