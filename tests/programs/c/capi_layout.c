/* pccl.h against pypccl's: values, layouts (of a 64-bit machine) and signatures. Compiled as C99
 * and as C++; never run. */

#include <pccl.h>

#ifdef __cplusplus
#define MUST(condition, name) static_assert(condition, #name)
#else
#define MUST(condition, name) typedef char must_##name[(condition) ? 1 : -1]
#endif
#define VALUE(name, value) MUST((int)(name) == (value), name)
#define SIZE(type, size) MUST(sizeof(type) == (size), type)
#define FIELD(type, field, offset) MUST(offsetof(type, field) == (offset), type##_##field)

VALUE(CCOIP_PROTOCOL_PORT_MASTER, 48148);
VALUE(CCOIP_PROTOCOL_PORT_SHARED_STATE, 48149);
VALUE(CCOIP_PROTOCOL_PORT_P2P, 48150);
VALUE(CCOIP_PROTOCOL_PORT_BANDWIDTH_BENCHMARK, 48151);

VALUE(inetIPv4, 0);
VALUE(inetIPv6, 1);

VALUE(pcclSuccess, 0);
VALUE(pcclNotInitialized, 1);
VALUE(pcclInternalError, 2);
VALUE(pcclInvalidArgument, 3);
VALUE(pcclInvalidUsage, 4);
VALUE(pcclTooFewPeers, 5);
VALUE(pcclMasterConnectionFailed, 6);
VALUE(pcclRankConnectionFailed, 7);
VALUE(pcclRankConnectionLost, 8);
VALUE(pcclNoSharedStateAvailable, 9);
VALUE(pcclPendingAsyncOps, 10);
VALUE(pcclUpdateTopologyFailed, 11);
VALUE(pcclTopologyOptimizationFailed, 12);

VALUE(pcclUint8, 0);
VALUE(pcclInt8, 1);
VALUE(pcclInt16, 2);
VALUE(pcclUint16, 3);
VALUE(pcclUint32, 4);
VALUE(pcclInt32, 5);
VALUE(pcclUint64, 6);
VALUE(pcclInt64, 7);
VALUE(pcclFloat16, 8);
VALUE(pcclBFloat16, 9);
VALUE(pcclFloat, 10);
VALUE(pcclDouble, 11);

VALUE(pcclDeviceCpu, 0);
VALUE(pcclDeviceCuda, 1);

VALUE(pcclSum, 0);
VALUE(pcclAvg, 1);
VALUE(pcclProd, 2);
VALUE(pcclMax, 3);
VALUE(pcclMin, 4);

VALUE(PCCL_ATTRIBUTE_GLOBAL_WORLD_SIZE, 1);
VALUE(PCCL_ATTRIBUTE_PEER_GROUP_WORLD_SIZE, 2);
VALUE(PCCL_ATTRIBUTE_NUM_DISTINCT_PEER_GROUPS, 3);
VALUE(PCCL_ATTRIBUTE_LARGEST_PEER_GROUP_WORLD_SIZE, 4);

VALUE(PCCL_SHARED_STATE_SYNC_STRATEGY_ENFORCE_POPULAR, 0);
VALUE(PCCL_SHARED_STATE_SYNC_STRATEGY_RECEIVE_ONLY, 1);
VALUE(PCCL_SHARED_STATE_SYNC_STRATEGY_SEND_ONLY, 2);

VALUE(pcclDistributionNone, 0);
VALUE(pcclDistributionNormal, 1);
VALUE(pcclDistributionUniform, 2);

VALUE(pcclQuantNone, 0);
VALUE(pcclQuantMinMax, 1);
VALUE(pcclQuantZeroPointScale, 2);

SIZE(pcclResult_t, 4);
SIZE(pcclDataType_t, 4);

SIZE(ccoip_ipv4_address_t, 4);
FIELD(ccoip_ipv4_address_t, data, 0);
SIZE(ccoip_ipv6_address_t, 16);
FIELD(ccoip_ipv6_address_t, data, 0);

SIZE(ccoip_inet_address_t, 24);
FIELD(ccoip_inet_address_t, protocol, 0);
FIELD(ccoip_inet_address_t, ipv4, 4);
FIELD(ccoip_inet_address_t, ipv6, 8);

SIZE(ccoip_socket_address_t, 28);
FIELD(ccoip_socket_address_t, inet, 0);
FIELD(ccoip_socket_address_t, port, 24);

SIZE(pcclCommCreateParams_t, 36);
FIELD(pcclCommCreateParams_t, master_address, 0);
FIELD(pcclCommCreateParams_t, peer_group, 28);
FIELD(pcclCommCreateParams_t, p2p_connection_pool_size, 32);

SIZE(pcclReduceInfo_t, 24);
FIELD(pcclReduceInfo_t, local_world_size, 0);
FIELD(pcclReduceInfo_t, tx_bytes, 8);
FIELD(pcclReduceInfo_t, rx_bytes, 16);

SIZE(pcclReduceOperandDescriptor_t, 8);
FIELD(pcclReduceOperandDescriptor_t, datatype, 0);
FIELD(pcclReduceOperandDescriptor_t, distribution_hint, 4);

SIZE(pcclQuantizationOptions_t, 8);
FIELD(pcclQuantizationOptions_t, quantized_datatype, 0);
FIELD(pcclQuantizationOptions_t, algorithm, 4);

SIZE(pcclReduceDescriptor_t, 40);
FIELD(pcclReduceDescriptor_t, count, 0);
FIELD(pcclReduceDescriptor_t, op, 8);
FIELD(pcclReduceDescriptor_t, tag, 16);
FIELD(pcclReduceDescriptor_t, src_descriptor, 24);
FIELD(pcclReduceDescriptor_t, quantization_options, 32);

SIZE(pcclReduceOpDescriptor_t, 56);
FIELD(pcclReduceOpDescriptor_t, sendbuf, 0);
FIELD(pcclReduceOpDescriptor_t, recvbuf, 8);
FIELD(pcclReduceOpDescriptor_t, descriptor, 16);
MUST(sizeof(struct pcclReduceSingleDescriptor_t) == 56, old_name);

SIZE(pcclAsyncReduceOp_t, 16);
FIELD(pcclAsyncReduceOp_t, comm, 0);
FIELD(pcclAsyncReduceOp_t, tag, 8);

SIZE(pcclRankUuid_t, 16);
FIELD(pcclRankUuid_t, data, 0);

SIZE(pcclTensorInfo_t, 40);
FIELD(pcclTensorInfo_t, name, 0);
FIELD(pcclTensorInfo_t, data, 8);
FIELD(pcclTensorInfo_t, count, 16);
FIELD(pcclTensorInfo_t, datatype, 24);
FIELD(pcclTensorInfo_t, device_type, 28);
FIELD(pcclTensorInfo_t, allow_content_inequality, 32);

SIZE(pcclSharedState_t, 24);
FIELD(pcclSharedState_t, revision, 0);
FIELD(pcclSharedState_t, count, 8);
FIELD(pcclSharedState_t, infos, 16);

SIZE(pcclSharedStateSyncInfo_t, 16);
FIELD(pcclSharedStateSyncInfo_t, tx_bytes, 0);
FIELD(pcclSharedStateSyncInfo_t, rx_bytes, 8);

SIZE(pcclBuildInfo_t, 1);
FIELD(pcclBuildInfo_t, has_cuda_support, 0);

struct functions {
  pcclResult_t (*init)(void);
  pcclResult_t (*create_communicator)(const pcclCommCreateParams_t*, pcclComm_t**);
  pcclResult_t (*get_attribute)(const pcclComm_t*, pcclAttribute_t, int*);
  pcclResult_t (*destroy_communicator)(pcclComm_t*);
  pcclResult_t (*connect)(pcclComm_t*);
  pcclResult_t (*update_topology)(pcclComm_t*);
  pcclResult_t (*are_peers_pending)(const pcclComm_t*, bool*);
  pcclResult_t (*optimize_topology)(const pcclComm_t*);
  pcclResult_t (*all_reduce)(const void*, void*, const pcclReduceDescriptor_t*, const pcclComm_t*,
                             pcclReduceInfo_t* PCCL_NULLABLE);
  pcclResult_t (*all_reduce_async)(const void*, void*, const pcclReduceDescriptor_t*,
                                   const pcclComm_t*, pcclAsyncReduceOp_t*);
  pcclResult_t (*all_reduce_multiple)(const pcclReduceOpDescriptor_t*, size_t, const pcclComm_t*,
                                      pcclReduceInfo_t*, int);
  pcclResult_t (*await_async_reduce)(const pcclAsyncReduceOp_t*, pcclReduceInfo_t*);
  pcclResult_t (*synchronize)(const pcclComm_t*, pcclSharedState_t*, pcclSharedStateSyncStrategy_t,
                              pcclSharedStateSyncInfo_t*);
  pcclResult_t (*create_master)(ccoip_socket_address_t, pcclMasterInstance_t**);
  pcclResult_t (*run_master)(pcclMasterInstance_t*);
  pcclResult_t (*interrupt_master)(pcclMasterInstance_t*);
  pcclResult_t (*await_master)(struct pcclMasterInstanceState_t*);
  pcclResult_t (*destroy_master)(pcclMasterInstance_t*);
  pcclResult_t (*get_build_info)(pcclBuildInfo_t*);
  const char* (*get_last_error)(void);
};

extern const struct functions all;
const struct functions all = {
    pcclInit,
    pcclCreateCommunicator,
    pcclGetAttribute,
    pcclDestroyCommunicator,
    pcclConnect,
    pcclUpdateTopology,
    pcclArePeersPending,
    pcclOptimizeTopology,
    pcclAllReduce,
    pcclAllReduceAsync,
    pcclAllReduceMultipleWithRetry,
    pcclAwaitAsyncReduce,
    pcclSynchronizeSharedState,
    pcclCreateMaster,
    pcclRunMaster,
    pcclInterruptMaster,
    pcclMasterAwaitTermination,
    pcclDestroyMaster,
    pcclGetBuildInfo,
    pcclGetLastError,
};

/* Zero-initialised fields: sum of tag 0, unquantized; and designated initialisers in the order of
 * the fields, as C++20 wants them. */
#if !defined(__cplusplus) || __cplusplus >= 202002L
extern const pcclReduceDescriptor_t descriptor;
const pcclReduceDescriptor_t descriptor = {
    .count = 1,
    .op = pcclAvg,
    .tag = 7,
    .src_descriptor = {.datatype = pcclFloat, .distribution_hint = pcclDistributionNone},
    .quantization_options = {.quantized_datatype = pcclUint8, .algorithm = pcclQuantNone},
};
#endif
