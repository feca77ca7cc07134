// Fits a line with several peers:  line MASTER PEERS NUMBER
//
// Every peer has its own points of y = 3x - 1, computes gradients from them, and averages them with
// the others: several arrays in one call, which runs again by itself when a member is lost. Weights
// stay equal on all members to the last bit.

#include <pccl.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void check(pcclResult_t result) {
  if (result != pcclSuccess) throw std::runtime_error(pcclGetLastError());
}

// Owns the handle, and leaves the run at the end.
class Communicator {
 public:
  explicit Communicator(const char* master) {
    check(pcclInit());
    pcclCommCreateParams_t params{};
    check(pcclResolveAddress(master, &params.master_address));
    check(pcclCreateCommunicator(&params, &comm_));
  }
  ~Communicator() { pcclDestroyCommunicator(comm_); }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  void connect() { check(pcclConnect(comm_)); }
  bool are_peers_pending() const {
    bool pending = false;
    check(pcclArePeersPending(comm_, &pending));
    return pending;
  }
  void update_topology() { check(pcclUpdateTopology(comm_)); }
  int world_size() const {
    int size = 0;
    check(pcclGetAttribute(comm_, PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE, &size));
    return size;
  }
  void sync(pcclSharedState_t& state) {
    check(pcclSynchronizeSharedState(comm_, &state, PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR,
                                     nullptr));
  }
  // Averages each of the arrays in place. Alone they are their own means.
  void average(std::vector<std::vector<double>*> arrays) {
    std::vector<pcclReduceOpDescriptor_t> all;
    for (std::vector<double>* array : arrays) {
      pcclReduceOpDescriptor_t one{};
      one.sendbuf = one.recvbuf = array->data();
      one.descriptor.count = array->size();
      one.descriptor.op = pcclAvg;
      one.descriptor.tag = all.size();
      one.descriptor.src_descriptor.datatype = pcclDouble;
      all.push_back(one);
    }
    const pcclResult_t result =
        pcclAllReduceMultipleWithRetry(all.data(), all.size(), comm_, nullptr, 4);
    if (result != pcclTooFewPeers) check(result);
  }

 private:
  pcclComm_t* comm_ = nullptr;
};

pcclTensorInfo_t entry(const char* name, std::vector<double>& array) {
  pcclTensorInfo_t info{};
  info.name = name;
  info.data = array.data();
  info.count = array.size();
  info.datatype = pcclDouble;
  return info;
}

void train(const char* master, int wanted, int number) {
  constexpr std::uint64_t kSteps = 200;
  constexpr int kPoints = 64;
  Communicator comm(master);
  comm.connect();
  std::vector<double> slope{0.1 * number};
  std::vector<double> offset{0.0};
  std::vector<pcclTensorInfo_t> entries{entry("slope", slope), entry("offset", offset)};
  pcclSharedState_t state{0, entries.size(), entries.data()};
  for (bool joining = true;; joining = false) {
    if (joining || comm.are_peers_pending()) {  // the same answer on all members
      comm.update_topology();                   // a newcomer's first one returns at once
      comm.sync(state);
    }
    if (state.revision == kSteps) break;
    if (state.revision == 0 && comm.world_size() < wanted) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    std::vector<double> by_slope{0.0};
    std::vector<double> by_offset{0.0};
    for (int i = 0; i < kPoints; ++i) {
      const double x = (i + 0.5 * number) / kPoints - 0.5;
      const double error = slope[0] * x + offset[0] - (3.0 * x - 1.0);
      by_slope[0] += 2.0 * error * x / kPoints;
      by_offset[0] += 2.0 * error / kPoints;
    }
    comm.average({&by_slope, &by_offset});
    slope[0] -= 2.0 * by_slope[0];
    offset[0] -= 0.4 * by_offset[0];
    ++state.revision;
  }
  std::printf("peer %d of %d: y = %.3f x + %.3f, bits %a %a\n", number, comm.world_size(), slope[0],
              offset[0], slope[0], offset[0]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s MASTER PEERS NUMBER\n", argv[0]);
    return 2;
  }
  try {
    train(argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
