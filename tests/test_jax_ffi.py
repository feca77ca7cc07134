"""cpp/pccl/bindings/xla_ffi.h says the same as the header that the installed jaxlib comes with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from jaxpeers import needs_jax

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "cpp" / "pccl" / "bindings" / "xla_ffi.h"

# Our struct -> XLA's, with our members and theirs. A member of ours that is a struct of ours is
# checked by that one's own row.
STRUCTS = {
    "Extension": ("XLA_FFI_Extension_Base", "struct_size kind:type next"),
    "Version": ("XLA_FFI_Api_Version", "major:major_version minor:minor_version"),
    "Metadata": (
        "XLA_FFI_Metadata",
        "struct_size version:api_version traits state_type:state_type_id",
    ),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", "base:extension_base metadata"),
    "ArrayBuffer": ("XLA_FFI_Buffer", "type:dtype data rank extents:dims"),
    "Text": ("XLA_FFI_ByteSpan", "data:ptr size:len"),
    "Scalar": ("XLA_FFI_Scalar", "type:dtype value"),
    "Attributes": ("XLA_FFI_Attrs", "count:size kinds:types names values:attrs"),
    "CallFrame": (
        "XLA_FFI_CallFrame",
        "api context:ctx stage arguments:args results:rets attributes:attrs future",
    ),
    "CreateError": ("XLA_FFI_Error_Create_Args", "message status:errc"),
    "DestroyError": ("XLA_FFI_Error_Destroy_Args", "error"),
    "CreateFuture": ("XLA_FFI_Future_Create_Args", "future"),
    "SetAvailable": ("XLA_FFI_Future_SetAvailable_Args", "future"),
    "SetError": ("XLA_FFI_Future_SetError_Args", "future error"),
    "GetRun": ("XLA_FFI_RunId_Get_Args", "context:ctx run:run_id"),
    "GetDevice": ("XLA_FFI_DeviceOrdinal_Get_Args", "context:ctx ordinal:device_ordinal"),
    "Api": (
        "XLA_FFI_Api",
        "version:api_version internal:internal_api create_error:XLA_FFI_Error_Create "
        "destroy_error:XLA_FFI_Error_Destroy create_future:XLA_FFI_Future_Create "
        "set_available:XLA_FFI_Future_SetAvailable set_error:XLA_FFI_Future_SetError "
        "get_run:XLA_FFI_RunId_Get get_device:XLA_FFI_DeviceOrdinal_Get",
    ),
}
VALUES = {  # one of ours, for two of theirs
    "XLA_FFI_Args": "count:size kinds:types values:args",
    "XLA_FFI_Rets": "count:size kinds:types values:rets",
}
NUMBERS = {
    "kMajorVersion": "XLA_FFI_API_MAJOR",
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "ValueKind::buffer": "XLA_FFI_ArgType_BUFFER",
    "AttributeKind::array": "XLA_FFI_AttrType_ARRAY",
    "AttributeKind::dictionary": "XLA_FFI_AttrType_DICTIONARY",
    "AttributeKind::scalar": "XLA_FFI_AttrType_SCALAR",
    "AttributeKind::string": "XLA_FFI_AttrType_STRING",
}
ENUMS = {
    "Status": "XLA_FFI_Error_Code_",
    "Type": "XLA_FFI_DataType_",
    "Stage": "XLA_FFI_ExecutionStage_",
}


def asserts() -> list[str]:
    lines = []
    rows = [(ours, *theirs) for ours, theirs in STRUCTS.items()]
    rows += [("Values", theirs, members) for theirs, members in VALUES.items()]
    for ours, theirs, members in rows:
        lines.append(f"sizeof(pccl::xla::{ours}) == sizeof({theirs})")
        lines.append(f"alignof(pccl::xla::{ours}) == alignof({theirs})")
        for member in members.split():
            name, _, other = member.partition(":")
            other = other or name
            lines += [
                f"offsetof(pccl::xla::{ours}, {name}) == offsetof({theirs}, {other})",
                f"sizeof(pccl::xla::{ours}::{name}) == sizeof({theirs}::{other})",
            ]
    for ours, theirs in NUMBERS.items():
        lines.append(f"int(pccl::xla::{ours}) == int({theirs})")
    for enum, prefix in ENUMS.items():
        for name in members_of(enum):
            lines.append(f"int(pccl::xla::{enum}::{name}) == int({prefix}{name.upper()})")
    # XLA takes handlers of its own version or an earlier one.
    lines.append("pccl::xla::kMinorVersion <= XLA_FFI_API_MINOR")
    return lines


def members_of(enum: str) -> list[str]:
    body = re.search(rf"enum class {enum} [^{{]*{{(.*?)}}", OURS.read_text(), re.DOTALL)
    assert body
    return re.findall(r"(\w+) =", body[1])


def compile_with(lines: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    import jax

    include = jax.ffi.include_dir()
    if not (Path(include) / "xla" / "ffi" / "api" / "c_api.h").exists():
        pytest.skip("this jaxlib comes without xla/ffi/api/c_api.h")
    source = folder / "layout.cpp"
    includes = ["#include <xla/ffi/api/c_api.h>", '#include "pccl/bindings/xla_ffi.h"']
    checks = [f"static_assert({line});" for line in lines]
    source.write_text("\n".join([*includes, *checks, ""]))
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof"]
    command += [f"-I{ROOT / 'cpp'}", f"-isystem{include}", str(source)]
    return subprocess.run(command, capture_output=True, text=True)


@needs_jax
def test_sizes_offsets_and_numbers_are_those_of_jaxlib(tmp_path: Path) -> None:
    done = compile_with(asserts(), tmp_path)
    assert done.returncode == 0, done.stderr


@needs_jax
def test_the_check_fails_where_they_differ(tmp_path: Path) -> None:
    done = compile_with(["sizeof(pccl::xla::ArrayBuffer) == sizeof(XLA_FFI_ByteSpan)"], tmp_path)
    assert done.returncode != 0 and "static assertion failed" in done.stderr


def test_every_struct_and_enum_of_the_header_is_checked() -> None:
    text = OURS.read_text()
    structs = set(re.findall(r"^struct (\w+) {", text, re.MULTILINE))
    assert structs - {"Header", "Values"} == set(STRUCTS)
    assert set(re.findall(r"^enum class (\w+)", text, re.MULTILINE)) == {
        *ENUMS,
        "ValueKind",
        "AttributeKind",
    }
