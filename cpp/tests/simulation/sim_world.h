// The parts of a simulated run: the processes of the master and the peers, the user programs, the
// checks, and the world that contains them and injects faults.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "pccl/link/frame.h"
#include "pccl/master/master.h"
#include "pccl/peer/engine.h"
#include "tests/simulation/sim_memory.h"
#include "tests/simulation/sim_network.h"
#include "tests/simulation/sim_task.h"
#include "tests/simulation/simulation.h"

namespace pccl::simulation {

class World;
class Host;

// -- the master's process

// The master's process: connections, frames, ticks. The master in it may be replaced.
class MasterHost {
 public:
  MasterHost(World& world, std::uint32_t index) : world_(world), index_(index) {}
  void start();
  void stop();                // the process ends and its memory is lost
  void stall(Instant until);  // the process does not run until then
  [[nodiscard]] bool running() const { return master_ != nullptr; }
  [[nodiscard]] const master::Group* group(std::uint32_t id) const {
    return master_ ? master_->group(id) : nullptr;
  }
  [[nodiscard]] std::string name() const {
    return index_ == 0 ? "master" : "master " + std::to_string(index_);
  }
  // With several masters. Null: this one does not serve the group.
  [[nodiscard]] const master::Quorum* quorum(std::uint32_t id) const {
    return master_ ? master_->quorum(id) : nullptr;
  }
  [[nodiscard]] NodeId node() const { return index_ == 0 ? kMasterNode : 1000 + index_; }
  [[nodiscard]] bool quiet() const;  // no byte is in flight, to or from the master
  // `done` gets the connection and the node's side, or null.
  using Through = std::function<void(const ConnectionPtr&, int)>;
  void open_relay(NodeId from, const RelayToken& token, Through done);
  // A peer reports a later epoch than this member's, of that peer alone, and goes on with it.
  void hear_lie(const peer::Session& of);
  // Whether this master serves an epoch that never was.
  [[nodiscard]] bool believes_a_lie() const;

 private:
  struct Meeting {
    master::ExpectRelay expected;
    std::array<NodeId, 2> nodes{};
    std::array<Through, 2> ends;
  };
  void expect_relay(const master::ExpectRelay& expected);
  void put_through(NodeId from, const RelayToken& token, Through done);
  void end_relay(const master::EndRelay& end);
  struct Peer {
    ConnectionPtr connection;
    wire::FrameReader reader{wire::kMaxFirstPayload};
    wire::Envelope heard;  // the latest one
  };
  struct Liar {
    wire::Envelope said;
    wire::Rejoin lie;
  };
  void accept(const ConnectionPtr& connection);
  void pump(master::ConnectionId id);
  void settle();
  void arm();
  [[nodiscard]] wire::Bytes tamper(master::ConnectionId to, wire::Bytes bytes);
  void hear_lie(const Liar& liar);
  void repeat_lie(const Liar& liar);
  void answer_liar(master::ConnectionId to, const wire::Bytes& bytes);
  void liar_lives(master::ConnectionId id);
  void forge_accept(master::ConnectionId from, const wire::Propose& proposal);
  void measure(Host& by, wire::Message& message);

  World& world_;
  std::uint32_t index_;
  std::unique_ptr<master::Master> master_;
  std::map<master::ConnectionId, Peer> peers_;
  std::map<master::ConnectionId, Liar> liars_;
  master::ConnectionId next_connection_ = 1;
  std::uint64_t life_ = 0;
  Instant stalled_until_{};
  Instant timer_{};
  std::list<Meeting> meetings_;
  std::vector<std::pair<std::set<PeerId>, std::weak_ptr<Connection>>> relayed_;
};

// -- a peer's process

// One array of an operation, with its original input.
struct ArrayData {
  DataType dtype = DataType::int64;
  std::uint64_t count = 0;           // as collective::ArrayRef
  std::vector<std::int32_t> values;  // the input
  wire::Bytes input;                 // the same as bytes
  wire::Bytes send;
  wire::Bytes recv;  // unused in place
  // The rounding error kept for each element, after and before the operation; empty: not kept.
  std::vector<float> left_out;
  std::vector<float> left_before;
  bool in_place = false;
  [[nodiscard]] const wire::Bytes& result() const { return in_place ? send : recv; }
};

// Converts whole numbers to elements.
[[nodiscard]] wire::Bytes to_bytes(DataType dtype, const std::vector<std::int64_t>& values);
// REQUIRES: float32 or float16.
[[nodiscard]] std::vector<double> to_numbers(DataType dtype, const wire::Bytes& bytes);

// An operation as the user sees it.
struct Reduction {
  peer::CallPtr call;
  collective::Kind kind = collective::Kind::all_reduce;
  PeerId root;  // of a broadcast
  ReduceOp op = ReduceOp::sum;
  reduce::Quantization quantization;
  std::uint64_t shape = 0;     // members must agree on it
  std::uint64_t position = 0;  // in the user's program; unknown to the engine
  std::vector<ArrayData> arrays;
  std::vector<std::int64_t> result;  // of the first array, after a commit
  std::uint64_t run = 0;
  bool rerun = false;
  std::size_t members = 0;  // for which the arrays are sized, else at the call
  Instant since{};
  bool ended = false;
};
using ReductionPtr = std::shared_ptr<Reduction>;

// The shared state of a user: some values, and the loop's step that made them.
using UserState = std::map<std::string, wire::Bytes>;

// A sync as the user sees it.
struct Syncing {
  peer::CallPtr call;
  bool standing = false;  // the member took part in an earlier sync of this run
  UserState before;
  UserState* live = nullptr;
  std::shared_ptr<const state::LocalState> hashes;
  std::vector<std::shared_ptr<wire::Bytes>> shared;  // see Memory::lay_out
  std::uint64_t run = 0;
  Instant since{};
  bool ended = false;
};
using SyncingPtr = std::shared_ptr<Syncing>;

// A round as the user sees it.
struct RoundEntry {
  peer::CallPtr call;
  std::uint64_t run = 0;
  Instant since{};
  bool ended = false;
};

class UserProgram;

// A peer's place in a replica.
struct RankId {
  std::uint32_t group = 0;
  std::string replica;   // its name
  std::size_t life = 0;  // index in World::lives; a replica that returns has a new one
};

class Host {
 public:
  Host(World& world, NodeId node, const RankId& rank_id);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  void start();
  void kill();
  void freeze();
  void resume();
  void corrupt_next() { corrupt_ = true; }

  [[nodiscard]] NodeId node() const { return node_; }
  [[nodiscard]] std::uint32_t group() const { return rank_id_.group; }
  [[nodiscard]] const RankId& rank_id() const { return rank_id_; }
  [[nodiscard]] bool ended_well() const { return ended_well_; }  // its program has finished
  [[nodiscard]] Instant ended_at() const { return ended_at_; }
  // Collectives of its program with the other ranks of its replica.
  std::uint64_t meetings = 0;
  [[nodiscard]] bool alive() const { return alive_; }
  [[nodiscard]] bool frozen() const { return frozen_; }
  [[nodiscard]] bool program_over() const { return !alive_ || program_over_; }
  [[nodiscard]] peer::Engine& engine() { return *engine_; }
  [[nodiscard]] const peer::Engine& engine() const { return *engine_; }
  [[nodiscard]] Memory& memory() { return memory_; }
  [[nodiscard]] std::uint32_t machine() const { return machine_; }
  [[nodiscard]] const MemoryKey& memory_key() const { return memory_key_; }
  [[nodiscard]] std::string name() const;
  [[nodiscard]] std::string state() const;  // in two or three words
  [[nodiscard]] bool control_quiet() const { return control_ && control_->quiet(); }

  // Runs `what` in this process: now, or once it is thawed; never if it was killed.
  void run(std::function<void()> what);

  // -- for user programs
  struct Until {
    Host& host;
    std::function<bool()> holds;
    [[nodiscard]] bool await_ready() const { return holds(); }
    void await_suspend(std::coroutine_handle<> handle) {
      host.waiters_.push_back({std::move(holds), handle, false});
    }
    void await_resume() const {}
  };
  struct Sleep {
    Host& host;
    Duration duration;
    [[nodiscard]] bool await_ready() const { return false; }
    void await_suspend(std::coroutine_handle<> handle) const;
    void await_resume() const {}
  };
  [[nodiscard]] Until until(std::function<bool()> holds) { return {*this, std::move(holds)}; }
  [[nodiscard]] Sleep sleep(Duration duration) { return {*this, duration}; }
  ReductionPtr reduce(ReductionPtr reduction, peer::OperationRequest request);
  peer::CallPtr enter(wire::RoundKind kind, wire::RoundPayload payload = wire::Nothing{});
  SyncingPtr sync(UserState& state, bool standing);
  void answer_later(const peer::CallPtr& call);
  void program_is_over(bool well);
  [[nodiscard]] World& world() { return world_; }
  [[nodiscard]] const std::list<ReductionPtr>& reductions() const { return reductions_; }
  [[nodiscard]] const std::list<RoundEntry>& rounds() const { return rounds_; }
  [[nodiscard]] const SyncingPtr& syncing() const { return syncing_; }
  void settle();  // called after every use of the engine

 private:
  friend class Checks;
  struct Waiter {
    std::function<bool()> holds;
    std::coroutine_handle<> handle;
    bool woken = false;
  };
  struct Link {
    ConnectionPtr connection;
    int side = 0;
    // The position of the next byte in the stream of frames: for corruptions.
    std::size_t header_filled = 0;
    std::array<std::uint8_t, link::kFrameHeaderBytes> header{};
    std::size_t payload_left = 0;
    std::size_t trailer_left = 0;
    bool checked = false;
  };
  void pump_all();
  void pump(std::uint64_t stripe);
  void read(std::uint64_t stripe, Link& link);
  void write(std::uint64_t stripe, Link& link);
  void follow_frames(Link& link, wire::Bytes& bytes);
  void pump_control();
  void dial_control(std::uint32_t index);
  void dial(const link::DialRequest& request);
  void adopt(std::uint64_t stripe, const ConnectionPtr& connection, int side);
  [[nodiscard]] bool carry_out(peer::EngineActions actions);
  void arm();
  void wake();
  [[nodiscard]] std::uint64_t run_id() const;

  World& world_;
  NodeId node_;
  RankId rank_id_;
  bool ended_well_ = false;
  Instant ended_at_{};
  std::uint32_t machine_ = 0;
  MemoryKey memory_key_;
  Memory memory_{world_, *this};
  std::unique_ptr<peer::Engine> engine_;
  bool alive_ = true;
  bool frozen_ = false;
  bool program_over_ = false;
  bool settling_ = false;
  bool corrupt_ = false;
  std::deque<std::function<void()>> deferred_;  // while frozen
  ConnectionPtr control_;
  std::map<std::uint64_t, Link> stripes_;
  std::uint64_t next_stripe_ = 1;
  Instant timer_ = Instant::max();
  std::list<Waiter> waiters_;
  std::unique_ptr<UserProgram> program_;
  std::list<ReductionPtr> reductions_;  // running ones and some that are over
  std::list<RoundEntry> rounds_;
  SyncingPtr syncing_;              // the latest
  std::optional<UserState> mixed_;  // as a failed sync has left it, with parts of another one
};

// -- user programs

class UserProgram {
 public:
  explicit UserProgram(Host& host) : host_(host) {}
  void start();

 private:
  using Thread = std::uint64_t;
  // The arguments of an operation, equal on all members at the same position.
  struct Shape {
    std::vector<std::pair<DataType, std::size_t>> arrays;
    collective::Kind kind = collective::Kind::all_reduce;
    std::uint64_t root = 0;  // of a broadcast; modulo the number of members
    ReduceOp op = ReduceOp::sum;
    std::uint64_t structure = 0;
    std::uint64_t position = 0;  // in the program; only calls of the same position may meet
    reduce::Quantization quantization;
    bool feedback = false;  // rounding errors are kept
  };

  Task<> explicit_api();
  Task<> simple_api();
  Task<> sync_loop();
  Task<> become_member(Thread thread);
  Task<bool> sync_state(Thread thread);
  void make_state(double chance);
  Task<> threads_main();
  Task<> threads_reduce();
  Task<bool> admit(Thread thread);            // simple API; true: newcomers were admitted
  Task<bool> update_topology(Thread thread);  // explicit API; false: try again
  Task<Error> wait(Thread thread, peer::CallPtr call);
  Task<std::optional<std::uint64_t>> agree_on_step(Thread thread, bool rerun);
  Task<> script(Thread thread, std::uint64_t step);
  Task<> disagree(Thread thread, std::uint64_t step);
  Task<> get_stuck(Thread thread, std::uint64_t step);
  Task<> burst(Thread thread, Random& script);
  Task<> compute(Thread thread, Duration most);
  Task<> meet(Thread thread);

  [[nodiscard]] Shape draw_shape(Random& script) const;
  [[nodiscard]] Shape draw_collective(Random& script) const;
  [[nodiscard]] ReductionPtr start_reduction(const Shape& shape, std::optional<std::uint64_t> tag,
                                             bool rerun, std::optional<std::int32_t> value = {});
  [[nodiscard]] Random script_for(std::uint64_t step, std::uint64_t salt) const;
  [[nodiscard]] bool out() const;
  [[nodiscard]] bool replicas() const;
  [[nodiscard]] std::uint64_t own_rank() const;
  void end();

  Host& host_;
  std::vector<Task<>> tasks_;
  // The members as of the latest call that ended, as node::Communicator keeps them.
  void see(const peer::Record& record) {
    if (record && (!view_ || record->epoch > view_->epoch)) view_ = record;
  }

  std::uint64_t step_ = 0;
  peer::Record view_;
  bool aligned_ = false;
  UserState state_;
  bool synced_ = false;
  bool worked_ = false;      // took part in an operation of the founders before the first sync
  bool state_lost_ = false;  // all holders are gone: this user gives up
  // Program::threads: jobs for the reduce thread
  std::deque<std::pair<Shape, std::uint64_t>> jobs_;
  bool closing_ = false;
  bool busy_ = false;
};

// -- checks

// One function per invariant. The first violation ends the run.
class Checks {
 public:
  explicit Checks(World& world) : world_(world) {}
  void started(const Host& host, const Reduction& reduction);
  void brings(const Syncing& syncing);
  void after_event(Host& host);
  void every_second();
  void at_the_end();
  void rebuild_now();
  void fail(const std::string& invariant, const std::string& what);
  [[nodiscard]] bool failed() const { return !violation_.empty(); }
  [[nodiscard]] const std::string& violation() const { return violation_; }

 private:
  using OpId = std::pair<std::uint64_t, wire::OpKey>;  // run, key
  using RoundId = std::pair<std::uint64_t, wire::RoundKey>;
  struct Contribution {
    Instant since{};  // of the call
    std::uint64_t shape = 0;
    std::uint64_t position = 0;
    ReduceOp op = ReduceOp::sum;
    std::vector<std::pair<DataType, std::vector<std::int32_t>>> arrays;
    std::vector<std::vector<float>> left_before;  // by array
    std::vector<std::vector<float>> left_out;     // after a commit
  };
  struct Ending {
    PeerId peer;
    std::string host;
    Code code = Code::ok;
    std::uint64_t epoch = 0;
    std::vector<PeerId> members;
    std::uint64_t answer = 0;
    PeerId culprit;
    std::vector<wire::Bytes> bytes;
  };
  struct Disagreement {
    PeerId one;
    PeerId other;
    std::string what;
  };
  [[nodiscard]] static std::vector<PeerId> ids(const peer::Record& record);
  void ended(Host& host, Reduction& reduction);
  void ended(Host& host, const RoundEntry& round);
  void ended(Host& host, Syncing& syncing);

  void keeps_no_ended_call(const Host& host);

  // I1
  void one_verdict(const std::string& what, const std::vector<Ending>& before, const Ending& now);
  void settle_disagreements();
  // I2
  void bit_parity(const std::string& what, const std::vector<Ending>& before, const Ending& now);
  [[nodiscard]] static bool near(const Reduction& reduction, const ArrayData& array,
                                 const std::vector<std::int64_t>& expected, std::size_t members,
                                 bool feedback);
  void right_result(const Host& host, const OpId& id, const Reduction& reduction);
  // I3
  [[nodiscard]] static bool ran_by_regions(const Reduction& reduction);
  [[nodiscard]] static bool goes_straight(const Reduction& reduction);
  void nothing_lost(const Host& host, const OpId& id, const Reduction& reduction);
  void inputs_survive(const Host& host, const Reduction& reduction);
  void left_alone(const Host& host, const Reduction& reduction);
  // I8
  void never_a_newcomers(const Host& host, const Syncing& syncing);
  // I4
  void no_hang();
  [[nodiscard]] std::size_t unfinished_segments(const Host& host) const;
  void no_false_alarm(const Host& host, const std::string& what, Code code);
  // Replicas are admitted and removed as a whole.
  void same_replicas(const peer::Record& record);
  void note_losses(const peer::Record& record);
  void replicas_are_whole();
  void replicas_were_the_same();
  // Several masters: one history, one run, and no commit in two memberships that both go on.
  void one_history(const Host& host);
  void one_run(const Host& host);
  void one_membership(const std::string& what, const std::vector<Ending>& before,
                      const Ending& now);
  // I5
  void mismatch_is_for_all(const Host& host, const OpId& id, const Reduction& reduction);
  void same_position(const Host& host, const OpId& id, const Reduction& reduction);

  World& world_;
  std::string violation_;
  std::vector<Disagreement> disagreements_;
  // By run, group and epoch: as the first member applied it.
  std::map<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>, wire::EpochRecord> epochs_;
  std::map<PeerId, peer::Record> seen_;
  struct TwoMemberships {
    std::array<PeerId, 2> peers;
    std::array<std::uint64_t, 2> epochs;
    std::array<bool, 2> go_on{};
    std::string what;
  };
  std::vector<TwoMemberships> twos_;
  std::map<OpId, std::map<PeerId, Contribution>> contributions_;
  std::map<OpId, std::vector<Ending>> operations_;
  std::map<RoundId, std::vector<Ending>> rounds_;
  // By run: the states that standing members brought into a sync.
  std::map<std::uint64_t, std::set<UserState>> standing_states_;
  // By run and admission point: the sets of replicas (by life) that groups had after it.
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::set<std::set<std::size_t>>> points_;
  // Replicas (by life) of which a rank was lost. It may have come back as a newcomer.
  std::set<std::size_t> lost_;
};

// -- the world

class World {
 public:
  World(std::uint64_t seed, const Options& options);
  Report run();

  [[nodiscard]] Instant now() const { return timeline.now(); }
  void log(const std::string& who, const std::string& what);
  [[nodiscard]] bool tracing() const { return options.trace; }
  [[nodiscard]] std::uint64_t seed() const { return seed_; }
  [[nodiscard]] PeerId new_id();
  void add_peer();  // or a replica
  void rank_ended(const Host& host);
  [[nodiscard]] std::optional<NodeId> node_at(const wire::Address& address) const;
  [[nodiscard]] Host* host_of(const PeerId& id);
  [[nodiscard]] Host* host_at(NodeId node);
  // When the last fault ends or has ended.
  [[nodiscard]] Instant calm_since() const { return calm_since_; }
  [[nodiscard]] bool bug_due(Bug bug);  // true once
  void came_back_as_newcomer(const Host& host);
  [[nodiscard]] bool left_at_the_end(const Host& host);
  [[nodiscard]] bool is_outnumbered(const Host& host);
  void judge_unreachable(const Host& host);

  const Options options;
  Timeline timeline;
  Random random;
  Network network;
  Settings settings;
  master::Options master_options;
  bool two_sites = false;  // measurements show two sites
  std::uint32_t eager_bytes = 64 << 10;
  std::uint64_t eager_room = 1 << 20;
  link::StripeTuner::Options stripes{3, 2, 6};
  std::size_t capacity = 4096;
  Duration think{};
  double memory_refused = 0;
  double arrays_shared = 0;        // fraction of arrays that lie in memory shared by the machine
  std::uint32_t block_bytes = 64;  // equal on all peers
  std::shared_ptr<BufferPool> pool = std::make_shared<BufferPool>(std::size_t{1} << 20);
  Report report;
  MasterHost master{*this, 0};
  std::deque<MasterHost> more_masters;
  [[nodiscard]] MasterHost& master_at(std::uint32_t index) {
    return index == 0 ? master : more_masters[index - 1];
  }
  Checks checks{*this};
  std::vector<std::unique_ptr<Host>> hosts;
  // One life of a replica, from its start to its end.
  struct Life {
    std::string name;
    std::vector<Host*> hosts;  // started so far
    bool over = false;         // a rank has ended before its program finished
    bool replaced = false;
    bool comes_back = false;
  };
  std::deque<Life> lives;  // a deque, so that references stay valid

 private:
  enum class Fault : std::uint8_t {
    join,
    kill,
    freeze,
    partition,
    cut,
    stall,
    corrupt,
    leave,
    abort,
    restart,
    master_stall,
    split,
    lie
  };
  Host& add_host(const RankId& rank_id);
  void add_replica(const std::string& name);
  void inject();
  void strike(Fault fault);
  void stop(Fault fault, Host& host);
  [[nodiscard]] MasterHost& pick_master();
  void restart_master(MasterHost& which);
  void split();
  void lie();
  void disturb_until(Instant when) { calm_since_ = std::max(calm_since_, when); }
  [[nodiscard]] Host* pick_host();
  [[nodiscard]] ConnectionPtr pick_connection(Host& host);
  [[nodiscard]] bool waits_for_frozen(const Host& host) const;
  [[nodiscard]] bool over();
  void note(const char* fault, const Host* host);

  std::uint64_t seed_;
  std::vector<Fault> faults_;  // not injected yet; the next one is last
  std::uint64_t next_fault_ = 0;
  std::uint64_t fault_gap_ = 100;
  std::uint64_t next_rebuild_ = 50;
  Instant calm_since_{};
  Instant next_second_{};
  std::uint32_t comebacks_ = 3;
  bool bug_done_ = false;
  std::deque<std::string> trace_;
};

}  // namespace pccl::simulation
