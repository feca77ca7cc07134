// The wide area of benchmarks/wan: carries packets between network namespaces, each of which sees
// it as its device `wan`, as late, as slowly and as unreliably as it is told. lab.py compiles,
// starts and commands it.
//
//   relay SEED MTU NETNS...   one host per file of a namespace; host i has an address that ends
//                             in i+1
//
// A packet goes through
//   its host's up-link     serialised at its rate, behind a bounded queue that drops at its tail
//   the path to the other  random losses, a fixed delay; may be cut
//   that host's site       as the up-link, if it comes from another one: the line of all its hosts
//   that host's down-link  as the up-link
//
// Devices hand over TCP in super-packets (IFF_VNET_HDR, TSO), tens of kilobytes in one call, so
// that packets of 1500 bytes cost little. Rates, queues and losses still count every segment of
// such a super-packet: the ones that get lost are cut out of it, and TCP recovers as it does
// elsewhere. Larger packets would be as cheap, but a connection's speed under loss grows with its
// segment size.
//
// Commands are lines on standard input; each is answered by one line, "ok", "error ..." or JSON:
//   delay A B MS          one way, from A to B, as all that is said of two hosts
//   loss A B SHARE        of segments
//   rate H UP DOWN MS     Mbit/s of IP packets, 0: no limit; queues hold that many ms of it
//   site H S              the host is on site S; before that, on one of its own, of its number
//   line S MBIT MS        what enters a site shares that
//   cut A B, heal A B     what is on its way is lost, too
//   reset A B COUNT PORT  the next COUNT packets of TCP data between the two reset their
//                         connections at both ends; PORT: only of that port, negative: of any but
//                         that one, 0: of any. COUNT 0 calls it off
//   stats                 counters since the start, or the last `clear`
//   clear
// It ends at the end of its input.
//
// One thread. Memory is one ring for each host, and a packet stays in one place while it is here.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Nanoseconds = double;  // of CLOCK_MONOTONIC

// virtio_net_hdr, which the device puts before every packet; <linux/virtio_net.h> is not C++.
struct Offload {
  static constexpr std::uint8_t kNone = 0;  // not a super-packet
  std::uint8_t flags = 0, kind = 0;
  std::uint16_t header_bytes = 0, segment_bytes = 0, checksum_start = 0, checksum_offset = 0;
};
static_assert(sizeof(Offload) == 10);

constexpr std::size_t kMaxHosts = 64;
constexpr std::size_t kVirtio = sizeof(Offload);
constexpr std::size_t kMostBytes = kVirtio + 65535;        // of one read
constexpr std::size_t kRingBytes = std::size_t{64} << 20;  // a second at 500 Mbit/s
constexpr std::size_t kLine = 64;
constexpr int kReads = 64;                 // from one host before what is due is written
constexpr Nanoseconds kRest = 50e3;        // while packets come: more of them for each wake-up
constexpr Nanoseconds kLook = 1e6;         // while packets come: between two looks for commands
constexpr double kLeastQueue = 16 * 1500;  // bytes, however slow a link is
constexpr std::size_t kMostResets = 256;   // connections that are remembered as reset

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "relay: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

Nanoseconds clock_now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec time{};
  clock_gettime(clock, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

timespec interval(Nanoseconds time) {
  const auto whole = static_cast<std::int64_t>(time);
  return {static_cast<time_t>(whole / 1'000'000'000), static_cast<long>(whole % 1'000'000'000)};
}

// ---- packets ------------------------------------------------------------------------------------

std::uint16_t get16(const std::uint8_t* from) {
  return static_cast<std::uint16_t>(from[0] << 8 | from[1]);
}

std::uint32_t get32(const std::uint8_t* from) {
  return static_cast<std::uint32_t>(get16(from)) << 16 | get16(from + 2);
}

void put16(std::uint8_t* to, std::uint32_t value) {
  to[0] = static_cast<std::uint8_t>(value >> 8);
  to[1] = static_cast<std::uint8_t>(value);
}

void put32(std::uint8_t* to, std::uint32_t value) {
  put16(to, value >> 16);
  put16(to + 2, value);
}

// The Internet checksum's sum, not inverted. REQUIRES: an even number of bytes.
std::uint32_t sum16(const std::uint8_t* from, std::size_t bytes, std::uint32_t sum = 0) {
  for (std::size_t i = 0; i < bytes; i += 2) sum += get16(from + i);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return sum;
}

// The sum of the pseudo header of TCP over IPv4.
std::uint32_t pseudo_sum(const std::uint8_t* ip, std::uint32_t tcp_bytes) {
  return sum16(ip + 12, 8, IPPROTO_TCP + tcp_bytes);
}

constexpr std::uint32_t kLongAgo = 1U << 30;  // bytes: more than any window
constexpr std::uint8_t kFin = 1, kSyn = 2, kRst = 4, kPush = 8, kAck = 16, kCwr = 128;

// A record in a ring: this, the virtio header, the IP packet.
struct Packet {
  Packet* next = nullptr;   // in the queue that it waits in
  Nanoseconds due = 0;      // when it leaves that
  std::uint32_t room = 0;   // bytes of the record
  std::uint32_t bytes = 0;  // of the virtio header and the packet
  std::uint32_t segments = 1;
  std::uint32_t headers = 0;  // bytes of IP and TCP headers, which each segment has
  std::uint32_t payload = 0;  // bytes of all segments but the last, which may have fewer
  std::uint8_t source = 0, target = 0;
  bool gone = false;  // its room is free as soon as all before it are gone, too

  [[nodiscard]] std::uint8_t* data();
  [[nodiscard]] std::uint8_t* ip() { return data() + kVirtio; }
  [[nodiscard]] std::uint8_t* tcp() { return ip() + 4 * (ip()[0] & 15U); }
  [[nodiscard]] bool is_tcp() {
    return ip()[9] == IPPROTO_TCP && bytes >= kVirtio + 40 && (get16(ip() + 6) & 0x3fff) == 0;
  }
  // On the wire, without anything below IP.
  [[nodiscard]] std::uint32_t wire_bytes() const {
    return bytes - static_cast<std::uint32_t>(kVirtio) + (segments - 1) * headers;
  }
};
static_assert(sizeof(Packet) <= kLine);

std::uint8_t* Packet::data() { return reinterpret_cast<std::uint8_t*>(this) + kLine; }

// Makes `packet` a super-packet, or packet, of `count` of its segments from `first` on; data() has
// them already behind the headers. `all`: what it was before.
void become(Packet& packet, const Packet& all, std::uint32_t first, std::uint32_t count) {
  const std::uint32_t offset = first * all.payload;
  const std::uint32_t whole = all.bytes - static_cast<std::uint32_t>(kVirtio) - all.headers;
  const std::uint32_t bytes = std::min(count * all.payload, whole - offset);
  packet.segments = count;
  packet.bytes = static_cast<std::uint32_t>(kVirtio) + all.headers + bytes;
  std::uint8_t* ip = packet.ip();
  std::uint8_t* tcp = packet.tcp();
  const auto ip_headers = static_cast<std::uint32_t>(tcp - ip);
  if (count == 1) {
    Offload header;
    std::memcpy(&header, packet.data(), kVirtio);
    header.kind = Offload::kNone;
    header.segment_bytes = 0;
    std::memcpy(packet.data(), &header, kVirtio);
  }
  put16(ip + 2, all.headers + bytes);
  put16(ip + 4, get16(ip + 4) + first);  // as if it had been cut up before
  put16(ip + 10, 0);
  put16(ip + 10, ~sum16(ip, ip_headers));
  put32(tcp + 4, get32(tcp + 4) + offset);
  if (first + count < all.segments) tcp[13] &= static_cast<std::uint8_t>(~(kFin | kPush));
  if (first > 0) tcp[13] &= static_cast<std::uint8_t>(~kCwr);
  // The kernel that gets it completes the checksum, as it would have for all of it.
  put16(tcp + 16, pseudo_sum(ip, all.headers - ip_headers + bytes));
}

// ---- memory and queues --------------------------------------------------------------------------

// Records of one host in order of their arrival, each in one piece.
class Ring {
 public:
  Ring() {
    void* memory = mmap(nullptr, kRingBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    memory_ = static_cast<std::uint8_t*>(memory);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { munmap(memory_, kRingBytes); }

  // Room for the largest packet, until `keep`; null when there is none.
  [[nodiscard]] Packet* offer() {
    if (head_ == tail_) head_ = tail_ = 0;  // memory that is in the cache
    if (tail_ >= head_ && kRingBytes - tail_ < kMost) {
      if (head_ <= kMost) return nullptr;
      if (tail_ < kRingBytes) {
        auto* filler = new (memory_ + tail_) Packet;
        filler->room = static_cast<std::uint32_t>(kRingBytes - tail_);
        filler->gone = true;
      }
      tail_ = 0;
    }
    if (tail_ < head_ && head_ - tail_ <= kMost) return nullptr;
    return new (memory_ + tail_) Packet;
  }
  void keep(Packet& packet) {
    packet.room = static_cast<std::uint32_t>((kLine + packet.bytes + kLine - 1) / kLine * kLine);
    tail_ += packet.room;
  }
  void release(Packet& packet) {
    packet.gone = true;
    while (head_ != tail_) {
      if (head_ == kRingBytes) {
        head_ = 0;
        continue;
      }
      const auto* first = reinterpret_cast<const Packet*>(memory_ + head_);
      if (!first->gone) break;
      head_ += first->room;
    }
  }

 private:
  static constexpr std::size_t kMost = 2 * kLine + (kMostBytes + kLine - 1) / kLine * kLine;
  std::uint8_t* memory_ = nullptr;
  std::size_t head_ = 0, tail_ = 0;  // the same: nothing in it
};

// First in, first out; a packet is in one of them at most.
class Queue {
 public:
  [[nodiscard]] Packet* first() const { return first_; }
  void push(Packet& packet) {
    packet.next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = &packet;
    last_ = &packet;
  }
  void pop() { first_ = first_->next; }

 private:
  Packet* first_ = nullptr;
  Packet* last_ = nullptr;
};

// An up-link or a down-link.
class Pipe {
 public:
  void set(double mbit, double queue_ms, Nanoseconds now) {
    const double waiting = per_byte_ > 0 ? std::max(free_at_ - now, 0.0) / per_byte_ : 0;
    per_byte_ = mbit > 0 ? 8e3 / mbit : 0;
    queue_bytes_ = std::max(kLeastQueue, mbit * 125 * queue_ms);
    free_at_ = now + waiting * per_byte_;
  }
  // How many of its segments find room, when it arrives at `now`; those pass, and the last of them
  // is through at `through`.
  [[nodiscard]] std::uint32_t enter(const Packet& packet, Nanoseconds now, Nanoseconds& through) {
    through = now;
    if (per_byte_ == 0) return packet.segments;
    const Nanoseconds begin = std::max(free_at_, now);
    const double room = queue_bytes_ - (begin - now) / per_byte_;
    std::uint32_t fit = packet.segments;
    double bytes = packet.wire_bytes();
    if (bytes > room) {
      const std::uint32_t each = packet.headers + packet.payload;
      fit = packet.segments == 1 ? 0 : static_cast<std::uint32_t>(std::max(room, 0.0) / each);
      fit = std::min(fit, packet.segments - 1);
      bytes = fit * each;
    }
    if (fit > 0) free_at_ = through = begin + bytes * per_byte_;
    return fit;
  }

 private:
  double per_byte_ = 0;  // nanoseconds; 0: no limit
  double queue_bytes_ = 0;
  Nanoseconds free_at_ = 0;  // when all that has entered is through
};

struct Counters {  // of segments, save bytes and resets
  std::uint64_t delivered = 0, bytes = 0, lost = 0, up_full = 0, line_full = 0, down_full = 0,
                cut = 0, no_room = 0;
  std::uint64_t resets = 0;
};

// From one host to another.
struct Path {
  Nanoseconds delay = 0;
  double loss = 0;
  std::uint64_t until_loss = 0;  // segments that still arrive before one does not
  bool cut = false;
  Queue queue;
  Nanoseconds last_due = 0;  // it never reorders
  std::mt19937_64 random;    // its own: the same losses whatever the other paths carry
  Counters counters;

  void draw() {
    if (loss > 0) until_loss = std::geometric_distribution<std::uint64_t>(loss)(random);
  }
};

// Connections that are to be reset between two hosts, either way.
struct Order {
  int count = 0;
  int port = 0;  // negative: of any but that one; 0: any
};

// A connection that is reset. An end obeys a reset only if its number is the very next one it
// expects (RFC 5961), and that is only known from what it sends: so whatever comes on it is
// answered by a reset, and at first both ends get a byte from long ago, which they have to
// acknowledge.
struct Flow {
  std::uint8_t one = 0, other = 0;  // hosts
  std::uint16_t one_port = 0, other_port = 0;
};

struct Station {
  int device = -1;
  Ring ring;
  Pipe up, down;
  Queue entering;  // through its site's line, until it is out of it
  Queue out;       // through the down-link, until it is out of it
  std::size_t site = 0;
};

// How late packets left, by powers of two of nanoseconds.
struct Lateness {
  std::array<std::uint64_t, 64> counts{};
  std::uint64_t all = 0;
  double sum = 0, most = 0;

  void add(Nanoseconds late) {
    ++counts[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(late)))];
    ++all;
    sum += late;
    most = std::max(most, late);
  }
  [[nodiscard]] double percentile(double share) const {
    std::uint64_t seen = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      seen += counts[i];
      if (static_cast<double>(seen) >= share * static_cast<double>(all)) {
        return std::min(std::ldexp(1.0, static_cast<int>(i)), most);
      }
    }
    return most;
  }
};

// ---- the relay ----------------------------------------------------------------------------------

class Relay {
 public:
  Relay(std::uint64_t seed, int mtu, const std::vector<std::string>& namespaces);
  void run();

 private:
  [[nodiscard]] Path& path(std::size_t from, std::size_t to) { return paths_[from * count_ + to]; }
  [[nodiscard]] Order& order(std::size_t a, std::size_t b) {
    return orders_[std::min(a, b) * count_ + std::max(a, b)];
  }
  bool take_in(std::size_t from);
  bool understand(Packet& packet, std::size_t from) const;
  void send(Packet& packet, std::size_t from);
  void send_runs(const Packet& packet, Nanoseconds due);
  void join_path(Packet& packet, Nanoseconds due);
  [[nodiscard]] bool is_reset(Packet& packet);
  void answer_reset(Packet& packet);
  void write_segment(std::size_t to, Packet& packet, bool back, bool reset);
  [[nodiscard]] Flow* find_flow(Packet& packet);
  [[nodiscard]] Queue* earliest(std::size_t to, bool from_here, Nanoseconds now);
  [[nodiscard]] bool pass(Packet& packet, Pipe& pipe, std::uint64_t& full);
  void arrive(std::size_t to, Nanoseconds now);
  bool write_out(std::size_t to, Nanoseconds now);
  [[nodiscard]] Nanoseconds next_due() const;
  bool hear();
  [[nodiscard]] std::string obey(const std::string& line);
  [[nodiscard]] std::string stats() const;
  void clear();

  std::size_t count_;
  std::deque<Station> stations_;
  std::vector<Pipe> lines_;    // by site
  std::vector<Path> paths_;    // count_ * count_, by source, then target
  std::vector<Order> orders_;  // the same, by the lower host, then the higher
  std::deque<Flow> flows_;
  std::array<std::uint8_t, 3> network_{};  // addresses begin with; known from the first packet on
  std::vector<std::uint8_t> scratch_ = std::vector<std::uint8_t>(kLine + kMostBytes);
  std::string heard_;  // of a line that is not complete
  std::uint64_t write_errors_ = 0;
  Lateness lateness_;
  Nanoseconds began_ = 0, cpu_began_ = 0;
};

// Makes the device `wan` in a namespace. It goes when the descriptor is closed.
int make_device(const std::string& name, int mtu) {
  const int file = open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0 || setns(file, CLONE_NEWNET) != 0) fail(name.c_str());
  close(file);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  ifreq request{};
  std::memcpy(request.ifr_name, "wan", 4);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) fail("TUNSETOFFLOAD");
  const int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  request.ifr_mtu = mtu;
  if (ioctl(control, SIOCSIFMTU, &request) != 0) fail("SIOCSIFMTU");
  // Packets that wait until this process has its turn; the links' queues are here.
  request.ifr_qlen = 10000;
  if (ioctl(control, SIOCSIFTXQLEN, &request) != 0) fail("SIOCSIFTXQLEN");
  close(control);
  return device;
}

Relay::Relay(std::uint64_t seed, int mtu, const std::vector<std::string>& namespaces)
    : count_(namespaces.size()),
      stations_(count_),
      lines_(count_),
      paths_(count_ * count_),
      orders_(count_ * count_),
      began_(clock_now()),
      cpu_began_(clock_now(CLOCK_PROCESS_CPUTIME_ID)) {
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    std::seed_seq seeds{seed, static_cast<std::uint64_t>(i)};
    paths_[i].random.seed(seeds);
  }
  const int home = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  for (std::size_t i = 0; i < count_; ++i) {
    stations_[i].device = make_device(namespaces[i], mtu);
    stations_[i].site = i;
  }
  if (home < 0 || setns(home, CLONE_NEWNET) != 0) fail("the namespace it came from");
  close(home);
}

// Reads one packet; false when none is there.
bool Relay::take_in(std::size_t from) {
  Station& station = stations_[from];
  Packet* packet = station.ring.offer();
  const bool room = packet != nullptr;
  if (!room) packet = new (scratch_.data()) Packet;
  const ssize_t bytes = read(station.device, packet->data(), kMostBytes);
  if (bytes <= 0) return false;
  packet->bytes = static_cast<std::uint32_t>(bytes);
  if (!understand(*packet, from)) return true;
  Counters& counters = path(from, packet->target).counters;
  if (!room) {
    counters.no_room += packet->segments;
  } else if (path(from, packet->target).cut) {
    counters.cut += packet->segments;
  } else if (!packet->is_tcp() || !is_reset(*packet)) {
    send(*packet, from);
  }
  return true;
}

// Whose it is, and its segments; false: not one of ours, such as multicast.
bool Relay::understand(Packet& packet, std::size_t from) const {
  const std::uint8_t* ip = packet.ip();
  if (packet.bytes < kVirtio + 20 || ip[0] >> 4 != 4) return false;
  const auto target = static_cast<std::size_t>(ip[19]) - 1;
  if (target >= count_ || target == from || std::memcmp(ip + 12, ip + 16, 3) != 0) return false;
  packet.source = static_cast<std::uint8_t>(from);
  packet.target = static_cast<std::uint8_t>(target);
  Offload header;
  std::memcpy(&header, packet.data(), kVirtio);
  if (header.kind == Offload::kNone || header.segment_bytes == 0 || !packet.is_tcp()) {
    return true;
  }
  const std::uint8_t* tcp = packet.tcp();
  packet.headers = static_cast<std::uint32_t>(tcp - ip) + 4 * (tcp[12] >> 4U);
  packet.payload = header.segment_bytes;
  const auto all = packet.bytes - static_cast<std::uint32_t>(kVirtio);
  if (all <= packet.headers) return false;
  packet.segments = (all - packet.headers + packet.payload - 1) / packet.payload;
  return true;
}

// Through the up-link and onto the path. It lies where its ring offered room.
void Relay::send(Packet& packet, std::size_t from) {
  Path& way = path(from, packet.target);
  Nanoseconds through = 0;
  const std::uint32_t fit = stations_[from].up.enter(packet, clock_now(), through);
  way.counters.up_full += packet.segments - fit;
  if (fit == 0) return;
  if (fit < packet.segments) become(packet, Packet(packet), 0, fit);
  const Nanoseconds due = std::max(way.last_due, through + way.delay);
  way.last_due = due;
  if (way.loss > 0 && way.until_loss < packet.segments) {
    send_runs(packet, due);
    return;
  }
  way.until_loss -= way.loss > 0 ? packet.segments : 0;
  join_path(packet, due);
}

// Each run of segments between two that are lost becomes a packet of its own.
void Relay::send_runs(const Packet& packet, Nanoseconds due) {
  const Packet all = packet;
  std::memcpy(scratch_.data(), &packet, kLine + packet.bytes);
  Path& way = path(all.source, all.target);
  for (std::uint32_t first = 0; first < all.segments; ++first) {
    const auto run =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(way.until_loss, all.segments - first));
    if (run > 0) {
      Packet* part = stations_[all.source].ring.offer();
      if (part == nullptr) {
        way.counters.no_room += run;
      } else {
        *part = all;
        const std::size_t headers = kVirtio + all.headers;
        const std::size_t offset = std::size_t{first} * all.payload;
        const std::uint8_t* data = scratch_.data() + kLine;
        std::memcpy(part->data(), data, headers);
        std::memcpy(
            part->data() + headers, data + headers + offset,
            std::min<std::size_t>(std::size_t{run} * all.payload, all.bytes - headers - offset));
        become(*part, all, first, run);
        join_path(*part, due);
      }
    }
    first += run;
    way.until_loss -= run;
    if (first < all.segments) {
      ++way.counters.lost;
      way.draw();
    }
  }
}

void Relay::join_path(Packet& packet, Nanoseconds due) {
  stations_[packet.source].ring.keep(packet);
  packet.due = due;
  path(packet.source, packet.target).queue.push(packet);
}

// The queue whose head was due first, among those from this site or from other sites. Null: no
// packet is due.
Queue* Relay::earliest(std::size_t to, bool from_here, Nanoseconds now) {
  Queue* queue = nullptr;
  for (std::size_t from = 0; from < count_; ++from) {
    if (from == to || (stations_[from].site == stations_[to].site) != from_here) continue;
    Queue& way = path(from, to).queue;
    if (way.first() == nullptr || way.first()->due > now) continue;
    if (queue == nullptr || way.first()->due < queue->first()->due) queue = &way;
  }
  return queue;
}

// Whether some of it finds room in the pipe, which it leaves when it is due then.
bool Relay::pass(Packet& packet, Pipe& pipe, std::uint64_t& full) {
  // When it arrived, not when this process came to it: lateness does not add up.
  const std::uint32_t fit = pipe.enter(packet, packet.due, packet.due);
  full += packet.segments - fit;
  if (fit == 0) {
    stations_[packet.source].ring.release(packet);
    return false;
  }
  if (fit < packet.segments) become(packet, Packet(packet), 0, fit);
  return true;
}

// Moves the packets that are due, in their order, into the down-link. Packets from another site
// pass the site's line first.
void Relay::arrive(std::size_t to, Nanoseconds now) {
  Station& station = stations_[to];
  const auto take = [&](Queue& queue) {
    Packet& packet = *queue.first();
    queue.pop();
    return &packet;
  };
  const auto is_cut = [&](Packet& packet) {
    Path& way = path(packet.source, to);
    if (!way.cut) return false;
    way.counters.cut += packet.segments;
    stations_[packet.source].ring.release(packet);
    return true;
  };
  while (Queue* queue = earliest(to, false, now)) {
    Packet& packet = *take(*queue);
    std::uint64_t& full = path(packet.source, to).counters.line_full;
    if (!is_cut(packet) && pass(packet, lines_[station.site], full)) station.entering.push(packet);
  }
  for (;;) {
    Queue* queue = earliest(to, true, now);
    const Packet* outside = station.entering.first();
    if (outside != nullptr && outside->due <= now &&
        (queue == nullptr || outside->due < queue->first()->due))
      queue = &station.entering;
    if (queue == nullptr) return;
    Packet& packet = *take(*queue);
    std::uint64_t& full = path(packet.source, to).counters.down_full;
    if (!is_cut(packet) && pass(packet, station.down, full)) station.out.push(packet);
  }
}

// Hands over what has left the down-link; whether there was anything.
bool Relay::write_out(std::size_t to, Nanoseconds now) {
  Station& station = stations_[to];
  bool any = false;
  while (Packet* packet = station.out.first()) {
    if (packet->due > now) break;
    any = true;
    station.out.pop();
    if (flows_.empty() || !packet->is_tcp() || find_flow(*packet) == nullptr) {
      const ssize_t written = write(station.device, packet->data(), packet->bytes);
      write_errors_ += written < 0 ? 1 : 0;
      Counters& counters = path(packet->source, to).counters;
      counters.delivered += packet->segments;
      counters.bytes += packet->wire_bytes();
      lateness_.add(now - packet->due);
    }
    stations_[packet->source].ring.release(*packet);
  }
  return any;
}

// ---- resets -------------------------------------------------------------------------------------

Flow* Relay::find_flow(Packet& packet) {
  const std::uint8_t a = packet.source, b = packet.target;
  const std::uint16_t from = get16(packet.tcp()), to = get16(packet.tcp() + 2);
  for (Flow& flow : flows_) {
    if ((flow.one == a && flow.other == b && flow.one_port == from && flow.other_port == to) ||
        (flow.one == b && flow.other == a && flow.one_port == to && flow.other_port == from)) {
      return &flow;
    }
  }
  return nullptr;
}

// Whether its connection is reset, by an order that it meets or by an earlier one: then it goes no
// further.
bool Relay::is_reset(Packet& packet) {
  Order& wanted = order(packet.source, packet.target);
  if (flows_.empty() && wanted.count == 0) return false;
  const std::uint8_t* tcp = packet.tcp();
  if (Flow* flow = find_flow(packet)) {
    if ((tcp[13] & (kSyn | kAck)) == kSyn) {  // a new connection of the same ports
      *flow = flows_.back();
      flows_.pop_back();
      return false;
    }
    answer_reset(packet);
    return true;
  }
  const int from = get16(tcp), to = get16(tcp + 2);
  const int port = std::abs(wanted.port);
  const bool has_port = from == port || to == port;
  const std::uint32_t headers = static_cast<std::uint32_t>(tcp - packet.ip()) + 4 * (tcp[12] >> 4U);
  const bool has_data = packet.bytes > kVirtio + headers && (tcp[13] & (kSyn | kRst)) == 0;
  if (wanted.count == 0 || !has_data || (wanted.port != 0 && has_port != (wanted.port > 0))) {
    return false;
  }
  --wanted.count;
  if (flows_.size() == kMostResets) flows_.pop_front();
  flows_.push_back({packet.source, packet.target, get16(tcp), get16(tcp + 2)});
  ++path(packet.source, packet.target).counters.resets;
  write_segment(packet.target, packet, false, false);
  write_segment(packet.source, packet, true, false);
  return true;
}

void Relay::answer_reset(Packet& packet) {
  const std::uint8_t flags = packet.tcp()[13];
  if ((flags & kRst) == 0 && (flags & kAck) != 0) write_segment(packet.source, packet, true, true);
}

// To one end of the connection of `packet`, at once, as if from the other one: a reset, or a byte
// from long ago. `back`: to the end that sent `packet`.
void Relay::write_segment(std::size_t to, Packet& packet, bool back, bool reset) {
  const std::size_t size = reset ? 40 : 41;
  std::array<std::uint8_t, kVirtio + 42> bytes{};
  std::uint8_t* ip = bytes.data() + kVirtio;
  std::uint8_t* tcp = ip + 20;
  const std::uint8_t* old_ip = packet.ip();
  const std::uint8_t* old_tcp = packet.tcp();
  ip[0] = 0x45;
  put16(ip + 2, static_cast<std::uint32_t>(size));
  ip[8] = 64;
  ip[9] = IPPROTO_TCP;
  std::memcpy(ip + 12, old_ip + (back ? 16 : 12), 4);
  std::memcpy(ip + 16, old_ip + (back ? 12 : 16), 4);
  put16(ip + 10, ~sum16(ip, 20));
  std::memcpy(tcp, old_tcp + (back ? 2 : 0), 2);
  std::memcpy(tcp + 2, old_tcp + (back ? 0 : 2), 2);
  const std::uint32_t number = get32(old_tcp + (back ? 8 : 4));
  put32(tcp + 4, reset ? number : number - kLongAgo);
  put32(tcp + 8, reset ? 0 : get32(old_tcp + (back ? 4 : 8)));
  tcp[12] = 5 << 4;
  tcp[13] = reset ? kRst : kAck;
  const std::uint32_t sum = pseudo_sum(ip, static_cast<std::uint32_t>(size - 20));
  put16(tcp + 16, ~sum16(tcp, 22, sum));  // the byte, 0, and a 0 to make it even
  if (write(stations_[to].device, bytes.data(), kVirtio + size) < 0) ++write_errors_;
}

// ---- commands -----------------------------------------------------------------------------------

std::string Relay::obey(const std::string& line) {
  std::istringstream words(line);
  std::string what;
  std::size_t a = 0, b = 0;
  words >> what;
  if (what == "stats") return stats();
  if (what == "clear") {
    clear();
    return "ok";
  }
  words >> a;
  if (!words || a >= count_) return "error: " + line;
  if (what == "line") {
    double mbit = 0, queue_ms = 0;
    words >> mbit >> queue_ms;
    if (!words) return "error: " + line;
    lines_[a].set(mbit, queue_ms, clock_now());
    return "ok";
  }
  if (what == "site") {
    words >> b;
    if (!words || b >= count_) return "error: " + line;
    stations_[a].site = b;
    return "ok";
  }
  if (what == "rate") {
    double up = 0, down = 0, queue_ms = 0;
    words >> up >> down >> queue_ms;
    if (!words) return "error: " + line;
    stations_[a].up.set(up, queue_ms, clock_now());
    stations_[a].down.set(down, queue_ms, clock_now());
    return "ok";
  }
  words >> b;
  if (!words || b >= count_ || b == a) return "error: " + line;
  Path& way = path(a, b);
  if (what == "cut" || what == "heal") {
    way.cut = what == "cut";
    return "ok";
  }
  double number = 0;
  words >> number;
  if (!words || number < 0) return "error: " + line;
  if (what == "delay") {
    way.delay = 1e6 * number;
  } else if (what == "loss" && number < 1) {
    way.loss = number;
    way.draw();
  } else if (what == "reset") {
    int port = 0;
    words >> port;
    order(a, b) = {static_cast<int>(number), port};
  } else {
    return "error: " + line;
  }
  return "ok";
}

std::string Relay::stats() const {
  std::ostringstream text;
  text.precision(12);
  text << "{\"seconds\": " << (clock_now() - began_) / 1e9
       << ", \"cpu_seconds\": " << (clock_now(CLOCK_PROCESS_CPUTIME_ID) - cpu_began_) / 1e9
       << ", \"late_ms\": {\"mean\": "
       << lateness_.sum / 1e6 / static_cast<double>(std::max<std::uint64_t>(lateness_.all, 1))
       << ", \"p99\": " << lateness_.percentile(0.99) / 1e6
       << ", \"most\": " << lateness_.most / 1e6 << "}, \"write_errors\": " << write_errors_
       << ", \"paths\": [";
  const char* comma = "";
  for (std::size_t from = 0; from < count_; ++from) {
    for (std::size_t to = 0; to < count_; ++to) {
      if (from == to) continue;
      const Counters& of = paths_[from * count_ + to].counters;
      text << comma << "{\"source\": " << from << ", \"target\": " << to
           << ", \"delivered\": " << of.delivered << ", \"bytes\": " << of.bytes
           << ", \"lost\": " << of.lost << ", \"up_full\": " << of.up_full
           << ", \"line_full\": " << of.line_full << ", \"down_full\": " << of.down_full
           << ", \"cut\": " << of.cut << ", \"no_room\": " << of.no_room
           << ", \"resets\": " << of.resets << "}";
      comma = ", ";
    }
  }
  text << "]}";
  return text.str();
}

void Relay::clear() {
  for (Path& way : paths_) way.counters = {};
  write_errors_ = 0;
  lateness_ = {};
  began_ = clock_now();
  cpu_began_ = clock_now(CLOCK_PROCESS_CPUTIME_ID);
}

// Reads commands; false at the end of the input.
bool Relay::hear() {
  std::array<char, 4096> bytes{};
  const ssize_t count = read(STDIN_FILENO, bytes.data(), bytes.size());
  if (count <= 0) return false;
  heard_.append(bytes.data(), static_cast<std::size_t>(count));
  for (std::size_t end = 0; (end = heard_.find('\n')) != std::string::npos;) {
    std::puts(obey(heard_.substr(0, end)).c_str());
    heard_.erase(0, end + 1);
  }
  std::fflush(stdout);
  return true;
}

// ---- the loop -----------------------------------------------------------------------------------

Nanoseconds Relay::next_due() const {
  Nanoseconds next = INFINITY;
  for (const Path& way : paths_) {
    if (const Packet* packet = way.queue.first()) next = std::min(next, packet->due);
  }
  for (const Station& station : stations_) {
    for (const Queue* queue : {&station.entering, &station.out})
      if (const Packet* packet = queue->first()) next = std::min(next, packet->due);
  }
  return next;
}

void Relay::run() {
  std::vector<pollfd> files;
  for (const Station& station : stations_) files.push_back({station.device, POLLIN, 0});
  files.push_back({STDIN_FILENO, POLLIN, 0});
  std::puts("ready");
  std::fflush(stdout);
  Nanoseconds looked = 0;
  for (;;) {
    const Nanoseconds now = clock_now();
    bool moved = false;
    for (std::size_t host = 0; host < count_; ++host) {
      arrive(host, now);
      moved = write_out(host, now) || moved;
    }
    for (std::size_t host = 0; host < count_; ++host) {
      for (int i = 0; i < kReads && take_in(host); ++i) moved = true;
    }
    Nanoseconds wait = next_due() - clock_now();
    if (moved) {
      if (wait > 0) {
        const timespec rest = interval(std::min(wait, kRest));
        clock_nanosleep(CLOCK_MONOTONIC, 0, &rest, nullptr);
      }
      if (now - looked < kLook) continue;
      wait = 0;
    }
    looked = now;
    const timespec limit = interval(std::clamp(wait, 0.0, 1e9));
    if (ppoll(files.data(), files.size(), &limit, nullptr) < 0 && errno != EINTR) fail("ppoll");
    if (files.back().revents != 0 && !hear()) return;
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 5 || static_cast<std::size_t>(count) > 3 + kMaxHosts) {
    std::fprintf(stderr, "relay SEED MTU NETNS NETNS...: 2 to %zu namespaces\n", kMaxHosts);
    return 2;
  }
  // Before others who want the processor, so that delays are what they should be; without the
  // right to that, it goes on as it is.
  const sched_param priority{.sched_priority = 1};
  sched_setscheduler(0, SCHED_RR, &priority);
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  const std::vector<std::string> namespaces(words + 3, words + count);
  const auto relay = std::make_unique<Relay>(std::strtoull(words[1], nullptr, 10),
                                             std::atoi(words[2]), namespaces);
  relay->run();
  std::puts("ended");
}
