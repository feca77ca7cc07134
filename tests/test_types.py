"""The explicit API's enums and descriptors."""

import copy
import gc
import pickle
import subprocess
import weakref

import numpy as np
import pytest
from programs import frameworks
from workers import command

import pccl
from pccl import (
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
)

FOREIGN = (DataType.BFLOAT16, DataType.FLOAT8_E4M3FN, DataType.FLOAT8_E5M2)
NUMPY_TYPES = [dtype for dtype in DataType if dtype not in FOREIGN]


def descriptor(count, dtype=DataType.FLOAT):
    return ReduceDescriptor(count, ReduceOp.SUM, 0, ReduceOperandDescriptor(dtype))


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_numpy_dtypes_convert_both_ways(dtype):
    assert DataType.from_numpy_dtype(dtype.to_numpy_dtype()) is dtype
    assert dtype.to_numpy_dtype().itemsize == dtype.size


def test_values_are_those_of_pypccl():
    assert [d.value for d in DataType] == list(range(17))  # those from 12 on are ours
    assert (DataType.INT16, DataType.FLOAT, DataType.DOUBLE) == (2, 10, 11)
    assert [op.name for op in ReduceOp] == ["SUM", "AVG", "PROD", "MAX", "MIN"]
    assert pccl.Result.TOPOLOGY_OPTIMIZATION_FAILED == 12


@pytest.mark.parametrize("dtype", FOREIGN)
def test_dtypes_of_ml_dtypes_are_known_by_name(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    theirs = np.dtype(getattr(ml_dtypes, dtype.label))
    assert DataType.from_numpy_dtype(theirs) is dtype
    assert dtype.to_numpy_dtype() == theirs
    assert dtype.size == theirs.itemsize


def test_some_dtypes_have_some_ops_only():
    assert [op for op in ReduceOp if DataType.BOOL.combines(op)] == [ReduceOp.MAX, ReduceOp.MIN]
    for dtype in (DataType.COMPLEX64, DataType.COMPLEX128):
        assert [op for op in ReduceOp if dtype.combines(op)] == [ReduceOp.SUM, ReduceOp.AVG]
    assert all(DataType.FLOAT8_E5M2.combines(op) for op in ReduceOp)


def test_bfloat16_says_what_to_import_when_numpy_lacks_it(tmp_path):
    subprocess.run(command(frameworks.name_a_missing_dtype), check=True, cwd=tmp_path)


@pytest.mark.parametrize("dtype", ["object", "U3", "M8[s]"])
def test_dtypes_that_cannot_be_reduced_are_invalid(dtype):
    with pytest.raises(pccl.InvalidArgument):
        DataType.from_numpy_dtype(dtype)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8", "longdouble", "clongdouble"])
def test_known_numbers_that_are_not_there_yet_are_not_supported(dtype):
    with pytest.raises(pccl.NotSupported):
        DataType.from_numpy_dtype(dtype)


def test_torch_dtypes_convert_both_ways():
    torch = pytest.importorskip("torch")
    for dtype in DataType:
        assert DataType.from_torch_dtype(dtype.to_torch_dtype()) is dtype
    with pytest.raises(ValueError, match="quint8"):
        DataType.from_torch_dtype(torch.quint8)


@pytest.mark.parametrize(
    ("given", "op"),
    [("sum", 0), ("avg", 1), ("mean", 1), ("prod", 2), ("max", 3), ("min", 4), (1, 1)],
)
def test_an_op_can_be_named(given, op):
    assert ReduceOp.parse(given, "allreduce") is ReduceOp(op)


@pytest.mark.parametrize("given", ["median", 5, None, 0.5, True, np.bool_(True), np.int64(9)])
def test_other_ops_are_refused(given):
    with pytest.raises(pccl.InvalidArgument, match="op must be .*, not [^a]"):
        ReduceOp.parse(given, "allreduce")


@pytest.mark.parametrize("given", [np.zeros(1), np.array(0), np.ones(3)])
def test_an_array_is_no_op_though_it_may_equal_one(given):
    with pytest.raises(pccl.InvalidArgument, match="not an array; outputs go to out="):
        ReduceOp.parse(given, "allreduce")


def test_quantization_options_take_positions_as_in_pypccl():
    options = QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX)
    assert options == QuantizationOptions()


def test_device_types_are_found_by_torchs_name():
    assert pccl.DeviceType.from_torch_device_type("cuda") is pccl.DeviceType.CUDA
    assert pccl.DeviceType.from_torch_device_type("meta") is None


def test_a_descriptor_keeps_its_arrays_alive():
    send, recv = np.ones(3, np.float32), np.empty(3, np.float32)
    alive = weakref.ref(send)
    made = ReduceOpDescriptor.from_numpy(send, recv, descriptor(3))
    assert made.sendbuf_ptr == send.ctypes.data
    del send
    gc.collect()
    assert alive() is not None


@pytest.mark.parametrize(
    ("send", "recv", "what", "message"),
    [
        (np.ones(3, "f4"), np.ones(3, "f8"), descriptor(3), "float64"),
        (np.ones(3, "f4"), np.ones(4, "f4"), descriptor(3), "4"),
        (np.ones(3, "f4"), np.ones(3, "f4"), descriptor(4), "count is 4"),
        (np.ones(3, "f4"), np.ones(3, "f4"), descriptor(3, DataType.INT32), "int32"),
        (np.ones(6, "f4")[::2], np.ones(3, "f4"), descriptor(3), "contiguous"),
        ([1.0], np.ones(1, "f4"), descriptor(1), "no NumPy array"),
    ],
)
def test_descriptors_that_do_not_fit_their_arrays_are_refused(send, recv, what, message):
    with pytest.raises(pccl.InvalidArgument, match=message):
        ReduceOpDescriptor.from_numpy(send, recv, what)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_have_the_addresses_of_their_own_arrays(again):
    send, recv = np.ones(3, np.float32), np.empty(3, np.float32)
    made = again(ReduceOpDescriptor.from_numpy(send, recv, descriptor(3)))
    own = [array.ctypes.data for array in made._kept]
    assert [made.sendbuf_ptr, made.recvbuf_ptr] == own
    assert not {send.ctypes.data, recv.ctypes.data} & set(own)
    entry = again(pccl.TensorInfo.from_numpy(send, "w"))
    assert entry.data_ptr == entry._kept.ctypes.data != send.ctypes.data
    in_place = again(ReduceOpDescriptor.from_numpy(send, send, descriptor(3)))
    assert in_place.sendbuf_ptr == in_place.recvbuf_ptr
    plain = copy.copy(ReduceOpDescriptor.from_numpy(send, recv, descriptor(3)))
    assert (plain.sendbuf_ptr, plain.recvbuf_ptr) == (send.ctypes.data, recv.ctypes.data)
    torch = pytest.importorskip("torch")
    entry = again(pccl.TensorInfo.from_torch(torch.ones(3), "w"))
    assert entry.data_ptr == entry._kept.data_ptr()


def test_null_addresses_are_refused_unless_nothing_is_there():
    with pytest.raises(pccl.InvalidArgument, match="null"):
        ReduceOpDescriptor(0, 0, descriptor(1))
    ReduceOpDescriptor(0, 0, descriptor(0))


def test_an_entry_has_no_less_than_no_elements():
    what = {"dtype": DataType.FLOAT, "device_type": pccl.DeviceType.CPU}
    with pytest.raises(pccl.InvalidArgument, match="'w' has -1 elements"):
        pccl.TensorInfo("w", 64, numel=-1, allow_content_inequality=False, **what)


def test_an_entry_may_be_empty():
    assert pccl.TensorInfo.from_numpy(np.empty(0), "e").numel == 0
    torch = pytest.importorskip("torch")
    assert pccl.TensorInfo.from_torch(torch.empty(0), "e").numel == 0
    with pytest.raises(pccl.InvalidArgument, match="null"):
        pccl.TensorInfo(
            "w",
            0,
            numel=1,
            dtype=DataType.FLOAT,
            device_type=pccl.DeviceType.CPU,
            allow_content_inequality=False,
        )


def test_a_descriptor_of_tensors_follows_their_memory():
    torch = pytest.importorskip("torch")
    send, recv = torch.ones(3), torch.zeros(3)
    kept = ReduceOpDescriptor.from_torch(send, recv, descriptor(3))
    send.data, recv.data = torch.ones(5), torch.zeros(5)
    kept._check_kept("f")
    assert (kept.sendbuf_ptr, kept.recvbuf_ptr) == (send.data_ptr(), recv.data_ptr())
    for wrong, words in (
        ((torch.ones(2), torch.ones(2)), "count is 3, but there are 2 elements"),
        ((torch.ones(3), torch.ones(4)), "send has 3 elements, but recv has 4"),
        ((torch.ones(3).double(), torch.ones(3).double()), "the descriptor says float32"),
        ((torch.ones(3, 3).T, torch.ones(3, 3)), "send is not contiguous"),
    ):
        kept._kept = wrong
        with pytest.raises(pccl.InvalidArgument, match=words):
            kept._check_kept("f")
    array = np.ones(3, np.float32)
    kept = ReduceOpDescriptor.from_numpy(array, array, descriptor(3))
    array.flags.writeable = False
    with pytest.raises(pccl.InvalidArgument, match="recv is read-only"):
        kept._check_kept("f")


def test_the_entry_of_a_tensor_follows_its_memory():
    torch = pytest.importorskip("torch")
    tensor = torch.nn.Parameter(torch.zeros(1000))
    entry = pccl.TensorInfo.from_torch(tensor, "w")
    for change in (
        lambda: setattr(tensor, "data", torch.ones(1000)),
        lambda: tensor.data.set_(torch.ones(1000)),
        lambda: setattr(tensor, "data", torch.ones(10, 100)),
    ):
        change()
        entry._check_sharable("sync_shared_state", receives=True)
        assert entry.data_ptr == tensor.data_ptr()
    for change, error in (
        (lambda: setattr(tensor, "data", torch.ones(10, 100).T), pccl.InvalidArgument),
        (lambda: setattr(tensor, "data", torch.ones(999)), pccl.InvalidUsage),
        (lambda: setattr(tensor, "data", torch.ones(1000).double()), pccl.InvalidUsage),
    ):
        change()
        with pytest.raises(error, match="w "):
            entry._check_sharable("sync_shared_state", receives=True)


def test_a_shared_state_counts_revisions_and_has_entries():
    entry = pccl.TensorInfo.from_numpy(np.ones(3), "w")
    state = pccl.SharedState([entry])
    state.push_revision()
    assert state.revision == 1
    with pytest.raises(pccl.InvalidArgument):
        pccl.SharedState([])


def test_the_public_names_are_those_promised():
    assert all(hasattr(pccl, name) for name in pccl.__all__)
    assert sorted(pccl.__all__) == list(pccl.__all__)
    assert {"broadcast", "allgather", "reduce_scatter", "alltoall"} < set(pccl.__all__)
    assert "Quantize" in pccl.__all__
    assert pccl.cuda.is_available() is False
