/*
 * pccl.h: all-reduce and shared state between machines that join and leave a run. C99 and C++.
 *
 * One process runs a master. Peers connect to it, are let in by the members, and then reduce arrays
 * and synchronise a state with each other. Names, values and layouts are those of pypccl's header;
 * additions are at the end. docs/reference/c.md has a tour, examples/c/ has complete programs.
 *
 * Rules for all functions
 *
 * Results: a function returns pcclSuccess, or a code for its failure; pcclGetLastError() returns
 * the sentence. No function ends the process. Output parameters are written on success only.
 *
 * Memory belongs to the caller. Memory that a call reads or writes must exist until the call
 * returns, and buffers of an asynchronous reduction until it was awaited. Structs are read during
 * the call only.
 *
 * Threads: any thread may call, with any handle. A call that destroys a handle must be the last one
 * with it.
 *
 * "Collective": all members of the group make the same calls in the same order. A collective call
 * blocks until all members make it, and ends in the same way for all. One exception: a peer's first
 * collective call after pcclConnect waits until the members let it in.
 *
 * Signals do not end a call: the handler runs, and the call goes on. PCCL_TIMEOUT, in seconds,
 * bounds every blocking call; without it a call waits as long as the members make progress. A
 * thread that is cancelled (pthread_cancel) ends after the call.
 *
 * Forks: a child cannot use its parent's handles; calls return pcclInvalidUsage.
 *
 * Settings are environment variables (docs/reference/settings.md), read by pcclCreateCommunicator
 * and pcclCreateMaster.
 */
#ifndef PCCL_H
#define PCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PCCL_EXPORT __attribute__((visibility("default")))
#else
#define PCCL_EXPORT
#endif

/* Marks pointers that may be NULL. For any other NULL pointer a call returns pcclInvalidArgument.
 */
#define PCCL_NULLABLE

/* The master's default port. The other ports are not used: a peer listens on one port, PCCL_PORT or
 * any free one. */
#define CCOIP_PROTOCOL_PORT_MASTER 48148
#define CCOIP_PROTOCOL_PORT_SHARED_STATE 48149
#define CCOIP_PROTOCOL_PORT_P2P 48150
#define CCOIP_PROTOCOL_PORT_BANDWIDTH_BENCHMARK 48151

#ifdef __cplusplus
extern "C" {
#endif

/* ---- addresses ---- */

typedef enum ccoip_inet_protocol_t { inetIPv4 = 0, inetIPv6 = 1 } ccoip_inet_protocol_t;

/* In the order of the text: 127.0.0.1 is {127, 0, 0, 1}. */
typedef struct ccoip_ipv4_address_t {
  uint8_t data[4];
} ccoip_ipv4_address_t;

typedef struct ccoip_ipv6_address_t {
  uint8_t data[16];
} ccoip_ipv6_address_t;

typedef struct ccoip_inet_address_t {
  ccoip_inet_protocol_t protocol; /* which of the two is used */
  ccoip_ipv4_address_t ipv4;
  ccoip_ipv6_address_t ipv6;
} ccoip_inet_address_t;

typedef struct ccoip_socket_address_t {
  ccoip_inet_address_t inet;
  uint16_t port; /* in the machine's own byte order */
} ccoip_socket_address_t;

/* ---- results ---- */

/* In brackets: what to do. [fix] the program or its configuration; [retry] the call, with the same
 * arrays: all members got the same result, so all call again; [rejoin] with pcclConnect. */
typedef enum pcclResult_t {
  pcclSuccess = 0,
  /* [fix] Call pcclInit first. */
  pcclNotInitialized = 1,
  /* A bug in the library, or out of memory. */
  pcclInternalError = 2,
  /* [fix] An argument is invalid, or members passed different counts, types or ops. */
  pcclInvalidArgument = 3,
  /* [fix] Not connected, connected twice, or a forked copy. Shared state: any other failure. */
  pcclInvalidUsage = 4,
  /* [retry] A reduction, while this peer is alone. */
  pcclTooFewPeers = 5,
  /* [retry] pcclConnect: no master answers there, or it refused this peer. */
  pcclMasterConnectionFailed = 6,
  /* [rejoin] No path to a neighbour. */
  pcclRankConnectionFailed = 7,
  /* [retry] A member was lost in the call. [rejoin] This peer was lost; then pcclGetAttribute
   * fails, too. */
  pcclRankConnectionLost = 8,
  /* Not returned: pcclSynchronizeSharedState returns pcclInvalidUsage instead. */
  pcclNoSharedStateAvailable = 9,
  /* [fix] A reduction of this communicator is unfinished. */
  pcclPendingAsyncOps = 10,
  /* pcclUpdateTopology: as pcclRankConnectionLost. */
  pcclUpdateTopologyFailed = 11,
  /* [rejoin] pcclOptimizeTopology: this peer is out of the run; or the deadline
   * passed, if pcclGetAttribute succeeds: go on. */
  pcclTopologyOptimizationFailed = 12
} pcclResult_t;

/* ---- what is reduced ---- */

typedef enum pcclDataType_t {
  pcclUint8 = 0,
  pcclInt8 = 1,
  pcclInt16 = 2,
  pcclUint16 = 3,
  pcclUint32 = 4,
  pcclInt32 = 5,
  pcclUint64 = 6,
  pcclInt64 = 7,
  pcclFloat16 = 8,  /* IEEE binary16; combined in float */
  pcclBFloat16 = 9, /* the upper half of a float; combined in float */
  pcclFloat = 10,
  pcclDouble = 11,
  pcclBool = 12,         /* one byte, 0 or 1; pcclMax (or) and pcclMin (and) only */
  pcclFloat8E4M3FN = 13, /* no infinities: a sum above 448 is NaN; combined in float */
  pcclFloat8E5M2 = 14,   /* the upper half of pcclFloat16; combined in float */
  pcclComplex64 = 15,    /* two floats: real, imaginary; pcclSum and pcclAvg only */
  pcclComplex128 = 16    /* two doubles; pcclSum and pcclAvg only */
} pcclDataType_t;

typedef enum pcclDeviceType_t {
  pcclDeviceCpu = 0,
  pcclDeviceCuda = 1 /* not supported yet: pcclInvalidArgument */
} pcclDeviceType_t;

/* pcclAvg: the sum over the contributing members, divided by their number; integers are rounded
 * towards zero. */
typedef enum pcclRedOp_t {
  pcclSum = 0,
  pcclAvg = 1,
  pcclProd = 2,
  pcclMax = 3,
  pcclMin = 4
} pcclRedOp_t;

typedef enum pcclDistributionHint_t {
  pcclDistributionNone = 0,
  pcclDistributionNormal = 1,
  pcclDistributionUniform = 2
} pcclDistributionHint_t;

typedef enum pcclQuantizationAlgorithm_t {
  pcclQuantNone = 0,
  pcclQuantMinMax = 1,
  pcclQuantZeroPointScale = 2
} pcclQuantizationAlgorithm_t;

typedef struct pcclReduceOperandDescriptor_t {
  pcclDataType_t datatype;
  pcclDistributionHint_t distribution_hint; /* has no effect */
} pcclReduceOperandDescriptor_t;

/* Quantization: floating-point elements travel between hosts as codes of 8 bits (pcclUint8 or
 * pcclInt8), in blocks of 512. pcclQuantMinMax: the codes of a block range from its least to its
 * largest element. pcclQuantZeroPointScale: the range includes zero, and zeros stay exact.
 * Integers, buffers of fewer than 64 elements, and groups on one host stay exact. All members pass
 * the same options. Not allowed with pcclProd. */
typedef struct pcclQuantizationOptions_t {
  pcclDataType_t quantized_datatype;
  pcclQuantizationAlgorithm_t algorithm;
} pcclQuantizationOptions_t;

/* Zero-initialised fields mean: sum, tag 0, unquantized. */
typedef struct pcclReduceDescriptor_t {
  size_t count; /* elements; 0 is allowed */
  pcclRedOp_t op;
  uint64_t tag; /* matches the reductions of the members */
  pcclReduceOperandDescriptor_t src_descriptor;
  pcclQuantizationOptions_t quantization_options;
} pcclReduceDescriptor_t;

typedef struct pcclReduceSingleDescriptor_t {
  void* sendbuf;
  void* recvbuf;
  pcclReduceDescriptor_t descriptor;
} pcclReduceOpDescriptor_t;

typedef struct pcclReduceInfo_t {
  uint32_t local_world_size; /* members whose input is in the result */
  uint64_t tx_bytes;         /* bytes sent and received by this peer */
  uint64_t rx_bytes;
} pcclReduceInfo_t;

/* ---- communicators ---- */

typedef struct pcclComm_t pcclComm_t;
typedef struct pcclRankInfo_t pcclRankInfo_t; /* unused */

/* unused */
typedef struct pcclRankUuid_t {
  uint8_t data[16];
} pcclRankUuid_t;

typedef struct pcclCommCreateParams_t {
  ccoip_socket_address_t master_address;
  uint32_t peer_group;               /* peers reduce only with peers of the same group; at most
                                        2^31 - 1 */
  uint32_t p2p_connection_pool_size; /* connections per link to another host; 0: the library
                                        decides; at most 255 */
} pcclCommCreateParams_t;

typedef enum pcclAttribute_t {
  PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE = 1,     /* members of all groups */
  PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE = 2, /* members of this peer's group */
  PCCL_ATTRIBUTE_NUM_DISTINCT_PEER_GROUPS = 3,
  PCCL_ATTRIBUTE_LARGEST_PEER_GROUP_WORLD_SIZE = 4
} pcclAttribute_t;

/* A reduction in flight, or one that was not awaited yet. */
typedef struct pcclAsyncReduceOp_t {
  pcclComm_t* comm;
  uint64_t tag;
} pcclAsyncReduceOp_t;

/* Call once per process, before any other function except those for masters. May be called again.
 * Does not block, and starts no thread. */
PCCL_EXPORT pcclResult_t pcclInit(void);

/* Makes a communicator. Does not block or connect. The caller owns the handle until
 * pcclDestroyCommunicator.
 *
 * pcclInvalidArgument: the address, the pool size, or a PCCL_* variable is invalid. */
PCCL_EXPORT pcclResult_t pcclCreateCommunicator(const pcclCommCreateParams_t* params,
                                                pcclComm_t** comm_out);

/* Copies a number. Does not block. The numbers are those of this peer's latest call that changed
 * its view (connect, update topology, a reduction, a synchronisation): they are equal on all
 * members after the same call, and never change between two calls.
 *
 * pcclInvalidUsage: not connected, or out of the run since; a loop that retries should end then. */
PCCL_EXPORT pcclResult_t pcclGetAttribute(const pcclComm_t* comm, pcclAttribute_t attribute,
                                          int* value_out);

/* Leaves the run, so that the others see a departure and not a loss, and frees the handle. Takes at
 * most a second. Reductions in flight end, and do not touch their memory afterwards. Blocking calls
 * of other threads return an error; no thread may begin another call with this handle. exit() does
 * the same to all open handles. */
PCCL_EXPORT pcclResult_t pcclDestroyCommunicator(pcclComm_t* comm);

/* Joins the run. Blocks: the first peer of a group is let in at once, a later one by the members'
 * pcclUpdateTopology. Tries once to reach the master; call again to retry. If a later call has left
 * this peer out of the run, it joins as a new peer.
 *
 * pcclMasterConnectionFailed: no master answers there, it refused this peer, or PCCL_TIMEOUT has
 * passed. pcclInvalidUsage: connected already, or destroyed by another thread meanwhile. */
PCCL_EXPORT pcclResult_t pcclConnect(pcclComm_t* comm);

/* Collective: lets waiting peers in. Blocks. A newcomer's first call returns at once, so that its
 * next call is also the members' next one; therefore a program calls it at one point of its loop.
 *
 * pcclPendingAsyncOps: a reduction is unfinished (a finished one that was not awaited does not
 * count). pcclInvalidUsage: not connected. pcclUpdateTopologyFailed: anything else. */
PCCL_EXPORT pcclResult_t pcclUpdateTopology(pcclComm_t* comm);

/* Collective: whether peers wait to be let in, with the same answer for all members. Blocks;
 * reductions may be in flight.
 *
 * pcclInvalidUsage: any failure. */
PCCL_EXPORT pcclResult_t pcclArePeersPending(const pcclComm_t* comm, bool* pending_out);

/* Collective: measures the network between the members for three seconds; then the master chooses
 * the members' order, their shares of the work, and the schedules. Blocks. Members that share
 * memory do not measure each other. A peer that is alone returns at once.
 *
 * pcclPendingAsyncOps: a reduction is unfinished. pcclInvalidUsage: not connected.
 * pcclTopologyOptimizationFailed: this peer is out of the run. If
 * pcclGetAttribute succeeds, it is not, and PCCL_TIMEOUT is too short: the
 * measurement takes some seconds. */
PCCL_EXPORT pcclResult_t pcclOptimizeTopology(const pcclComm_t* comm);

/* ---- reductions ---- */

/* Collective: combines the members' sendbufs into recvbuf, with the same bytes on every member.
 * Blocks.
 *
 * sendbuf and recvbuf are the same or do not overlap. If they are the same, the buffer is unchanged
 * after a failure. If not, sendbuf is never written, and recvbuf is undefined after a failure.
 * info_out is optional.
 *
 * Calls of the members are matched by tag. A tag is taken until its reduction has ended, or until
 * an asynchronous one was awaited. Reductions with different tags may run at once, in any order.
 * Only one thread may make reductions with tag 0, the default: as long as it lives, other threads
 * get pcclInvalidUsage, since nothing would tell the members the order of two threads' calls.
 *
 * pcclInvalidArgument: an argument is invalid, the tag is taken, or members disagree about count,
 * type or op (then all members get it). pcclTooFewPeers: this peer is alone.
 * pcclRankConnectionLost: a member was lost, or this peer is out of the run. */
PCCL_EXPORT pcclResult_t pcclAllReduce(const void* sendbuf, void* recvbuf,
                                       const pcclReduceDescriptor_t* descriptor,
                                       const pcclComm_t* comm,
                                       pcclReduceInfo_t* PCCL_NULLABLE info_out);

/* The same, but does not wait for the end. (A newcomer waits until it is let in.) The buffers must
 * not be touched, and the tag not be used, until pcclAwaitAsyncReduce has returned. Await it
 * exactly once; later failures are returned there. */
PCCL_EXPORT pcclResult_t pcclAllReduceAsync(const void* sendbuf, void* recvbuf,
                                            const pcclReduceDescriptor_t* descriptor,
                                            const pcclComm_t* comm, pcclAsyncReduceOp_t* op_out);

/* Collective: several reductions, at most max_in_flight of them at once. When a member is lost,
 * each runs again among the survivors, from its unchanged input. Blocks until all have ended, even
 * after a failure. All members pass the same tags in the same order; a tag may occur twice. A
 * buffer that is written overlaps no buffer of another descriptor. info_out has the members of the
 * last reduction, and the bytes of all.
 *
 * pcclTooFewPeers: this peer is alone, or the last survivor. pcclInvalidArgument: as above, or
 * max_in_flight < 1. Otherwise the first failure. */
PCCL_EXPORT pcclResult_t pcclAllReduceMultipleWithRetry(const pcclReduceOpDescriptor_t* descriptors,
                                                        size_t count, const pcclComm_t* comm,
                                                        pcclReduceInfo_t* PCCL_NULLABLE info_out,
                                                        int max_in_flight);

/* Blocks until the reduction has ended. Any thread may call it.
 *
 * pcclInvalidUsage: there is no reduction with this tag, or it was awaited already. Otherwise as
 * pcclAllReduce. */
PCCL_EXPORT pcclResult_t pcclAwaitAsyncReduce(const pcclAsyncReduceOp_t* op,
                                              pcclReduceInfo_t* PCCL_NULLABLE info_out);

/* ---- shared state ---- */

typedef enum pcclSharedStateSyncStrategy_t {
  /* Sends and receives. Does not mix with the others. */
  PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR = 0,
  /* Its own content is not a candidate. */
  PCCL_SHARED_STATE_SYNC_STRATEGY_RECEIVE_ONLY = 1,
  /* Evicted if another content wins. */
  PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY = 2
} pcclSharedStateSyncStrategy_t;

/* One entry of a state. */
typedef struct pcclTensorInfo_t {
  const char* name; /* UTF-8, up to 1024 bytes, different for each entry */
  void* data;       /* any alignment; NULL only with count 0 */
  size_t count;     /* elements */
  pcclDataType_t datatype;
  pcclDeviceType_t device_type;
  bool allow_content_inequality; /* members keep their own content; newcomers receive it */
} pcclTensorInfo_t;

typedef struct pcclSharedState_t {
  uint64_t revision; /* written back. Add one after every change of the state */
  size_t count;      /* entries, at least one */
  pcclTensorInfo_t* infos;
} pcclSharedState_t;

typedef struct pcclSharedStateSyncInfo_t {
  uint64_t tx_bytes; /* of entries, sent and received by this peer; 0 if all members were equal */
  uint64_t rx_bytes;
} pcclSharedStateSyncInfo_t;

/* Collective: makes the entries equal on all members, byte for byte; newcomers receive them.
 * Blocks. The state with the highest revision that a member (not a newcomer) offers wins, then the
 * content that most members have, then the longest-standing member's (docs/guide/shared-state.md).
 * Either the call succeeds for all members, or nothing is written on any. The entries must not be
 * written meanwhile. info_out is optional.
 *
 * pcclPendingAsyncOps: a reduction is unfinished. pcclInvalidArgument: an entry cannot be shared,
 * or entries of a member overlap (then all members get it); two entries may be the same array if
 * they are on all members. pcclRankConnectionLost: a member gave up in this call; call again.
 * pcclInvalidUsage: anything else. */
PCCL_EXPORT pcclResult_t pcclSynchronizeSharedState(
    const pcclComm_t* comm, pcclSharedState_t* shared_state, pcclSharedStateSyncStrategy_t strategy,
    pcclSharedStateSyncInfo_t* PCCL_NULLABLE info_out);

/* ---- masters ---- */

typedef struct pcclMasterInstanceState_t pcclMasterInstance_t;

/* Makes a master for this address; port 0 takes a free one. Does not block or bind. The caller owns
 * the handle until pcclDestroyMaster. */
PCCL_EXPORT pcclResult_t pcclCreateMaster(ccoip_socket_address_t listen_address,
                                          pcclMasterInstance_t** master_out);

/* Binds the address and serves, on threads of its own. Does not block. Peers can connect when it
 * returns.
 *
 * pcclInvalidUsage: the address cannot be bound, or this master has run before. */
PCCL_EXPORT pcclResult_t pcclRunMaster(pcclMasterInstance_t* master);

/* Asks the master to stop, and returns at once. May be called again, and from a signal handler.
 *
 * pcclInvalidUsage: it was never run. */
PCCL_EXPORT pcclResult_t pcclInterruptMaster(pcclMasterInstance_t* master);

/* Blocks until the master has stopped; then its port is free again. May be called again.
 *
 * pcclInvalidUsage: it was never run. */
PCCL_EXPORT pcclResult_t pcclMasterAwaitTermination(pcclMasterInstance_t* master);

/* Stops the master if it runs, and frees the handle. No thread may be in a call with it. */
PCCL_EXPORT pcclResult_t pcclDestroyMaster(pcclMasterInstance_t* master);

/* ---- the library ---- */

typedef struct pcclBuildInfo_t {
  bool has_cuda_support;
} pcclBuildInfo_t;

/* Returns how this library was built. Does not block. */
PCCL_EXPORT pcclResult_t pcclGetBuildInfo(pcclBuildInfo_t* build_info_out);

/* ---- additions to pypccl's header ---- */

/* Returns the reason of the calling thread's latest failed call, as a sentence; "" if no call has
 * failed. Never NULL. Calls that succeed do not change it. The text belongs to the library, and is
 * valid until the thread's next failure or its end. */
PCCL_EXPORT const char* pcclGetLastError(void);

/* Converts "host:port", "1.2.3.4:5" or "[::1]:48148"; the default port is
 * CCOIP_PROTOCOL_PORT_MASTER. Resolves a name, which may block, and prefers its first IPv4 address.
 *
 * pcclInvalidArgument: the text is not an address, or the host is unknown. */
PCCL_EXPORT pcclResult_t pcclResolveAddress(const char* text, ccoip_socket_address_t* address_out);

/* Returns the address that the master listens on, with its real port.
 *
 * pcclInvalidUsage: it was never run. */
PCCL_EXPORT pcclResult_t pcclGetMasterAddress(const pcclMasterInstance_t* master,
                                              ccoip_socket_address_t* address_out);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* PCCL_H */
