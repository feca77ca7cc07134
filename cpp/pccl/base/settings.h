// All PCCL_* variables of the engine, read in one place. The Python layer and capi/communicator.cpp
// read those that stand for an argument of `pccl.init` (PCCL_MASTER, PCCL_MIN_PEERS, PCCL_PORT,
// PCCL_ADVERTISE, PCCL_SECRET).
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"

namespace pccl {

// Which cipher an end of an encrypted connection prefers.
enum class Cipher : std::uint8_t {
  automatic,  // "auto": AES where the processor has instructions for it, else ChaCha20
  aes,
  chacha20,
};

// Which data frames carry a 64-bit checksum.
enum class Checksum : std::uint8_t {
  automatic,  // "auto": frames that leave the host on an unencrypted link
  always,     // "always": every frame
  never,      // "never": none, to measure the cost of checksums
};

// Read once when a communicator or a master is made, and passed down as const: a later change of
// the environment affects only later objects. Tests and the simulator fill in their own. Durations
// are float seconds in the environment. An empty variable counts as unset. PCCL_LOG_LEVEL and
// PCCL_LOG_FORMAT are only checked here: log.h reads them.
struct Settings {
  // PCCL_NAME: what messages call this peer: 1 to 64 printable ASCII characters without blanks,
  // such as a host and a number. Empty: the host's name and the process id.
  std::string name;

  // PCCL_TRACE: a folder in which each peer writes a trace of its operations. Empty: none.
  std::string trace;
  // PCCL_TRACE_MB: MiB after which a trace ends. 1 to 65536.
  unsigned trace_mb = 256;

  // PCCL_BIND: local address (literal or host name, no port) on which a peer listens. Empty: all.
  std::string bind_address;

  // PCCL_HEARTBEAT_INTERVAL: seconds between heartbeats on the control connection and on links.
  Duration heartbeat_interval = std::chrono::seconds(1);

  // PCCL_HEARTBEAT_TIMEOUT: silence after which a link is reported to the master. Longer than
  // PCCL_LINK_TIMEOUT, so that a short network failure does not cost a peer its membership.
  Duration heartbeat_timeout = std::chrono::seconds(6);

  // PCCL_RECONNECT_TIMEOUT: how long a peer tries to restore a broken control connection before it
  // considers the master lost.
  Duration reconnect_timeout = std::chrono::seconds(10);

  // PCCL_LINK_TIMEOUT: how long a peer tries to connect to another peer before it reports the link.
  Duration link_timeout = std::chrono::seconds(3);

  // PCCL_STRAGGLER_TIMEOUT: a master evicts members for which at least half of the group has waited
  // this long in one call, and ends calls that most members have not entered by then. "none":
  // never.
  std::optional<Duration> straggler_timeout = std::chrono::minutes(30);

  // PCCL_REPLAN_INTERVAL: minimum time between plans that a master makes because transfers have
  // shown other rates.
  Duration replan_interval = std::chrono::seconds(30);
  // PCCL_MEASURE_AFTER: when an operation took at least this long and links were never measured,
  // the master has them measured at the next admission point. Zero: never.
  Duration measure_after = std::chrono::seconds(1);

  // PCCL_RELAY: 1 or 0: whether a master relays between peers that cannot connect, where every plan
  // or a transfer of state needs that link.
  bool relay = true;
  // PCCL_RELAY_RATE: bytes per second that a master relays in all. 0: no limit.
  std::uint64_t relay_rate = 0;

  // PCCL_BUFFER_BYTES: limit on the receive buffers that this process promises to senders as
  // credit. At least four segments.
  std::size_t buffer_bytes = std::size_t{256} << 20;

  // PCCL_SEGMENT_BYTES: size of the unit that is checked, acknowledged and sent again as a whole.
  // 4 KiB to 16 MiB, a multiple of 64, so that no element is split.
  std::size_t segment_bytes = std::size_t{512} << 10;

  // PCCL_STRIPES: connections per link, up to 255. 0: the library decides.
  unsigned stripes = 0;

  // PCCL_THREADS: threads that move and combine the bytes of one communicator, up to 64. 0: half
  // the cores, at most 8.
  unsigned threads = 0;

  // PCCL_TCP_CONGESTION: congestion control of connections between hosts. Empty: BBR on long paths,
  // if the kernel allows it. "system": the system's.
  std::string tcp_congestion;

  // PCCL_SHM: 1 or 0: whether peers on one host reduce in shared memory.
  bool shm = true;

  // PCCL_HOST_ID: peers with different texts count as being on different hosts.
  std::string host_id;

  // PCCL_LOCAL_RANK: this process's number, set by `pccl run`. Orders the ranks of peers that found
  // a group together. Unset: order of joining.
  unsigned local_rank = 0xffffffff;

  // PCCL_TIMEOUT: timeout of calls that have no timeout argument. "none": calls wait while members
  // make progress.
  std::optional<Duration> timeout;

  // PCCL_CHECKSUM: auto, always or never.
  Checksum checksum = Checksum::automatic;

  // PCCL_CIPHER: auto, aes or chacha20.
  Cipher cipher = Cipher::automatic;

  // PCCL_KEY_UPDATE_RECORDS: number of TLS records sent under one key. The default is 64 GiB of
  // full records; AES-GCM is safe for six times as much (RFC 8446, 5.5).
  std::uint64_t key_update_records = std::uint64_t{1} << 22;

  // A sentence for each name that begins with PCCL_ and is not a variable of any layer.
  [[nodiscard]] static std::vector<std::string> unknown(const std::vector<std::string>& names);

  // Reads the process's environment; the first call also warns of unknown variables.
  // invalid_argument: a text does not parse or is out of range; names the variable. REQUIRES: no
  // other thread changes the environment meanwhile.
  [[nodiscard]] static Result<Settings> from_environment();

  // The same from any source: `lookup(name)` returns the text, or nullptr when unset.
  using Lookup = std::function<const char*(const char* name)>;
  [[nodiscard]] static Result<Settings> from(const Lookup& lookup);
};

}  // namespace pccl
